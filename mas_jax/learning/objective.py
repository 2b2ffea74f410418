"""The role programme's objective on one micro-batch: every stream of every role, added up.

Streams: policy, exact divergence, KL to a reference, entropy, value. Each is a weighted sum over
its role's tokens, divided by the weight of those tokens in the whole batch (`token_counts`), so the
parts of micro-batches and hosts simply add.
Dimensions: M micro-batches, B rows, T positions, A roles. Must not know: episodes, optimizers.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mas_jax.learning import advantages, losses
from mas_jax.learning.batch import TokenBatch
from mas_jax.learning.programme import Programme, Row
from mas_jax.model import logprobs, qwen3
from mas_jax.records import ROLES


class Forward(NamedTuple):
    """How a trainer runs a model: see `qwen3.hidden` and `logprobs.py`."""

    config: qwen3.ModelConfig
    temperature: float
    chunk: int
    dtype: str
    remat: str
    backend: str


class Scores(NamedTuple):
    """Constants of an update, [M, B, T] each.

    old_logprobs: of the policy before it; None where the first forward pass gives them.
    teachers: log-probs by name. old_values, gae_advantages, returns: of a critic, None without.
    """

    old_logprobs_MBT: jax.Array | None
    teachers_MBT: Mapping[str, jax.Array]
    old_values_MBT: jax.Array | None
    gae_advantages_MBT: jax.Array | None
    returns_MBT: jax.Array | None


class Exact(NamedTuple):
    """A teacher whose whole distribution the objective reads; constants."""

    params: qwen3.Params
    forward: Forward


class Tokens(NamedTuple):
    """What the streams of one micro-batch read, [B, T] each; see `TokenBatch` and `Scores`."""

    segment_ids_BT: jax.Array
    owner_BT: jax.Array
    weights_BT: jax.Array
    policy_weights_BT: jax.Array
    advantages_BT: jax.Array
    sampler_logprobs_BT: jax.Array
    logprobs_BT: jax.Array
    old_BT: jax.Array
    entropy_BT: jax.Array
    teachers_BT: Mapping[str, jax.Array]
    gae_advantages_BT: jax.Array | None
    values_BT: jax.Array | None
    old_values_BT: jax.Array | None
    returns_BT: jax.Array | None
    divergence_BT: Mapping[str, jax.Array]
    view_weights_BT: jax.Array | None


def learned(weights: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Tokens of any stream that have a predecessor in their segment.

    weights (f32), segment_ids (int32) and the result (bool) are of one shape, [..., B, T].
    """
    return (weights != 0) & logprobs.predictable(segment_ids)


def head_of(params: qwen3.Params, forward: Forward, tokens_BT, segment_ids_BT) -> logprobs.Head:
    """Hidden states [B, T, D] and unembedding [V, D] of packed rows."""
    dtype = jnp.dtype(forward.dtype)
    hidden_BTD = qwen3.hidden(
        params, forward.config, tokens_BT,
        segment_ids_BT=segment_ids_BT, dtype=dtype, remat=forward.remat, backend=forward.backend,
    )  # fmt: skip
    unembed_VD = qwen3.unembedding(params, forward.config).astype(dtype)
    return logprobs.Head(hidden_BTD, unembed_VD, forward.config.vocab_size)


def values_of(params: qwen3.Params, head: logprobs.Head) -> jax.Array:
    """The critic's value of the state before each token, [B, T]; 0 at the first position."""
    return jnp.roll(qwen3.values(params, head.hidden_BTD), 1, axis=1).at[:, 0].set(0.0)


def own_counts(programme: Programme, batch: TokenBatch) -> dict[str, dict[str, jax.Array]]:
    """Weight of each role's tokens in the whole batch: of the "policy" stream, of "all", and of
    those in "view" if there is one."""
    is_learned = learned(batch.weights_MBT, batch.segment_ids_MBT)
    weights = {"policy": batch.policy_weights_MBT, "all": batch.weights_MBT}
    if batch.view is not None:
        weights["view"] = batch.view.weights_MBT

    def _count(name: str, role: str) -> jax.Array:
        is_own = is_learned & (batch.owner_MBT == ROLES[role])
        return jnp.sum(jnp.where(is_own, weights[name], 0.0))

    return {role: {name: _count(name, role) for name in weights} for role in programme}


def token_counts(
    programme: Programme, own: Mapping[str, Mapping[str, jax.Array]]
) -> dict[str, Mapping[str, jax.Array]]:
    """What divides each role's streams, from `own_counts`: the "policy" stream, divergences in a
    "view", and "all" others.

    With aggregation "all_tokens" a role counts the tokens of every role that learns. All counts are
    f32 scalars, of shape [].
    """
    every = {
        name: sum(own[role][name] for role, row in programme.items() if row.learns)
        for name in {name for counts in own.values() for name in counts}
    }
    return {
        role: every if row.aggregation == "all_tokens" else own[role]
        for role, row in programme.items()
    }


def _advantages(
    row: Row, tokens: Tokens, weights_BT: jax.Array
) -> tuple[jax.Array, losses.Metrics]:
    """The sum of the row's advantages [B, T], and metrics."""
    total_BT, metrics = jnp.zeros_like(tokens.advantages_BT), {}
    if {"group", "tree", "step"} & set(row.advantages):
        total_BT += tokens.advantages_BT
    if "gae" in row.advantages:
        total_BT += tokens.gae_advantages_BT
    if "distillation" in row.advantages:
        distilled_BT, metrics = advantages.distillation(
            tokens.teachers_BT[row.teacher], tokens.old_BT, weights_BT, tokens.segment_ids_BT,
            beta=row.beta, log_ratio_clip=row.log_ratio_clip, future_discount=row.future_discount,
        )  # fmt: skip
        total_BT += distilled_BT
    return total_BT, metrics | {"advantage": losses.token_mean(total_BT, weights_BT)}


def _policy(row: Row, tokens: Tokens, weights_BT: jax.Array) -> losses.Loss:
    """The row's policy stream."""
    if row.policy_loss == "sft":
        return losses.sft(tokens.logprobs_BT, weights_BT)
    if not row.advantages:
        return jnp.float32(0.0), {}
    advantages_BT, metrics = _advantages(row, tokens, weights_BT)
    correction_BT, gap = losses.importance_weights(
        tokens.old_BT, tokens.sampler_logprobs_BT, weights_BT, tokens.segment_ids_BT,
        form=row.correction, cap=row.correction_cap,
    )  # fmt: skip
    # on the advantage, so that metrics keep their weights; the loss is linear in it
    args = (tokens.logprobs_BT, tokens.old_BT, correction_BT * advantages_BT, weights_BT)
    clips = dict(clip_low=row.clip_low, clip_high=row.clip_high)
    if row.policy_loss == "gspo":
        loss, own = losses.gspo(*args, tokens.segment_ids_BT, **clips)
    elif row.policy_loss == "cispo":
        loss, own = losses.cispo(*args, **clips)
    else:
        loss, own = losses.ppo(*args, **clips, dual_clip=row.dual_clip)
    return loss, own | metrics | gap


def _reference(row: Row, tokens: Tokens, weights_BT: jax.Array) -> losses.Loss:
    """The row's KL penalty, and its KL (k1) to every teacher that was scored."""
    total, metrics = jnp.float32(0.0), {}
    for name, theirs_BT in tokens.teachers_BT.items():
        _, found = losses.kl(tokens.logprobs_BT, theirs_BT, weights_BT, estimator="k1")
        metrics[f"kl_to_{name}"] = found["kl"]
        if row.kl_coef and name == row.kl_reference:
            total, found = losses.kl(
                tokens.logprobs_BT, theirs_BT, weights_BT, estimator=row.kl_estimator
            )
            metrics |= {f"penalty_{key}": value for key, value in found.items()}
    return total, metrics


def _streams(role: str, row: Row, tokens: Tokens) -> tuple[list[tuple], losses.Metrics]:
    """(coefficient, sum, which count divides it) of each stream of a role, and metrics."""
    mask_BT = (tokens.owner_BT == ROLES[role]) & learned(tokens.weights_BT, tokens.segment_ids_BT)
    weights_BT = jnp.where(mask_BT, tokens.weights_BT, 0.0)
    policy, metrics = _policy(row, tokens, jnp.where(mask_BT, tokens.policy_weights_BT, 0.0))
    entropy, more = losses.entropy_bonus(tokens.entropy_BT, weights_BT)
    penalty, found = _reference(row, tokens, weights_BT)
    metrics = metrics | more | found
    streams = [
        (1.0, policy, "policy"),
        (row.entropy_coef, entropy, "all"),
        (row.kl_coef, penalty, "all"),
    ]
    if row.is_exact:
        count = "view" if row.is_viewed else "all"
        if row.is_viewed:
            weights_BT = jnp.where(mask_BT, tokens.view_weights_BT, 0.0)
        exact, more = losses.divergence(tokens.divergence_BT[role], weights_BT)
        streams.append((row.divergence_coef, exact, count))
        metrics |= more
    if "gae" in row.advantages:
        error, more = losses.value_loss(
            tokens.values_BT, tokens.old_values_BT, tokens.returns_BT, weights_BT,
            clip=row.value_clip,
        )  # fmt: skip
        streams.append((row.value_coef, error, "all"))
        metrics |= more
    return streams, metrics


_KERNELS = {"reverse_kl": logprobs.reverse_kl, "forward_kl": logprobs.forward_kl}


def _teacher_head(teacher: Exact, batch: TokenBatch, *, is_viewed: bool) -> logprobs.Head:
    """A teacher's hidden states for the student's positions [B, T, D], without a gradient: in the
    same context, or those that predict the same tokens in the row of views."""
    params = jax.lax.stop_gradient(teacher.params)
    if not is_viewed:
        return head_of(params, teacher.forward, batch.tokens_MBT, batch.segment_ids_MBT)
    view = batch.view
    head = head_of(params, teacher.forward, view.tokens_MBS, view.segment_ids_MBS)
    # position t predicts token t + 1: what stands before that token in the view
    before_BT = jnp.maximum(jnp.roll(view.place_MBT, -1, axis=1) - 1, 0)
    hidden_BTD = jnp.take_along_axis(head.hidden_BTD, before_BT[..., None], axis=1)
    return dataclasses.replace(head, hidden_BTD=hidden_BTD)


def _divergences(
    programme: Programme, forward: Forward, head: logprobs.Head, batch: TokenBatch,
    exact: Mapping[str, Exact], logprobs_BT: jax.Array,
) -> dict[str, jax.Array]:  # fmt: skip
    """Exact divergence [B, T] to its teacher of each role that learns by one."""
    found = {}
    knobs = dict(temperature=forward.temperature, chunk=forward.chunk)
    for role, row in programme.items():
        if not (row.is_exact and row.learns):
            continue
        teacher = _teacher_head(exact[row.teacher], batch, is_viewed=row.is_viewed)
        mask_BT = learned(batch.weights_MBT, batch.segment_ids_MBT)
        mask_BT &= batch.owner_MBT == ROLES[role]
        if row.is_viewed:
            mask_BT &= batch.view.weights_MBT != 0
        if row.divergence == "gated_log_ratio":
            theirs_BT = logprobs.token_logprobs(teacher, batch.tokens_MBT, mask_BT, **knobs)
            found[role] = losses.gated_log_ratio(
                logprobs_BT, theirs_BT, mask_BT, slope=row.gate_slope
            )
        elif row.divergence == "jsd":
            found[role] = logprobs.jsd(head, teacher, mask_BT, beta=row.jsd_beta, **knobs)
        else:
            found[role] = _KERNELS[row.divergence](head, teacher, mask_BT, **knobs)
    return found


def _tokens(
    params: qwen3.Params, programme: Programme, forward: Forward, batch: TokenBatch, scores: Scores,
    exact: Mapping[str, Exact],
) -> Tokens:  # fmt: skip
    """The forward pass; batch and scores are slices [B, T]."""
    head = head_of(params, forward, batch.tokens_MBT, batch.segment_ids_MBT)
    logprobs_BT, entropy_BT = logprobs.token_logprobs_and_entropy(
        head, batch.tokens_MBT, learned(batch.weights_MBT, batch.segment_ids_MBT),
        temperature=forward.temperature, chunk=forward.chunk,
    )  # fmt: skip
    now_BT = jax.lax.stop_gradient(logprobs_BT)
    teachers_BT = dict(scores.teachers_MBT)
    if any("live" in row.teachers for row in programme.values()):
        teachers_BT["live"] = now_BT
    return Tokens(
        segment_ids_BT=batch.segment_ids_MBT,
        owner_BT=batch.owner_MBT,
        weights_BT=batch.weights_MBT,
        policy_weights_BT=batch.policy_weights_MBT,
        advantages_BT=batch.advantages_MBT,
        sampler_logprobs_BT=batch.sampler_logprobs_MBT,
        logprobs_BT=logprobs_BT,
        old_BT=now_BT if scores.old_logprobs_MBT is None else scores.old_logprobs_MBT,
        entropy_BT=entropy_BT,
        teachers_BT=teachers_BT,
        gae_advantages_BT=scores.gae_advantages_MBT,
        values_BT=values_of(params, head) if forward.config.value_head else None,
        old_values_BT=scores.old_values_MBT,
        returns_BT=scores.returns_MBT,
        divergence_BT=_divergences(programme, forward, head, batch, exact, logprobs_BT),
        view_weights_BT=None if batch.view is None else batch.view.weights_MBT,
    )


def objective(  # eight: the three things that vary, and what they are read with
    params: qwen3.Params, programme: Programme, forward: Forward, batch: TokenBatch, scores: Scores,
    exact: Mapping[str, Exact], counts: Mapping[str, Mapping[str, jax.Array]],
    role_weights: Mapping[str, jax.Array],
) -> tuple[jax.Array, losses.Metrics]:  # fmt: skip
    """One micro-batch's part of the loss, divided by the global counts already, and metrics.

    batch, scores: slices [B, T], and [B, S] of a view, without their first axis. counts:
    `token_counts` of the whole batch. role_weights: a factor for each role, beside its row's.
    These, the loss and metrics, (sum, count) by "role/name", are scalars.
    """
    tokens = _tokens(params, programme, forward, batch, scores, exact)
    total, metrics = jnp.float32(0.0), {}
    for role, row in programme.items():
        if not row.learns:
            continue
        streams, own = _streams(role, row, tokens)
        for coef, loss, count in streams:
            if coef:
                factor = role_weights[role] * row.weight * coef
                total += factor * loss / jnp.maximum(counts[role][count], 1e-9)  # without tokens: 0
        metrics |= {f"{role}/{name}": value for name, value in own.items()}
    return total, metrics
