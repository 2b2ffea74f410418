"""One step's questions by position, episodes in order, and what is reported of them."""

import math
from collections import Counter
from dataclasses import replace

import pytest
from evaluation_episodes import make_episode, make_trace
from scripted_team import Script, make_team
from test_credit import episode
from test_rollout import PATIENT, RUN, SAYS, failing, questions, raising

from mas_jax.learning.experience import collect, describe, questions_of
from mas_jax.records import Failure, FailureKind, StopReason, WorldError

POOL = questions(10)


def uids(step, *, count=4, host=0, num_hosts=1, seed=0, pool=POOL):
    found = questions_of(pool, seed=seed, step=step, count=count, host=host, num_hosts=num_hosts)
    return [question.uid for question in found]


# --- questions ------------------------------------------------------------------------------------


def test_every_epoch_is_all_questions_once_in_an_order_of_its_own():
    drawn = [uid for step in range(10) for uid in uids(step)]  # 40: four epochs of 10
    epochs = [drawn[start : start + 10] for start in range(0, 40, 10)]
    for epoch in epochs:
        assert Counter(epoch) == Counter(q.uid for q in POOL)
    assert len(set(map(tuple, epochs))) == 4


def test_a_step_needs_no_steps_before_it_and_its_questions_are_its_own():
    alone = uids(7)
    assert [uids(step) for step in range(9)][7] == alone
    assert uids(7, seed=1) != alone


def test_a_step_may_ask_for_more_questions_than_there_are():
    drawn = uids(0, count=25)
    assert Counter(Counter(drawn).values()) == {2: 5, 3: 5}


@pytest.mark.parametrize("num_hosts", [2, 4])
def test_hosts_share_a_steps_questions_without_overlap(num_hosts):
    whole = uids(3, count=8)
    shares = [uids(3, count=8, host=host, num_hosts=num_hosts) for host in range(num_hosts)]
    assert [whole[host::num_hosts] for host in range(num_hosts)] == shares


def test_questions_that_hosts_cannot_share_are_an_error():
    with pytest.raises(ValueError, match=r"train\.questions=6 cannot be shared by 4 hosts"):
        uids(0, count=6, num_hosts=4)


# --- episodes -------------------------------------------------------------------------------------


def test_episodes_come_in_order_of_question_and_rollout_however_they_finish():
    pool = [POOL[7], POOL[2], POOL[9]]
    script = Script(SAYS)
    episodes = collect(pool, 3, make_team("cascade"), world=script.world, run=RUN, limits=PATIENT)
    assert [(e.question, e.rollout) for e in episodes] == [
        (uid, rollout) for uid in ("q7", "q2", "q9") for rollout in range(3)
    ]
    assert all(e.reward == 1.0 for e in episodes)


def test_an_episode_that_the_world_failed_is_among_them():
    world = failing(Script(SAYS), search=raising(WorldError(FailureKind.RETRIEVER, "down")))
    episodes = collect(POOL[:2], 2, make_team("cascade"), world=world, run=RUN, limits=PATIENT)
    assert [e.failure.kind for e in episodes] == [FailureKind.RETRIEVER] * 4
    found = describe(episodes)
    assert found["rollout/errors/retriever"] == 4
    assert (found["rollout/failure_frac"], found["rollout/em"]) == (1, 0)


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


def test_an_agent_whose_template_rewrote_its_past_is_one_agent():
    strands = (
        make_trace("searcher", [(4, 2, "search")]),
        make_trace("searcher", [(9, 3, "report")]),
    )
    found = describe([make_episode("a", 0, traces=strands, correct=(0.0,))])
    assert (found["rollout/searcher/agents"], found["rollout/searcher/length"]) == (1, 5)


def test_no_episodes_are_numbers_all_the_same():
    assert all(math.isfinite(value) for value in describe([]).values())
