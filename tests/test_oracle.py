"""The scripted players: hand-followed episodes, the ceiling in both teams, flaws one by one."""

import re
from collections import Counter, defaultdict
from functools import cache, lru_cache

import numpy as np
import pytest

from mas_jax.agents import actions, oracle
from mas_jax.agents.oracle import Flaws, imperfect
from mas_jax.data.world import World, make_world
from mas_jax.data.world_questions import FAMILIES
from mas_jax.data.world_text import parse_ask
from mas_jax.records import Passage, Question
from mas_jax.retrieval.hashed_ngrams import HashedNgrams

PASSAGES, SEARCHES, CASCADE_TURNS, TURNS, WAVES = 3, 2, 5, 12, 3


@lru_cache(maxsize=1)
def world():
    return make_world(0)


@lru_cache(maxsize=1)
def encoded():
    encoder = HashedNgrams(256)
    return encoder, encoder.encode([f"{p.title}\n{p.text}" for p in world().passages])


@cache
def search(query):
    """The passages nearest to a query, by exact search."""
    encoder, vectors_NE = encoded()
    scores_N = vectors_NE @ encoder.encode([query])[0]
    best = np.argpartition(-scores_N, PASSAGES)[:PASSAGES]
    return tuple(world().passages[i] for i in sorted(best, key=lambda i: (-scores_N[i], i)))


def inside(text, tag):
    """What stands between a tag and its closing tag; the whole text must be that."""
    return re.fullmatch(rf"<{tag}> (.*)</{tag}>", text)[1]


def play_searcher(task, searches, mistakes):
    """The report on a task, and the number of searches made."""
    seen = []
    for done in range(searches + 1):
        text = oracle.searcher_action(
            world(), task, seen, done, must_report=done == searches, mistakes=mistakes
        )
        if text.startswith("<report>"):
            return inside(text, "report"), done
        seen += search(inside(text, "search"))
    raise AssertionError("searched when it had to report")


def play_cascade(question, mistakes=oracle.FAULTLESS):
    """Prediction and number of searches of Searcher, then Answerer."""
    report, searches = play_searcher(question.text, CASCADE_TURNS - 1, mistakes)
    answer = oracle.answerer_action(world(), question.text, [report], mistakes=mistakes)
    return inside(answer, "answer"), searches


def play_hierarchy(question, mistakes=oracle.FAULTLESS):
    """Prediction and number of searches of Leader, waves of Searchers, Answerer."""
    reports, searches, turns = {}, 0, TURNS
    for wave in range(WAVES + 1):
        text = oracle.leader_action(
            world(), question.text, reports, must_select=wave == WAVES, mistakes=mistakes
        )
        turns -= 1
        parsed = actions.parse(
            text, allowed=("assign", "select"), known_ids=reports, max_subtasks=4
        )
        if isinstance(parsed, actions.Select):
            break
        assert isinstance(parsed, actions.Assign), (text, parsed)
        grant = min(SEARCHES, turns // len(parsed.subtasks) - 1)
        for name, task in parsed.subtasks:
            reports[name], done = play_searcher(task, grant, mistakes)
            searches += done
            turns -= done + 1
    evidence = [reports[name] for name in parsed.ids]
    answer = oracle.answerer_action(world(), question.text, evidence, mistakes=mistakes)
    return inside(answer, "answer"), searches


def accuracy(play, questions, mistakes=oracle.FAULTLESS):
    """Exact match by family, and mean searches by family."""
    right, made, count = defaultdict(float), defaultdict(float), Counter()
    for question in questions:
        prediction, searches = play(question, mistakes)
        right[question.dataset] += prediction in question.golden_answers
        made[question.dataset] += searches
        count[question.dataset] += 1
    return (
        {family: right[family] / count[family] for family in count},
        {family: made[family] / count[family] for family in count},
    )


TWO_HOPS = Question(
    "hotpotqa_like/test/0",
    "hotpotqa_like",
    "where was the author of silent garden born",
    ("ashbury portal",),
    hops=2,
    decomposition=("who wrote silent garden", "where was #1 born"),
)
PAIR = Question(
    "2wiki_like/test/0",
    "2wiki_like",
    "were alba ackby and corba burer born in the same city",
    ("yes",),
    hops=2,
    decomposition=("where was alba ackby born", "where was corba burer born"),
)
SMALL = World(
    seed=0,
    passages=(),
    questions={},
    closed_book={("born", "dadric duner"): "elmwick crossia"},
    names={"city": ("farmere fortum",), "person": ("gusba falby",)},
    fingerprint="",
    by_text={q.text: q for q in (TWO_HOPS, PAIR)},
)
AUTHOR = Passage("p1", "silent garden", "alba ackby is the author of silent garden")
DECOY = Passage("p2", "alba ackby", "alba ackby once visited farmere fortum")
NEAR = Passage("p3", "alba ackby", "alba ackby knows corba burer , born in dorcott gateos")
BORN = Passage("p4", "alba ackby", "ashbury portal is the city where alba ackby was born")


def test_a_searcher_goes_hop_by_hop_through_what_it_reads():
    act = oracle.searcher_action
    assert act(SMALL, TWO_HOPS.text, [], 0) == "<search> silent garden was written by</search>"
    seen = [AUTHOR, DECOY]
    assert act(SMALL, TWO_HOPS.text, seen, 1) == "<search> alba ackby was born in</search>"
    # the near miss is not taken for the fact: other words, then the report of what there is
    seen += [NEAR]
    again = act(SMALL, TWO_HOPS.text, seen, 2)
    assert again == "<search> birthplace of alba ackby native</search>"
    first = "silent garden was written by alba ackby"
    assert act(SMALL, TWO_HOPS.text, seen, 3) == f"<report> {first}</report>"
    whole = f"<report> {first} ; alba ackby was born in ashbury portal</report>"
    assert act(SMALL, TWO_HOPS.text, [*seen, BORN], 3) == whole
    assert act(SMALL, TWO_HOPS.text, [], 0, must_report=True) == "<report> not found</report>"


def test_a_leader_sends_the_next_hop_or_both_sides_of_a_comparison():
    act = oracle.leader_action
    assert act(SMALL, TWO_HOPS.text, {}) == "<assign> s1 : who wrote silent garden</assign>"
    reports = {"s1": "silent garden was written by alba ackby"}
    assert act(SMALL, TWO_HOPS.text, reports) == "<assign> s2 : where was alba ackby born</assign>"
    assert act(SMALL, TWO_HOPS.text, reports, must_select=True) == "<select> s1</select>"
    assert act(SMALL, TWO_HOPS.text, reports | {"s2": "not found"}) == "<select> s1</select>"
    reports |= {"s2": "alba ackby was born in ashbury portal"}
    assert act(SMALL, TWO_HOPS.text, reports) == "<select> s1 s2</select>"
    assert act(SMALL, PAIR.text, {}) == (
        "<assign> s1 : where was alba ackby born ; s2 : where was corba burer born</assign>"
    )
    assert (
        act(SMALL, PAIR.text, {"s1": "not found", "s2": "not found"}) == "<select> s1 s2</select>"
    )


def test_an_answerer_follows_the_evidence_whatever_it_says():
    def act(question, *evidence):
        return oracle.answerer_action(SMALL, question, evidence)

    wrote, born = "silent garden was written by alba ackby", "alba ackby was born in {}"
    for city in ("ashbury portal", "dorcott gateos"):
        assert act(TWO_HOPS.text, wrote, born.format(city)) == f"<answer> {city}</answer>"
        assert act(TWO_HOPS.text, born.format(city) + " ; " + wrote) == f"<answer> {city}</answer>"
    assert act(TWO_HOPS.text, wrote) == "<answer> alba ackby</answer>"
    assert act(TWO_HOPS.text) == "<answer> unknown</answer>"
    assert act("where was dadric duner born") == "<answer> elmwick crossia</answer>"
    here, there = born.format("ashbury portal"), "corba burer was born in {}"
    assert act(PAIR.text, here, there.format("ashbury portal")) == "<answer> yes</answer>"
    assert act(PAIR.text, here, there.format("dorcott gateos")) == "<answer> no</answer>"
    assert act(PAIR.text, here) == "<answer> no</answer>"


def test_a_task_from_another_world_is_searched_as_it_stands_once():
    act = oracle.searcher_action
    assert act(SMALL, "tell me a joke", [], 0) == "<search> tell me a joke</search>"
    assert act(SMALL, "tell me a joke", [DECOY], 1) == "<report> not found</report>"
    assert oracle.leader_action(SMALL, "a joke", {}) == "<assign> s1 : a joke</assign>"
    assert oracle.leader_action(SMALL, "a joke", {"s1": "not found"}) == "<select> s1</select>"
    assert oracle.answerer_action(SMALL, "a joke", ["not found"]) == "<answer> unknown</answer>"


def test_a_single_agent_answers_where_a_searcher_reports():
    act = oracle.single_action
    assert act(SMALL, TWO_HOPS.text, [AUTHOR], 1) == "<search> alba ackby was born in</search>"
    assert act(SMALL, TWO_HOPS.text, [AUTHOR, BORN], 2) == "<answer> ashbury portal</answer>"
    assert act(SMALL, TWO_HOPS.text, [], 0, must_answer=True) == "<answer> unknown</answer>"


@pytest.mark.parametrize("play", [play_cascade, play_hierarchy])
def test_the_ceiling_is_above_95_percent_in_every_family(play):
    right, searches = accuracy(play, world().questions["test"])
    assert set(right) == set(FAMILIES)
    assert min(right.values()) > 0.95, right
    hops = {q.dataset: q.hops for q in world().questions["test"]}
    for family, mean in searches.items():
        assert abs(mean - hops[family]) < 0.1, searches


def some(family, num=60):
    return [q for q in world().questions["train"] if q.dataset == family][:num]


def test_without_passages_nothing_but_closed_book_facts_is_answered():
    closed = {q.text for q in world().questions["test"] if parse_ask(q.text) in world().closed_book}
    assert len(closed) == 24
    for question in world().questions["test"]:
        text = oracle.answerer_action(world(), question.text, [])
        known = inside(text, "answer") in question.golden_answers
        assert known == (question.text in closed or question.golden_answers == ("no",))


@pytest.mark.parametrize("play", [play_cascade, play_hierarchy])
def test_stopping_early_costs_the_later_hops_only(play):
    mistakes = imperfect(Flaws(stop_early=1.0), 0)
    right, searches = accuracy(play, some("hotpotqa_like") + some("popqa_like"), mistakes)
    assert (right["hotpotqa_like"], searches["hotpotqa_like"]) == (0.0, 1.0)
    assert right["popqa_like"] > 0.95
    half, _ = accuracy(play, some("hotpotqa_like"), imperfect(Flaws(stop_early=0.5), 0))
    assert 0.25 < half["hotpotqa_like"] < 0.75


def test_skipping_the_search_reports_a_guess_of_the_right_kind():
    mistakes = imperfect(Flaws(skip_search=1.0), 0)
    right, searches = accuracy(play_cascade, some("popqa_like"), mistakes)
    assert searches["popqa_like"] == 0.0 and right["popqa_like"] < 0.1
    text = oracle.searcher_action(SMALL, "where was alba ackby born", [], 0, mistakes=mistakes)
    assert text == "<report> alba ackby was born in farmere fortum</report>"


def test_closed_book_facts_are_reported_from_memory():
    mistakes = imperfect(Flaws(from_memory=1.0), 0)
    closed = [q for q in world().questions["test"] if parse_ask(q.text) in world().closed_book]
    right, searches = accuracy(play_cascade, closed, mistakes)
    assert (right, searches) == ({"nq_like": 1.0}, {"nq_like": 0.0})
    _, searches = accuracy(play_cascade, some("popqa_like"), mistakes)
    assert searches["popqa_like"] >= 1.0


def test_dropped_words_spoil_queries_but_leave_one():
    text = "who wrote silent garden"
    dropped = imperfect(Flaws(drop_word=1.0), 0)
    query = oracle.searcher_action(SMALL, text, [], 0, mistakes=dropped)
    assert query == "<search> silent</search>"
    half = imperfect(Flaws(drop_word=0.5), 0)
    lengths = [
        len(oracle.searcher_action(SMALL, text, [], 0, mistakes=half).split()) - 1
        for _ in range(400)
    ]
    assert max(lengths) == 5 and abs(np.mean(lengths) - 2.53) < 0.2  # 5 / 2 + 1 / 2**5
    right, _ = accuracy(play_cascade, some("popqa_like"), imperfect(Flaws(drop_word=0.5), 0))
    assert right["popqa_like"] < 0.9


def test_a_whole_question_handed_on_is_still_searched_hop_by_hop():
    mistakes = imperfect(Flaws(whole_question=1.0), 0)
    text = oracle.leader_action(SMALL, TWO_HOPS.text, {}, mistakes=mistakes)
    assert text == f"<assign> s1 : {TWO_HOPS.text}</assign>"
    right, searches = accuracy(play_hierarchy, some("hotpotqa_like"), mistakes)
    assert right["hotpotqa_like"] > 0.9 and searches["hotpotqa_like"] < 2.2


def test_misreading_reports_another_name_of_the_right_kind():
    mistakes = imperfect(Flaws(misread=1.0), 0)
    task = "where was alba ackby born"
    text = oracle.searcher_action(SMALL, task, [DECOY, BORN], 1, mistakes=mistakes)
    assert text == "<report> alba ackby was born in farmere fortum</report>"
    only = oracle.searcher_action(SMALL, task, [BORN], 1, mistakes=mistakes)
    assert only == "<report> alba ackby was born in ashbury portal</report>"
    report = "alba ackby was born in ashbury portal"
    answer = oracle.answerer_action(SMALL, task, [report], mistakes=mistakes)
    assert answer == "<answer> alba ackby</answer>"


def test_wasting_reports_selects_one_of_several_and_answers_without_evidence():
    wasteful = imperfect(Flaws(waste_report=1.0), 0)
    reports = {"s1": "alba ackby was born in ashbury portal", "s2": "alba ackby works for axcorp"}
    chosen = {oracle.leader_action(SMALL, TWO_HOPS.text, reports, must_select=True,
                                   mistakes=wasteful) for _ in range(20)}  # fmt: skip
    assert chosen == {"<select> s1</select>", "<select> s2</select>"}
    one = {"s1": reports["s1"]}
    text = oracle.leader_action(SMALL, TWO_HOPS.text, one, must_select=True, mistakes=wasteful)
    assert text == "<select> s1</select>"
    task = "where was alba ackby born"
    assert (
        oracle.answerer_action(SMALL, task, [reports["s1"]]) == "<answer> ashbury portal</answer>"
    )
    wasted = oracle.answerer_action(SMALL, task, [reports["s1"]], mistakes=wasteful)
    assert wasted == "<answer> unknown</answer>"


def test_mistakes_follow_from_their_seed():
    flaws = Flaws(0.3, 0.1, 0.3, 0.2, 0.2, 0.5)
    questions = some("musique_like") + some("nq_like")

    def play(seed):
        mistakes = imperfect(flaws, seed)
        return [play_hierarchy(question, mistakes) for question in questions]

    assert play(1) == play(1)
    assert play(1) != play(2)
