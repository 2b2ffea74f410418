"""A training step on made-up rows, and the work that tokens are for a model: what the benchmarks
of growth and of a device share.

Dimensions: M micro-batches, B rows, T positions. Must not know: peers, records.
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mas_jax.config import default_config, role
from mas_jax.learning import batch as packing
from mas_jax.learning import update
from mas_jax.learning.batch import TokenBatch
from mas_jax.learning.objective import Forward, Scores
from mas_jax.learning.programme import make_programme
from mas_jax.learning.trainer import Trainer
from mas_jax.model import qwen3
from mas_jax.records import ROLES


def make_batch(vocab_size: int, shape: tuple[int, int, int], segment: int) -> TokenBatch:
    """Random rows [M, B, T] of sequences of `segment` tokens each, all of them learned."""
    rng = np.random.default_rng(0)
    segment_ids_MBT = np.broadcast_to(1 + np.arange(shape[2], dtype=np.int32) // segment, shape)
    is_first_T = np.arange(shape[2]) % segment == 0
    weights_MBT = np.broadcast_to(np.where(is_first_T, 0.0, 1.0).astype(np.float32), shape)
    zeros_MBT = np.zeros(shape, np.float32)
    return TokenBatch(
        tokens_MBT=rng.integers(0, vocab_size, shape, dtype=np.int32),
        segment_ids_MBT=segment_ids_MBT.copy(),
        owner_MBT=np.full(shape, ROLES["answerer"], np.int32),
        weights_MBT=weights_MBT.copy(), policy_weights_MBT=weights_MBT.copy(),
        advantages_MBT=rng.normal(size=shape).astype(np.float32) * weights_MBT,
        rewards_MBT=zeros_MBT, sampler_logprobs_MBT=zeros_MBT,
    )  # fmt: skip


def make_trainer(
    config: qwen3.ModelConfig, mesh: Mesh, *, dtype: str, remat: str, chunk: int
) -> Trainer:
    """GRPO of one role without a teacher, AdamW, masters in float32."""
    settings = default_config().train.optimizer.to_dict() | dict(moment_dtype=dtype)
    forward = Forward(
        config, temperature=1.0, chunk=chunk, dtype=dtype, remat=remat, backend="auto"
    )
    optimizer = update.make_optimizer(update.OptimizerSettings(**settings), config, num_updates=1)
    programme = make_programme({"answerer": role(entropy_coef=0.0)})
    return Trainer(
        programme, forward, mesh, optimizer, {}, updates_per_batch=1, whiten=False, ema_decay=0.0
    )


def make_update(trainer: Trainer, shape: tuple[int, int, int], segment: int) -> Callable[[], None]:
    """One whole update at a call, of a state that it keeps; random weights, made where they lie."""
    config = trainer.forward.config
    made = jax.jit(
        lambda key: qwen3.init(config, key, dtype=jnp.float32),
        out_shardings=qwen3.param_shardings(config, trainer.mesh),
    )
    held = [trainer.init(made(jax.random.key(0)))]
    local = make_batch(config.vocab_size, shape, segment)
    batch = packing.globalise(local, trainer.mesh)
    scores = Scores(None, {}, None, None, None)

    def _update() -> None:
        held[0], _ = trainer.update(held[0], batch, scores, shape[0])
        jax.block_until_ready(held[0].params)

    return _update


def timed(run: Callable[[], object], runs: int) -> list[float]:
    """Seconds of so many runs after one that is not counted."""
    seconds = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def forward_flops(config: qwen3.ModelConfig, lengths: list[int], *, with_head: bool) -> float:
    """FLOPs of a forward pass over sequences: 2 for each weight of a matmul and token, and causal
    attention, 2 x layers x heads x head dim x length^2 (METHODS 8.5). Training takes 3 times that.
    """
    embedding = config.vocab_size * config.model_dim
    matrices = qwen3.param_count(config) - (embedding if config.tied else 2 * embedding)
    matrices += embedding if with_head else 0
    wide = config.num_layers * config.num_heads * config.head_dim
    return 2.0 * matrices * sum(lengths) + 2.0 * wide * sum(n**2 for n in lengths)
