"""Losses: hand-computed values, loops in float64, what must not change them, gradients."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mas_jax.learning import losses

# one compilation for each instead of one for each operation
ppo = jax.jit(losses.ppo, static_argnames=("clip_low", "clip_high", "dual_clip"))
gspo = jax.jit(losses.gspo, static_argnames=("clip_low", "clip_high"))
cispo = jax.jit(losses.cispo, static_argnames=("clip_low", "clip_high"))
kl = jax.jit(losses.kl, static_argnames="estimator")
value_loss = jax.jit(losses.value_loss, static_argnames="clip")
importance_weights = jax.jit(losses.importance_weights, static_argnames=("form", "cap"))

B, T = 4, 12
CLIPS = dict(clip_low=0.2, clip_high=0.3)

# each of the data `d`, all [B, T]; x is what the gradient goes to
LOSSES = {
    "ppo": lambda d: ppo(d["x"], d["old"], d["advantages"], d["weights"], **CLIPS, dual_clip=3.0),
    "gspo": lambda d: gspo(d["x"], d["old"], d["advantages"], d["weights"], d["segments"], **CLIPS),
    "cispo": lambda d: cispo(d["x"], d["old"], d["advantages"], d["weights"], **CLIPS),
    "sft": lambda d: losses.sft(d["x"], d["weights"]),
    "k1": lambda d: kl(d["x"], d["old"], d["weights"], estimator="k1"),
    "k2": lambda d: kl(d["x"], d["old"], d["weights"], estimator="k2"),
    "k3": lambda d: kl(d["x"], d["old"], d["weights"], estimator="k3"),
    "entropy": lambda d: losses.entropy_bonus(d["x"], d["weights"]),
    "divergence": lambda d: losses.divergence(d["x"], d["weights"]),
    "value": lambda d: value_loss(d["x"], d["old"], d["advantages"], d["weights"], clip=0.4),
}
POLICY_LOSSES = ("ppo", "gspo", "cispo")
each_loss = pytest.mark.parametrize("name", LOSSES)
each_policy_loss = pytest.mark.parametrize("name", POLICY_LOSSES)


def make_data(seed: int) -> dict[str, np.ndarray]:
    """Two or three traces a row with gaps inside, weights constant over each trace."""
    rng = np.random.default_rng(seed)
    lengths = [(5, 6, 1), (4, 4, 4), (12, 0, 0), (3, 7, 2)]
    segments = np.stack([np.repeat([1, 2, 3], row) for row in lengths])
    segments[0, -1] = segments[3, -2:] = 0
    owned = (rng.random((B, T)) < 0.7) & (segments > 0)
    trace = np.arange(B)[:, None] * 4 + segments
    x = -np.exp(rng.normal(size=(B, T)))
    return {
        "x": x.astype(np.float32),
        "old": (x + 0.4 * rng.normal(size=(B, T))).astype(np.float32),
        "advantages": rng.normal(size=4 * B)[trace].astype(np.float32),
        "weights": np.where(owned, rng.uniform(0.2, 2.0, 4 * B)[trace], 0).astype(np.float32),
        "segments": segments,
    }


@functools.partial(jax.jit, static_argnames="name")
def value_and_grad(name: str, d: dict):
    """Loss sum, its gradient [B, T] and the metrics."""
    (total, metrics), grads = jax.value_and_grad(
        lambda x: LOSSES[name](d | {"x": x}), has_aux=True
    )(jnp.asarray(d["x"]))
    return total, grads, metrics


def assert_equal_results(left, right):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-5)


def is_max(name: str) -> bool:
    return name.endswith("_max")


def mean(metric) -> float:
    return float(metric[0] / metric[1])


# --- by hand --------------------------------------------------------------------------------------


def row(*values: float) -> jax.Array:
    return jnp.asarray([values], jnp.float32)


def test_ppo_by_hand_clips_each_side_where_it_would_gain_and_bounds_bad_likely_tokens():
    ratios = row(1.5, 0.5, 0.5, 1.5, 4.0, 4.0, 9.0)
    advantages = row(2, 2, -2, -2, -2, 2, 2)
    weights = row(1, 1, 1, 1, 1, 0.5, 0)
    old = row(*[-3.0] * 7)
    total, metrics = ppo(jnp.log(ratios) + old, old, advantages, weights, **CLIPS, dual_clip=3.0)
    # -min(r A, clip(r, .8, 1.3) A), and for A < 0 at most 3 |A|:
    #  -min(3, 2.6) = -2.6 clipped    -min(1, 1.6) = -1      -min(-1, -1.6) = 1.6 clipped
    #  -min(-3, -2.6) = 3             min(8, 6) = 6 dual     0.5 * -2.6 = -1.3 clipped
    np.testing.assert_allclose(total, -2.6 - 1 + 1.6 + 3 + 6 - 1.3, rtol=1e-6)
    # metrics weigh as the loss does: 1 + 1 + 1 + .5 of 5.5 clipped, and half of the second 4
    np.testing.assert_allclose(metrics["clip_frac"], (3.5, 5.5), rtol=1e-6)
    np.testing.assert_allclose(metrics["ratio"], (1.5 + 0.5 + 0.5 + 1.5 + 4 + 2, 5.5), rtol=1e-6)
    np.testing.assert_allclose(metrics["log_ratio_abs_max"], (math.log(4), 1), rtol=1e-6)
    # sum of w (r - 1 - log r) = 10 - 5.5 - log(1.5 * .5 * .5 * 1.5 * 4 * sqrt 4) = 4.5 - log 4.5
    np.testing.assert_allclose(metrics["approx_kl"], (4.5 - math.log(4.5), 5.5), rtol=1e-5)
    assert mean(metrics["log_ratio_clamp_frac"]) == 0


def test_zero_switches_each_bound_off():
    old, weights = row(0, 0, 0), row(1, 1, 1)
    x, advantages = jnp.log(row(9, 0.1, 9)), row(1, -1, -1)
    off = dict(clip_low=0.0, clip_high=0.0, dual_clip=0.0)
    # -(9) + 0.1 + 9 = 0.1
    total, metrics = ppo(x, old, advantages, weights, **off)
    np.testing.assert_allclose(total, 0.1, rtol=1e-5)
    assert metrics["clip_frac"] == (0, 3)
    # clip_high = 0.3 alone: -1.3 + 0.1 + 9; clip_low = 0.2 alone: -9 + 0.8 + 9
    for bounds, expected in ((dict(clip_high=0.3), 7.8), (dict(clip_low=0.2), 0.8)):
        total, _ = ppo(x, old, advantages, weights, **(off | bounds))
        np.testing.assert_allclose(total, expected, rtol=1e-5)


def test_gspo_by_hand_has_one_ratio_for_a_trace_and_skips_the_gap():
    segments, weights = jnp.asarray([[1, 1, 1, 1, 2, 2, 0]]), row(1, 0, 1, 1, 1, 1, 0)
    log_ratios = row(0.3, 50.0, -0.1, 0.1, 0.5, 0.1, -50.0)
    advantages = row(2, 0, 2, 2, 1, 1, 0)
    old = jnp.full_like(log_ratios, -1.0)
    total, metrics = gspo(old + log_ratios, old, advantages, weights, segments, **CLIPS)
    # trace 1: mean (.3 - .1 + .1) / 3 = .1, ratio e^.1 = 1.105, three tokens with A = 2
    # trace 2: mean .3, ratio e^.3 = 1.350 above 1.3, two tokens with A = 1
    np.testing.assert_allclose(total, -(3 * 2 * math.exp(0.1) + 2 * 1.3), rtol=1e-6)
    np.testing.assert_allclose(mean(metrics["clip_frac"]), 2 / 5, rtol=1e-6)
    np.testing.assert_allclose(metrics["ratio"][0], 3 * math.exp(0.1) + 2 * math.exp(0.3), 1e-6)


def test_cispo_by_hand_weighs_log_probs_and_keeps_the_clipped_tokens_gradient():
    x, weights = jnp.log(row(0.5, 0.2)), row(1, 1)
    old, advantages = jnp.log(row(0.25, 0.2)), row(3, -1)

    def loss(x):
        return cispo(x, old, advantages, weights, **CLIPS)

    (total, metrics), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(x)
    # ratios 2 (held at 1.3) and 1: -1.3 * 3 * log .5 + 1 * log .2; gradient -1.3 * 3 and +1
    np.testing.assert_allclose(total, -3.9 * math.log(0.5) + math.log(0.2), rtol=1e-6)
    np.testing.assert_allclose(grads, row(-3.9, 1), rtol=1e-6)
    assert mean(metrics["clip_frac"]) == 0.5


def test_kl_estimators_by_hand():
    x, reference, weights = jnp.log(row(0.5, 0.5)), jnp.log(row(0.25, 0.5)), row(2, 1)
    # log-ratio log 2 with weight 2, and 0 with weight 1; 1/2 + log 2 - 1 for k3 as d = -log 2
    log_2 = math.log(2)
    for name, expected in {"k1": log_2, "k2": log_2**2 / 2, "k3": log_2 - 0.5}.items():
        total, metrics = kl(x, reference, weights, estimator=name)
        np.testing.assert_allclose(total, 2 * expected, rtol=1e-6)
        np.testing.assert_allclose(metrics["kl"], (2 * expected, 3), rtol=1e-6)
        np.testing.assert_allclose(metrics["kl_log_ratio_abs_max"], (log_2, 1), rtol=1e-6)


def test_k3_of_a_token_that_the_policy_hardly_gives_is_finite_and_counted():
    total, metrics = kl(row(-90, -1), row(-1, -1), row(1, 1), estimator="k3")
    np.testing.assert_allclose(total, math.exp(10) - 10 - 1, rtol=1e-6)
    assert mean(metrics["kl_clamp_frac"]) == 0.5


def test_log_ratios_are_clamped_and_counted():
    off = dict(clip_low=0.0, clip_high=0.0)
    total, metrics = ppo(row(0, 0), row(-60, 0), row(-1, 1), row(1, 1), **off, dual_clip=0.0)
    np.testing.assert_allclose(total, math.exp(20) - 1, rtol=1e-6)
    assert mean(metrics["log_ratio_clamp_frac"]) == 0.5
    assert metrics["log_ratio_abs_max"] == (60, 1)


def test_sft_entropy_and_divergence_by_hand_are_weighted_sums():
    x, weights = row(-2, -3, -7), row(1, 0.5, 0)
    assert losses.sft(x, weights)[0] == 2 + 1.5
    assert losses.sft(x, weights)[1] == {"nll": (3.5, 1.5)}
    assert losses.entropy_bonus(-x, weights)[0] == -(2 + 1.5)
    assert losses.entropy_bonus(-x, weights)[1] == {"entropy": (3.5, 1.5)}
    assert losses.divergence(-x, weights)[0] == 2 + 1.5
    assert losses.divergence(-x, weights)[1] == {"divergence": (3.5, 1.5)}


def test_value_loss_by_hand_takes_the_larger_of_both_errors():
    values, old, returns, weights = row(2, 1, 5), row(1, 1, 5), row(3, 0, 0), row(1, 2, 0)
    # free: (1 + 2 * 1) / 2 = 1.5
    total, metrics = value_loss(values, old, returns, weights, clip=0.0)
    assert total == 1.5 and metrics["value_clip_frac"] == (0, 3)
    # held: 2 becomes 1.5, whose error 1.5^2 = 2.25 is the larger: (2.25 + 2) / 2
    total, metrics = value_loss(values, old, returns, weights, clip=0.5)
    assert total == 2.125 and metrics["value_clip_frac"] == (1, 3)
    assert metrics["value_squared_error"] == (3, 3) and metrics["return"] == (3, 3)


def test_importance_weights_by_hand():
    segments = jnp.asarray([[1, 1, 1, 2, 2, 0]])
    mask = jnp.asarray([[True, False, True, True, True, False]])
    sampler = row(-1, 7, -1, -1, -1, 7)
    old = sampler + jnp.log(row(4, 50, 1, 0.5, 0.5, 50))
    expected = {
        "none": row(1, 0, 1, 1, 1, 0),
        "token": row(3, 0, 1, 0.5, 0.5, 0),  # 4 capped at 3
        "sequence": row(2, 0, 2, 0.5, 0.5, 0),  # sqrt(4 * 1), sqrt(.5 * .5)
    }
    for form, weights in expected.items():
        got, metrics = importance_weights(old, sampler, mask, segments, form=form, cap=3.0)
        np.testing.assert_allclose(got, weights, rtol=1e-6)
        np.testing.assert_allclose(metrics["importance_weight"], (weights.sum(), 4), rtol=1e-6)
        np.testing.assert_allclose(metrics["sampler_log_ratio_abs_max"], (math.log(4), 1), 1e-6)
        # sum of w - 1 - log w = (4 + 1 + .5 + .5) - 4 - log(4 / 4) = 2
        np.testing.assert_allclose(metrics["sampler_trainer_kl"], (2, 4), rtol=1e-5)
        assert mean(metrics["importance_cap_frac"]) == (0.25 if form == "token" else 0)
        largest = {"none": 1, "token": 4, "sequence": 2}[form]
        np.testing.assert_allclose(metrics["importance_weight_max"], (largest, 1), rtol=1e-6)


def test_sequence_mean_by_hand():
    x = row(1, 9, 3, 10, 9, 4)
    mask = jnp.asarray([[True, False, True, True, False, True]])
    # ids far apart and out of order; the last trace has a neighbour with no token of its own
    segments = jnp.asarray([[70, 70, 70, 3, 5, 1]])
    np.testing.assert_array_equal(
        losses.sequence_mean(x, mask, segments), row(2, 0, 2, 10, 0, 4)
    )  # (1 + 3) / 2, 10 / 1, none, 4 / 1


def test_a_metric_is_the_weighted_sum_and_the_sum_of_weights():
    x, weights = row(2, math.nan, 3, 5), row(1, 0, 0.5, 2)
    np.testing.assert_array_equal(losses.token_mean(x, weights), (2 + 1.5 + 10, 3.5))
    np.testing.assert_array_equal(losses.token_mean(x, weights != 0), (10, 3))  # a mask weighs 1
    np.testing.assert_array_equal(losses.token_mean(x > 2, weights), (2.5, 3.5))


def test_metrics_of_parts_merge_to_those_of_the_whole():
    left = {"ratio": (6.0, 4.0), "gap_max": (2.0, 1.0)}
    right = {"ratio": (1.0, 1.0), "gap_max": (5.0, 1.0)}
    assert losses.merge_metrics(left, right) == {"ratio": (7, 5), "gap_max": (5, 1)}
    nothing = jax.tree.map(jnp.zeros_like, left)
    assert losses.merge_metrics(left, nothing) == left


# --- loops in float64 -----------------------------------------------------------------------------


def clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def reference_ratios(name: str, d: dict, x: np.ndarray) -> np.ndarray:
    log_ratios = np.zeros((B, T))
    for b in range(B):
        for t in range(T):
            log_ratios[b, t] = clamp(x[b, t] - float(d["old"][b, t]), -20, 20)
    if name == "gspo":
        own = log_ratios.copy()
        for b in range(B):
            for t in range(T):
                trace = [
                    own[b, u]
                    for u in range(T)
                    if d["segments"][b, u] == d["segments"][b, t] and d["weights"][b, u] != 0
                ]
                log_ratios[b, t] = sum(trace) / max(len(trace), 1)
    return np.exp(log_ratios)


def reference(name: str, d: dict, x: np.ndarray, constant_x: np.ndarray) -> float:
    """Loss sum by loops; constant_x stands where the loss takes x as a constant."""
    ratios = reference_ratios(name, d, constant_x if name == "cispo" else x)
    total = 0.0
    for b in range(B):
        for t in range(T):
            weight = float(d["weights"][b, t])
            if weight == 0:
                continue
            value, old, ratio = x[b, t], float(d["old"][b, t]), ratios[b, t]
            advantage = float(d["advantages"][b, t])
            bounded = clamp(ratio, 0.8, 1.3)
            objective = min(ratio * advantage, bounded * advantage)
            d3 = clamp(old - value, -10, 10)
            held = old + clamp(value - old, -0.4, 0.4)
            total += (
                weight
                * {
                    "ppo": -max(objective, 3 * advantage) if advantage < 0 else -objective,
                    "gspo": -objective,
                    "cispo": -bounded * advantage * value,
                    "sft": -value,
                    "k1": value - old,
                    "k2": 0.5 * (value - old) ** 2,
                    "k3": math.exp(d3) - d3 - 1,
                    "entropy": -value,
                    "divergence": value,
                    "value": 0.5 * max((value - advantage) ** 2, (held - advantage) ** 2),
                }[name]
            )
    return total


@each_loss
@pytest.mark.parametrize("seed", range(2))
def test_value_and_gradient_agree_with_loops_and_finite_differences(name, seed):
    d = make_data(seed)
    x = d["x"].astype(np.float64)
    total, grads, _ = value_and_grad(name, d)
    np.testing.assert_allclose(total, reference(name, d, x, x), rtol=1e-5, atol=1e-5)
    expected = np.zeros((B, T))
    for b, t in np.argwhere(d["weights"] != 0):
        step = np.zeros((B, T))
        step[b, t] = 1e-6
        rise = reference(name, d, x + step, x) - reference(name, d, x - step, x)
        expected[b, t] = rise / 2e-6
    np.testing.assert_allclose(grads, expected, rtol=1e-4, atol=1e-5)


# --- what must not change them --------------------------------------------------------------------


@each_loss
def test_nothing_at_a_masked_token_reaches_value_gradient_or_metrics(name):
    d = make_data(0)
    clean = value_and_grad(name, d)
    for junk in (np.nan, np.inf, 1e30):
        dirty = {
            key: np.where(d["weights"] == 0, np.float32(junk), d[key])
            for key in ("x", "old", "advantages")
        }
        got = value_and_grad(name, d | dirty)
        for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(got), strict=True):
            np.testing.assert_array_equal(a, b)
    assert np.isfinite(clean[1]).all()
    np.testing.assert_array_equal(clean[1][d["weights"] == 0], 0)


@each_loss
def test_a_nan_at_an_owned_token_is_loud(name):
    d = make_data(0)
    b, t = np.argwhere(d["weights"] != 0)[3]
    d["x"][b, t] = np.nan
    assert np.isnan(value_and_grad(name, d)[0])


@each_loss
def test_padding_and_row_order_change_nothing(name):
    d = make_data(1)
    total, grads, metrics = value_and_grad(name, d)
    padded = {key: np.pad(array, ((0, 3), (0, 5))) for key, array in d.items()}
    order = np.random.default_rng(0).permutation(B + 3)
    got = value_and_grad(name, {key: array[order] for key, array in padded.items()})
    assert_equal_results((total, metrics), (got[0], got[2]))
    np.testing.assert_allclose(got[1][np.argsort(order)][:B, :T], grads, rtol=1e-6)


@each_loss
def test_micro_batches_add_up_and_weights_scale_loss_and_metrics_alike(name):
    d = make_data(2)
    total, grads, metrics = value_and_grad(name, d)
    parts = [value_and_grad(name, {k: v[rows] for k, v in d.items()}) for rows in ([0, 1], [2, 3])]
    merged = losses.merge_metrics(parts[0][2], parts[1][2])
    assert_equal_results((total, metrics), (parts[0][0] + parts[1][0], merged))
    np.testing.assert_allclose(np.concatenate([part[1] for part in parts]), grads, rtol=1e-6)
    tripled = value_and_grad(name, d | {"weights": 3 * d["weights"]})
    scaled = {key: metric if is_max(key) else (3 * metric[0], 3 * metric[1])
              for key, metric in metrics.items()}  # fmt: skip
    assert_equal_results((3 * total, 3 * grads, scaled), tripled)


@each_loss
def test_a_weight_of_two_is_the_trace_twice(name):
    d = make_data(3)
    doubled = np.asarray([1, 2, 1, 2], np.float32)[:, None]
    total, grads, metrics = value_and_grad(name, d | {"weights": doubled * d["weights"]})
    twice = value_and_grad(name, {key: array[[0, 1, 1, 2, 3, 3]] for key, array in d.items()})
    assert_equal_results((total, metrics), (twice[0], twice[2]))
    # the two copies' gradients add up in the parameters
    np.testing.assert_allclose(grads, doubled * twice[1][jnp.asarray([0, 1, 3, 4])], rtol=1e-6)


@each_loss
def test_no_tokens_give_zero_and_an_empty_count(name):
    d = make_data(0)
    total, grads, metrics = value_and_grad(name, d | {"weights": np.zeros((B, T), np.float32)})
    assert total == 0 and not np.any(grads)
    assert all(metric == (0, 0) for metric in metrics.values())


def test_gspo_traces_do_not_hear_of_each_other():
    d = make_data(3)
    other = d["segments"] == 2
    moved = d | {"x": np.where(other, d["x"] - 0.7, d["x"]).astype(np.float32)}
    here = ~other & (d["weights"] != 0)
    before, after = (np.asarray(value_and_grad("gspo", data)[1]) for data in (d, moved))
    np.testing.assert_array_equal(before[here], after[here])
    assert not np.allclose(before[other], after[other])


def test_importance_weights_read_nothing_outside_the_mask():
    d = make_data(0)
    mask = d["weights"] != 0
    clean = importance_weights(d["x"], d["old"], mask, d["segments"], form="token", cap=2.0)
    old, sampler = (np.where(mask, d[key], np.nan).astype(np.float32) for key in ("x", "old"))
    for form in ("none", "token", "sequence"):
        got = importance_weights(old, sampler, mask, d["segments"], form=form, cap=2.0)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(got))
    got = importance_weights(old, sampler, mask, d["segments"], form="token", cap=2.0)
    assert_equal_results(clean, got)


# --- gradients ------------------------------------------------------------------------------------


@each_policy_loss
def test_descent_makes_good_tokens_likelier_and_bad_ones_less(name):
    d = make_data(0)
    d["old"] = d["x"]  # ratio 1
    _, grads, metrics = value_and_grad(name, d)
    np.testing.assert_allclose(grads, -d["weights"] * d["advantages"], rtol=1e-5, atol=1e-7)
    assert metrics["clip_frac"][0] == 0 and mean(metrics["ratio"]) == 1


@each_policy_loss
def test_a_one_token_response_at_the_end_of_the_row_keeps_its_signal(name):
    weights = row(0, 0, 0, 1)
    d = dict(x=row(0, 0, 0, -2), old=row(0, 0, 0, -2), advantages=row(0, 0, 0, 1.5))
    d |= dict(weights=weights, segments=jnp.asarray([[1, 1, 2, 2]]))
    np.testing.assert_array_equal(value_and_grad(name, d)[1], row(0, 0, 0, -1.5))


@each_loss
def test_only_the_first_argument_gets_a_gradient(name):
    d = {key: jnp.asarray(array) for key, array in make_data(0).items()}

    def total(old, advantages):
        return LOSSES[name](d | {"old": old, "advantages": advantages})[0]

    for grads in jax.jit(jax.grad(total, argnums=(0, 1)))(d["old"], d["advantages"]):
        np.testing.assert_array_equal(grads, 0)


def test_importance_weights_are_constants():
    d = make_data(0)

    def total(x):
        knobs = dict(form="sequence", cap=2.0)
        weights, _ = importance_weights(x, d["old"], d["weights"] != 0, d["segments"], **knobs)
        return weights.sum()

    np.testing.assert_array_equal(jax.jit(jax.grad(total))(d["x"]), 0)


# --- five tokens, every one of them enumerated ----------------------------------------------------

THETA = jnp.asarray([0.3, -1.2, 0.9, 0.1, -0.4])
REFERENCE = jax.nn.log_softmax(jnp.asarray([-0.5, 0.4, 0.2, 1.6, -0.9]))


@jax.jit
def reverse_kl(theta):
    policy = jax.nn.log_softmax(theta)
    return jnp.sum(jnp.exp(policy) * (policy - REFERENCE))


@jax.jit
def forward_kl(theta):
    policy = jax.nn.log_softmax(theta)
    return jnp.sum(jnp.exp(REFERENCE) * (REFERENCE - policy))


@functools.partial(jax.jit, static_argnames="estimator")
def expected_kl(theta, estimator, sampled_from):
    """The estimator's expectation: each token's value, weighted by its probability."""
    weights = jnp.exp(jax.nn.log_softmax(sampled_from))
    total, _ = kl(
        jax.nn.log_softmax(theta)[None], REFERENCE[None], weights[None], estimator=estimator
    )
    return total


def test_expected_value_of_k1_and_k3_is_the_kl_and_of_k2_is_not():
    exact = reverse_kl(THETA)
    assert exact > 0.3
    for name in ("k1", "k3"):
        np.testing.assert_allclose(expected_kl(THETA, name, THETA), exact, rtol=1e-5)
    assert abs(expected_kl(THETA, "k2", THETA) - exact) > 0.01


def test_expected_gradients_are_zero_the_reverse_kls_and_the_forward_kls():
    reverse, forward = jax.grad(reverse_kl)(THETA), jax.grad(forward_kl)(THETA)
    assert np.abs(reverse - forward).max() > 0.05
    for name, gradient in {"k1": jnp.zeros(5), "k2": reverse, "k3": forward}.items():
        got = jax.grad(expected_kl)(THETA, name, THETA)
        np.testing.assert_allclose(got, gradient, atol=1e-6, err_msg=name)


def test_importance_weights_turn_the_samplers_expectation_into_the_policys():
    sampler, policy = REFERENCE, jax.nn.log_softmax(THETA)
    mask, segments = jnp.ones((1, 5), bool), jnp.asarray([[1, 2, 3, 4, 5]])
    worth = jnp.asarray([1.0, -2.0, 0.5, 3.0, 0.0])
    for form in ("token", "sequence"):  # the same for traces of one token
        weights, _ = importance_weights(
            policy[None], sampler[None], mask, segments, form=form, cap=100.0
        )
        got = jnp.sum(jnp.exp(sampler) * weights[0] * worth)
        np.testing.assert_allclose(got, jnp.sum(jnp.exp(policy) * worth), rtol=1e-5)


def test_a_step_down_the_entropy_bonus_raises_the_entropy():
    def entropy(theta):
        policy = jax.nn.log_softmax(theta)
        return -jnp.sum(jnp.exp(policy) * policy)

    def loss(theta):
        return 0.01 * losses.entropy_bonus(entropy(theta)[None, None], jnp.ones((1, 1)))[0]

    assert entropy(THETA - jax.grad(loss)(THETA)) > entropy(THETA) + 1e-4


# --- errors ---------------------------------------------------------------------------------------


def test_settings_that_mean_nothing_are_errors():
    x = row(-1, -1)
    mask, segments = x != 0, jnp.ones_like(x, int)
    with pytest.raises(ValueError, match="k4"):
        losses.kl(x, x, x, estimator="k4")
    with pytest.raises(ValueError, match="dual_clip=1"):
        losses.ppo(x, x, x, x, **CLIPS, dual_clip=1.0)
    for form, cap in (("trace", 2.0), ("token", 0.0)):
        with pytest.raises(ValueError, match=f"{form}.*{cap}"):
            losses.importance_weights(x, x, mask, segments, form=form, cap=cap)


def test_arrays_of_another_shape_are_errors_and_never_broadcast():
    d = make_data(0)
    with pytest.raises(ValueError, match=r"\(4, 1\)"):
        losses.sft(d["x"][:, :1], d["weights"])
    with pytest.raises(ValueError, match=r"\(4, 1\)"):
        losses.ppo(d["x"], d["old"], d["advantages"][:, :1], d["weights"], **CLIPS, dual_clip=0.0)
