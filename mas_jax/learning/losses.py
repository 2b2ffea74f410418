"""Losses on per-token log-probs: each a weighted sum over tokens, to be minimised.

Every loss takes arrays and returns `(loss_sum, metrics)`. `weights_BT` is 0 where a token takes no
part: whatever stands there, NaN included, reaches neither value nor gradient; NaN elsewhere reaches
both. Nothing is divided here: `update.py` divides the sums once, by the weights' global sum.
Metrics are (weighted sum, sum of weights); those whose name ends in `_max` are (maximum, 1 or 0).
`merge_metrics` adds the former and keeps the larger of the latter.

A trace is a run of one segment id in one row. Its tokens with a weight may stand in several spans.
Log-ratios are natural, of the new to the old policy, and clamped to +-LOG_RATIO_LIMIT before `exp`,
beyond which there is no gradient either; `log_ratio_clamp_frac` says how often.
Dimensions: B rows, T positions. Must not know: models, roles, config.
"""

import functools

import jax
import jax.numpy as jnp

Metrics = dict[str, tuple[jax.Array, jax.Array]]
Loss = tuple[jax.Array, Metrics]

LOG_RATIO_LIMIT = 20.0  # exp(20) = 5e8: squared and summed over 10^9 tokens still a float32
K3_LIMIT = 10.0  # k3 grows with exp: 22,000 for one token at the limit


def masked(mask_BT: jax.Array, *arrays_BT: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays [B, T] with 0 outside the mask (bool). Raises: ValueError if shapes differ."""
    shapes = [array_BT.shape for array_BT in arrays_BT]
    if any(shape != mask_BT.shape for shape in shapes):
        raise ValueError(f"token arrays of shapes {shapes} beside a mask {mask_BT.shape}")
    return tuple(jnp.where(mask_BT, array_BT, 0.0) for array_BT in arrays_BT)


def token_mean(x_BT: jax.Array, weights_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The metric (weighted sum, sum of weights) of a quantity [B, T]; a bool mask weighs 1."""
    kept_BT, weights_BT = weights_BT != 0, weights_BT.astype(jnp.float32)
    (x_BT,) = masked(kept_BT, x_BT.astype(jnp.float32))
    return jax.lax.stop_gradient(jnp.sum(weights_BT * x_BT)), jnp.sum(weights_BT)


def token_max(x_BT: jax.Array, mask_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The metric (maximum, 1) of a quantity [B, T] >= 0 over the mask, or (0, 0) if that is empty.

    Belongs under a name that ends in `_max`.
    """
    (x_BT,) = masked(mask_BT, x_BT)
    return jax.lax.stop_gradient(jnp.max(x_BT)), jnp.any(mask_BT).astype(jnp.float32)


def merge_metrics(left: Metrics, right: Metrics) -> Metrics:
    """Metrics of two disjoint sets of tokens as those of their union; zeros change nothing."""
    merge = {name: jnp.maximum if name.endswith("_max") else jnp.add for name in left}
    return {name: jax.tree.map(merge[name], left[name], right[name]) for name in left}


def sequence_mean(x_BT: jax.Array, mask_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """Mean of x over the masked-in tokens of each trace, on each of those tokens, [B, T]; else 0.

    Two traces that stand side by side must differ in id; ids need not be small or in order.
    """
    x_BT, ones_BT = masked(mask_BT, x_BT, jnp.ones_like(x_BT))
    changes_BT = jnp.diff(segment_ids_BT, axis=1, prepend=segment_ids_BT[:, :1]) != 0
    trace_BT = jnp.cumsum(changes_BT, axis=1)  # 0..T-1: of as many traces as a row can hold
    add = functools.partial(jax.ops.segment_sum, num_segments=x_BT.shape[1])
    sums_BT, counts_BT = jax.vmap(add)(x_BT, trace_BT), jax.vmap(add)(ones_BT, trace_BT)
    means_BT = jnp.take_along_axis(sums_BT / jnp.maximum(counts_BT, 1.0), trace_BT, axis=1)
    return jnp.where(mask_BT, means_BT, 0.0)


def ppo(
    logprobs_BT: jax.Array,
    old_logprobs_BT: jax.Array,
    advantages_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> Loss:
    """Clipped policy loss, the sum of -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    r is each token's new over old probability. For A < 0 the objective is at least dual_clip A, so
    that a token which became likely cannot dominate. 0 switches a bound off.
    Shapes: all [B, T] f32; log-probs in nats. Raises: ValueError for a dual_clip in (0, 1].
    Source: PPO (arXiv 1707.06347) eq. 7; two bounds: DAPO (arXiv 2503.14476); dual clip: arXiv
    1912.09729 eq. 8.
    """
    kept_BT = weights_BT != 0
    raw_BT, log_ratio_BT = _log_ratio(logprobs_BT, old_logprobs_BT, kept_BT)
    is_clipped_BT, losses_BT = _clipped(
        jnp.exp(log_ratio_BT), *masked(kept_BT, advantages_BT), clip_low, clip_high, dual_clip
    )
    metrics = _policy_metrics(raw_BT, jnp.exp(log_ratio_BT), is_clipped_BT, weights_BT)
    return jnp.sum(weights_BT * losses_BT), metrics


def gspo(
    logprobs_BT: jax.Array,
    old_logprobs_BT: jax.Array,
    advantages_BT: jax.Array,
    weights_BT: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
) -> Loss:
    """The clipped policy loss with one ratio for a trace, exp of its mean log-ratio.

    The mean is over the trace's tokens with a weight. Token form: the ratio's value is the trace's,
    its gradient the token's own; equal to the sequence form where advantage and weight are constant
    over a trace, and defined where they are not (distillation). 0 switches a bound off.
    Shapes: all [B, T], f32 but for the ids. Source: GSPO (arXiv 2507.18071) eqs. 5-7 and 13-14.
    """
    kept_BT = weights_BT != 0
    raw_BT, log_ratio_BT = _log_ratio(logprobs_BT, old_logprobs_BT, kept_BT)
    mean_BT = jax.lax.stop_gradient(sequence_mean(log_ratio_BT, kept_BT, segment_ids_BT))
    own_BT = log_ratio_BT - jax.lax.stop_gradient(log_ratio_BT)  # 0 with a gradient
    ratio_BT = jnp.exp(mean_BT + own_BT)
    (advantages_BT,) = masked(kept_BT, advantages_BT)
    is_clipped_BT, losses_BT = _clipped(ratio_BT, advantages_BT, clip_low, clip_high, 0.0)
    metrics = _policy_metrics(raw_BT, ratio_BT, is_clipped_BT, weights_BT)
    return jnp.sum(weights_BT * losses_BT), metrics


def cispo(
    logprobs_BT: jax.Array,
    old_logprobs_BT: jax.Array,
    advantages_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
) -> Loss:
    """Policy gradient with clipped weights, the sum of -w sg(clip(r)) A log p.

    A token beyond the bounds keeps a gradient, of the bound's size. 0 switches a bound off. The
    value means nothing; only its gradient does.
    Shapes: all [B, T] f32; log-probs in nats. Source: MiniMax-M1 (arXiv 2506.13585) eqs. 4-5.
    """
    kept_BT = weights_BT != 0
    raw_BT, log_ratio_BT = _log_ratio(logprobs_BT, old_logprobs_BT, kept_BT)
    logprobs_BT, advantages_BT = masked(kept_BT, logprobs_BT, advantages_BT)
    ratio_BT = jnp.exp(log_ratio_BT)
    bounded_BT = _bound(ratio_BT, clip_low, clip_high)
    scale_BT = jax.lax.stop_gradient(bounded_BT * advantages_BT)
    metrics = _policy_metrics(raw_BT, ratio_BT, bounded_BT != ratio_BT, weights_BT)
    return jnp.sum(-weights_BT * scale_BT * logprobs_BT), metrics


def sft(logprobs_BT: jax.Array, weights_BT: jax.Array) -> Loss:
    """Negative log-likelihood, the sum of -w log p. Shapes: [B, T] f32, nats."""
    kept_BT = weights_BT != 0
    (logprobs_BT,) = masked(kept_BT, logprobs_BT)
    return jnp.sum(-weights_BT * logprobs_BT), {"nll": token_mean(-logprobs_BT, weights_BT)}


def kl(
    logprobs_BT: jax.Array,
    reference_logprobs_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    estimator: str,
) -> Loss:
    """An estimate of KL(policy || reference) from tokens that the policy sampled, as a direct loss.

    With d = log reference - log policy of the token, and expectations over the policy's tokens:
      k1 = -d              value: KL, unbiased; gradient: 0 in expectation, of no use as a loss
      k2 = d^2 / 2         value: biased; gradient: that of KL(policy || reference)
      k3 = exp(d) - d - 1  value: KL, unbiased; gradient: that of KL(reference || policy)
    All three hold for the current policy's own tokens; for an older one's multiply the weights by
    the ratio. k3's d is clamped to +-K3_LIMIT, beyond which there is no gradient.
    Shapes: all [B, T] f32, nats; no gradient to the reference. Raises: ValueError for another name.
    Source: J. Schulman, "Approximating KL divergence" (2020); the gradients follow by
    differentiating each under the expectation.
    """
    kept_BT = weights_BT != 0
    logprobs_BT, reference_BT = masked(kept_BT, logprobs_BT, reference_logprobs_BT)
    raw_BT = jax.lax.stop_gradient(reference_BT) - logprobs_BT
    clamped_BT = jnp.clip(raw_BT, -K3_LIMIT, K3_LIMIT)
    values = {
        "k1": lambda: -raw_BT,
        "k2": lambda: 0.5 * jnp.square(raw_BT),
        "k3": lambda: jnp.expm1(clamped_BT) - clamped_BT,
    }
    if estimator not in values:
        raise ValueError(f"estimator={estimator!r}; choose from {sorted(values)}")
    values_BT = values[estimator]()
    metrics = {
        "kl": token_mean(values_BT, weights_BT),
        "kl_clamp_frac": token_mean(jnp.abs(raw_BT) > K3_LIMIT, weights_BT),
        "kl_log_ratio_abs_max": token_max(jnp.abs(raw_BT), kept_BT),
    }
    return jnp.sum(weights_BT * values_BT), metrics


def entropy_bonus(entropy_BT: jax.Array, weights_BT: jax.Array) -> Loss:
    """Negative entropy, the sum of -w H: times a positive coefficient it raises the entropy.

    entropy_BT [B, T]: of the distribution that each token is drawn from, nats.
    """
    kept_BT = weights_BT != 0
    (entropy_BT,) = masked(kept_BT, entropy_BT)
    return jnp.sum(-weights_BT * entropy_BT), {"entropy": token_mean(entropy_BT, weights_BT)}


def divergence(divergence_BT: jax.Array, weights_BT: jax.Array) -> Loss:
    """Sum of w times an exact divergence per token, [B, T], nats, from `model/logprobs.py`."""
    kept_BT = weights_BT != 0
    (divergence_BT,) = masked(kept_BT, divergence_BT)
    return jnp.sum(weights_BT * divergence_BT), {
        "divergence": token_mean(divergence_BT, weights_BT)
    }


def gated_log_ratio(
    logprobs_BT: jax.Array, teacher_logprobs_BT: jax.Array, mask_BT: jax.Array, *, slope: float
) -> jax.Array:
    """SDAR's loss of each masked-in token, g d with d = log teacher - log policy, [B, T].

    g = sigmoid(slope d), a constant. WARNING: the gradient is -g grad log policy. The teacher only
    weighs the tokens that were sampled, and with slope 0 it is not in the gradient at all: the
    policy imitates itself. Kept as the baseline that it is; `divergence` distils.
    Shapes: [B, T] f32, nats. Source: SDAR (arXiv 2605.15155), as its public code has it.
    """
    logprobs_BT, teacher_BT = masked(mask_BT, logprobs_BT, teacher_logprobs_BT)
    gap_BT = jax.lax.stop_gradient(teacher_BT) - logprobs_BT
    gate_BT = jax.lax.stop_gradient(jax.nn.sigmoid(slope * gap_BT))
    return jnp.where(mask_BT, gate_BT * gap_BT, 0.0)


def value_loss(
    values_BT: jax.Array,
    old_values_BT: jax.Array,
    returns_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    clip: float,
) -> Loss:
    """Half the squared error of a critic, the sum of w (V - R)^2 / 2.

    With clip > 0 the larger of that and the error of V held within `clip` of the old value, so that
    a critic which moved far has no gradient to move on; 0 for none.
    Shapes: all [B, T] f32; gradient to values_BT alone. Source: arXiv 2006.05990, appendix B.2.
    """
    kept_BT = weights_BT != 0
    values_BT, *constants = masked(kept_BT, values_BT, old_values_BT, returns_BT)
    old_BT, returns_BT = jax.lax.stop_gradient(constants)
    errors_BT = jnp.square(values_BT - returns_BT)
    bounded_BT = old_BT + jnp.clip(values_BT - old_BT, -clip, clip) if clip else values_BT
    losses_BT = 0.5 * jnp.maximum(errors_BT, jnp.square(bounded_BT - returns_BT))
    metrics = {
        "value": token_mean(values_BT, weights_BT),
        "return": token_mean(returns_BT, weights_BT),
        "value_squared_error": token_mean(errors_BT, weights_BT),
        "value_clip_frac": token_mean(bounded_BT != values_BT, weights_BT),
    }
    return jnp.sum(weights_BT * losses_BT), metrics


def importance_weights(
    old_logprobs_BT: jax.Array,
    sampler_logprobs_BT: jax.Array,
    weights_BT: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    form: str,
    cap: float,
) -> tuple[jax.Array, Metrics]:
    """Weights min(p_old / p_sampler, cap) for tokens whose sampler computed other numbers, [B, T].

    To be multiplied into the loss's weights, not into its count. form: "token", "sequence" (the
    geometric mean over the trace's masked-in tokens, on each of them), or "none" (1; the gap is
    measured all the same). 0 outside the mask; constants. importance_weight_max is before the cap.
    Raises: ValueError for another form or a cap <= 0.
    Source: truncated importance sampling for rollout engines (F. Yao et al., 2025).
    """
    if form not in ("none", "token", "sequence") or cap <= 0:
        raise ValueError(f"form={form!r}, cap={cap}; want none, token or sequence, and a cap > 0")
    kept_BT = weights_BT != 0
    raw_BT, log_ratio_BT = _log_ratio(old_logprobs_BT, sampler_logprobs_BT, kept_BT)
    log_factors_BT = {
        "none": lambda: jnp.zeros_like(log_ratio_BT),
        "token": lambda: log_ratio_BT,
        "sequence": lambda: sequence_mean(log_ratio_BT, kept_BT, segment_ids_BT),
    }[form]()
    uncapped_BT = jnp.exp(log_factors_BT)
    (factors_BT,) = masked(kept_BT, uncapped_BT if form == "none" else uncapped_BT.clip(max=cap))
    metrics = {
        "sampler_trainer_kl": token_mean(jnp.expm1(log_ratio_BT) - log_ratio_BT, weights_BT),
        "sampler_log_ratio_abs_max": token_max(jnp.abs(raw_BT), kept_BT),
        "importance_weight": token_mean(factors_BT, weights_BT),
        "importance_weight_max": token_max(uncapped_BT, kept_BT),
        "importance_cap_frac": token_mean(uncapped_BT > factors_BT, weights_BT),
    }
    return jax.lax.stop_gradient(factors_BT), metrics


def _log_ratio(
    logprobs_BT: jax.Array, old_logprobs_BT: jax.Array, mask_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """log p - log p_old [B, T] as it is, and clamped; 0 outside the mask, p_old a constant."""
    logprobs_BT, old_BT = masked(mask_BT, logprobs_BT, old_logprobs_BT)
    raw_BT = logprobs_BT - jax.lax.stop_gradient(old_BT)
    return raw_BT, jnp.clip(raw_BT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _bound(ratio_BT: jax.Array, clip_low: float, clip_high: float) -> jax.Array:
    """Ratios held in [1 - clip_low, 1 + clip_high]; 0 for no bound."""
    lowest = 1.0 - clip_low if clip_low else None
    return jnp.clip(ratio_BT, lowest, 1.0 + clip_high if clip_high else None)


def _clipped(
    ratio_BT: jax.Array,
    advantages_BT: jax.Array,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> tuple[jax.Array, jax.Array]:
    """Where a bound took the gradient away, and the losses -min(r A, bounded r A), [B, T]."""
    if 0.0 < dual_clip <= 1.0:
        raise ValueError(f"dual_clip={dual_clip} would bind at ratio 1; set more than 1, or 0")
    advantages_BT = jax.lax.stop_gradient(advantages_BT)
    free_BT = ratio_BT * advantages_BT
    objective_BT = jnp.minimum(free_BT, _bound(ratio_BT, clip_low, clip_high) * advantages_BT)
    if dual_clip:
        floor_BT = jnp.where(advantages_BT < 0, dual_clip * advantages_BT, -jnp.inf)
        objective_BT = jnp.maximum(objective_BT, floor_BT)
    return objective_BT != free_BT, -objective_BT


def _policy_metrics(
    raw_BT: jax.Array, ratio_BT: jax.Array, is_clipped_BT: jax.Array, weights_BT: jax.Array
) -> Metrics:
    """What every policy loss reports; approx_kl is k3 of KL(old || new) from old's tokens."""
    log_ratio_BT = jnp.clip(raw_BT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return {
        "ratio": token_mean(ratio_BT, weights_BT),
        "clip_frac": token_mean(is_clipped_BT, weights_BT),
        "approx_kl": token_mean(jnp.expm1(log_ratio_BT) - log_ratio_BT, weights_BT),
        "log_ratio_clamp_frac": token_mean(jnp.abs(raw_BT) > LOG_RATIO_LIMIT, weights_BT),
        "log_ratio_abs_max": token_max(jnp.abs(raw_BT), weights_BT != 0),
    }
