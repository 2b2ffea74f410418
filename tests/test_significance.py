"""When a difference counts: by hand, against scipy and enumeration, and by simulation."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from mas_jax.evaluation import significance
from mas_jax.evaluation.bootstrap import Interval, p_value, paired, resample
from mas_jax.evaluation.significance import (
    Claim,
    compare_seeds,
    equivalence_over_questions,
    equivalence_over_seeds,
    holm,
    mcnemar,
    over_sets,
    supported,
    t_interval,
)

# --- several sets ---------------------------------------------------------------------------------


def test_over_all_is_one_test_of_the_macro_average():
    rng = np.random.default_rng(5)
    first = {name: rng.random(40) for name in ("a", "b")}
    second = {name: values - 0.1 for name, values in first.items()}
    found = significance.over_all(first, second)
    assert found.interval.difference == pytest.approx(0.1)
    assert found.interval.low == pytest.approx(0.1) and found.p_value == found.adjusted < 0.001


def test_holm_by_hand():
    # sorted .01 .02 .04 times 3 2 1: .03 .04 .04
    np.testing.assert_allclose(holm([0.04, 0.01, 0.02]), [0.04, 0.03, 0.04])
    # .02 * 2 = .04 is below the .06 before it, and may not be
    np.testing.assert_allclose(holm([0.02, 0.02, 0.5]), [0.06, 0.06, 0.5])
    assert holm([0.6, 0.7]).tolist() == [1.0, 1.0]
    assert holm([0.3]).tolist() == [0.3]
    assert holm([]).tolist() == []


def rejected(p_values, alpha):
    """Holm's steps as he wrote them: reject the smallest until one passes its own bound."""
    out = [False] * len(p_values)
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        if p_values[index] > alpha / (len(p_values) - rank):
            break
        out[index] = True
    return out


def test_corrected_values_reject_what_the_stepwise_procedure_rejects():
    rng = np.random.default_rng(0)
    for _ in range(300):
        p_values = rng.uniform(size=7) ** 3
        for alpha in (0.01, 0.05, 0.2):
            assert (holm(p_values) <= alpha).tolist() == rejected(p_values, alpha)


def test_holm_keeps_the_chance_of_any_false_rejection():
    rng = np.random.default_rng(1)
    any_alone = any_corrected = 0
    for _ in range(2000):
        p_values = rng.uniform(size=7)
        any_alone += p_values.min() < 0.05
        any_corrected += holm(p_values).min() < 0.05
    assert any_alone > 500  # 1 - .95^7 = 30% of 2000
    assert any_corrected <= 130  # at most 100 expected, deviation 9.7


@pytest.mark.parametrize("p_values", [[0.1, 1.2], [-0.1], [float("nan")], [[0.1]]])
def test_what_is_no_p_value_is_an_error(p_values):
    with pytest.raises(ValueError, match=r"want a list of numbers in \[0, 1\]"):
        holm(p_values)


def test_each_set_is_compared_by_itself_and_corrected_for_all():
    rng = np.random.default_rng(2)
    second = {name: rng.binomial(4, 0.4, 60) / 4 for name in "abc"}
    gains = {"a": 0.5, "b": 0.1, "c": 0.0}
    first = {name: np.clip(second[name] + gains[name] * rng.random(60), 0, 1) for name in "abc"}
    first["c"] = rng.permutation(second["c"])
    found = over_sets(first, second, seed=3)
    p_values = []
    for name in "abc":
        alone = {name: first[name]}, {name: second[name]}
        assert found[name].interval == paired(*alone, seed=3)
        p_values.append(p_value(resample(*alone, seed=3)))
        assert found[name].p_value == p_values[-1]
    assert [found[name].adjusted for name in "abc"] == holm(p_values).tolist()
    assert found["a"].adjusted < 0.05 < found["c"].adjusted
    with pytest.raises(ValueError, match="same questions"):
        over_sets(first, {"a": second["a"]})


# --- several training seeds -----------------------------------------------------------------------


def test_t_interval_by_hand():
    # mean 2, deviation 1, error 1 / sqrt(3); t of 2 degrees of freedom at .975 is 4.302653
    got = t_interval([1.0, 2.0, 3.0])
    half = 4.302653 / np.sqrt(3)
    np.testing.assert_allclose([got.difference, got.low, got.high], [2, 2 - half, 2 + half], 1e-6)
    assert got.level == 0.95


def test_t_interval_is_scipys():
    rng = np.random.default_rng(3)
    for size in (2, 3, 5, 12):
        values = rng.normal(0.03, 0.02, size)
        for level in (0.5, 0.9, 0.99):
            got = t_interval(values, level=level)
            want = stats.ttest_1samp(values, 0.0).confidence_interval(level)
            np.testing.assert_allclose([got.low, got.high], [want.low, want.high], rtol=1e-9)


def test_t_intervals_of_five_seeds_hold_the_truth_in_about_95_of_a_hundred_studies():
    rng = np.random.default_rng(4)
    hits = 0
    for _ in range(2000):
        interval = t_interval(rng.normal(0.02, 0.01, 5))
        hits += interval.low <= 0.02 <= interval.high
    assert 0.935 <= hits / 2000 <= 0.965  # deviation 0.005


def test_equal_differences_have_an_interval_of_no_width():
    assert t_interval([0.5, 0.5, 0.5]) == Interval(0.5, 0.5, 0.5, 0.95)


def test_one_seed_shows_no_spread():
    for values in ([0.1], []):
        with pytest.raises(ValueError, match="at least 2 training seeds"):
            t_interval(values)


def make_seed(rng, gain, spread):
    """Question values of two systems in one training seed, on two sets."""
    shift = gain + spread * rng.normal()
    second = {"a": rng.random(200), "b": rng.random(100)}
    return {name: values + shift for name, values in second.items()}, second


def test_a_claim_holds_the_bootstrap_of_every_seed_and_the_t_interval_over_them():
    rng = np.random.default_rng(5)
    pairs = [make_seed(rng, 0.1, 0.02) for _ in range(3)]
    claim = compare_seeds(pairs, level=0.9, seed=1)
    assert claim.seeds == tuple(paired(*pair, level=0.9, seed=1) for pair in pairs)
    assert claim.over_seeds == t_interval([i.difference for i in claim.seeds], level=0.9)


def interval(low, high):
    return Interval((low + high) / 2, low, high, 0.95)


@pytest.mark.parametrize(
    ("seeds", "over_seeds", "wanted"),
    [
        ([(1, 2), (1, 3)], (1, 2), True),
        ([(-2, -1), (-3, -1)], (-2, -1), True),
        ([(1, 2), (-1, 3)], (1, 2), False),  # one seed alone does not show it
        ([(1, 2), (1, 3)], (-1, 4), False),  # the seeds differ too much
        ([(1, 2), (-3, -1)], (1, 2), False),  # on both sides
        ([(-2, -1), (-2, -1)], (1, 2), False),
        ([(0, 2), (1, 3)], (1, 2), False),  # touching zero
        ([(1, 2), (1, 3)], (0, 2), False),
        ([(-2, 0), (-3, -1)], (-2, -1), False),
    ],
)
def test_a_claim_is_supported_when_all_intervals_lie_on_one_side(seeds, over_seeds, wanted):
    claim = Claim(tuple(interval(*pair) for pair in seeds), interval(*over_seeds))
    assert supported(claim) is wanted


def test_seeds_that_disagree_support_nothing_although_each_is_certain():
    rng = np.random.default_rng(6)
    pairs = [make_seed(rng, gain, 0.0) for gain in (0.3, -0.2, 0.1)]
    claim = compare_seeds(pairs)
    assert all(i.low > 0 or i.high < 0 for i in claim.seeds)
    assert not supported(claim)
    assert supported(compare_seeds([make_seed(rng, 0.1, 0.005) for _ in range(3)]))


def test_seeds_on_other_sets_or_numbers_of_questions_are_an_error():
    rng = np.random.default_rng(7)
    one, other = make_seed(rng, 0.1, 0.0), make_seed(rng, 0.1, 0.0)
    fewer = tuple({"a": system["a"]} for system in other)
    for pairs in ([one, fewer], [one, (other[0], fewer[1])]):
        with pytest.raises(ValueError, match="same questions"):
            compare_seeds(pairs)
    with pytest.raises(ValueError, match="at least 2 training seeds"):
        compare_seeds([one])


# --- no difference --------------------------------------------------------------------------------


def test_equivalence_over_seeds_by_hand():
    # mean 0, deviation 1, error 1 / sqrt(3); t of 2 degrees of freedom at .95 is 2.919986, so the
    # 90% interval is +-1.685854
    values = [-1.0, 0.0, 1.0]
    got = equivalence_over_seeds(values, margin=1.7)
    assert got.equivalent and got.p_value < 0.05
    np.testing.assert_allclose([got.interval.low, got.interval.high], [-1.685854, 1.685854], 1e-5)
    assert got.interval.level == pytest.approx(0.9)
    got = equivalence_over_seeds(values, margin=1.68)
    assert not got.equivalent and got.p_value > 0.05


def test_equivalence_over_seeds_is_two_one_sided_tests_of_scipy():
    rng = np.random.default_rng(8)
    decisions = set()
    for size in (2, 3, 8):
        for _ in range(40):
            values = rng.normal(0.0, 0.01, size)
            got = equivalence_over_seeds(values, margin=0.012)
            above = stats.ttest_1samp(values, -0.012, alternative="greater").pvalue
            below = stats.ttest_1samp(values, 0.012, alternative="less").pvalue
            assert got.p_value == pytest.approx(max(above, below), rel=1e-9)
            assert got.equivalent == (max(above, below) < 0.05)
            decisions.add(got.equivalent)
    assert decisions == {True, False}


def test_at_the_margin_equivalence_is_claimed_at_most_as_often_as_alpha():
    rng = np.random.default_rng(9)
    claimed = sum(
        equivalence_over_seeds(rng.normal(0.01, 0.002, 5), margin=0.01).equivalent
        for _ in range(2000)
    )
    assert 70 <= claimed <= 130  # 100 expected, deviation 9.7


def test_a_missing_significance_is_no_equivalence():
    rng = np.random.default_rng(10)
    first, second = ({"a": rng.binomial(1, 0.5, 30).astype(float)} for _ in range(2))
    around = paired(first, second)
    assert around.low < 0 < around.high
    got = equivalence_over_questions(first, second, margin=0.02)
    assert not got.equivalent and got.p_value > 0.05


def test_equivalence_over_questions_asks_for_the_90_percent_interval_within_the_margin():
    rng = np.random.default_rng(11)
    second = {"a": rng.binomial(4, 0.4, 300) / 4, "b": rng.binomial(4, 0.6, 200) / 4}
    first = {name: rng.permutation(values) for name, values in second.items()}
    around = paired(first, second, level=0.9, seed=2)
    widest = max(-around.low, around.high)
    for factor, wanted in ((1.02, True), (0.98, False)):
        got = equivalence_over_questions(first, second, margin=factor * widest, seed=2)
        np.testing.assert_allclose(
            [got.interval.low, got.interval.high], [around.low, around.high], atol=1e-12
        )
        assert got.equivalent is wanted
    # without questions that differ nothing is left to chance: only the added draw of 10,001
    same = equivalence_over_questions(first, first, margin=0.01)
    assert same.equivalent and same.p_value == pytest.approx(1 / 10_001)


def test_equal_seeds_are_equivalent_if_they_are_within_the_margin():
    assert equivalence_over_seeds([0.5, 0.5], margin=0.6).p_value == 0.0
    far = equivalence_over_seeds([0.5, 0.5], margin=0.5)
    assert (far.p_value, far.equivalent) == (1.0, False)


@pytest.mark.parametrize(("margin", "alpha"), [(0.0, 0.05), (-1.0, 0.05), (0.1, 0.5), (0.1, 0.0)])
def test_a_margin_that_admits_nothing_is_an_error(margin, alpha):
    values = {"a": np.zeros(3)}
    with pytest.raises(ValueError, match="want a margin above 0"):
        equivalence_over_seeds([0.1, 0.2], margin=margin, alpha=alpha)
    with pytest.raises(ValueError, match="want a margin above 0"):
        equivalence_over_questions(values, values, margin=margin, alpha=alpha)


# --- single runs ----------------------------------------------------------------------------------


def test_mcnemar_by_hand():
    # five questions that only the first answered, one that only the second did; of 2^6 outcomes
    # 1 + 6 are as uneven on that side: p = 2 * 7 / 64
    first = np.array([1, 1, 1, 1, 1, 0, 1, 0, 0])
    second = np.array([0, 0, 0, 0, 0, 1, 1, 0, 0])
    got = mcnemar(first, second)
    assert (got.first_only, got.second_only, got.p_value) == (5, 1, 14 / 64)
    assert mcnemar(second, first).p_value == 14 / 64
    assert mcnemar(first, first) == significance.McNemar(0, 0, 1.0)
    assert mcnemar(np.array([True, False]), np.array([False, True])).p_value == 1.0


def outcome(first_only, second_only):
    first = [1] * first_only + [0] * second_only + [1, 0, 0]
    second = [0] * first_only + [1] * second_only + [1, 0, 0]
    return mcnemar(np.array(first), np.array(second))


def test_mcnemar_is_scipys_binomial_test():
    for first_only, second_only in itertools.product(range(12), repeat=2):
        if first_only + second_only:
            want = stats.binomtest(first_only, first_only + second_only).pvalue
            assert outcome(first_only, second_only).p_value == pytest.approx(want, rel=1e-12)


def test_mcnemar_is_the_share_of_coin_sequences_that_are_as_uneven():
    for total in range(1, 9):
        heads = [sum(coins) for coins in itertools.product((0, 1), repeat=total)]
        for first_only in range(total + 1):
            gap = abs(2 * first_only - total)
            share = Fraction(sum(abs(2 * h - total) >= gap for h in heads), 2**total)
            assert outcome(first_only, total - first_only).p_value == float(share)


def test_mcnemar_of_thousands_of_questions_is_exact():
    assert outcome(3000, 3000).p_value == 1.0
    want = stats.binomtest(2880, 6000).pvalue
    assert outcome(2880, 3120).p_value == pytest.approx(want, rel=1e-9)


def test_what_are_no_two_single_runs_is_an_error():
    with pytest.raises(ValueError, match="same questions"):
        mcnemar(np.zeros(3), np.zeros(2))
    with pytest.raises(ValueError, match=r"use bootstrap\.paired"):
        mcnemar(np.array([0.25, 1.0]), np.array([0.0, 1.0]))
