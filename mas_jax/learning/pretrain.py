"""Supervised training on traces: the toy world's starting policy learns the roles from a script.

Loss: mean over sampled tokens of -log p(token | prefix); nobody's tokens are context only.

Dimensions: B rows, T positions. Must not know: worlds, teams, where traces come from.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mas_jax.model import logprobs, qwen3, sharding
from mas_jax.records import Trace


@dataclass(frozen=True)
class PretrainSettings:
    """rows x length tokens a step; the learning rate warms up, then falls to 0 as a cosine."""

    steps: int
    rows: int
    length: int
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    max_grad_norm: float
    chunk: int
    seed: int


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens_BT", "segment_ids_BT", "sampled_BT"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Batch:
    """Packed traces: tokens, segment ids (0: padding) and which tokens somebody sampled, [B, T]."""

    tokens_BT: np.ndarray
    segment_ids_BT: np.ndarray
    sampled_BT: np.ndarray


def pack(traces: Sequence[Trace], rows: int, length: int) -> tuple[Batch, int]:
    """As many of the traces, in order, as first fit puts into the rows, and how many those are.

    Stops at the first trace that fits nowhere. Raises: ValueError for a trace longer than a row.
    """
    tokens_BT = np.zeros((rows, length), np.int32)
    segment_ids_BT = np.zeros((rows, length), np.int32)
    sampled_BT = np.zeros((rows, length), bool)
    used_B, segments_B = [0] * rows, [0] * rows
    for index, trace in enumerate(traces):
        size = len(trace.tokens)
        if size > length:
            raise ValueError(
                f"the trace of {trace.role} for {trace.question!r} has {size} tokens; rows have "
                f"{length}: set the row length to at least {size}"
            )
        row = next((b for b in range(rows) if used_B[b] + size <= length), None)
        if row is None:
            return Batch(tokens_BT, segment_ids_BT, sampled_BT), index
        place = slice(used_B[row], used_B[row] + size)
        segments_B[row] += 1
        used_B[row] += size
        tokens_BT[row, place] = trace.tokens
        segment_ids_BT[row, place] = segments_B[row]
        sampled_BT[row, place] = np.asarray(trace.owners) > 0
    return Batch(tokens_BT, segment_ids_BT, sampled_BT), len(traces)


def batches(traces: Sequence[Trace], settings: PretrainSettings) -> Iterator[Batch]:
    """`settings.steps` batches; every pass over the traces has a random order of its own."""
    order: list[int] = []
    num_passes = 0
    shortest = min(len(trace.tokens) for trace in traces)
    most = settings.rows * settings.length // shortest  # traces that any packing could hold
    for _ in range(settings.steps):
        while len(order) < most:
            rng = np.random.default_rng((settings.seed, num_passes))
            order += rng.permutation(len(traces)).tolist()
            num_passes += 1
        window = [traces[i] for i in order[:most]]
        batch, num_packed = pack(window, settings.rows, settings.length)
        order = order[num_packed:]
        yield batch


def _negative(logprobs_C: jax.Array, data: None) -> jax.Array:
    """Negative log-likelihood of each token, [C]."""
    return -logprobs_C


def nll_sum(
    params: qwen3.Params, config: qwen3.ModelConfig, batch: Batch, *, chunk: int
) -> tuple[jax.Array, jax.Array]:
    """Sum of -log p over sampled tokens in nats, and how many there are."""
    hidden_BTD = qwen3.hidden(params, config, batch.tokens_BT, segment_ids_BT=batch.segment_ids_BT)
    head = logprobs.Head(hidden_BTD, qwen3.unembedding(params, config), config.vocab_size)
    mask_BT = batch.sampled_BT & logprobs.predictable(batch.segment_ids_BT)
    loss, _ = logprobs.loss_sum(
        _negative, head, batch.tokens_BT, mask_BT, None,
        with_entropy=False, temperature=1.0, chunk=chunk,
    )  # fmt: skip
    return loss, jnp.sum(mask_BT)


def make_optimizer(
    settings: PretrainSettings, config: qwen3.ModelConfig
) -> optax.GradientTransformation:
    """AdamW with a clipped global gradient norm; decay on matrices only."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, settings.learning_rate, settings.warmup_steps, settings.steps
    )
    return optax.chain(
        optax.clip_by_global_norm(settings.max_grad_norm),
        optax.adamw(
            schedule, b2=0.98, weight_decay=settings.weight_decay, mask=qwen3.decay_mask(config)
        ),
    )


def make_step(config: qwen3.ModelConfig, settings: PretrainSettings, mesh: Mesh) -> Callable:
    """Compiled (params, optimizer state, batch) -> (params, optimizer state, mean loss).

    Parameters and state are donated; rows are split over the batch axes.
    """
    optimizer = make_optimizer(settings, config)
    rows = NamedSharding(mesh, sharding.spec(("batch", "length")))
    params_at = qwen3.param_shardings(config, mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())

    def _step(params, state, batch):
        def _loss(params):
            total, count = nll_sum(params, config, batch, chunk=settings.chunk)
            return total / jnp.maximum(count, 1)

        loss, gradient = jax.value_and_grad(_loss)(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    shapes = jax.eval_shape(
        optimizer.init,
        jax.eval_shape(lambda: qwen3.init(config, jax.random.key(0), dtype=jnp.float32)),
    )
    state_at = optax.tree.map_params(
        optimizer, lambda _, at: at, shapes, params_at, transform_non_params=lambda _: everywhere
    )
    return jax.jit(
        _step,
        in_shardings=(params_at, state_at, Batch(rows, rows, rows)),
        out_shardings=(params_at, state_at, everywhere),
        donate_argnums=(0, 1),
    )


def pretrain(
    params: qwen3.Params,
    config: qwen3.ModelConfig,
    traces: Sequence[Trace],
    settings: PretrainSettings,
    *,
    mesh: Mesh,
    on_step: Callable[[int, float], None],
) -> qwen3.Params:
    """Parameters after `settings.steps` updates; on_step(step, mean loss in nats) after each.

    Raises: FloatingPointError, naming the step, if a loss is not finite; ValueError, before
    anything is trained, for a trace longer than a row.
    """
    pack([max(traces, key=lambda trace: len(trace.tokens))], 1, settings.length)
    step_fn = make_step(config, settings, mesh)
    with jax.set_mesh(mesh):
        params = jax.device_put(params, qwen3.param_shardings(config, mesh))
        state = make_optimizer(settings, config).init(params)
        for step, batch in enumerate(batches(traces, settings)):
            params, state, loss = step_fn(params, state, batch)
            if not np.isfinite(loss):
                raise FloatingPointError(f"pretraining: loss {loss} at step {step}")
            on_step(step, float(loss))
    return params


def held_out_loss(
    params: qwen3.Params, config: qwen3.ModelConfig, traces: Sequence[Trace], *, chunk: int
) -> float:
    """Mean -log p of the sampled tokens of traces, in nats."""
    length = max(len(trace.tokens) for trace in traces)
    batch, _ = pack(traces, len(traces), length)
    total, count = jax.jit(lambda p, b: nll_sum(p, config, b, chunk=chunk))(params, batch)
    return float(total) / float(count)
