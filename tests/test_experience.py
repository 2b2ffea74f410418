"""One step's questions by position, episodes in order, and what is reported of them."""

import asyncio
import json
import math
from dataclasses import replace

import pytest
from evaluation_episodes import make_episode, make_trace, random_episode
from scripted_team import Script, make_team
from test_credit import episode
from test_rollout import PATIENT, RUN, SAYS, failing, questions, raising

from mas_jax.learning.experience import collect, describe, divided, remembering, tally
from mas_jax.records import (
    Failure,
    FailureKind,
    Judgement,
    Passage,
    SearchFailure,
    StopReason,
    WorldError,
)

# --- episodes -------------------------------------------------------------------------------------


def test_episodes_come_in_order_of_question_and_rollout_however_they_finish():
    pool = [questions(10)[index] for index in (7, 2, 9)]
    script = Script(SAYS)
    episodes = collect(pool, 3, make_team("cascade"), world=script.world, run=RUN, limits=PATIENT)
    assert [(e.question, e.rollout) for e in episodes] == [
        (uid, rollout) for uid in ("q7", "q2", "q9") for rollout in range(3)
    ]
    assert all(e.reward == 1.0 for e in episodes)


def test_an_episode_that_the_world_failed_is_among_them():
    world = failing(Script(SAYS), search=raising(WorldError(FailureKind.RETRIEVER, "down")))
    episodes = collect(questions(2), 2, make_team("cascade"), world=world, run=RUN, limits=PATIENT)
    assert [e.failure.kind for e in episodes] == [FailureKind.RETRIEVER] * 4
    found = describe(episodes)
    assert found["rollout/errors/retriever"] == 4
    assert (found["rollout/failure_frac"], found["rollout/em"]) == (1, 0)


def test_the_texts_of_all_that_was_found_are_remembered():
    script = Script(
        SAYS, finds=lambda query: [Passage("p1", "thing", "red"), Passage("p2", "", "x")]
    )
    search, texts = remembering(script.world.search)
    world = replace(script.world, search=search)
    collect(questions(1), 1, make_team("cascade"), world=world, run=RUN, limits=PATIENT)
    assert texts == {"p1": "thing\nred", "p2": "\nx"}
    failed, nothing = remembering(
        Script(SAYS, finds=lambda q: SearchFailure("late", "")).world.search
    )
    assert asyncio.run(failed(["a"], 3)) == [SearchFailure("late", "")]
    assert nothing == {}


# --- what they were like --------------------------------------------------------------------------


def test_description_by_hand():
    cut = make_trace("answerer", [(3, 5, "invalid")], candidate=1)
    cut = replace(cut, turns=(replace(cut.turns[0], stop_reason=StopReason.LENGTH),))
    right = episode(
        "a", 0,
        traces=(
            make_trace("searcher", [(4, 2, "search"), (3, 4, "report")]),
            make_trace("answerer", [(3, 1, "answer")]),
            cut,
        ),
        correct=(1.0, 0.0), num_searches=1, turns_used=2,
    )  # fmt: skip
    failed = episode(
        "a", 1, traces=(make_trace("searcher", [(4, 2, "invalid"), (3, 2, "search")]),),
        failure=Failure(FailureKind.API, "gone"), num_searches=1, correct=(),
    )  # fmt: skip
    found = describe([right, failed])
    want = {
        "rollout/episodes": 2,
        "rollout/reward": 0.5,  # of the one that has one
        "rollout/em": 0.5,  # first candidates, the failed one wrong
        "rollout/failure_frac": 0.5,
        "rollout/answered_frac": 0.5,
        "rollout/errors/api": 1,
        "rollout/valid_action_frac": 4 / 6,
        "rollout/searcher/agents": 1,
        "rollout/searcher/length": (6 + 4) / 2,
        "rollout/searcher/valid_action_frac": 3 / 4,
        "rollout/searcher/cut_off_frac": 0,
        "rollout/answerer/agents": 1,
        "rollout/answerer/length": (1 + 5) / 2,
        "rollout/answerer/valid_action_frac": 1 / 2,
        "rollout/answerer/cut_off_frac": 1 / 2,
    }
    assert {name: found[name] for name in want} == pytest.approx(want)
    assert not any(name.startswith("rollout/leader") for name in found)


def test_queries_are_told_apart_within_a_question_and_reports_have_lengths():
    def searched(uid, rollout, query, report):
        search = make_trace("searcher", [(4, 2, "search"), (3, report, "report")])
        tokens = list(search.tokens)
        tokens[4:6] = query
        return episode(uid, rollout, traces=(replace(search, tokens=tuple(tokens), question=uid),))

    found = describe([searched("a", 0, (8, 9), 4), searched("a", 1, (8, 9), 2),
                      searched("b", 0, (8, 9), 3), searched("b", 1, (9, 9), 3)])  # fmt: skip
    # of four queries a's two are the same: 3/4; reports (4 + 2 + 3 + 3) / 4
    assert found["rollout/searcher/distinct_queries_frac"] == 0.75
    assert found["rollout/searcher/report_length"] == 3


def test_an_agent_whose_template_rewrote_its_past_is_one_agent():
    strands = (
        make_trace("searcher", [(4, 2, "search")]),
        make_trace("searcher", [(9, 3, "report")]),
    )
    found = describe([make_episode("a", 0, traces=strands, correct=(0.0,))])
    assert (found["rollout/searcher/agents"], found["rollout/searcher/length"]) == (1, 5)


def test_metrics_of_hosts_are_those_of_all_their_episodes():
    for team in ("hierarchy", "single"):
        episodes = [random_episode(f"q{i}", j, team) for i in range(5) for j in range(4)]
        episodes += [
            make_episode("q9", 0, failure=Failure(FailureKind.API, ""), correct=()),
            replace(make_episode("q9", 1, correct=(1.0,)), judgements=(Judgement("a", None),)),
        ]
        parts = [[e for e in episodes if e.question in of] for of in ("q1 q4", "q0 q2 q3 q9")]
        tallies = json.loads(json.dumps([tally(part) for part in parts]))
        assert divided(*tallies) == pytest.approx(describe(episodes))
        assert describe(parts[0])["rollout/reward"] != describe(episodes)["rollout/reward"]


def test_leaves_of_hosts_are_described_as_all_of_them():
    searches = make_trace("searcher", [(4, 2, "search"), (3, 4, "report")])
    leaves = [
        replace(episode(uid, i, traces=(searches,)), tree=0, shared_turns=i)
        for uid, i in (("a", 0), ("a", 1), ("b", 0), ("b", 0))
    ]
    want = describe(leaves)
    assert want["rollout/tree/shared_turns"] == 0.25
    assert divided(tally(leaves[:2]), tally(leaves[2:])) == pytest.approx(want)


def test_no_episodes_are_numbers_all_the_same():
    assert all(math.isfinite(value) for value in describe([]).values())
