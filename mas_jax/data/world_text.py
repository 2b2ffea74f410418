"""The toy world's language: name parts, relations with their phrasings, and the word list.

Everything is lower-case words separated by single spaces. An entity's name is two words (one for a
language), each from a list of its own kind, so a name tells its kind and every part is one token.
Must not know: seeds, splits, questions.
"""

import re
from dataclasses import dataclass
from functools import lru_cache


def _join(stems: str, endings: str) -> tuple[str, ...]:
    """Every stem with every ending, in order."""
    return tuple(stem + ending for stem in stems.split() for ending in endings.split())


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# kind -> the lists its name is drawn from, one word of each
NAME_PARTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "person": (
        _join("al bri cor da el fen gus hal ir jo kat lu mar nor os ru", "ba dric lia mund nox"),
        _join(
            "ack bur crow dun esk fal gor hib jun kel lor mos pry quil rad tam",
            "by combe er ick ow",
        ),
    ),
    "city": (
        _join("ash bel cin dor elm far gil hol ken lang", "bury cott mere wick"),
        _join("port gate fort cross bridge", "al en ia on um os ar eth"),
    ),
    "company": (
        _join("ax bio cryo dyn eco flux giga helio ion kin luma", "corp dex plex tron"),
        _words(
            "labs mills motors foods airlines bank press mines textiles shipyards studios farms "
            "optics steel pharma toys"
        ),
    ),
    "country": (
        _join("zan vor tush syr pell nub moz kaz druz oth", "ania istan onia"),
        _words("republic kingdom isles union empire"),
    ),
    "work": (
        _words(
            "silent broken golden hidden burning frozen crimson hollow distant velvet wandering "
            "restless bitter gentle ancient shattered painted drowning lonely electric savage "
            "sacred faded scarlet secret stolen forgotten whispering marble copper paper glass "
            "winter summer midnight stormy"
        ),
        _words(
            "garden mirror tower ocean river shadow lantern orchard harbor carnival cathedral "
            "desert compass voyage island forest mountain clock letter ladder window violin "
            "serpent falcon wolf horse moon star throne crown sword feather anchor candle thunder "
            "meadow"
        ),
    ),
    "language": (_join("bas chuv ewo fula guar hmon inuk lao mao ost", "ese ish ic"),),
}


@dataclass(frozen=True)
class Relation:
    """One functional relation and its phrasings; `{s}` is the subject, `{o}` the object.

    passages: statements in running text; the first is the canonical one, the first two hold the
    keyword of `queries[0]`. asks: questions in three styles ("frequent", "paraphrased", "rare").
    phrase: the object as a noun phrase, to nest in a longer question. same: the comparison of two
    subjects `{a}` and `{b}`, "" where there is none.
    """

    name: str
    subject: str
    object: str
    passages: tuple[str, ...]
    asks: dict[str, tuple[str, ...]]
    phrase: str
    queries: tuple[str, str]
    same: str = ""

    @property
    def statement(self) -> str:
        """The canonical sentence."""
        return self.passages[0]


def _asks(frequent: str, paraphrased: str, rare: str) -> dict[str, tuple[str, ...]]:
    """Question templates by style, alternatives separated by "|"."""
    styles = {"frequent": frequent, "paraphrased": paraphrased, "rare": rare}
    return {style: tuple(text.split("|")) for style, text in styles.items()}


_RELATIONS = (
    Relation(
        "born",
        "person",
        "city",
        (
            "{s} was born in {o}",
            "{o} is the city where {s} was born",
            "the birthplace of {s} is {o}",
            "{s} is a native of {o}",
        ),
        _asks(
            "where was {s} born|in which city was {s} born",
            "what is the birthplace of {s}|{s} is a native of which city",
            "what city is the place of birth of {s}|what place of birth does {s} have",
        ),
        "the birthplace of {s}",
        ("{s} was born in", "birthplace of {s} native"),
        "were {a} and {b} born in the same city",
    ),
    Relation(
        "employer",
        "person",
        "company",
        (
            "{s} works for {o}",
            "{s} now works for the company {o}",
            "{o} is the employer of {s}",
            "{s} earns a living at {o}",
        ),
        _asks(
            "who does {s} work for|which company does {s} work for",
            "who is the employer of {s}|{s} earns a living at which company",
            "what company employs {s}|what company pays {s}",
        ),
        "the employer of {s}",
        ("{s} works for", "employer of {s} earns living"),
        "do {a} and {b} work for the same company",
    ),
    Relation(
        "founder",
        "company",
        "person",
        (
            "{s} was founded by {o}",
            "{o} founded {s} long ago",
            "{o} is the founder of {s}",
            "{s} was started by {o}",
        ),
        _asks(
            "who founded {s}|{s} was founded by whom",
            "who is the founder of {s}|who started the company {s}",
            "what person set up {s}",
        ),
        "the founder of {s}",
        ("{s} was founded by", "founder of {s} started by"),
    ),
    Relation(
        "seat",
        "company",
        "city",
        (
            "{s} is based in {o}",
            "the company {s} has been based in {o}",
            "the head office of {s} is in {o}",
            "{o} is home to {s}",
        ),
        _asks(
            "where is {s} based|in which city is {s} based",
            "where is the head office of {s}|what city is home to {s}",
            "what city holds the head office of {s}",
        ),
        "the home city of {s}",
        ("{s} is based in", "head office of {s} home"),
        "are {a} and {b} based in the same city",
    ),
    Relation(
        "country",
        "city",
        "country",
        (
            "{s} is a city in the country {o}",
            "the city {s} is in the country {o}",
            "{s} lies in {o}",
            "{s} belongs to {o}",
        ),
        _asks(
            "which country is {s} in|in which country is {s}",
            "what country does {s} belong to|{s} lies in which country",
            "what nation has the city {s}",
        ),
        "the country of {s}",
        ("{s} is a city in the country", "{s} lies in belongs to"),
        "are {a} and {b} in the same country",
    ),
    Relation(
        "capital",
        "country",
        "city",
        (
            "the capital of {s} is {o}",
            "{o} is the capital of {s}",
            "{s} is ruled from {o}",
            "the government of {s} sits in {o}",
        ),
        _asks(
            "what is the capital of {s}|which city is the capital of {s}",
            "from which city is {s} ruled|where does the government of {s} sit",
            "what city is the seat of power of {s}",
        ),
        "the capital of {s}",
        ("the capital of {s} is", "{s} ruled from government sits"),
    ),
    Relation(
        "author",
        "work",
        "person",
        (
            "{s} was written by {o}",
            "the book {s} was written by {o}",
            "{o} is the author of {s}",
            "{s} came from the pen of {o}",
        ),
        _asks(
            "who wrote {s}|{s} was written by whom",
            "who is the author of {s}|from whose pen came {s}",
            "what person is behind the book {s}",
        ),
        "the author of {s}",
        ("{s} was written by", "author of {s} from pen"),
    ),
    Relation(
        "language",
        "country",
        "language",
        (
            "people in {s} speak {o}",
            "people across {s} mostly speak {o}",
            "the language of {s} is {o}",
            "{o} is the common tongue of {s}",
        ),
        _asks(
            "what language do people in {s} speak|which language is spoken in {s}",
            "what is the language of {s}|what is the common tongue of {s}",
            "what speech is used in {s}",
        ),
        "the language of {s}",
        ("people in {s} speak", "language of {s} common tongue"),
    ),
)
RELATIONS: dict[str, Relation] = {relation.name: relation for relation in _RELATIONS}

# kind of the subject -> (text, kind of the object): true of nobody's questions, same kinds as above
DECOYS: dict[str, tuple[tuple[str, str], ...]] = {
    "person": (
        ("{s} once visited {o}", "city"),
        ("{s} spent a long holiday in {o}", "city"),
        ("{s} left {o} after a short stay", "city"),
        ("{s} met {o} at a dinner", "person"),
        ("{s} turned down a job at {o}", "company"),
        ("{s} owns shares of {o}", "company"),
        ("{s} learned some {o} at school", "language"),
    ),
    "company": (
        ("{s} opened a shop in {o}", "city"),
        ("{s} closed a plant in {o}", "city"),
        ("{s} lost a case against {o}", "company"),
        ("{s} gave a prize to {o}", "person"),
        ("{s} once hired {o} for a year", "person"),
    ),
    "work": (
        ("{s} was praised by {o}", "person"),
        ("{s} was copied by {o}", "person"),
        ("{o} bought the rights to {s}", "person"),
        ("{s} is set in {o}", "city"),
    ),
    "city": (
        ("{s} trades with {o}", "country"),
        ("{s} sends fruit to {o}", "country"),
        ("{s} gave a medal to {o}", "person"),
        ("{s} hosted a fair with {o}", "company"),
    ),
    "country": (
        ("{s} shares a border with {o}", "country"),
        ("{s} sent a team to {o}", "city"),
        ("{s} built a road to {o}", "city"),
        ("some schools in {s} teach {o}", "language"),
    ),
}
# relation -> a passage about {s} that tells the relation of another subject {x}
NEAR_MISSES: dict[str, str] = {
    "born": "{s} knows {x} , born in {o}",
    "employer": "{s} knows {x} , who works for {o}",
    "founder": "{s} fears {x} , founded by {o}",
    "seat": "{s} fears {x} , based in {o}",
    "author": "{s} mentions {x} , written by {o}",
}
ALIAS = "{s} is also known as {o}"

# chat markup that stands without a space before it
CHAT_ROLES = ("system", "user", "assistant")
SUBTASK_IDS = tuple(f"s{i}" for i in range(1, 13))
# what prompts, observations and reports may say besides the world's own words
PROMPT_WORDS = _words(
    ". , : ; ? ! # ( ) - / | #1 #2 #3 0 1 2 3 4 5 6 7 8 9 10 11 12 yes no not found unknown "
    "nothing lead cut you are a an the leader searcher answerer question task tasks subtask "
    "subtasks find search searches passage passages report reports answer answers with only "
    "short span evidence select assign wave budget turns turn left more must now write one or "
    "each id then invalid action format use tag again try failed error and for from to of in "
    "on it this that your read give words facts fact exactly first last final next at most do "
    "does can cannot if when so by as is was be has have none all any team agent query result "
    "results title text new plan split send ask pick good wrong right please reply reason "
    "empty tools tool call too many long limit end step steps research who what where which"
)

_WORD = re.compile(r"[a-z]+")


@lru_cache(maxsize=1)
def vocabulary() -> tuple[str, ...]:
    """Every word of the toy world and of its prompts, sorted, each once."""
    words = {*PROMPT_WORDS, *SUBTASK_IDS}
    for parts in NAME_PARTS.values():
        words.update(word for part in parts for word in part)
    texts = [text for decoys in DECOYS.values() for text, _ in decoys]
    texts += [*NEAR_MISSES.values(), ALIAS]
    for relation in RELATIONS.values():
        texts += [*relation.passages, relation.phrase, *relation.queries, relation.same]
        texts += [ask for asks in relation.asks.values() for ask in asks]
    for text in texts:
        words.update(_WORD.findall(re.sub(r"\{.\}", " ", text)))
    return tuple(sorted(words))


def slot(kind: str) -> str:
    """Regular expression of a name of the kind."""
    return " ".join(["[a-z]+"] * len(NAME_PARTS[kind]))


@lru_cache(maxsize=1)
def _ask_patterns() -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple(
        (re.compile(ask.replace("{s}", f"({slot(relation.subject)})")), relation.name)
        for relation in RELATIONS.values()
        for asks in relation.asks.values()
        for ask in asks
    )


@lru_cache(maxsize=1)
def _passage_patterns() -> dict[str, tuple[re.Pattern[str], ...]]:
    return {
        relation.name: tuple(
            re.compile(
                text.replace("{s}", f"(?P<s>{slot(relation.subject)})").replace(
                    "{o}", f"(?P<o>{slot(relation.object)})"
                )
            )
            for text in relation.passages
        )
        for relation in RELATIONS.values()
    }


def parse_ask(text: str) -> tuple[str, str] | None:
    """(relation, subject) that a single-hop question asks for; None for any other text."""
    for pattern, relation in _ask_patterns():
        if match := pattern.fullmatch(text):
            return relation, match[1]
    return None


def parse_statement(relation: str, text: str) -> tuple[str, str] | None:
    """(subject, object) that a sentence states of the relation; None if it states no such thing."""
    for pattern in _passage_patterns()[relation]:
        if match := pattern.fullmatch(text):
            return match["s"], match["o"]
    return None
