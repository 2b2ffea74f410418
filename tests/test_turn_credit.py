"""Credit of single search agents' turns: by hand, through packing, and what must not change it."""

import math
import random
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from evaluation_episodes import make_episode, make_trace
from test_credit import ROW

from mas_jax.learning import advantages
from mas_jax.learning.batch import pack
from mas_jax.learning.credit import credit, over_hosts
from mas_jax.learning.turn_credit import Sources, states
from mas_jax.records import Question

QUESTION = Question(
    "q", "toy", "where was ada born", ("red town", "redton"), 2,
    decomposition=("where was ada born",), gold_passages=("p1", "p2"),
)  # fmt: skip
TEXTS = {"p1": "red blue", "p2": "green", "p3": "nothing of use here"}
SOURCES = Sources({"q": QUESTION, "r": replace(QUESTION, uid="r")}, TEXTS)
FORMAT = replace(ROW, outcome="format_tiers")
STEPS = replace(ROW, advantages=("group", "step"), scale="none", step_weight=2.0, step_discount=0.5)
CRITIC = replace(ROW, advantages=("gae",), outcome="f1_and_keys", turn_reward="search_progress")


def played(rollout, *steps, says="wrong", uid="q", parts=None):
    """An episode of a single agent; steps: ids that a search found, "answer" or "invalid".

    Turn t is preceded by 2 tokens of nobody and has 2 of its own. parts: turns of each trace.
    """
    traces, rest = [], list(steps)
    for count in parts or [len(steps)]:
        now, rest = rest[:count], rest[count:]
        actions = [step if isinstance(step, str) else "search" for step in now]
        made = make_trace("searcher", [(2, 2, action) for action in actions], path="single")
        turns = tuple(
            turn if isinstance(step, str) else replace(turn, query="ada born", found=tuple(step))
            for turn, step in zip(made.turns, now, strict=True)
        )
        traces.append(replace(made, question=uid, rollout=rollout, turns=turns))
    made = make_episode(
        uid, rollout, team="single", traces=tuple(traces), correct=(float(says == "redton"),)
    )
    return replace(made, predictions=(says,))


def credited(episodes, row, sources=SOURCES):
    return credit(episodes, {"searcher": row}, sources)[0]


# --- outcomes -------------------------------------------------------------------------------------


def test_outcomes_by_hand():
    episodes = [
        played(0, ["p1"], "answer", says="redton"),
        played(1, "invalid", "answer", says="redton"),
        played(2, "answer", says="town"),
        played(3, "invalid", "invalid", says=""),
    ]
    # "town" and "red town": precision 1, recall 1/2, F1 2/3. The one query is the sub-question.
    wanted = {
        "correct": [1.0, 1.0, 0.0, 0.0],
        "format_tiers": [1.0, 0.8, 0.2, 0.0],
        "f1_or_format": [1.0, 1.0, 2 / 3, 0.0],
        "f1_and_keys": [1.618, 1.0, 2 / 3, 0.0],
    }
    for outcome, values in wanted.items():
        found = credited(episodes, replace(ROW, outcome=outcome))
        assert [c.reward for c in found] == pytest.approx(values), outcome
    wrong = credited([played(0, "answer", says="x")], replace(ROW, outcome="f1_or_format"))
    assert [c.reward for c in wrong] == [0.1]


def test_an_outcome_is_combined_with_a_behaviour():
    row = replace(FORMAT, behaviour="invalid_action", behaviour_weight=0.5)
    found = credited([played(0, "invalid", "answer", says="redton")], row)
    assert [c.reward for c in found] == pytest.approx([0.5 * 0.8 - 0.5])


# --- StepSearch -----------------------------------------------------------------------------------


def test_rewards_of_turns_by_hand():
    episode = played(0, ["p1"], "invalid", ["p1", "p2"], "answer", says="redton")
    (found,) = credited([episode], CRITIC)
    # the first of two gold passages: 1/2; the second, beside one that was seen: 1/2 - 1/2
    assert found.turn_rewards == pytest.approx((0.5, 0.0, 0.0, 0.0))
    assert found.reward == pytest.approx(1.618)
    assert found.turn_advantages == ()
    _, metrics = credit([episode], {"searcher": CRITIC}, SOURCES)
    assert metrics["credit/searcher/turn_reward"] == pytest.approx(0.5)


def test_a_turns_reward_is_earned_with_its_last_token_and_seen_by_the_critic():
    found = credited([played(0, ["p1"], ["p1"], "answer", says="redton")], CRITIC)
    batch, _, _ = pack(
        found, {"searcher": CRITIC}, micro_rows=1, length=14, agree=lambda rows: rows
    )
    # turns are tokens 2-3, 6-7, 10-11: 1/2 for a gold passage, -1 for the same again, the end
    want = np.zeros(14)
    want[[3, 7, 11]] = [0.5, -1.0, 1.618]
    np.testing.assert_allclose(batch.rewards_MBT[0, 0], want, atol=1e-6)
    rewards_BT = jnp.asarray(batch.rewards_MBT[0])
    got, _ = advantages.gae(
        rewards_BT, jnp.zeros_like(rewards_BT), jnp.asarray(batch.weights_MBT[0] != 0),
        jnp.asarray(batch.segment_ids_MBT[0]), discount=1.0, decay=1.0,
    )  # fmt: skip
    # from each token on: 0.5 - 1 + 1.618, then -1 + 1.618, then 1.618; nothing between turns
    want = [0, 0, 1.118, 1.118, 0, 0, 0.618, 0.618, 0, 0, 1.618, 1.618, 0, 0]
    np.testing.assert_allclose(got[0], want, atol=1e-6)


def test_what_the_corpus_has_not_of_the_gold_passages_is_no_gain():
    nowhere = replace(QUESTION, gold_passages=("p8", "p9"))
    (found,) = credited(
        [played(0, ["p1"], ["p1"], "answer")], CRITIC, Sources({"q": nowhere}, TEXTS)
    )
    assert found.turn_rewards == (0.0, -1.0, 0.0)


# --- GiGPO ----------------------------------------------------------------------------------------


def test_the_state_of_a_turn_is_what_it_was_told_last():
    (trace,) = played(0, ["p1", "p3"], [], "invalid", "answer").traces
    assert states(trace, QUESTION, TEXTS) == [
        "where was ada born", "red blue\nnothing of use here", "search", "invalid no tag",
    ]  # fmt: skip
    assert states(replace(trace, turns=()), QUESTION, TEXTS) == []


PAIR = [
    played(0, ["p1"], "answer", says="redton"),
    played(1, ["p1"], ["p2"], "answer"),
]


def test_advantages_of_turns_by_hand():
    won, lost = credited(PAIR, STEPS)
    # returns 0.5, 1 and 0, 0, 0. Both begin with the question: mean 0.25, so +-0.25; both saw p1:
    # mean 0.5, so +-0.5; p2 was seen once. Twice that; the episodes: mean 0.5, so +-0.5
    assert won.turn_advantages == pytest.approx((0.5, 1.0))
    assert lost.turn_advantages == pytest.approx((-0.5, -1.0, 0.0))
    assert (won.advantage, lost.advantage) == (0.5, -0.5)
    metrics = credit(PAIR, {"searcher": STEPS}, SOURCES)[1]
    names = ("step_groups", "step_group_size", "step_singletons", "step_constant_frac")
    got = [metrics[f"credit/searcher/{name}"] for name in names]
    assert got == pytest.approx([3, 5 / 3, 1, 1 / 5])
    # of two hosts, the other with two turns in one group, which differ: of seven turns one alone
    other = dict(zip(names, (1.0, 2.0, 0.0, 0.0), strict=True))
    both = over_hosts([metrics, {f"credit/searcher/{n}": x for n, x in other.items()}])
    got = [both[f"credit/searcher/{name}"] for name in names]
    assert got == pytest.approx([4, 7 / 4, 1, 1 / 7])
    # with the deviation of two, which is their distance over the root of 2
    scaled = credited(PAIR, replace(STEPS, scale="std", step_weight=1.0))
    root = 1 / math.sqrt(2)
    assert scaled[0].turn_advantages == pytest.approx((root, root), rel=1e-5)
    assert scaled[1].turn_advantages == pytest.approx((-root, -root, 0), rel=1e-5)


def test_episode_and_turn_add_up_on_the_turns_tokens():
    batch, _, _ = pack(
        credited(PAIR, STEPS), {"searcher": STEPS}, micro_rows=2, length=12, agree=lambda rows: rows
    )
    rows = sorted(batch.advantages_MBT[0].tolist())
    assert rows == [
        [0, 0, -1.0, -1.0, 0, 0, -1.5, -1.5, 0, 0, -0.5, -0.5],
        [0, 0, 1.0, 1.0, 0, 0, 1.5, 1.5, 0, 0, 0, 0],
    ]


def test_turns_alone_are_without_the_episodes_advantage():
    found = credited(PAIR, replace(STEPS, advantages=("step",)))
    assert [c.advantage for c in found] == [0.0, 0.0]
    assert [c.turn_advantages for c in found] == [c.turn_advantages for c in credited(PAIR, STEPS)]


def test_equal_rewards_of_equally_long_episodes_teach_nothing():
    for says in ("wrong", "redton"):
        found = credited([played(i, ["p1"], "answer", says=says) for i in range(4)], STEPS)
        assert {c.advantage for c in found} == {0.0}
        assert {c.turn_advantages for c in found} == {(0.0, 0.0)}
    # failure is worth 0 however long it took; success is worth more the sooner it comes
    lengths = [["p1"]], [["p1"], ["p1"]]
    lost = credited([played(i, *s, "answer") for i, s in enumerate(lengths)], STEPS)
    assert not any(value for c in lost for value in c.turn_advantages)
    late = credited([played(i, *s, "answer", says="redton") for i, s in enumerate(lengths)], STEPS)
    assert late[0].turn_advantages[0] > 0 > late[1].turn_advantages[0]
    # so that a group of equal outcomes is not dropped
    dropping = replace(STEPS, drop_zero_variance=True)
    assert not any(c.is_dropped for c in credited(PAIR[:1], dropping))


def test_questions_share_no_anchor_group():
    other = [replace_question(episode, "r") for episode in PAIR]
    assert credited(PAIR + other, STEPS)[:2] == credited(PAIR, STEPS)


def replace_question(episode, uid):
    traces = tuple(replace(trace, question=uid) for trace in episode.traces)
    return replace(episode, question=uid, traces=traces)


def test_rewards_of_turns_are_part_of_a_turns_return():
    row = replace(STEPS, turn_reward="search_progress", advantages=("step",), step_weight=1.0)
    won, lost = credited(PAIR, row)
    # turns earn 0.5, 1 and 0.5, 0.5, 0: returns 1, 1 and 0.5 + 0.25, 0.5, 0
    assert won.turn_advantages == pytest.approx((0.125, 0.25))
    assert lost.turn_advantages == pytest.approx((-0.125, -0.25, 0.0))


def random_episodes():
    rng = random.Random(1)
    found = [["p1"], ["p2"], ["p3"], ["p1", "p3"], []]
    return [
        played(
            i, *rng.choices([*found, "invalid"], k=rng.randrange(4)), "answer",
            says=rng.choice(["wrong", "redton", "town"]), uid=uid,
        )
        for uid in ("q", "r") for i in range(6)
    ]  # fmt: skip


@pytest.mark.parametrize("row", [STEPS, CRITIC, replace(STEPS, scale="std")])
def test_the_order_of_episodes_changes_nothing(row):
    episodes = random_episodes()
    want = credit(episodes, {"searcher": row}, SOURCES)
    for seed in range(3):
        shuffled = random.Random(seed).sample(episodes, len(episodes))
        assert credit(shuffled, {"searcher": row}, SOURCES) == want


def test_a_longer_row_changes_no_value():
    found = credited(random_episodes(), STEPS)

    def values(length):
        batch, _, _ = pack(
            found, {"searcher": STEPS}, micro_rows=2, length=length, agree=lambda rows: rows
        )
        kept = batch.weights_MBT != 0
        return sorted(zip(batch.advantages_MBT[kept], batch.weights_MBT[kept], strict=True))

    assert values(20) == values(64)


def test_traces_of_one_agent_have_their_own_turns():
    whole = [played(0, ["p1"], ["p2"], "answer", says="redton"), played(1, ["p1"], "answer")]
    parted = [
        played(0, ["p1"], ["p2"], "answer", says="redton", parts=[2, 0, 1]),
        played(1, ["p1"], "answer", parts=[1, 1]),
    ]
    for row in (STEPS, CRITIC):
        for name in ("turn_advantages", "turn_rewards"):
            want = [value for c in credited(whole, row) for value in getattr(c, name)]
            found = credited(parted, row)
            assert [value for c in found for value in getattr(c, name)] == want
            for c in found:
                assert len(getattr(c, name)) in (0, len(c.trace.turns))


# --- packing --------------------------------------------------------------------------------------


def merged(pair, row):
    _, _, stats = pack(pair, {"searcher": row}, micro_rows=1, length=16, agree=lambda rows: rows)
    return stats.merged_traces


def test_traces_merge_only_if_their_turns_are_credited_alike():
    one, other = credited([played(i, ["p1"], "answer") for i in range(2)], STEPS)
    assert merged([one, other], STEPS) == 1
    better = replace(other, turn_advantages=(0.5, 0.0))
    assert merged([one, better], STEPS) == 0
    assert merged([better, replace(better)], STEPS) == 1
    first, second = better.trace.turns
    moved = replace(better.trace, turns=(replace(first, end=first.end - 1), second))
    assert merged([better, replace(better, trace=moved)], STEPS) == 0
    # rewards of turns are read by a critic alone
    earned = replace(one, turn_rewards=(0.25, 0.0))
    assert merged([one, earned], STEPS) == 1
    assert merged([one, earned], CRITIC) == 0


# --- what is missing ------------------------------------------------------------------------------


def test_a_question_that_is_not_among_the_sources_is_named():
    for row in (STEPS, CRITIC):
        for sources in (None, Sources({}, TEXTS)):
            with pytest.raises(ValueError, match=r"read questions, and that of 'q' is not among"):
                credited(PAIR, row, sources)
    assert len(credited(PAIR, FORMAT, None)) == 2  # reads what the episode says
