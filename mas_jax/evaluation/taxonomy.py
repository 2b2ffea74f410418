"""Why an episode was wrong: one category each, by the last place that the answer reached.

An answer passes what the searches showed, the Searchers' reports, the evidence that the Answerer
read, and the answer. A place "has" the answer where a golden answer stands in its text; the first
one is decided by the gold passages among those found, where the question knows its own.
Must not know: files, models.
"""

import enum
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mas_jax.agents import actions
from mas_jax.agents.chat import THOUGHT_END, Chat
from mas_jax.evaluation.report import Grid
from mas_jax.evaluation.statistics import gold_recall
from mas_jax.records import NOBODY, Episode, Question, Trace, Turn
from mas_jax.rewards.exact_match import normalize_answer, normalize_triviaqa

_CLOSED = frozenset({"yes", "no", "noanswer"})


class Category(enum.StrEnum):
    """What became of an episode; the order in which an answer gets lost."""

    CORRECT = "correct"
    NOT_RETRIEVED = "gold never retrieved"
    NOT_REPORTED = "retrieved but not reported"
    NOT_SELECTED = "reported but not selected"
    NOT_ANSWERED = "selected but not answered"
    FORMAT = "format only"
    ALIAS = "alias only"
    UNDECIDED = "undecided"  # no golden answer says where it came from, such as yes
    WORLD = "failure of the world"


# whose error it is; the single agent does the Answerer's part itself
_ROLES = {
    Category.NOT_RETRIEVED: "searcher",
    Category.NOT_REPORTED: "searcher",
    Category.NOT_SELECTED: "leader",
    Category.NOT_ANSWERED: "answerer",
    Category.FORMAT: "answerer",
    Category.ALIAS: "answerer",
}


@dataclass(frozen=True)
class Trail:
    """The texts of an episode at the places that an answer passes.

    found: what each search showed its Searcher; reports; evidence: the Answerer's prompts;
    unparsed: what the first candidate wrote, thoughts excepted, in generations that were invalid.
    has_leader: whether anybody selects. has_answerer: whether anybody but the searcher answers.
    """

    found: tuple[str, ...]
    reports: tuple[str, ...]
    evidence: tuple[str, ...]
    unparsed: tuple[str, ...]
    has_leader: bool
    has_answerer: bool


def categorise(episode: Episode, question: Question, *, chat: Chat) -> Category:
    """The category of an episode, judged by its first candidate, as avg@k is.

    A wrong answer is first compared with the golden ones (`FORMAT`, `ALIAS`: upper bounds, to be
    read by a person). Then the last place decides that has a golden answer as a run of words; a
    report from memory counts. Without a Leader nothing is left unselected, and a single agent
    answers from what it found. yes, no, and answers that stand in the question prove nothing in a
    text: if there are no others the episode is `UNDECIDED`, unless gold passages were not found.
    Retrieved means that searches found all gold passages, of gold pages at least one passage each.
    chat: that the episode was played with. Raises: ValueError if the question is not the episode's.
    """
    if episode.question != question.uid:
        raise ValueError(
            f"episode of {episode.question!r} with question {question.uid!r}; pass its own"
        )
    if episode.failure is not None:
        return Category.WORLD
    if episode.correct[:1] == (1.0,):
        return Category.CORRECT
    trail = follow(episode, chat)
    traceable = [gold for gold in question.golden_answers if _is_traceable(gold, question.text)]
    prediction = episode.predictions[0] if episode.predictions else ""
    if _is_format(prediction, question.golden_answers) or (
        not prediction and _has_any(trail.unparsed, traceable)
    ):
        return Category.FORMAT
    if any(_is_alias(prediction, gold) for gold in question.golden_answers):
        return Category.ALIAS
    return _where_lost(trail, traceable, gold_recall(question, episode.retrieved))


def role_of(category: Category, team: str) -> str:
    """The role in which the answer was lost; "" where it was not, or nobody can say.

    What was never retrieved counts as the Searchers', although a Leader may have asked wrongly.
    """
    role = _ROLES.get(category, "")
    return "searcher" if team == "single" and role == "answerer" else role


def follow(episode: Episode, chat: Chat) -> Trail:
    """The texts of an episode at the places that an answer passes."""
    strands: dict[tuple[str, int], list[Trace]] = {}
    for trace in episode.traces:
        if trace.turns:
            strands.setdefault((trace.path, trace.candidate), []).append(trace)
    answerers = [traces for traces in strands.values() if traces[0].role == "answerer"]
    searchers = [traces for traces in strands.values() if traces[0].role == "searcher"]
    has_answerer = episode.team != "single"
    last = answerers if has_answerer else searchers
    return Trail(
        found=tuple(text for traces in searchers for text in _observations(traces, chat)),
        reports=tuple(
            text
            for traces in searchers
            for trace in traces
            for turn in trace.turns
            if turn.action == "report"
            for text in _reported(_said(trace, turn, chat))
        ),
        evidence=tuple(
            dict.fromkeys(
                _text(traces[0].tokens[: traces[0].turns[0].start], chat) for traces in answerers
            )
        ),
        unparsed=tuple(
            _said(trace, turn, chat)
            for traces in last
            if traces[0].candidate == 0
            for trace in traces
            for turn in trace.turns
            if turn.action == "invalid"
        ),
        has_leader=any(traces[0].role == "leader" for traces in strands.values()),
        has_answerer=has_answerer,
    )


def grid(categories: Mapping[str, Sequence[Category]], *, title: str) -> Grid:
    """Number of episodes of each category, with its share in %, a column for each system."""
    counts = {name: Counter(values) for name, values in categories.items()}
    rows = []
    for category in Category:
        cells = [
            f"{number[category]:,} ({100 * number[category] / max(number.total(), 1):.1f})"
            for number in counts.values()
        ]
        rows.append((category.value, *cells))
    return Grid(title, ("episodes (%)", *counts), tuple(rows))


# --- places ---------------------------------------------------------------------------------------


def _where_lost(trail: Trail, traceable: Sequence[str], recall: float | None) -> Category:
    retrieved = _has_any(trail.found, traceable) if recall is None else recall == 1.0
    if not traceable:
        is_lost = recall is not None and not retrieved
        return Category.NOT_RETRIEVED if is_lost else Category.UNDECIDED
    if not trail.has_answerer:
        return Category.NOT_ANSWERED if retrieved else Category.NOT_RETRIEVED
    if _has_any(trail.evidence, traceable):
        return Category.NOT_ANSWERED
    if _has_any(trail.reports, traceable):
        return Category.NOT_SELECTED if trail.has_leader else Category.NOT_ANSWERED
    return Category.NOT_REPORTED if retrieved else Category.NOT_RETRIEVED


def _observations(strands: Sequence[Trace], chat: Chat) -> list[str]:
    """What each search of an agent showed it: the message after the one that searched.

    A template that rewrites the past puts it into the next strand, last before its first turn.
    """
    texts = []
    for index, strand in enumerate(strands):
        for turn in strand.turns:
            if turn.action != "search":
                continue
            source, starts = strand, [s for s in _messages(strand, chat) if s >= turn.end]
            if not starts and index + 1 < len(strands):
                source = strands[index + 1]
                starts = [s for s in _messages(source, chat) if s < source.turns[0].start][-2:]
            if starts:
                end = starts[1] if len(starts) > 1 else len(source.tokens)
                texts.append(_text(source.tokens[starts[0] : end], chat))
    return texts


def _messages(trace: Trace, chat: Chat) -> list[int]:
    """Where the template begins a message."""
    (mark,) = chat.start
    pairs = zip(trace.tokens, trace.owners, strict=True)
    return [i for i, (token, owner) in enumerate(pairs) if token == mark and owner == NOBODY]


def _text(tokens: Sequence[int], chat: Chat) -> str:
    """Decoded, with line ends in place of what begins and ends a message."""
    controls, parts = {*chat.start, *chat.end}, [[]]
    for token in tokens:
        if token in controls:
            parts.append([])
        else:
            parts[-1].append(token)
    return "\n".join(chat.tokenizer.decode(part) for part in parts if part)


def _said(trace: Trace, turn: Turn, chat: Chat) -> str:
    return _text(trace.tokens[turn.start : turn.end], chat).rpartition(THOUGHT_END)[2]


def _reported(said: str) -> tuple[str, ...]:
    action = actions.parse(said, allowed=("report",))
    return (action.text,) if isinstance(action, actions.Report) else ()


# --- words ----------------------------------------------------------------------------------------


def has_answer(text: str, answer: str) -> bool:
    """Whether an answer stands in a text as a run of whole words; False if it normalises to "".

    Under either normalisation: punctuation deleted ("1,000" as "1000") or replaced by a space
    ("Paris/London" as two words). Source: DPR's has_answer, with SQuAD's normalisation.
    """
    return any(
        normalize(answer) != "" and f" {normalize(answer)} " in f" {normalize(text)} "
        for normalize in (normalize_answer, normalize_triviaqa)
    )


def _has_any(texts: Iterable[str], answers: Sequence[str]) -> bool:
    return any(has_answer(text, answer) for text in texts for answer in answers)


def _is_traceable(gold: str, question: str) -> bool:
    """Whether finding the golden answer in a text says anything."""
    return normalize_answer(gold) not in {"", *_CLOSED} and not has_answer(question, gold)


def _is_format(prediction: str, golden_answers: Sequence[str]) -> bool:
    """Whether a golden answer stands among other words; yes and no must be the first."""
    first = normalize_answer(prediction).split()[:1]
    for gold in golden_answers:
        if normalize_answer(gold) in _CLOSED:
            if first == [normalize_answer(gold)]:
                return True
        elif has_answer(prediction, gold) and _folded(prediction) != _folded(gold):
            return True
    return False


def _is_alias(prediction: str, gold: str) -> bool:
    """Whether two answers look like names of one thing.

    Equal without accents, spaces and punctuation; the same words in another order; or the words of
    one all in the other and at least half of it. Numbers alone are never parts.
    """
    one, other = _folded(prediction), _folded(gold)
    if not one or not other or not _CLOSED.isdisjoint((" ".join(one), " ".join(other))):
        return False
    if "".join(one) == "".join(other) or sorted(one) == sorted(other):
        return True
    small, large = sorted((set(one), set(other)), key=len)
    named = any(not word.isdigit() for word in small)
    return named and small <= large and 2 * len(small) >= len(large)


def _folded(answer: str) -> list[str]:
    """Its words without case, accents, punctuation and articles."""
    letters = unicodedata.normalize("NFKD", answer.casefold())
    plain = "".join(char for char in letters if not unicodedata.combining(char))
    spaced = "".join(char if char.isalnum() else " " for char in plain)
    return normalize_answer(spaced).split()
