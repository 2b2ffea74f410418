"""Where a wrong episode lost its answer: scripted episodes, the toy world's known flaws, words."""

import asyncio
import functools
import random
from collections import Counter
from dataclasses import replace

import pytest
from scripted_team import QUESTION, RUN, CharTokenizer, Script, make_team

from mas_jax.agents import chat, rollout
from mas_jax.agents.oracle import Flaws
from mas_jax.config import default_config
from mas_jax.data.tokenizer import make_toy_tokenizer
from mas_jax.evaluation.taxonomy import Category, categorise, follow, grid, has_answer, role_of
from mas_jax.learning import scenes
from mas_jax.learning.toy_policy import scripted_episodes
from mas_jax.records import Passage, Question

FOUND = [Passage("p1", "thing", "ada made the thing in 1901")]
LOST = [Passage("p2", "thing", "a thing is what was made")]


def play(team, says, *, found=FOUND, question=QUESTION):
    """The episode of a script: (path, turn) -> what is said."""
    script = Script(says, finds=lambda query: found)
    play_it = rollout.play_episode(question, 0, team, world=script.world, run=RUN)
    return asyncio.run(play_it)


def look(query="a"):
    return f"<search> {query}</search>"


def report(text):
    return f"<report> {text}</report>"


def answer(text):
    return f"<answer> {text}</answer>"


def cascade(reported, answered):
    """One search, a report and an answer."""
    return {
        ("searcher", 0): look(),
        ("searcher", 1): report(reported),
        ("answerer", 0): answer(answered),
    }


def hierarchy(reported, selected, answered):
    """Two Searchers, of whom the second reports nothing of use."""
    return {
        ("leader", 0): "<assign> s1 : one ; s2 : two</assign>",
        ("leader/w1.s1", 0): look(),
        ("leader/w1.s1", 1): report(reported),
        ("leader/w1.s2", 0): report("not found"),
        ("leader", 1): f"<select> {selected}</select>",
        ("answerer", 0): answer(answered),
    }


def judge(episode, team, *, question=QUESTION):
    return categorise(episode, question, chat=team.chat)


# --- the chain ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("says", "found", "wanted", "role"),
    [
        (cascade("nobody", "bob"), LOST, Category.NOT_RETRIEVED, "searcher"),
        (cascade("nobody", "bob"), [], Category.NOT_RETRIEVED, "searcher"),
        (cascade("nobody", "bob"), FOUND, Category.NOT_REPORTED, "searcher"),
        (cascade("it was ada", "bob"), FOUND, Category.NOT_ANSWERED, "answerer"),
        (cascade("it was ada", "bob"), LOST, Category.NOT_ANSWERED, "answerer"),  # from memory
        (cascade("it was ada", "it was ada"), FOUND, Category.FORMAT, "answerer"),
        (cascade("it was ada", "àda"), FOUND, Category.ALIAS, "answerer"),
        (cascade("nobody", "ada"), LOST, Category.CORRECT, ""),
    ],
)
def test_a_cascade_loses_its_answer_at_the_last_place_that_had_it(says, found, wanted, role):
    team = make_team("cascade")
    category = judge(play(team, says, found=found), team)
    assert (category, role_of(category, "cascade")) == (wanted, role)


@pytest.mark.parametrize(
    ("says", "found", "wanted", "role"),
    [
        (hierarchy("nobody", "s1", "bob"), LOST, Category.NOT_RETRIEVED, "searcher"),
        (hierarchy("nobody", "s1", "bob"), FOUND, Category.NOT_REPORTED, "searcher"),
        (hierarchy("it was ada", "s2", "bob"), FOUND, Category.NOT_SELECTED, "leader"),
        (hierarchy("it was ada", "s2 s1", "bob"), FOUND, Category.NOT_ANSWERED, "answerer"),
        (hierarchy("it was ada", "s2", "ada"), FOUND, Category.CORRECT, ""),
    ],
)
def test_a_hierarchy_can_also_lose_it_in_the_selection(says, found, wanted, role):
    team = make_team("hierarchy")
    category = judge(play(team, says, found=found), team)
    assert (category, role_of(category, "hierarchy")) == (wanted, role)


@pytest.mark.parametrize(
    ("found", "answered", "wanted"),
    [
        (LOST, "bob", Category.NOT_RETRIEVED),
        (FOUND, "bob", Category.NOT_ANSWERED),
        (FOUND, "ada of 1901", Category.FORMAT),
    ],
)
def test_a_single_agent_answers_from_what_it_found(found, answered, wanted):
    team = make_team("single")
    says = {("single", 0): look(), ("single", 1): answer(answered)}
    category = judge(play(team, says, found=found), team)
    assert category == wanted
    assert role_of(category, "single") == "searcher"


def test_a_report_that_is_not_a_report_and_a_query_do_not_count():
    team = make_team("cascade")
    says = {
        ("searcher", 0): look("did ada make it"),
        ("searcher", 1): "I think it was ada",
        ("searcher", 2): "ada",
        ("answerer", 0): answer("bob"),
    }
    assert judge(play(team, says, found=LOST), team) == Category.NOT_RETRIEVED


def test_an_answer_without_its_tags_is_a_matter_of_format_only_if_it_is_right():
    team = make_team("cascade")
    for words, wanted in (("ada", Category.FORMAT), ("bob", Category.NOT_ANSWERED)):
        says = cascade("it was ada", "") | {
            ("answerer", 0): f"so it was {words}",
            ("answerer/c0", 1): f"{words}!",
        }
        assert judge(play(team, says), team) == wanted


def test_what_a_thought_mentions_is_not_said():
    team = make_team("cascade", template=chat.THINKING)
    says = cascade("", "") | {
        ("searcher", 1): f"<think>\nada?\n</think>{report('nobody')}",
        ("answerer", 0): "<think>\nada\n</think>bob",
        ("answerer/c0", 1): "<think>\nada\n</think>bob",
    }
    assert judge(play(team, says), team) == Category.NOT_REPORTED


def test_the_first_candidate_is_judged():
    team = make_team("cascade", candidates=3)
    says = cascade("it was ada", "") | {("answerer", 0): [answer(x) for x in ("bob", "ada", "ada")]}
    assert judge(play(team, says), team) == Category.NOT_ANSWERED
    says[("answerer", 0)] = [answer(x) for x in ("ada", "bob", "bob")]
    assert judge(play(team, says), team) == Category.CORRECT
    # the second and third candidates' words are not the first one's
    says[("answerer", 0)] = ["bob", "ada", "ada"]
    says |= {(f"answerer/c{c}", 1): "bob" if c == 0 else "ada" for c in range(3)}
    assert judge(play(team, says), team) == Category.NOT_ANSWERED


def test_a_report_that_was_cut_for_the_answerer_is_not_a_leaders_error_where_there_is_none():
    team = make_team("cascade")
    team = replace(team, budgets=replace(team.budgets, observation=45))
    episode = play(team, cascade("so much was made by so many that it was in the end ada", "bob"))
    assert "ada" not in follow(episode, team.chat).evidence[0]
    assert judge(episode, team) == Category.NOT_ANSWERED


def test_a_failure_of_the_world_is_no_error_of_a_role():
    team = make_team("cascade")
    script = Script(cascade("it was ada", "ada"))
    world = replace(script.world, search=None)  # calling it raises
    episode = asyncio.run(rollout.play_episode(QUESTION, 0, team, world=world, run=RUN))
    assert judge(episode, team) == Category.WORLD
    assert role_of(Category.WORLD, "cascade") == ""


def test_another_question_is_an_error():
    team = make_team("cascade")
    episode = play(team, cascade("ada", "ada"))
    with pytest.raises(ValueError, match=r"episode of 'toy/1' with question 'toy/2'"):
        judge(episode, team, question=replace(QUESTION, uid="toy/2"))


# --- places ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [chat.TOY, chat.INSTRUCT, chat.THINKING, chat.NOT_THINKING])
def test_the_places_hold_the_same_under_every_template_also_where_the_past_is_rewritten(template):
    team = make_team("cascade", template=template)
    thought = "<think>\nhm\n</think>\n\n" if template.drops_thoughts else ""
    says = {
        ("searcher", 0): thought + look("first"),
        ("searcher", 1): thought + look("second"),
        ("searcher", 2): thought + report("both"),
        ("answerer", 0): thought + answer("ada"),
    }
    script = Script(says, finds=lambda query: [Passage("p", "t", f"about {query}")])

    async def sample(prompt, **request):
        """The script's, with the tags of thoughts as the control tokens that they are."""
        (said,) = await script.sample(prompt, **request)
        tokens = CharTokenizer().encode_template(CharTokenizer().decode(said.tokens))
        return [replace(said, tokens=tuple(tokens), logprobs=(-0.1,) * len(tokens))]

    world = replace(script.world, sample=sample)
    episode = asyncio.run(rollout.play_episode(QUESTION, 0, team, world=world, run=RUN))
    trail = follow(episode, team.chat)
    # each observation alone: neither the prompt nor the other one
    assert [text.removeprefix("user").strip() for text in trail.found] == [
        "t about first |",
        "t about second |",
    ]
    assert trail.reports == ("both",)
    (evidence,) = trail.evidence
    assert "who made the thing from s1 : both" in evidence
    assert trail.unparsed == ()
    strands = sum(trace.role == "searcher" for trace in episode.traces)
    assert strands == (3 if thought else 1)


def test_what_a_search_showed_before_the_world_failed_was_found():
    # the script knows no second turn: the observation is the last thing in the trace
    team = make_team("cascade")
    episode = play(team, {("searcher", 0): look()})
    assert episode.failure is not None
    (text,) = follow(episode, team.chat).found
    assert text.split() == ["user", "thing", "ada", "made", "the", "thing", "in", "1901", "|"]


# --- what can be traced ---------------------------------------------------------------------------

CHOICE = Question("toy/1", "toy", "who is older, ada or bob", ("ada",))
YES = Question("toy/1", "toy", "is ada older than bob", ("yes",))
ALICE = {"p1": FOUND[0], "p2": LOST[0]}


@pytest.mark.parametrize("question", [CHOICE, YES])
def test_answers_that_prove_nothing_in_a_text_leave_the_episode_undecided(question):
    team = make_team("cascade")
    episode = play(team, cascade("ada it is, yes", "bob"), question=question)
    assert judge(episode, team, question=question) == Category.UNDECIDED
    # an alias that the question does not name decides again
    known = replace(question, golden_answers=(*question.golden_answers, "ada lovelace"))
    assert judge(episode, team, question=known) == Category.NOT_RETRIEVED


def test_gold_passages_decide_what_was_retrieved():
    team = make_team("cascade")
    episode = play(team, cascade("nobody", "bob"), found=FOUND)
    gold = replace(QUESTION, gold_passages=("p1",))
    assert judge(episode, team, question=gold) == Category.NOT_REPORTED
    both = replace(QUESTION, gold_passages=("p1", "p2"))
    assert judge(episode, team, question=both) == Category.NOT_RETRIEVED
    # of a gold page any passage will do
    page = replace(QUESTION, gold_titles=("thing",))
    assert judge(episode, team, question=page) == Category.NOT_REPORTED
    assert judge(episode, team, question=replace(page, gold_titles=("thing", "other"))) == (
        Category.NOT_RETRIEVED
    )
    # they are also evidence where the answer is not
    yes = replace(YES, gold_passages=("p2",))
    episode = play(team, cascade("nobody", "no"), found=FOUND, question=yes)
    assert judge(episode, team, question=yes) == Category.NOT_RETRIEVED
    episode = play(team, cascade("nobody", "no"), found=LOST, question=yes)
    assert judge(episode, team, question=yes) == Category.UNDECIDED


# --- words ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prediction", "gold", "wanted"),
    [
        ("The answer is Paris, France.", "Paris", Category.FORMAT),
        ("yes, both are", "yes", Category.FORMAT),
        ("they are, yes", "yes", None),
        ("1,000 people", "1000", Category.FORMAT),
        ("Parisian", "Paris", None),
        ("Beyonce", "Beyoncé", Category.ALIAS),
        ("New-York", "New York", Category.ALIAS),
        ("March 12, 1990", "12 March 1990", Category.ALIAS),
        ("Obama", "Barack Obama", Category.ALIAS),
        ("Barack Hussein Obama", "Barack Obama", Category.ALIAS),
        ("Obama", "Barack Hussein Obama II", None),  # a quarter of the words
        ("1990", "March 1990", None),  # a number alone
        ("no", "no one", None),
        ("the", "Paris", None),
        ("", "Paris", None),
    ],
)
def test_format_and_alias_by_hand(prediction, gold, wanted):
    team = make_team("cascade")
    question = replace(QUESTION, golden_answers=(gold,))
    episode = replace(play(team, cascade("nobody", "x"), found=LOST), predictions=(prediction,))
    category = judge(episode, team, question=question)
    others = (Category.NOT_RETRIEVED, Category.UNDECIDED)
    assert category == wanted if wanted else category in others


def test_has_answer_by_hand():
    assert has_answer("It lies in Paris/London.", "the London")
    assert has_answer("1,000 people", "1000")
    assert has_answer("the U.S. army", "US")
    assert not has_answer("Parisian", "Paris")
    assert not has_answer("anything", "The")
    assert not has_answer("", "Paris")


def test_has_answer_is_a_run_of_words():
    rng = random.Random(0)
    found = 0
    for _ in range(2000):
        text = [rng.choice("xyz") * rng.randint(1, 2) for _ in range(8)]
        part = [rng.choice("xyz") * rng.randint(1, 2) for _ in range(rng.randint(1, 3))]
        want = any(text[i : i + len(part)] == part for i in range(len(text)))
        assert has_answer(" ".join(text), " ".join(part)) == want
        found += want
    assert 300 < found < 1700


# --- the toy world, whose flaws are known ---------------------------------------------------------


@functools.cache
def make_scene() -> scenes.Scene:
    return scenes.make_scene(default_config(), make_toy_tokenizer())


def toy_categories(team, flaws, *, with_gold):
    scene = make_scene()
    questions = {q.uid: q for q in scene.questions["test"]}
    if not with_gold:
        questions = {uid: replace(q, gold_passages=()) for uid, q in questions.items()}
    episodes = scripted_episodes(
        default_config(), team, scene, split="test", count=70, runs=1, flaws=flaws
    )
    return [categorise(e, questions[e.question], chat=scene.chat) for e in episodes]


@pytest.mark.parametrize("team", ["cascade", "hierarchy", "single"])
def test_who_never_searches_never_retrieves(team):
    counts = Counter(toy_categories(team, Flaws(skip_search=1.0), with_gold=True))
    assert set(counts) == {Category.NOT_RETRIEVED, Category.CORRECT}
    assert counts[Category.NOT_RETRIEVED] > 50


def test_a_searcher_that_stops_after_the_first_hop_never_retrieves_the_last():
    counts = Counter(toy_categories("cascade", Flaws(stop_early=1.0), with_gold=True))
    assert set(counts) == {Category.NOT_RETRIEVED, Category.CORRECT}
    assert counts[Category.NOT_RETRIEVED] > 20


def test_who_misreads_what_was_found_loses_it_in_the_report_or_the_answer():
    counts = Counter(toy_categories("cascade", Flaws(misread=0.5), with_gold=False))
    assert counts[Category.NOT_REPORTED] > 5 and counts[Category.NOT_ANSWERED] > 5
    assert counts[Category.NOT_RETRIEVED] + counts[Category.NOT_SELECTED] == 0


def test_golden_answers_in_the_text_mostly_tell_what_gold_passages_tell():
    flaws = Flaws(**default_config().pretrain.flaws)
    pairs = [
        (one, other)
        for one, other in zip(
            toy_categories("cascade", flaws, with_gold=False),
            toy_categories("cascade", flaws, with_gold=True),
            strict=True,
        )
        if Category.CORRECT != one != Category.UNDECIDED
    ]
    assert len(pairs) > 20
    assert sum(one == other for one, other in pairs) / len(pairs) >= 0.9


# --- the table ------------------------------------------------------------------------------------


def test_the_table_counts_every_category_of_every_system():
    systems = {"one": [Category.CORRECT, Category.CORRECT, Category.ALIAS], "none": []}
    table = grid(systems, title="what became of episodes")
    assert table.header == ("episodes (%)", "one", "none")
    assert [row[0] for row in table.rows] == [category.value for category in Category]
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["correct"] == ("2 (66.7)", "0 (0.0)")
    assert rows["alias only"] == ("1 (33.3)", "0 (0.0)")
    assert rows["undecided"] == ("0 (0.0)", "0 (0.0)")
