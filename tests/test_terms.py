"""Behaviour terms: every case of the paper's definition by hand."""

import math

import pytest

from mas_jax.records import Episode, StopReason, Trace, Turn
from mas_jax.rewards import terms


def trace(*actions: str, role: str = "searcher", path: str = "searcher") -> Trace:
    """A trace of one sampled token a turn; terms look at the turns only."""
    turns = tuple(Turn(2 * i + 1, 2 * i + 2, a, StopReason.TOKEN) for i, a in enumerate(actions))
    num_tokens = 2 * len(actions)
    return Trace(
        tokens=(7,) * num_tokens,
        owners=(0, 2) * len(actions),
        logprobs=(0.0, -1.0) * len(actions),
        question="q1",
        rollout=0,
        role=role,
        path=path,
        policy="student",
        turns=turns,
    )


def episode(*traces: Trace, num_searches: int, failed_searches: int = 0) -> Episode:
    return Episode(
        question="q1",
        rollout=0,
        team="hierarchy",
        traces=traces,
        predictions=("x",),
        correct=(0.0,),
        reward=0.0,
        num_searches=num_searches,
        failed_searches=failed_searches,
        turns_used=3,
        outcome="answered",
    )


@pytest.mark.parametrize(
    ("actions", "term"),
    [
        ((), 0.0),
        (("report",), 0.0),  # no search
        (("search",), 0.0),  # one search, but cut off before the report
        (("search", "report"), 0.5),
        (("search", "search"), 1.0),
        (("search", "search", "report"), 1.0),
        (("search",) * 7, 1.0),
        (("invalid",), -1.0),
        (("invalid", "report"), -1.0),
        (("search", "search", "invalid", "report"), -1.0),  # also after the searches were earned
        (("search", "report", "invalid"), -1.0),
    ],
)
def test_search_activity_of_a_searcher(actions, term):
    assert terms.search_activity(trace(*actions)) == term


def test_search_activity_is_about_searchers_only():
    with pytest.raises(ValueError, match="search_activity of a leader"):
        terms.search_activity(trace("assign", role="leader"))


@pytest.mark.parametrize(
    ("num_searches", "term"),
    [(0, 0.0), (1, 1 / 6), (3, 0.5), (5, 5 / 6), (6, 1.0), (7, 1.0), (40, 1.0)],
)
def test_assignment_counts_searches_up_to_six(num_searches, term):
    leader = trace("assign", "select", role="leader")
    assert terms.assignment(episode(leader, num_searches=num_searches), cap=6) == term


def test_assignment_counts_a_search_that_the_retriever_failed():
    # the Leader caused an executed search either way
    assert terms.assignment(episode(num_searches=3, failed_searches=3), cap=6) == 0.5


def test_assignment_has_another_cap_on_request_and_refuses_none():
    assert terms.assignment(episode(num_searches=3), cap=4) == 0.75
    with pytest.raises(ValueError, match="cap=0"):
        terms.assignment(episode(num_searches=3), cap=0)


def test_an_invalid_leader_loses_the_assignment_term_and_an_invalid_searcher_does_not_cost_it():
    good, bad = trace("assign", role="leader"), trace("assign", "invalid", role="leader")
    searcher = trace("invalid", "report")
    assert terms.assignment(episode(bad, num_searches=6), cap=6) == -1.0
    assert terms.assignment(episode(good, bad, num_searches=6), cap=6) == -1.0
    assert terms.assignment(episode(good, searcher, num_searches=6), cap=6) == 1.0


def test_invalid_action_of_any_role():
    for role in ("leader", "searcher", "answerer"):
        assert terms.invalid_action(trace("answer", "invalid", role=role)) == -1.0
        assert terms.invalid_action(trace("answer", role=role)) == 0.0
    assert terms.invalid_action(trace()) == 0.0


def test_the_mix_of_correctness_and_behaviour():
    # 0.9 * 0.6 + 0.1 * 0.5 = 0.59; an invalid Searcher on a right answer: 0.9 - 0.1 = 0.8
    assert terms.combine(0.6, 0.5, weight=0.1) == pytest.approx(0.59)
    assert terms.combine(1.0, -1.0, weight=0.1) == pytest.approx(0.8)
    assert terms.combine(0.0, -1.0, weight=0.1) == pytest.approx(-0.1)
    assert terms.combine(0.3, -1.0, weight=0.0) == 0.3
    assert terms.combine(0.3, -1.0, weight=1.0) == -1.0
    for weight in (-0.1, 1.1):
        with pytest.raises(ValueError, match=f"weight={weight}"):
            terms.combine(1.0, 1.0, weight=weight)


def test_a_judged_reward_is_format_correctness_and_judgement():
    good, weights = trace("search", "report"), (0.1, 0.4, 0.5)
    assert terms.judged(good, 1.0, 0.7, weights=weights) == pytest.approx(0.1 + 0.4 + 0.35)
    assert terms.judged(good, 0.0, 0.0, weights=weights) == 0.1
    assert math.isnan(terms.judged(good, 1.0, None, weights=weights))
    # an invalid action is worth nothing, whatever the judge says, and that is known without it
    for score in (1.0, None):
        assert terms.judged(trace("invalid", "report"), 1.0, score, weights=weights) == 0.0


def test_a_search_costs_up_to_a_cap():
    # 0, 1/4, 4/4 and no more
    assert [terms.search_cost(n, cap=4) for n in (0, 1, 4, 9)] == [0.0, -0.25, -1.0, -1.0]
    assert terms.num_searches(trace("search", "invalid", "search", "report")) == 2
    with pytest.raises(ValueError, match="cap=0"):
        terms.search_cost(1, cap=0)


def test_the_error_of_a_mean_of_outcomes_by_hand():
    """2 of 4: p = 3/6, sqrt(1/4 / 4); 4 of 4: p = 5/6, sqrt(5/36 / 4); 0 of 1: p = 1/3."""
    assert terms.sampling_error((1.0, 0.0, 0.0, 1.0)) == 0.25
    assert terms.sampling_error((1.0,) * 4) == pytest.approx((5 / 144) ** 0.5)
    assert terms.sampling_error((0.0,)) == pytest.approx((2 / 9) ** 0.5)
    with pytest.raises(ValueError, match="no outcome"):
        terms.sampling_error(())
