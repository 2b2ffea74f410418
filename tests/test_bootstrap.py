"""The paired bootstrap: by hand, its coverage by simulation, pairs and strata, what is missing."""

import numpy as np
import pytest
from evaluation_episodes import make_episode, make_plan

from mas_jax.evaluation import bootstrap
from mas_jax.evaluation.bootstrap import paired, question_means
from mas_jax.evaluation.statistics import score_episode
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


def test_intervals_hold_the_truth_about_as_often_as_they_say(monkeypatch):
    monkeypatch.setattr(bootstrap, "NUM_DRAWS", 500)  # of 300 experiments, for speed
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(300):
        first, second = correlated(rng, 80, 0.1)
        interval = paired({"a": first}, {"a": second}, level=0.9)
        hits += interval.low <= 0.1 <= interval.high
    # 270 expected; the deviation of a binomial is 5.2, and percentiles run a little narrow
    assert 250 <= hits <= 287


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
