"""The paired bootstrap: by hand, its coverage by simulation, pairs and strata, what is missing."""

import numpy as np
import pytest
from evaluation_episodes import make_episode, make_plan

from mas_jax.evaluation.bootstrap import (
    NUM_DRAWS,
    interval,
    p_value,
    paired,
    question_means,
    question_values,
    resample,
)
from mas_jax.evaluation.statistics import accuracy_by_dataset, all_at_k, pass_at_k, score_episode
from mas_jax.records import Failure, FailureKind


def scores_of(rights):
    """Scores from e.g. {"a0": "1.0F"}: right, missing, wrong, and a failure of the world."""
    down = Failure(FailureKind.RETRIEVER, "down")
    return [
        score_episode(
            make_episode(
                uid, rollout, correct=(float(mark == "1"),), failure=down if mark == "F" else None
            )
        )
        for uid, marks in rights.items()
        for rollout, mark in enumerate(marks)
        if mark != "."
    ]


# --- means of questions ---------------------------------------------------------------------------


def test_what_is_missing_or_failed_is_wrong():
    plan = make_plan({"a": 3, "b": 1}, 4)
    means = question_means(plan, scores_of({"a0": "1.0F", "a2": "1111", "b0": "011."}))
    # of four runs each: 1, none at all (a1 was never played), 4; 2
    assert {name: values.tolist() for name, values in means.items()} == {
        "a": [0.25, 0.0, 1.0],
        "b": [0.5],
    }


def test_means_stand_in_the_plans_order_whatever_the_scores_order():
    plan = make_plan({"a": 4, "b": 3}, 2)
    marks = {"a0": "11", "a1": "10", "a2": "00", "a3": "01", "b0": "11", "b1": "0.", "b2": "1."}
    scores = scores_of(marks)
    want = question_means(plan, scores)
    got = question_means(plan, scores[::-1])
    assert {name: values.tolist() for name, values in got.items()} == {
        name: values.tolist() for name, values in want.items()
    }
    assert want["a"].tolist() == [1.0, 0.5, 0.0, 0.5]


def test_values_of_questions_average_to_the_numbers_of_the_datasets():
    plan = make_plan({"a": 5, "b": 3}, 4)
    rng = np.random.default_rng(0)
    scores = scores_of({q.uid: "".join(rng.choice(list("01.F"), 4)) for q in plan.questions})
    wanted = accuracy_by_dataset(plan, scores, k=2)
    for name, estimator in (("pass_at_k", pass_at_k), ("all_at_k", all_at_k)):
        values = question_values(plan, scores, lambda n, c, f=estimator: f(n, c, 2))
        for dataset in ("a", "b"):
            assert values[dataset].mean() == pytest.approx(wanted[dataset][name], abs=1e-12)
    # a0 alone, by hand: one right of four, so 1 - C(3, 2) / C(4, 2) = 1/2
    one = question_values(make_plan({"a": 1}, 4), scores_of({"a0": "0100"}), lambda n, c: c / n)
    two = question_values(
        make_plan({"a": 1}, 4), scores_of({"a0": "0100"}), lambda n, c: pass_at_k(n, c, 2)
    )
    assert (one["a"].tolist(), two["a"].tolist()) == ([0.25], [0.5])


# --- intervals ------------------------------------------------------------------------------------


def test_by_hand_a_constant_gap_is_certain_and_two_questions_have_three_outcomes():
    hard_or_easy = np.asarray([0.0, 0.25, 0.75, 0.5])
    got = paired({"a": hard_or_easy + 0.25}, {"a": hard_or_easy})
    assert (got.difference, got.low, got.high, got.level) == (0.25, 0.25, 0.25, 0.95)
    # gaps 1 and 0: drawn twice the mean is 0, 1/2 or 1 with probabilities 1/4, 1/2, 1/4
    wide = paired({"a": np.asarray([1.0, 0.0])}, {"a": np.zeros(2)})
    assert (wide.difference, wide.low, wide.high) == (0.5, 0.0, 1.0)
    narrow = paired({"a": np.asarray([1.0, 0.0])}, {"a": np.zeros(2)}, level=0.4)
    assert (narrow.low, narrow.high, narrow.level) == (0.5, 0.5, 0.4)


def test_datasets_weigh_equally_and_are_drawn_inside_themselves():
    # 100 questions that gain nothing and 2 that gain 1: (0 + 1) / 2, and no draw says otherwise
    first = {"big": np.full(100, 0.5), "small": np.ones(2)}
    second = {"big": np.full(100, 0.5), "small": np.zeros(2)}
    got = paired(first, second)
    assert (got.difference, got.low, got.high) == (0.5, 0.5, 0.5)


def test_exchanged_systems_have_the_mirrored_difference_and_interval():
    rng = np.random.default_rng(0)
    first, second = ({"a": rng.random(40), "b": rng.random(30)} for _ in range(2))
    there, back = paired(first, second), paired(second, first)
    mirrored = [-there.difference, -there.high, -there.low]
    np.testing.assert_allclose([back.difference, back.low, back.high], mirrored, atol=1e-12)
    assert paired(first, second) == there
    assert there.low < there.difference < there.high


def test_interval_agrees_with_one_draw_at_a_time():
    rng = np.random.default_rng(1)
    first, second = ({"a": rng.random(25), "b": rng.random(12)} for _ in range(2))
    draws = []
    for _ in range(4000):
        gaps = []
        for name in first:
            index = rng.integers(0, len(first[name]), len(first[name]))
            gaps.append(np.mean([first[name][q] - second[name][q] for q in index]))
        draws.append(np.mean(gaps))
    got = paired(first, second)
    # percentiles of 4,000 and of 10,000 draws of a deviation of about .07
    np.testing.assert_allclose([got.low, got.high], np.percentile(draws, [2.5, 97.5]), atol=0.012)


def correlated(rng, num_questions, gain):
    """Two systems on the same questions, of which some are hard for both; 4 runs each."""
    ease = rng.beta(0.5, 0.5, num_questions) * (1 - gain)
    return tuple(rng.binomial(4, p) / 4 for p in (ease + gain, ease))


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(300):
        first, second = correlated(rng, 80, 0.1)
        interval = paired({"a": first}, {"a": second}, level=0.9, num_draws=500)
        hits += interval.low <= 0.1 <= interval.high
    # 270 expected; the deviation of a binomial is 5.2, and percentiles run a little narrow
    assert 250 <= hits <= 287


def test_stratified_intervals_of_95_percent_hold_the_truth_in_92_to_98_of_a_hundred_studies():
    sizes, gains = {"a": 120, "b": 60, "c": 40}, {"a": 0.1, "b": 0.0, "c": -0.04}
    rng = np.random.default_rng(5)
    truth, hits = sum(gains.values()) / 3, 0
    for study in range(300):
        pairs = {name: correlated(rng, size, abs(gains[name])) for name, size in sizes.items()}
        # in c the second system is the better one
        first = {name: pair[gains[name] < 0] for name, pair in pairs.items()}
        second = {name: pair[gains[name] >= 0] for name, pair in pairs.items()}
        interval = paired(first, second, seed=study, num_draws=1000)
        hits += interval.low <= truth <= interval.high
    assert 0.92 <= hits / 300 <= 0.98


def test_pairs_are_narrower_than_two_separate_samples_where_questions_are_hard_for_both():
    rng = np.random.default_rng(3)
    first, second = correlated(rng, 200, 0.05)
    together = paired({"a": first}, {"a": second})
    apart = paired({"a": first}, {"a": rng.permutation(second)})
    assert together.difference == pytest.approx(apart.difference)
    assert together.high - together.low < 0.7 * (apart.high - apart.low)
    # and the pair's interval tells the gain from nothing
    assert together.low > 0 > apart.low


def test_strata_are_narrower_than_one_pot_where_datasets_differ():
    rng = np.random.default_rng(4)
    gaps = {"a": 0.4 + 0.05 * rng.normal(size=50), "b": -0.4 + 0.05 * rng.normal(size=50)}
    zeros = {name: np.zeros(50) for name in gaps}
    strata = paired(gaps, zeros)
    pot = paired({"all": np.concatenate(list(gaps.values()))}, {"all": np.zeros(100)})
    assert strata.difference == pytest.approx(pot.difference)
    assert strata.high - strata.low < 0.3 * (pot.high - pot.low)


def test_other_questions_cannot_be_paired():
    three, two = {"a": np.zeros(3)}, {"a": np.zeros(2)}
    for first, second in ((three, two), (three, {"b": np.zeros(3)}), ({}, {})):
        with pytest.raises(ValueError, match="same questions"):
            paired(first, second)


def test_a_dataset_without_questions_is_an_error():
    nothing = {"a": np.zeros(3), "b": np.zeros(0)}
    with pytest.raises(ValueError, match="at least one a dataset"):
        paired(nothing, nothing)


# --- p values -------------------------------------------------------------------------------------


def test_p_by_hand():
    # of 9 draws 2 are not above zero, 7 not below: 2 * (2 + 1) / (9 + 1)
    assert p_value(np.array([-1.0, 0.0, 1, 1, 1, 2, 2, 3, 4])) == pytest.approx(0.6)
    assert p_value(-np.array([-1.0, 0.0, 1, 1, 1, 2, 2, 3, 4])) == pytest.approx(0.6)
    assert p_value(np.zeros(9)) == 1.0  # ties are on the far side of both
    assert p_value(np.ones(99)) == pytest.approx(2 / 100)  # never 0


def test_draws_of_one_question_or_of_equal_systems_are_known():
    assert resample({"a": np.ones(1)}, {"a": np.zeros(1)}, num_draws=7).tolist() == [1.0] * 7
    same = {"a": np.array([0.5, 1.0])}
    assert p_value(resample(same, same)) == 1.0
    assert resample(same, same).shape == (NUM_DRAWS,)


def test_p_is_below_a_twentieth_where_the_interval_excludes_zero():
    rng = np.random.default_rng(6)
    excluded = 0
    for gain in np.linspace(0.0, 0.16, 40):
        first, second = correlated(rng, 60, gain)
        interval = paired({"a": first}, {"a": second}, num_draws=1000)
        p = p_value(resample({"a": first}, {"a": second}, num_draws=1000))
        if abs(p - 0.05) > 0.006:  # three draws: the added one, and between two percentiles
            assert (p < 0.05) == (interval.low > 0 or interval.high < 0)
            excluded += p < 0.05
    assert 5 <= excluded <= 35


def test_p_of_equal_systems_is_small_about_as_often_as_it_says():
    rng = np.random.default_rng(7)
    small = 0
    for study in range(300):
        first, second = correlated(rng, 80, 0.0)
        draws = resample({"a": first}, {"a": second}, seed=study, num_draws=500)
        small += p_value(draws) < 0.1
    # 30 expected, deviation 5.2
    assert 15 <= small <= 45


def test_the_interval_of_one_system_is_that_of_its_difference_from_nothing():
    rng = np.random.default_rng(3)
    values = {"a": rng.random(30), "b": rng.random(50)}
    found = interval(values)
    assert found.difference == pytest.approx((values["a"].mean() + values["b"].mean()) / 2)
    assert found.low < found.difference < found.high
    spread = np.sqrt(sum(v.var() / v.size for v in values.values())) / 2
    assert found.high - found.low == pytest.approx(2 * 1.96 * spread, rel=0.1)
