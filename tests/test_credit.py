"""Rewards by the role programme, groups and their advantages, and what is left out of them."""

import itertools
import math
import random
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from evaluation_episodes import make_episode, make_trace, random_episode

from mas_jax.learning.credit import credit, over_hosts
from mas_jax.learning.programme import Row
from mas_jax.records import Failure, FailureKind, Judgement

ROW = Row(
    trained=True, advantages=("group",), tree_form="sum", correct="mean", behaviour="none",
    behaviour_weight=0.1, behaviour_cap=6, judge_weights=(0.1, 0.4, 0.5), alignment="none",
    invalid="term", group_by="question", scale="std", scale_eps=1e-6,
    drop_zero_variance=False, teacher="teacher", beta=0.01, log_ratio_clip=0.0,
    future_discount=0.0, gae_discount=1.0, gae_decay=1.0, policy_loss="ppo", clip_low=0.2,
    clip_high=0.2, dual_clip=0.0, divergence="none", divergence_coef=0.0, jsd_beta=0.5,
    kl_coef=0.0, kl_reference="teacher", kl_estimator="k3", entropy_coef=0.0, value_coef=0.0,
    value_clip=0.0, correction="none", correction_cap=2.0, aggregation="token", weight=1.0,
    outcome="correct", key_weight=0.618, turn_reward="none", step_weight=1.0, step_discount=0.95,
    step_similarity=0.9, gate_slope=5.0, view="none",
)  # fmt: skip
PAPER = {
    "leader": replace(ROW, behaviour="assignment"),
    "searcher": replace(ROW, behaviour="search_activity"),
    "answerer": ROW,
}
TWO_SEARCHES = [(3, 2, "search"), (2, 2, "search"), (2, 3, "report")]
ONE_SEARCH = [(3, 2, "search"), (2, 3, "report")]


def episode(uid="q", rollout=0, *, traces=(), **fields):
    """An episode whose traces are of it."""
    made = make_episode(uid, rollout, **fields)
    return replace(made, traces=tuple(replace(t, question=uid, rollout=rollout) for t in traces))


def answers(correct, uid="q", rollout=0, **fields):
    """An episode of Answerers alone, one for each candidate."""
    traces = [make_trace("answerer", [(2, 2, "answer")], candidate=c) for c in range(len(correct))]
    return episode(uid, rollout, traces=traces, correct=correct, **fields)


def rewards_of(episodes, programme):
    return [credited.reward for credited in credit(episodes, programme)[0]]


def advantages_of(episodes, row):
    return [credited.advantage for credited in credit(episodes, {"answerer": row})[0]]


# --- rewards --------------------------------------------------------------------------------------


def test_the_papers_rewards_by_hand():
    invalid = [(3, 2, "invalid"), (2, 3, "report")]
    team = episode(
        traces=[
            make_trace("leader", [(4, 2, "assign"), (9, 2, "select")]),
            make_trace("searcher", TWO_SEARCHES, path="leader/w0.s1"),
            make_trace("searcher", ONE_SEARCH, path="leader/w0.s2"),
            make_trace("searcher", invalid, path="leader/w0.s3"),
            make_trace("answerer", [(2, 2, "answer")], candidate=0),
            make_trace("answerer", [(2, 2, "answer")], candidate=1),
        ],
        correct=(1.0, 0.0),
        num_searches=3,
    )
    # mean 0.5: 0.45 + 0.1 * 3/6; 0.45 + 0.1 * 1; 0.45 + 0.1 * 0.5; 0.45 - 0.1; own candidates
    want = [0.5, 0.55, 0.5, 0.35, 1.0, 0.0]
    np.testing.assert_allclose(rewards_of([team], PAPER), want, rtol=1e-12)


@pytest.mark.parametrize(
    ("how", "want"), [("mean", 0.4), ("first", 0.0), ("majority", 1.0), ("any", 1.0)]
)
def test_five_candidates_make_one_number_for_the_searcher(how, want):
    searched = episode(
        traces=[make_trace("searcher", ONE_SEARCH)], correct=(0.0, 1.0, 0.0, 1.0, 0.0)
    )
    searched = replace(searched, predictions=("a", "right", "b", "right", "c"))
    assert rewards_of([searched], {"searcher": replace(ROW, correct=how)}) == pytest.approx([want])


def test_a_tied_majority_is_the_earliest_prediction():
    searched = episode(traces=[make_trace("searcher", ONE_SEARCH)], correct=(0.0, 1.0, 1.0, 0.0))
    searched = replace(searched, predictions=("a", "right", "right", "a"))
    assert rewards_of([searched], {"searcher": replace(ROW, correct="majority")}) == [0.0]


def test_an_invalid_action_is_a_term_of_the_reward_or_all_of_it():
    trace = make_trace("searcher", [(3, 2, "invalid"), (2, 2, "search"), (2, 2, "report")])
    searched = [episode(traces=[trace], correct=(1.0,))]
    term = replace(ROW, behaviour="invalid_action", behaviour_weight=0.2)
    assert rewards_of(searched, {"searcher": term}) == pytest.approx([0.8 - 0.2])
    assert rewards_of(searched, {"searcher": replace(term, invalid="reward")}) == [-1.0]
    # without a behaviour term an invalid action costs nothing, whatever the weight
    assert rewards_of(searched, {"searcher": ROW}) == [1.0]


def test_the_single_agent_is_a_searcher_with_one_prediction():
    trace = make_trace("searcher", [(3, 2, "search"), (2, 2, "search"), (2, 2, "answer")])
    alone = episode(team="single", traces=[replace(trace, path="single")], correct=(1.0,))
    assert rewards_of([alone], PAPER) == pytest.approx([0.9 + 0.1])


def test_traces_of_one_agent_share_what_the_whole_agent_earned():
    # the template rewrote the past: one search in each of the first two sequences
    strands = [make_trace("searcher", [step]) for step in TWO_SEARCHES]
    plain = [make_trace("searcher", ONE_SEARCH)]
    parted = [
        episode(rollout=0, traces=strands, correct=(1.0,)),
        episode(rollout=1, traces=plain, correct=(0.0,)),
    ]
    credited, metrics = credit(parted, PAPER)
    assert [c.reward for c in credited] == pytest.approx([1.0, 1.0, 1.0, 0.05])
    # two agents: mean 0.525, unbiased std of 0.475 each side is 0.475 * sqrt(2)
    want = 1 / math.sqrt(2)
    np.testing.assert_allclose([c.advantage for c in credited], [want] * 3 + [-want], rtol=1e-5)
    assert metrics["credit/searcher/num_traces"] == 4
    assert metrics["credit/searcher/num_agents"] == 2
    assert metrics["credit/searcher/group_size"] == 2
    assert metrics["credit/searcher/reward"] == pytest.approx(0.525)


# --- groups ---------------------------------------------------------------------------------------


def test_a_group_is_a_question_or_the_candidates_of_one_request():
    episodes = [answers((1.0, 0.0), "a", 0), answers((1.0, 1.0), "a", 1)]
    # question: mean 0.75, so 0.25 or -0.75 off it; context: mean 0.5, then nothing to compare
    plain = replace(ROW, scale="none")
    assert advantages_of(episodes, plain) == [0.25, -0.75, 0.25, 0.25]
    assert advantages_of(episodes, replace(plain, group_by="context")) == [0.5, -0.5, 0.0, 0.0]


def test_census_of_groups_over_mixed_datasets():
    episodes = [
        answers((1.0,), "nq/test/1", 0),
        answers((0.0,), "nq/test/1", 1),
        answers((0.0,), "hotpotqa/test/1", 0),
        answers((0.0,), "hotpotqa/test/1", 1),
        answers((0.0,), "hotpotqa/test/1", 2),
        answers((1.0,), "popqa/test/1", 0),
    ]
    _, metrics = credit(episodes, {"answerer": ROW})
    assert {name.removeprefix("credit/answerer/"): value for name, value in metrics.items()} == {
        "credit/num_episodes": 6.0,
        "credit/failed_episodes": 0.0,
        "num_traces": 6.0,
        "num_agents": 6.0,
        "reward": pytest.approx(1 / 3),
        "groups": 3.0,
        "group_size": 2.0,
        "singletons": 1.0,
        "zero_variance_frac": pytest.approx(1 / 3),
        "dropped_frac": 0.0,
    }


def test_advantages_are_those_of_each_role_and_question_alone():
    episodes = [random_episode(f"q{i}", j, "hierarchy") for i in range(6) for j in range(5)]
    programme = {"searcher": ROW, "answerer": ROW}
    credited, _ = credit(episodes, programme)
    groups = defaultdict(list)
    for c in credited:
        groups[c.trace.role, c.trace.question].append(c)
    assert len(credited) > 50
    for members in groups.values():
        rewards = np.asarray([c.reward for c in members])
        std = rewards.std(ddof=1) if len(members) > 1 else 0.0
        want = (rewards - rewards.mean()) / (std + 1e-6) if std > 0 else 0 * rewards
        np.testing.assert_allclose([c.advantage for c in members], want, atol=1e-9)


def test_the_order_of_episodes_changes_nothing():
    episodes = [random_episode(f"q{i}", j, "hierarchy") for i in range(4) for j in range(12)]
    programme = {"searcher": ROW, "answerer": replace(ROW, group_by="context")}
    want = credit(episodes, programme)
    for seed in range(3):
        shuffled = random.Random(seed).sample(episodes, len(episodes))
        assert credit(shuffled, programme) == want


def test_a_role_without_a_group_has_no_advantage_and_no_census():
    episodes = [answers((1.0, 0.0))]
    distilled = replace(ROW, advantages=("distillation",))
    assert advantages_of(episodes, distilled) == [0.0, 0.0]
    assert "credit/answerer/groups" not in credit(episodes, {"answerer": distilled})[1]


def test_the_zero_variance_filter_drops_constant_groups_and_never_distillation():
    episodes = [answers((1.0, 0.0), "a"), answers((0.0, 0.0), "b"), answers((1.0,), "c")]

    def dropped(**changes):
        credited, _ = credit(episodes, {"answerer": replace(ROW, **changes)})
        return [c.is_dropped for c in credited]

    assert dropped() == [False] * 5
    assert dropped(drop_zero_variance=True) == [False, False, True, True, True]
    both = ("group", "distillation")
    assert dropped(drop_zero_variance=True, advantages=both) == [False] * 5
    assert dropped(drop_zero_variance=True, advantages=("distillation",)) == [False] * 5


# --- what is not learned from ---------------------------------------------------------------------


def test_a_reward_of_zero_counts_and_a_missing_one_does_not():
    lost = Failure(FailureKind.RETRIEVER, "gone")
    missing = [
        answers((0.0,), rollout=2, failure=lost),
        answers((math.nan,), rollout=3),
        replace(answers((0.0,), rollout=4), reward=None),
        episode(rollout=5, traces=[make_trace("answerer", [(2, 2, "answer")])], correct=(),
                failure=lost),
    ]  # fmt: skip
    present = [answers((1.0,), rollout=0), answers((0.0,), rollout=1)]
    credited, metrics = credit(present + missing, {"answerer": replace(ROW, scale="none")})
    assert [(c.trace.rollout, c.reward, c.advantage) for c in credited] == [
        (0, 1.0, 0.5),
        (1, 0.0, -0.5),
    ]
    assert metrics["credit/failed_episodes"] == 4
    assert metrics["credit/answerer/group_size"] == 2


def test_nothing_but_failures_is_an_empty_batch():
    credited, metrics = credit(
        [answers((0.0,), failure=Failure(FailureKind.API, "down"))], {"answerer": ROW}
    )
    assert credited == []
    assert metrics == {"credit/num_episodes": 1.0, "credit/failed_episodes": 1.0}


def test_an_episode_that_comes_twice_is_named():
    with pytest.raises(ValueError, match="2 episodes of question 'q', rollout 3"):
        credit([answers((1.0,), "q", 3), answers((0.0,), "q", 3)], {"answerer": ROW})


def test_a_search_costs_a_searcher_its_own_and_the_leader_all():
    row = replace(ROW, behaviour="search_cost", behaviour_weight=0.3, behaviour_cap=4)
    traces = [
        make_trace("leader", [(3, 2, "assign"), (2, 2, "select")]),
        make_trace("searcher", [(3, 2, "search"), (2, 3, "report")], path="leader/w1.s1"),
        make_trace("searcher", [(3, 2, "report")], path="leader/w1.s2"),
    ]
    played = episode(traces=traces, correct=(1.0,), num_searches=2)
    found = rewards_of([played], {"leader": row, "searcher": row})
    # 0.7 - 0.3 * 2/4, 0.7 - 0.3 * 1/4, 0.7
    assert found == pytest.approx([0.55, 0.625, 0.7])


def test_a_role_without_a_row_is_named():
    with pytest.raises(ValueError, match="has a answerer, for which the programme has no row"):
        credit([answers((1.0,))], {"searcher": ROW})


# --- judged subtasks, and rollouts that weigh alike -----------------------------------------------

CRITIC = replace(ROW, behaviour="judge", scale="population_std")


def searched(rollout, scores, *, correct=0.0, uid="q", steps=ONE_SEARCH):
    """An episode with a Searcher for each score."""
    paths = [f"leader/w1.s{i}" for i in range(1, len(scores) + 1)]
    traces = [make_trace("searcher", steps, path=path) for path in paths]
    made = episode(uid, rollout, traces=traces, correct=(correct,))
    judgements = itertools.starmap(Judgement, zip(paths, scores, strict=True))
    return replace(made, judgements=tuple(judgements))


def test_a_searcher_is_rewarded_by_format_team_and_judge_by_hand():
    invalid = [(3, 2, "invalid"), (2, 3, "report")]
    judged = [
        searched(0, [1.0, 0.2], correct=1.0),  # 0.1 + 0.4 + 0.5, 0.1 + 0.4 + 0.1
        searched(1, [0.4]),  # 0.1 + 0.2
        searched(2, [1.0], correct=1.0, steps=invalid),  # 0
    ]
    want = [1.0, 0.6, 0.3, 0.0]
    np.testing.assert_allclose(rewards_of(judged, {"searcher": CRITIC}), want, rtol=1e-12)
    other = replace(CRITIC, judge_weights=(0.0, 0.0, 1.0))
    assert rewards_of(judged, {"searcher": other}) == [1.0, 0.2, 0.4, 0.0]


def test_a_missing_judgement_leaves_one_searcher_out_and_nothing_else():
    answered = make_trace("answerer", [(2, 2, "answer")])
    judged = [searched(0, [1.0, None], correct=1.0), searched(1, [0.0, None, None])]
    judged = [replace(e, traces=(*e.traces, replace(answered, rollout=e.rollout))) for e in judged]
    programme = {"searcher": CRITIC, "answerer": ROW}
    credited, metrics = credit(judged, programme)
    assert [(c.trace.role, c.trace.rollout, c.trace.path) for c in credited] == [
        ("searcher", 0, "leader/w1.s1"), ("answerer", 0, "answerer"),
        ("searcher", 1, "leader/w1.s1"), ("answerer", 1, "answerer"),
    ]  # fmt: skip
    # as if the others had never been there: two rewards, one each side of their mean
    assert [c.advantage for c in credited[::2]] == pytest.approx([1.0, -1.0], rel=1e-5)
    assert metrics["credit/failed_episodes"] == 0
    assert metrics["credit/searcher/judge_failures"] == 3
    assert metrics["credit/searcher/judge_score"] == 0.5
    assert metrics["credit/searcher/num_agents"] == 5
    assert metrics["credit/searcher/num_traces"] == metrics["credit/searcher/group_size"] == 2
    assert metrics["credit/searcher/reward"] == pytest.approx((1.0 + 0.1) / 2)


def test_no_judgement_at_all_is_an_empty_role():
    credited, metrics = credit([searched(0, [None, None])], {"searcher": CRITIC})
    assert credited == [] and "credit/searcher/reward" not in metrics
    assert metrics["credit/searcher/judge_failures"] == 2


def test_a_row_that_wants_judgements_that_nobody_made_is_named():
    alone = episode(traces=[make_trace("searcher", ONE_SEARCH)])
    with pytest.raises(ValueError, match="searcher of 'q', rollout 0, was not judged"):
        credit([alone], {"searcher": CRITIC})


def test_aligned_rollouts_weigh_alike_by_hand():
    aligned = replace(CRITIC, alignment="weights", judge_weights=(0.0, 0.0, 1.0))
    judged = [searched(0, [1.0]), searched(1, [0.0, 0.5]), searched(2, [0.0, 0.0, 1.0, 1.0])]
    credited, metrics = credit(judged, {"searcher": aligned})
    # d = 4: weights 4; 2, 2; 1, 1, 1, 1. Mean (4 + 1 + 2) / 12 = 7/12,
    # variance (6 * 1 + 2 / 4) / 12 - 49/144 = (78 - 49) / 144 = 29/144
    assert [c.weight for c in credited] == [4.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0]
    want = [(12 * r - 7) / math.sqrt(29) for r in (1, 0, 0.5, 0, 0, 1, 1)]
    np.testing.assert_allclose([c.advantage for c in credited], want, rtol=1e-5)
    assert metrics["credit/searcher/aligned_to"] == metrics["credit/searcher/weight_max"] == 4
    # not aligned: every agent alike
    credited, metrics = credit(judged, {"searcher": replace(aligned, alignment="none")})
    assert {c.weight for c in credited} == {1.0} and "credit/searcher/aligned_to" not in metrics


def test_hosts_agree_on_the_number_that_weights_are_scaled_to():
    aligned = replace(CRITIC, alignment="weights")
    heard = []

    def agree(value):
        heard.append(value)
        return 6

    credited, _ = credit([searched(0, [1.0, 0.0])], {"searcher": aligned}, agree=agree)
    assert [c.weight for c in credited] == [3.0, 3.0]
    # a host without such agents, or episodes, is asked as well
    credit([answers((1.0,))], {"searcher": aligned, "answerer": ROW}, agree=agree)
    credit([], {"searcher": aligned}, agree=agree)
    assert heard == [2, 1, 1]


def test_a_missing_judgement_leaves_its_rollout_its_whole_weight():
    aligned = replace(CRITIC, alignment="weights")
    judged = [searched(0, [1.0, None]), searched(1, [0.0, 1.0])]
    credited, _ = credit(judged, {"searcher": aligned})
    assert [c.weight for c in credited] == [2.0, 1.0, 1.0]


# --- trees ----------------------------------------------------------------------------------------


def test_leaves_are_compared_within_their_question_and_their_tree():
    row = replace(ROW, advantages=("tree",), scale="none")
    leaves = [
        replace(answers((value,), rollout=index), tree=index // 2)
        for index, value in enumerate([1.0, 0.0, 1.0, 1.0])
    ]
    # inter: mean 3/4; intra: means 1/2 and 1
    assert advantages_of(leaves, row) == pytest.approx([0.75, -1.25, 0.25, 0.25])
    nested = replace(row, tree_form="nested", drop_zero_variance=True)
    found, metrics = credit(leaves, {"answerer": nested})
    assert [c.advantage for c in found] == pytest.approx([0.5, -0.5, 0.0, 0.0])
    assert [c.is_dropped for c in found] == [False, False, True, True]
    assert metrics["credit/answerer/groups"] == 2
    assert credit(leaves[::-1], {"answerer": nested})[0] == found


# --- hosts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("alone", [0, 1])  # how many of four questions the first host has
def test_metrics_of_hosts_are_those_of_all_their_episodes(alone):
    def asked(e, uid):
        return replace(e, question=uid, traces=tuple(replace(t, question=uid) for t in e.traces))

    episodes = [
        asked(e, f"q{i}")
        for i in range(4)
        for e in (
            searched(0, [1.0, None], correct=float(i % 2)), searched(1, [0.4] * (i + 1)),
            searched(2, [None]),
        )
    ]  # fmt: skip
    row = replace(CRITIC, alignment="weights", drop_zero_variance=True)
    agree = {"agree": lambda count: 4}  # the largest of all
    want = credit(episodes, {"searcher": row}, **agree)[1]
    parts = [
        credit([e for e in episodes if (e.question < f"q{alone}") == mine], {"searcher": row},
               **agree)[1]
        for mine in (True, False)
    ]  # fmt: skip
    assert over_hosts(parts) == pytest.approx(want)
    assert want["credit/searcher/reward"] != parts[1]["credit/searcher/reward"] or not alone
    assert {"judge_score", "dropped_frac", "zero_variance_frac", "weight_max"} <= {
        name.rpartition("/")[2] for name in want
    }


def measured(rollout, right, error):
    """A hint whose reward is so many of four solutions."""
    trace = replace(make_trace("searcher", ONE_SEARCH), question="q", rollout=rollout)
    correct = (1.0,) * right + (0.0,) * (4 - right)
    return replace(episode("q", rollout, traces=(trace,), correct=correct), reward_error=error)


def test_a_measured_reward_weighs_by_its_error_in_group_and_loss_by_hand():
    """As in test_advantages.py: weights 29/28, 26/28, 29/28 of rewards 0, 1/2, 1. Their mean is
    1/2, their variance with n - 1 = 2 is 2 29/28 1/4 / 2 = 29/112."""
    errors = [(5 / 144) ** 0.5, 0.25, (5 / 144) ** 0.5]
    episodes = [measured(i, 2 * i, error) for i, error in enumerate(errors)]
    credited, metrics = credit(episodes, {"searcher": ROW})
    assert [c.weight for c in credited] == pytest.approx([29 / 28, 26 / 28, 29 / 28])
    scale = (29 / 112) ** 0.5 + ROW.scale_eps
    assert [c.advantage for c in credited] == pytest.approx([-0.5 / scale, 0.0, 0.5 / scale])
    assert metrics["credit/searcher/reward_error"] == pytest.approx(sum(errors) / 3)
    assert metrics["credit/searcher/weight_max"] == pytest.approx(29 / 28)
    exact = [replace(e, reward_error=None) for e in episodes]
    plain, found = credit(exact, {"searcher": ROW})
    assert {c.weight for c in plain} == {1.0} and "credit/searcher/reward_error" not in found
