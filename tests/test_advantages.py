"""Advantages: hand-computed values, loops in float64, what must not leak, and exact gradients."""

import difflib
import itertools
import math
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mas_jax.learning import advantages, losses

EPS = 1e-6
distillation = jax.jit(
    advantages.distillation, static_argnames=("beta", "log_ratio_clip", "future_discount")
)
gae = jax.jit(advantages.gae, static_argnames=("discount", "decay"))
ppo = jax.jit(losses.ppo, static_argnames=("clip_low", "clip_high", "dual_clip"))
CLIPS = dict(clip_low=0.2, clip_high=0.2, dual_clip=3.0)
PLAIN = dict(log_ratio_clip=0.0, future_discount=0.0)


def row(*values: float) -> jax.Array:
    return jnp.asarray([values], jnp.float32)


# --- groups: by hand ------------------------------------------------------------------------------


def test_group_relative_by_hand_in_every_scale():
    rewards, groups = [1, 0, 0, 0.5, 0.1], ["a", "a", "a", "b", "b"]
    # a: mean 1/3, deviations 2/3, -1/3, -1/3, squares 4/9 + 1/9 + 1/9 = 2/3
    #    n - 1: sqrt(1/3); n: sqrt(2/9).   b: mean .3, +-.2; n - 1: sqrt(.08); n: .2
    a, b = np.array([2, -1, -1]) / 3, np.array([0.2, -0.2])
    expected = {
        "std": [*a / (math.sqrt(1 / 3) + EPS), *b / (math.sqrt(0.08) + EPS)],
        "population_std": [*a / (math.sqrt(2 / 9) + EPS), *b / (0.2 + EPS)],
        "none": [*a, *b],
        "leave_one_out": [1 - 0, 0 - 0.5, 0 - 0.5, 0.5 - 0.1, 0.1 - 0.5],
    }
    assert set(expected) == set(advantages.SCALES)
    for scale, values in expected.items():
        got, is_constant, census = advantages.group_relative(rewards, groups, scale=scale, eps=EPS)
        np.testing.assert_allclose(got, values, atol=1e-14)
        assert got.dtype == np.float64 and not is_constant.any()
        assert census == advantages.Census(2, 2, 3, 2.5, 0, 0, 0, 0)


@pytest.mark.parametrize("scale", advantages.SCALES)
def test_census_of_singletons_equal_rewards_and_failed_groups(scale):
    rewards = [1.0, 0.7, 0.7, 0.7, math.nan, math.nan, 1.0, 0.0, None]
    groups = ["alone", "same", "same", "same", "failed", "failed", "good", "good", "good"]
    got, is_constant, census = advantages.group_relative(rewards, groups, scale=scale, eps=EPS)
    assert not got[:6].any() and got[6] > 0 > got[7] and got[8] == 0
    assert is_constant.tolist() == [True] * 6 + [False] * 3
    assert census == advantages.Census(
        num_groups=4,
        size_min=0,
        size_max=3,
        size_mean=6 / 4,
        empty=1,
        singletons=1,
        zero_variance=1,
        missing=3,
    )


def test_same_index_in_two_datasets_is_two_groups():
    keys = [("nq", 3), ("hotpotqa", 3), ("nq", 3), ("hotpotqa", 3)]
    got, _, census = advantages.group_relative([1, 5, 3, 9], keys, scale="none", eps=EPS)
    assert got.tolist() == [-1, -2, 1, 2]
    assert (census.num_groups, census.size_max) == (2, 2)


def test_a_reward_of_zero_counts_and_a_missing_one_does_not():
    knobs = dict(scale="none", eps=EPS)
    zero = advantages.group_relative([1.0, 0.5, 0.0], [7, 7, 7], **knobs)
    assert zero[0].tolist() == [0.5, 0.0, -0.5] and zero[2].missing == 0
    for nothing in (None, math.nan):
        got = advantages.group_relative([1.0, 0.5, nothing], [7, 7, 7], **knobs)
        assert got[0].tolist() == [0.25, -0.25, 0.0] and got[2].missing == 1


def test_no_rewards_are_no_groups():
    got, is_constant, census = advantages.group_relative([], [], scale="std", eps=EPS)
    assert got.shape == is_constant.shape == (0,)
    assert census == advantages.Census(0, 0, 0, 0.0, 0, 0, 0, 0)


def test_wrong_arguments_are_errors():
    for rewards, groups, scale, eps in (
        ([1, 2], [1], "std", EPS),
        ([1, math.inf], [1, 1], "std", EPS),
        ([1, 2], [1, 1], "variance", EPS),
        ([1, 2], [1, 1], "std", 0.0),
    ):
        with pytest.raises(ValueError, match="want"):
            advantages.group_relative(rewards, groups, scale=scale, eps=eps)


def test_weighted_groups_by_hand_in_every_scale():
    # weights 3, 1: n = 4, mean 3/4, squares 3/16 + 9/16 = 3/4; n: sqrt(3/16), n - 1: sqrt(1/4);
    # less the mean of the other three: 1 - 2/3, 0 - 1. The other group keeps to itself.
    expected = {
        "population_std": np.array([0.25, -0.75]) / (math.sqrt(3 / 16) + EPS),
        "std": np.array([0.25, -0.75]) / (0.5 + EPS),
        "none": [0.25, -0.75],
        "leave_one_out": [1 / 3, -1.0],
    }
    for scale, values in expected.items():
        got, is_constant, census = advantages.group_relative(
            [1.0, 0.0, 0.5, None], ["a", "a", "b", "a"], scale=scale, eps=EPS,
            weights_X=np.array([3.0, 1.0, 8.0, 5.0]),
        )  # fmt: skip
        np.testing.assert_allclose(got, [*values, 0.0, 0.0], atol=1e-14)
        assert is_constant.tolist() == [False, False, True, False]
        assert census == advantages.Census(2, 1, 2, 1.5, 0, 1, 0, 1)


@pytest.mark.parametrize("scale", advantages.SCALES)
def test_a_weight_of_one_is_none_and_the_scale_of_a_fraction_is_its_own(scale):
    rewards, groups = [1.0, 0.0, 0.3, 0.9, 0.2], [0, 0, 0, 1, 1]
    plain, *_ = advantages.group_relative(rewards, groups, scale=scale, eps=EPS)
    ones, *_ = advantages.group_relative(
        rewards, groups, scale=scale, eps=EPS, weights_X=np.ones(5)
    )
    np.testing.assert_array_equal(plain, ones)
    small, *_ = advantages.group_relative(
        rewards, groups, scale="population_std", eps=EPS, weights_X=np.full(5, 0.01)
    )
    large, *_ = advantages.group_relative(rewards, groups, scale="population_std", eps=EPS)
    np.testing.assert_allclose(small, large, rtol=1e-12)


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, math.nan]])
def test_weights_that_weigh_nothing_are_errors(weights):
    with pytest.raises(ValueError, match="want 2 above 0"):
        advantages.group_relative([1, 2], [0, 0], scale="std", eps=EPS, weights_X=weights)


# --- turns: by hand -------------------------------------------------------------------------------


def test_returns_to_go_by_hand():
    # 1; 0 + 0.5 * 1; 2 + 0.5 * 0.5
    got = advantages.returns_to_go([2.0, 0.0, 1.0], discount=0.5)
    assert got.tolist() == [2.25, 0.5, 1.0] and got.dtype == np.float64
    assert advantages.returns_to_go([], discount=0.5).shape == (0,)
    last = advantages.returns_to_go([0, 0, 0, 1], discount=0.95)
    np.testing.assert_allclose(last, [0.95**3, 0.95**2, 0.95, 1.0], rtol=1e-12)


def test_texts_are_alike_from_the_given_ratio_on():
    # ten characters of which nine match: 2 * 9 / 20 = 0.9
    states = ["abcdefghij", "abcdefghiX", "abcdefghXX", "abcdefghij", "abcdefghij"]
    keys = ["q", "q", "q", "q", "r"]
    got = advantages.alike(states, keys, similarity=0.9)
    assert got == [("q", 0), ("q", 0), ("q", 1), ("q", 0), ("r", 0)]
    assert [n for _, n in advantages.alike(states, keys, similarity=0.91)] == [0, 1, 2, 0, 0]
    assert [n for _, n in advantages.alike(states, keys, similarity=0.5)] == [0, 0, 0, 0, 0]
    assert advantages.alike([], [], similarity=0.9) == []


def test_a_group_is_compared_by_its_first_text_as_difflib_does():
    rng = np.random.default_rng(0)
    states = ["".join(rng.choice(list("ab "), 300)) for _ in range(3)]
    states += [text[: 300 - cut] for text in states for cut in (1, 40, 90)]
    firsts, want = [], []
    for state in states:  # the plain way
        near = [difflib.SequenceMatcher(None, state, first).ratio() >= 0.9 for first in firsts]
        want.append(near.index(True) if any(near) else len(firsts))
        firsts += [] if any(near) else [state]
    assert [n for _, n in advantages.alike(states, [0] * 12, similarity=0.9)] == want
    assert 3 < len(firsts) < 12


# --- groups: one at a time, and what must not change them -----------------------------------------

SAMPLES = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.1, 0.2, 0.9, 1.0, -1.0, None]),
        st.sampled_from([("nq", 1), ("nq", 2), ("musique", 1), "uid"]),
    ),
    max_size=24,
)


def one_group_at_a_time(samples, scale):
    """Advantages by the definition, from the standard library's statistics."""
    result = []
    for reward, key in samples:
        group = [other for other, its_key in samples if its_key == key and other is not None]
        deviation = statistics.pstdev if scale == "population_std" else statistics.stdev
        if reward is None or len(group) < 2 or deviation(group) < EPS:
            result.append(0.0)
        elif scale == "leave_one_out":
            result.append(reward - (math.fsum(group) - reward) / (len(group) - 1))
        else:
            divisor = 1.0 if scale == "none" else deviation(group) + EPS
            result.append((reward - statistics.fmean(group)) / divisor)
    return result


@settings(max_examples=60, deadline=None)
@given(samples=SAMPLES, scale=st.sampled_from(advantages.SCALES), order=st.randoms())
def test_groups_agree_with_one_at_a_time_and_samples_may_come_in_any_order(samples, scale, order):
    def run(pairs):
        return advantages.group_relative(
            [reward for reward, _ in pairs], [key for _, key in pairs], scale=scale, eps=EPS
        )

    got, is_constant, census = run(samples)
    np.testing.assert_allclose(got, one_group_at_a_time(samples, scale), atol=1e-12)
    assert not got[is_constant].any()
    shuffled = list(range(len(samples)))
    order.shuffle(shuffled)
    again, constant_again, census_again = run([samples[i] for i in shuffled])
    np.testing.assert_allclose(again, got[shuffled], atol=1e-12)
    np.testing.assert_array_equal(constant_again, is_constant[shuffled])
    assert census_again == census


@pytest.mark.parametrize("scale", advantages.SCALES)
def test_a_small_spread_on_a_large_reward_keeps_its_size(scale):
    """float32, or a mean of squares less a square of the mean, would lose it."""
    rewards = [1e6 + 0.001 * k for k in range(4)]
    got, _, _ = advantages.group_relative(rewards, [0] * 4, scale=scale, eps=EPS)
    expected = one_group_at_a_time([(reward, 0) for reward in rewards], scale)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


# --- trees ----------------------------------------------------------------------------------------


LEAVES = [1, 0, 0, 1, 1, 0]  # of one question
IN_TREES = [0, 0, 0, 1, 1, 1]


def test_tree_relative_by_hand_in_both_forms():
    # all six: mean 1/2, deviations +-1/2, n - 1: sqrt(6/4/5) = sqrt(.3), inter +-.5/sqrt(.3)
    # tree 0: mean 1/3, deviations 2/3, -1/3, -1/3, squares 2/3, n - 1: sqrt(1/3)
    # tree 1: mean 2/3, deviations 1/3, 1/3, -2/3
    inter = np.array([1, -1, -1, 1, 1, -1]) * 0.5 / (math.sqrt(0.3) + EPS)
    centred = np.array([2, -1, -1, 1, 1, -2]) / 3
    total, is_constant, census = advantages.tree_relative(
        LEAVES, ["q"] * 6, IN_TREES, form="sum", scale="std", eps=EPS
    )
    np.testing.assert_allclose(total, inter + centred / (math.sqrt(1 / 3) + EPS), atol=1e-14)
    assert not is_constant.any() and census == advantages.Census(1, 6, 6, 6.0, 0, 0, 0, 0)
    # z-scores are +-z, z = .5/(sqrt(.3) + eps); tree 0: mean -z/3, deviations 4/3 z, -2/3 z twice,
    # squares 24/9 z^2, n - 1: sqrt(4/3) z
    z = 0.5 / (math.sqrt(0.3) + EPS)
    nested, _, census = advantages.tree_relative(
        LEAVES, ["q"] * 6, IN_TREES, form="nested", scale="std", eps=EPS
    )
    want = 2 * z * centred / (math.sqrt(4 / 3) * z + EPS)
    np.testing.assert_allclose(nested, want, atol=1e-14)
    assert census == advantages.Census(2, 3, 3, 3.0, 0, 0, 0, 0)


def test_a_tree_without_spread_still_differs_from_the_others_in_the_sum_alone():
    rewards, trees = [1, 1, 1, 0], [0, 0, 1, 1]
    knobs = dict(scale="none", eps=EPS)
    total, is_constant, _ = advantages.tree_relative(
        rewards, ["q"] * 4, trees, form="sum", **knobs
    )  # inter 1/4, 1/4, 1/4, -3/4; intra 0, 0, 1/2, -1/2
    np.testing.assert_allclose(total, [0.25, 0.25, 0.75, -1.25])
    assert not is_constant.any()
    nested, is_constant, _ = advantages.tree_relative(
        rewards, ["q"] * 4, trees, form="nested", **knobs
    )
    np.testing.assert_allclose(nested, [0, 0, 0.5, -0.5])
    assert is_constant.tolist() == [True, True, False, False]


@pytest.mark.parametrize("form", advantages.FORMS)
def test_equal_leaves_lone_leaves_and_failed_ones_teach_nothing(form):
    def relative(rewards, questions, trees):
        return advantages.tree_relative(rewards, questions, trees, form=form, scale="std", eps=EPS)[
            :2
        ]

    got, is_constant = relative([0.7] * 4, ["q"] * 4, [0, 0, 1, 1])
    assert not got.any() and is_constant.all()
    got, is_constant = relative([1.0], ["q"], [0])
    assert not got.any() and is_constant.all()
    got, _ = relative([1.0, 0.0, math.nan, 1.0], ["q"] * 4, [0, 0, 0, 1])
    without, _ = relative([1.0, 0.0, 1.0], ["q"] * 3, [0, 0, 1])
    assert got[2] == 0.0
    np.testing.assert_array_equal(got[[0, 1, 3]], without)
    # a lone leaf of a tree: nothing within the tree
    inter, *_ = advantages.group_relative([1.0, 0.0, 1.0], ["q"] * 3, scale="std", eps=EPS)
    assert got[3] == (inter[2] if form == "sum" else 0.0)


@pytest.mark.parametrize("form", advantages.FORMS)
@pytest.mark.parametrize("scale", advantages.SCALES)
def test_leaves_may_come_in_any_order_and_trees_of_two_questions_share_a_number(form, scale):
    rng = np.random.default_rng(0)
    rewards, questions = rng.random(24), np.repeat(["a", "b"], 12)
    trees = np.tile(np.repeat([0, 1, 2], 4), 2)
    knobs = dict(form=form, scale=scale, eps=EPS)
    whole, *_ = advantages.tree_relative(rewards, questions, trees, **knobs)
    order = rng.permutation(24)
    mixed, *_ = advantages.tree_relative(rewards[order], questions[order], trees[order], **knobs)
    np.testing.assert_allclose(mixed, whole[order], atol=1e-12)
    alone, *_ = advantages.tree_relative(rewards[:12], questions[:12], trees[:12], **knobs)
    np.testing.assert_allclose(whole[:12], alone, atol=1e-12)


def test_wrong_arguments_of_trees_are_errors():
    knobs = dict(scale="std", eps=EPS)
    with pytest.raises(ValueError, match="form='product'"):
        advantages.tree_relative([1.0], ["q"], [0], form="product", **knobs)
    with pytest.raises(ValueError, match="shorter"):
        advantages.tree_relative([1.0, 0.0], ["q", "q"], [0], form="sum", **knobs)


# --- distillation: by hand ------------------------------------------------------------------------


def test_distillation_by_hand():
    teacher, old = row(-1, -2, -9, -1), row(-2, -2, -4, -1.5)
    mask, segments = jnp.asarray([[True, False, True, True]]), jnp.ones((1, 4), int)
    # log-ratios 1, -, -5, .5; held within 2: 1, -, -2, .5
    got, metrics = distillation(teacher, old, mask, segments, beta=0.1, **PLAIN)
    np.testing.assert_allclose(got, row(0.1, 0, -0.5, 0.05), rtol=1e-6)
    assert metrics["teacher_kl"] == (3.5, 3) and metrics["teacher_clip_frac"] == (0, 3)
    assert metrics["teacher_log_ratio_abs_max"] == (5, 1)
    knobs = dict(beta=0.1, log_ratio_clip=2.0, future_discount=0.0)
    got, metrics = distillation(teacher, old, mask, segments, **knobs)
    np.testing.assert_allclose(got, row(0.1, 0, -0.2, 0.05), rtol=1e-6)
    assert metrics["teacher_kl"] == (3.5, 3) and metrics["teacher_clip_frac"] == (1, 3)
    # weights change no advantage, and weigh the metrics: -(1 * 1 - 5 * .5 + .5 * 2) of 3.5
    weighted, metrics = distillation(teacher, old, row(1, 0, 0.5, 2), segments, **knobs)
    np.testing.assert_array_equal(weighted, got)
    assert metrics["teacher_kl"] == (0.5, 3.5) and metrics["teacher_clip_frac"] == (0.5, 3.5)


def test_future_log_ratios_by_hand_skip_the_gap_and_stop_at_the_end_of_the_trace():
    log_ratios = row(1, 50, 2, 4, 8, 50, 16, 50)
    mask = jnp.asarray([[True, False, True, True, True, False, True, False]])
    segments = jnp.asarray([[1, 1, 1, 1, 2, 2, 2, 0]])
    knobs = dict(beta=0.1, log_ratio_clip=0.0, future_discount=0.5)
    got, _ = distillation(log_ratios, jnp.zeros_like(log_ratios), mask, segments, **knobs)
    # trace 1: 1 + .5 * 2 + .25 * 4 = 3, 2 + .5 * 4 = 4, 4; trace 2: 8 + .5 * 16 = 16, 16
    np.testing.assert_allclose(got, 0.1 * row(3, 0, 4, 4, 16, 0, 16, 0), rtol=1e-6)


def test_a_one_token_response_at_the_end_of_the_row_keeps_its_teacher_signal():
    mask, segments = jnp.asarray([[False, False, True]]), jnp.asarray([[1, 1, 2]])
    for discount in (0.0, 0.9):
        knobs = dict(beta=0.01, log_ratio_clip=0.0, future_discount=discount)
        got, _ = distillation(row(0, 0, -1), row(0, 0, -3), mask, segments, **knobs)
        np.testing.assert_allclose(got, row(0, 0, 0.02), rtol=1e-6)


# --- gae: by hand ---------------------------------------------------------------------------------


def test_gae_by_hand_carries_across_the_gap_and_ends_with_the_trace():
    rewards = row(0, 7, 1, 2, 0)
    values = row(0.5, 9, 0.4, 1.0, 9)
    mask = jnp.asarray([[True, False, True, True, False]])
    segments = jnp.asarray([[1, 1, 1, 2, 0]])
    got, returns = gae(rewards, values, mask, segments, discount=0.9, decay=0.5)
    # last of trace 1: 1 - .4 = .6; first: 0 + .9 * .4 - .5 + .45 * .6 = .13; trace 2: 2 - 1
    np.testing.assert_allclose(got, row(0.13, 0, 0.6, 1, 0), atol=1e-6)
    np.testing.assert_allclose(returns, row(0.63, 0, 1, 2, 0), atol=1e-6)


def test_gae_without_decay_is_one_step_and_with_full_decay_the_return_less_the_value():
    rewards, values = row(0, 0, 1), row(0.2, 0.5, 0.9)
    mask, segments = jnp.ones((1, 3), bool), jnp.ones((1, 3), int)
    one_step, _ = gae(rewards, values, mask, segments, discount=1.0, decay=0.0)
    np.testing.assert_allclose(one_step, row(0.3, 0.4, 0.1), atol=1e-6)
    full, returns = gae(rewards, values, mask, segments, discount=1.0, decay=1.0)
    np.testing.assert_allclose(full, row(0.8, 0.5, 0.1), atol=1e-6)
    np.testing.assert_allclose(returns, row(1, 1, 1), atol=1e-6)


def test_whiten_by_hand():
    mask = jnp.asarray([[True, True, False, True]])
    # mean 2, population variance (1 + 1 + 0) / 3
    got = advantages.whiten(row(1, 3, math.nan, 2), mask, eps=1e-6)
    np.testing.assert_allclose(got, row(-1, 1, 0, 0) / math.sqrt(2 / 3), rtol=1e-5)
    np.testing.assert_array_equal(advantages.whiten(row(1, 3, 9, 2), mask & False, eps=1e-6), 0)
    np.testing.assert_array_equal(advantages.whiten(row(5, 5, 9, 5), mask, eps=1e-6), 0)


def test_whiten_counts_a_weight_of_three_as_three_tokens():
    # tokens 1, 3, 3, 3: mean 2.5, variance (2.25 + 3 * .25) / 4 = .75
    got = advantages.whiten(row(1, math.nan, 3), row(1, 0, 3), eps=1e-6)
    np.testing.assert_allclose(got, row(-1.5, 0, 0.5) / math.sqrt(0.75), rtol=1e-5)
    small = advantages.whiten(row(1, math.nan, 3), row(0.01, 0, 0.03), eps=1e-6)
    np.testing.assert_allclose(small, got, rtol=1e-5)  # sequences' weights sum to less than 1


# --- per token: loops in float64, and what must not leak ------------------------------------------

B, T = 3, 14


def make_data(seed: int) -> tuple[np.ndarray, ...]:
    """Two arrays of numbers, the mask, and segments with padding behind them."""
    rng = np.random.default_rng(seed)
    lengths = [(6, 7, 1), (4, 4, 6), (14, 0, 0)]
    segments = np.stack([np.repeat([1, 2, 0], length) for length in lengths])
    mask = (rng.random((B, T)) < 0.6) & (segments > 0)
    return *rng.normal(size=(2, B, T)).astype(np.float32), mask, segments


def owned_later(mask, segments, b, t):
    """Positions of the owned tokens of the trace from t on, t first."""
    return [u for u in range(t, T) if segments[b, u] == segments[b, t] and mask[b, u]]


PER_TOKEN = {
    "distillation": lambda *arrays: distillation(
        *arrays, beta=0.3, log_ratio_clip=1.5, future_discount=0.0
    )[0],
    "discounted distillation": lambda *arrays: distillation(
        *arrays, beta=0.3, log_ratio_clip=1.5, future_discount=0.8
    )[0],
    "gae": lambda *arrays: gae(*arrays, discount=0.95, decay=0.7)[0],
    "returns": lambda *arrays: gae(*arrays, discount=0.95, decay=0.7)[1],
}
each = pytest.mark.parametrize("name", PER_TOKEN)


def by_loops(name, first, second, mask, segments):
    """Sums over the later tokens, written out instead of carried."""
    first, second = first.astype(np.float64), second.astype(np.float64)
    result = np.zeros((B, T))
    for b, t in np.argwhere(mask):
        later = owned_later(mask, segments, b, t)
        if "distillation" in name:
            gamma = 0.8 if "discounted" in name else 0.0
            ratios = [min(max(first[b, u] - second[b, u], -1.5), 1.5) for u in later]
            result[b, t] = 0.3 * sum(gamma**k * ratio for k, ratio in enumerate(ratios))
        else:
            ends = [*second[b, later][1:], 0.0]
            deltas = first[b, later] + 0.95 * np.asarray(ends) - second[b, later]
            result[b, t] = sum((0.95 * 0.7) ** k * delta for k, delta in enumerate(deltas))
            result[b, t] += second[b, t] if name == "returns" else 0.0
    return result


@each
@pytest.mark.parametrize("seed", range(3))
def test_per_token_advantages_agree_with_loops(name, seed):
    data = make_data(seed)
    np.testing.assert_allclose(PER_TOKEN[name](*data), by_loops(name, *data), atol=1e-5)


@each
def test_nothing_outside_the_mask_leaks_in(name):
    first, second, mask, segments = make_data(0)
    clean = np.asarray(PER_TOKEN[name](first, second, mask, segments))
    np.testing.assert_array_equal(clean[~mask], 0)
    for junk in (np.nan, np.inf, 1e30):
        dirty = (np.where(mask, x, np.float32(junk)) for x in (first, second))
        np.testing.assert_array_equal(PER_TOKEN[name](*dirty, mask, segments), clean)


@each
def test_a_nan_at_an_owned_token_is_loud_in_its_own_trace_and_silent_in_others(name):
    first, second, mask, segments = make_data(0)
    clean = np.asarray(PER_TOKEN[name](first, second, mask, segments))
    t = owned_later(mask, segments, 0, 0)[-1]
    t_behind = owned_later(mask, segments, 0, 6)[0]
    for spoilt in (t, t_behind):
        teacher = first.copy()
        teacher[0, spoilt] = np.nan
        got = np.asarray(PER_TOKEN[name](teacher, second, mask, segments))
        assert np.isnan(got[0, spoilt])
        elsewhere = (segments != segments[0, spoilt]) | (np.arange(B)[:, None] != 0)
        np.testing.assert_array_equal(got[elsewhere], clean[elsewhere])


@each
def test_padding_and_row_order_change_no_advantage(name):
    data = make_data(1)
    clean = np.asarray(PER_TOKEN[name](*data))
    padded = [np.pad(array, ((0, 1), (0, 3)))[::-1] for array in data]
    np.testing.assert_allclose(PER_TOKEN[name](*padded)[::-1][:B, :T], clean, rtol=1e-6)


@each
def test_advantages_are_constants(name):
    first, second, mask, segments = make_data(0)
    for argument in (0, 1):
        grads = jax.grad(lambda *xs: PER_TOKEN[name](*xs, mask, segments).sum(), argnums=argument)(
            first, second
        )
        np.testing.assert_array_equal(grads, 0)


# --- distillation through the policy loss ---------------------------------------------------------

V = 5
THETA = jnp.asarray([0.3, -1.2, 0.9, 0.1, -0.4])
TEACHER = jax.nn.log_softmax(jnp.asarray([-0.5, 0.4, 0.2, 1.6, -0.9]))
BETA = 0.01


def reverse_kl(theta, teacher_V):
    policy_V = jax.nn.log_softmax(theta)
    return jnp.sum(jnp.exp(policy_V) * (policy_V - teacher_V))


def distil(theta, teacher_V, tokens_BT, weights_BT):
    """PPO's loss with the distillation advantage, the policy being its own old one (ratio 1)."""
    policy_V = jax.nn.log_softmax(theta)
    logprobs_BT, mask_BT = policy_V[tokens_BT], weights_BT != 0
    segments_BT = jnp.ones_like(tokens_BT)
    advantages_BT, _ = advantages.distillation(
        teacher_V[tokens_BT], logprobs_BT, mask_BT, segments_BT, beta=BETA, **PLAIN
    )
    return losses.ppo(logprobs_BT, logprobs_BT, advantages_BT, weights_BT, **CLIPS)[0]


distil_grad = jax.jit(jax.grad(distil))
EVERY_TOKEN = jnp.arange(V)[None]


def test_teacher_equal_to_student_gives_exactly_no_gradient():
    student = jax.jit(jax.nn.log_softmax)(THETA)
    got, metrics = distillation(
        student[None], student[None], jnp.ones((1, V), bool), jnp.ones((1, V), int), beta=1, **PLAIN
    )
    np.testing.assert_array_equal(got, 0)
    assert metrics["teacher_kl"] == (0, V)
    grads = jax.grad(lambda x: ppo(x, x, got, jnp.ones((1, V)), **CLIPS)[0])(student[None])
    np.testing.assert_array_equal(grads, 0)


def test_expected_gradient_is_beta_times_that_of_the_exact_reverse_kl():
    weights = jnp.exp(jax.nn.log_softmax(THETA))[None]
    exact = BETA * jax.jit(jax.grad(reverse_kl))(THETA, TEACHER)
    assert jnp.abs(exact).max() > 1e-3
    got = distil_grad(THETA, TEACHER, EVERY_TOKEN, weights)
    np.testing.assert_allclose(got, exact, atol=1e-8)


def test_another_teacher_alone_gives_another_gradient():
    weights = jnp.exp(jax.nn.log_softmax(THETA))[None]
    other = jnp.roll(TEACHER, 1)
    got = [distil_grad(THETA, teacher, EVERY_TOKEN, weights) for teacher in (TEACHER, other)]
    assert jnp.abs(got[0] - got[1]).max() > 1e-3


def test_sampled_gradient_is_within_its_interval_of_the_exact_one():
    policy = np.asarray(jax.nn.log_softmax(THETA), np.float64)
    probs = np.exp(policy)
    num_tokens = 40_000
    tokens = np.random.default_rng(0).choice(V, num_tokens, p=probs / probs.sum())
    got = distil_grad(THETA, TEACHER, tokens[None], jnp.ones((1, num_tokens))) / num_tokens
    # one token's gradient is -beta log(p_T / p) (onehot - p): its deviation, by enumeration
    log_ratio = np.asarray(TEACHER, np.float64) - policy
    each_VV = -BETA * log_ratio[:, None] * (np.eye(V) - probs)
    exact_V = probs @ each_VV
    errors_V = np.sqrt(probs @ (each_VV - exact_V) ** 2 / num_tokens)
    assert (np.abs(exact_V) > 10 * errors_V).any()  # the interval tells it from nothing
    assert (np.abs(got - exact_V) < 4 * errors_V).all()


@pytest.mark.parametrize("discount", [0.0, 1.0])
def test_future_sum_of_one_gives_the_gradient_of_whole_traces_and_zero_that_of_tokens(discount):
    """Traces of two tokens, the second drawn after the first; all 25 of them enumerated."""
    rng = np.random.default_rng(1)
    first, second, t_first, t_second = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((V,), (V, V)) * 2
    )
    pairs = np.asarray(list(itertools.product(range(V), repeat=2)))

    def logprobs(first, second):
        log_V, log_VV = jax.nn.log_softmax(first), jax.nn.log_softmax(second)
        return jnp.stack([log_V[pairs[:, 0]], log_VV[pairs[:, 0], pairs[:, 1]]], axis=1)

    teacher = logprobs(t_first, t_second)

    def loss(first, second):
        policy = logprobs(first, second)
        weights = jnp.broadcast_to(jnp.exp(policy.sum(1, keepdims=True)), policy.shape)
        ones = jnp.ones(policy.shape, int)
        knobs = dict(beta=BETA, log_ratio_clip=0.0, future_discount=discount)
        advantages_BT, _ = advantages.distillation(teacher, policy, ones > 0, ones, **knobs)
        weights = jax.lax.stop_gradient(weights)
        return losses.ppo(policy, policy, advantages_BT, weights, **CLIPS)[0]

    def exact(first, second):
        policy = logprobs(first, second)
        reach = jnp.exp(policy.sum(1))
        if discount:
            return BETA * jnp.sum(reach * (policy - teacher).sum(1))
        log_V, log_VV = jax.nn.log_softmax(first), jax.nn.log_softmax(second)
        t_V, t_VV = jax.nn.log_softmax(t_first), jax.nn.log_softmax(t_second)
        kl_V = jnp.sum(jnp.exp(log_VV) * (log_VV - t_VV), axis=1)
        seen_V = jax.lax.stop_gradient(jnp.exp(log_V))  # contexts as given
        return BETA * (jnp.sum(jnp.exp(log_V) * (log_V - t_V)) + jnp.sum(seen_V * kl_V))

    got, expected = (jax.jit(jax.grad(f, argnums=(0, 1)))(first, second) for f in (loss, exact))
    for a, b in zip(got, expected, strict=True):
        assert jnp.abs(b).max() > 1e-4
        np.testing.assert_allclose(a, b, atol=1e-8)


def test_equal_rewards_teach_nothing_while_the_teacher_still_does():
    """One zero-variance group: reward's advantage 0, distillation's not; the two are summed."""
    by_reward, is_constant, _ = advantages.group_relative([1.0] * V, [0] * V, scale="std", eps=EPS)
    assert is_constant.all() and not by_reward.any()
    student = jax.nn.log_softmax(THETA)
    by_teacher, _ = distillation(
        TEACHER[None], student[None], jnp.ones((1, V), bool), jnp.ones((1, V), int), beta=1, **PLAIN
    )
    total = by_teacher + by_reward[None].astype(np.float32)
    grads = jax.grad(lambda x: ppo(x, x, total, jnp.ones((1, V)), **CLIPS)[0])(student[None])
    np.testing.assert_allclose(grads, -(TEACHER - student)[None], rtol=1e-5)


# --- rewards that are measured --------------------------------------------------------------------


def test_the_better_known_of_two_measured_rewards_weighs_more_by_hand():
    """Of 4 solutions 0, 2 and 4 right: e^2 = 5/144, 1/16, 5/144, whose mean is 19/432; the rewards'
    variance is 1/4, so t^2 = 89/432. Precisions 1/(104/432), 1/(116/432) are as 29 to 26, and the
    group's mean is 28. In the other group 2, 2 and 1 right differ by less than their errors: 1/16
    twice and 1/18 are as 24, 24 and 27 to a mean of 25.
    """
    rewards_X = np.array([0.0, 0.5, 1.0, 0.5, 0.5, 0.25])
    errors_X = np.sqrt([5 / 144, 1 / 16, 5 / 144, 1 / 16, 1 / 16, 1 / 18])
    weights_X = advantages.error_weights(rewards_X, errors_X, list("aaabbb"))
    wanted_X = [29 / 28, 26 / 28, 29 / 28, 24 / 25, 24 / 25, 27 / 25]
    np.testing.assert_allclose(weights_X, wanted_X, rtol=1e-12)
    order = [5, 0, 3, 1, 4, 2]
    shuffled_X = advantages.error_weights(
        rewards_X[order], errors_X[order], [list("aaabbb")[i] for i in order]
    )
    np.testing.assert_allclose(shuffled_X, weights_X[order], rtol=1e-12)


def test_exact_rewards_and_single_ones_weigh_alike():
    rewards_X, errors_X = np.array([0.0, 0.5, 1.0, 0.3]), np.array([1e-6, 1e-5, 1e-6, 0.2])
    weights_X = advantages.error_weights(rewards_X, errors_X, list("aaab"))
    np.testing.assert_allclose(weights_X, 1.0, atol=1e-9)
    with pytest.raises(ValueError, match="errors above 0"):
        advantages.error_weights(rewards_X, 0 * errors_X, list("aaab"))
