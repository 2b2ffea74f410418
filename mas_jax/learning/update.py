"""TrainState and one update: sums over micro-batches, divided once by global counts, then applied.

Micro-batches are a loop whose length is data, so that one program serves every batch of a shape;
teachers and old policies are scored by the same loop. Every entry point states its shardings.
Dimensions: M micro-batches, B rows, T positions. Must not know: episodes, teams, files.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mas_jax.learning import advantages, losses, teachers
from mas_jax.learning.batch import TokenBatch, ViewBatch
from mas_jax.learning.objective import (
    Exact,
    Forward,
    head_of,
    learned,
    objective,
    own_counts,
    token_counts,
    values_of,
)
from mas_jax.learning.programme import Programme
from mas_jax.model import logprobs, qwen3, sharding
from mas_jax.records import ROLES

SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW. The learning rate warms up linearly over warmup_steps updates, then is constant or
    falls, to be 0 after the last update; moment_dtype: of the first moment, the second has the
    weights'."""

    learning_rate: float
    warmup_steps: int
    schedule: str
    b1: float
    b2: float
    eps: float
    weight_decay: float
    max_grad_norm: float
    moment_dtype: str


def make_schedule(settings: OptimizerSettings, num_updates: int) -> optax.Schedule:
    """Learning rate of each update. Raises: ValueError for an unknown schedule."""
    peak, warmup = settings.learning_rate, settings.warmup_steps
    rest = max(num_updates - warmup, 1)
    after = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, 0.0, rest),
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest),
    }
    if settings.schedule not in SCHEDULES:
        raise ValueError(f"schedule={settings.schedule!r}; choose from {SCHEDULES}")
    # the first update has a rate above 0
    rising = optax.linear_schedule(peak / (warmup + 1), peak, max(warmup, 1))
    return optax.join_schedules([rising, after[settings.schedule]()], [warmup])


def make_optimizer(
    settings: OptimizerSettings, config: qwen3.ModelConfig, num_updates: int
) -> optax.GradientTransformation:
    """AdamW after a clip of the global gradient norm; decay on matrices only."""
    return optax.chain(
        optax.clip_by_global_norm(settings.max_grad_norm),
        optax.adamw(
            make_schedule(settings, num_updates),
            b1=settings.b1,
            b2=settings.b2,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            mask=qwen3.decay_mask(config),
            mu_dtype=jnp.dtype(settings.moment_dtype),
        ),
    )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "opt_state", "step", "average"],
    meta_fields=[],
)
@dataclass(frozen=True)
class TrainState:
    """What an update changes: master weights, optimizer, step (int32); average: of the weights, for
    a teacher named "ema", else None."""

    params: qwen3.Params
    opt_state: Any
    step: jax.Array
    average: qwen3.Params | None


def init_state(
    params: qwen3.Params, optimizer: optax.GradientTransformation, *, with_average: bool
) -> TrainState:
    """The state before the first update."""
    average = jax.tree.map(jnp.copy, params) if with_average else None
    return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32), average)


def state_shardings(
    optimizer: optax.GradientTransformation, config: qwen3.ModelConfig, mesh: Mesh,
    *, dtype: str, with_average: bool,
) -> tuple[TrainState, TrainState]:  # fmt: skip
    """Shapes of the state, and where each leaf lives: moments beside their parameters."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    params_at = qwen3.param_shardings(config, mesh)
    shapes = jax.eval_shape(
        lambda: init_state(
            qwen3.init(config, jax.random.key(0), dtype=jnp.dtype(dtype)), optimizer,
            with_average=with_average,
        )
    )  # fmt: skip
    moments_at = optax.tree.map_params(
        optimizer, lambda _, at: at, shapes.opt_state, params_at,
        transform_non_params=lambda _: everywhere,
    )  # fmt: skip
    average_at = params_at if with_average else None
    return shapes, TrainState(params_at, moments_at, everywhere, average_at)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of an array [M, B, T]: rows over the batch axes."""
    return NamedSharding(mesh, PartitionSpec(None, *sharding.spec(("batch", "length"))))


def abstract_batch(mesh: Mesh, shape: tuple[int, int, int], *, view_length: int = 0) -> TokenBatch:
    """Shapes of a batch of M micro-batches of [B, T], and where they lie; with rows of views of a
    length, 0 for none."""
    at = batch_sharding(mesh)
    ints = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=at)
    floats = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=at)
    return TokenBatch(
        tokens_MBT=ints, segment_ids_MBT=ints, owner_MBT=ints, weights_MBT=floats,
        policy_weights_MBT=floats, advantages_MBT=floats, rewards_MBT=floats,
        sampler_logprobs_MBT=floats, view=_abstract_view(at, shape, view_length),
    )  # fmt: skip


def _abstract_view(at: NamedSharding, shape: tuple[int, int, int], length: int) -> ViewBatch | None:
    if not length:
        return None
    shown = jax.ShapeDtypeStruct((*shape[:2], length), jnp.int32, sharding=at)
    places = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=at)
    return ViewBatch(shown, shown, places, places.update(dtype=jnp.float32))


def _slice(tree: Any, index: jax.Array) -> Any:
    """Arrays [M, B, T] at a micro-batch, [B, T]."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


@functools.cache
def make_score(forward: Forward, mesh: Mesh) -> sharding.OnMesh:
    """Compiled (params, batch, num_micro) -> log-probs [M, B, T] of learned tokens, and values.

    Values are None without a value head. Nothing is donated. Made once for equal arguments.
    """
    at = batch_sharding(mesh)

    def _score(params, batch: TokenBatch, num_micro):
        def _one(index, found):
            micro = _slice(batch, index)
            head = head_of(params, forward, micro.tokens_MBT, micro.segment_ids_MBT)
            is_learned = learned(micro.weights_MBT, micro.segment_ids_MBT)
            logprobs_BT = logprobs.token_logprobs(
                head, micro.tokens_MBT, is_learned,
                temperature=forward.temperature, chunk=forward.chunk,
            )  # fmt: skip
            new = (logprobs_BT, values_of(params, head) if forward.config.value_head else None)
            return jax.tree.map(lambda all_MBT, x: all_MBT.at[index].set(x), found, new)

        zeros_MBT = jnp.zeros(batch.tokens_MBT.shape, jnp.float32)
        start = (zeros_MBT, zeros_MBT if forward.config.value_head else None)
        return jax.lax.fori_loop(0, num_micro, _one, start)

    jitted = jax.jit(
        _score,
        in_shardings=(qwen3.param_shardings(forward.config, mesh), at, None),
        out_shardings=(at, at if forward.config.value_head else None),
    )
    return sharding.OnMesh(jitted, mesh)


def make_gae(programme: Programme, mesh: Mesh, *, whiten: bool) -> Callable:
    """Compiled (batch, values_MBT) -> advantages and returns [M, B, T] of the roles with a critic.

    Computed on the whole batch; whiten: advantages less their mean, over their deviation, in which
    tokens weigh as they do in the loss.
    """
    at = batch_sharding(mesh)

    def _gae(batch: TokenBatch, values_MBT):
        batch, shape = dataclasses.replace(batch, view=None), batch.tokens_MBT.shape
        flat = jax.tree.map(lambda x: x.reshape(-1, shape[-1]), (batch, values_MBT))
        flat_batch, values_BT = flat
        is_learned = learned(flat_batch.weights_MBT, flat_batch.segment_ids_MBT)
        total_BT, returns_BT = jnp.zeros_like(values_BT), jnp.zeros_like(values_BT)
        any_BT = jnp.zeros_like(is_learned)
        for role, row in programme.items():
            if "gae" not in row.advantages:
                continue
            mask_BT = is_learned & (flat_batch.owner_MBT == ROLES[role])
            own_BT, own_returns_BT = advantages.gae(
                flat_batch.rewards_MBT, values_BT, mask_BT, flat_batch.segment_ids_MBT,
                discount=row.gae_discount, decay=row.gae_decay,
            )  # fmt: skip
            total_BT, any_BT = total_BT + own_BT, any_BT | mask_BT
            returns_BT = returns_BT + jnp.where(mask_BT, own_returns_BT, 0.0)
        if whiten:
            weights_BT = jnp.where(any_BT, flat_batch.weights_MBT, 0.0)
            total_BT = advantages.whiten(total_BT, weights_BT, eps=1e-8)
        return total_BT.reshape(shape), returns_BT.reshape(shape)

    return jax.jit(_gae, in_shardings=(at, at), out_shardings=(at, at))


def make_gradients(
    programme: Programme, forward: Forward, mesh: Mesh, exact_forwards: Mapping[str, Forward]
) -> sharding.OnMesh:
    """Compiled (params, batch, scores, exact, num_micro, role_weights) -> (gradient, metrics).

    The gradient is that of the whole objective, in the parameters' dtype; metrics are (sum, count)
    by name, `loss` among them. exact: parameters of the teachers that exact_forwards names, but for
    "live", which are the policy's own.
    Nothing is donated: a second pass with other role_weights gives a single role's gradient.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())
    params_at, at = qwen3.param_shardings(forward.config, mesh), batch_sharding(mesh)

    def _gradients(params, batch, scores, exact, num_micro, role_weights):
        own = own_counts(programme, batch)
        counts = token_counts(programme, own)

        def _loss(params, index):
            known = exact | {"live": params}
            return objective(
                params, programme, forward, _slice(batch, index), _slice(scores, index),
                {name: Exact(known[name], theirs) for name, theirs in exact_forwards.items()},
                counts, role_weights,
            )  # fmt: skip

        def _one(index, carry):
            gradient, loss, metrics = carry
            (part, found), new = jax.value_and_grad(_loss, has_aux=True)(params, index)
            gradient = jax.tree.map(jnp.add, gradient, new)
            return gradient, loss + part, losses.merge_metrics(metrics, found)

        shapes = jax.eval_shape(lambda: _loss(params, 0))
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes[1])
        start = (jax.tree.map(jnp.zeros_like, params), jnp.float32(0.0), zeros)
        gradient, loss, metrics = jax.lax.fori_loop(0, num_micro, _one, start)
        for role, row in programme.items():
            if row.learns:
                one = jnp.float32(1.0)
                if row.is_viewed:
                    metrics[f"{role}/view_tokens"] = (own[role]["view"], one)
                metrics[f"{role}/tokens"] = (own[role]["all"], one)
                metrics[f"{role}/policy_tokens"] = (own[role]["policy"], one)
        return gradient, metrics | {"loss": (loss, jnp.float32(1.0))}

    jitted = jax.jit(
        _gradients,
        in_shardings=(params_at, at, at, None, None, None),
        out_shardings=(params_at, everywhere),
    )
    return sharding.OnMesh(jitted, mesh)


def make_apply(
    optimizer: optax.GradientTransformation, states_at: TrainState, *, ema_decay: float
) -> Callable:
    """Compiled (state, gradient, is_step_end) -> (state, metrics); the state is donated.

    A gradient that is not finite, or all zero, leaves parameters, optimizer and average as they
    are; the step counts all the same (it advances where is_step_end, since a step may have several
    updates). metrics: gradient_norm, skipped (1.0 or 0.0), update_norm, param_norm.
    """
    params_at = states_at.params
    everywhere = states_at.step

    def _apply(state: TrainState, gradient, is_step_end):
        norm = optax.tree.norm(gradient)
        is_good = jnp.isfinite(norm) & (norm > 0)
        safe = jax.tree.map(lambda g: jnp.where(is_good, g, 0.0).astype(g.dtype), gradient)
        updates, opt_state = optimizer.update(safe, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)

        def _chosen(new, old):
            return jax.tree.map(lambda n, o: jnp.where(is_good, n, o), new, old)

        params, opt_state = _chosen(params, state.params), _chosen(opt_state, state.opt_state)
        average = state.average
        if average is not None:
            average = _chosen(teachers.ema(average, params, decay=ema_decay), average)
        step = state.step + is_step_end.astype(jnp.int32)
        metrics = {
            "gradient_norm": norm,
            "skipped": 1.0 - is_good.astype(jnp.float32),
            "update_norm": jnp.where(is_good, optax.tree.norm(updates), 0.0),
            "param_norm": optax.tree.norm(params),
        }
        return TrainState(params, opt_state, step, average), metrics

    return jax.jit(
        _apply,
        in_shardings=(states_at, params_at, everywhere),
        out_shardings=(states_at, everywhere),
        donate_argnums=(0,),
    )


def make_drift(programme: Programme, mesh: Mesh) -> Callable:
    """Compiled (batch, reference log-probs, num_micro) -> {role: (sum, count)} of k1 estimates of
    KL(sampler || reference), over the learned tokens of the first micro-batches, as they weigh.
    """
    at, everywhere = batch_sharding(mesh), NamedSharding(mesh, PartitionSpec())

    def _drift(batch: TokenBatch, reference_MBT, num_micro):
        is_first = jnp.arange(batch.tokens_MBT.shape[0])[:, None, None] < num_micro
        is_learned = learned(batch.weights_MBT, batch.segment_ids_MBT) & is_first
        gap_MBT = batch.sampler_logprobs_MBT - reference_MBT
        return {
            role: losses.token_mean(
                gap_MBT,
                jnp.where(is_learned & (batch.owner_MBT == ROLES[role]), batch.weights_MBT, 0.0),
            )
            for role in programme
        }

    return jax.jit(_drift, in_shardings=(at, at, None), out_shardings=everywhere)


def divided(metrics: losses.Metrics) -> dict[str, float]:
    """Metrics as numbers: sum over count; those without a count are left out."""
    found = jax.device_get(metrics)
    return {name: float(total / count) for name, (total, count) in found.items() if count > 0}
