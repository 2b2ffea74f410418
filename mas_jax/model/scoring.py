"""The sharded entry point from token ids to log-probs and entropies, for students and teachers.

Dimensions: B rows, T positions. Must not know: roles, losses, whose weights it is given.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from mas_jax.model import logprobs, qwen3, sharding


class Scores(NamedTuple):
    """Log-prob and entropy of each scored token in nats, [B, T] float32, 0 where not scored."""

    logprobs_BT: jax.Array
    entropy_BT: jax.Array


def score(
    params: qwen3.Params,
    config: qwen3.ModelConfig,
    tokens_BT: jax.Array,
    segment_ids_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    temperature: float,
    chunk: int,
    dtype: jnp.dtype,
    backend: str,
) -> Scores:
    """Log-probs and entropies of the masked-in tokens of packed rows, [B, T] each.

    A token without a predecessor in its segment scores 0, whatever the mask says.
    temperature, chunk: as in `logprobs.py`; dtype, backend: as in `qwen3.hidden`.
    """
    hidden_BTD = qwen3.hidden(
        params, config, tokens_BT, segment_ids_BT=segment_ids_BT, dtype=dtype, backend=backend
    )
    unembed_VD = qwen3.unembedding(params, config).astype(dtype)
    head = logprobs.Head(hidden_BTD, unembed_VD, config.vocab_size)
    kept_BT = mask_BT & logprobs.predictable(segment_ids_BT)
    return Scores(
        *logprobs.token_logprobs_and_entropy(
            head, tokens_BT, kept_BT, temperature=temperature, chunk=chunk
        )
    )


@functools.cache
def make_score(
    config: qwen3.ModelConfig,
    mesh: Mesh,
    *,
    temperature: float,
    chunk: int,
    dtype: jnp.dtype,
    backend: str,
) -> Callable[..., Scores]:
    """`score` compiled for a mesh: (params, tokens_BT, segment_ids_BT, mask_BT) -> Scores.

    Parameters come as `qwen3.param_shardings` lays them out and are kept (nothing is donated); rows
    are split over the batch axes, going in and coming out. Made once for equal arguments.
    """
    rows = NamedSharding(mesh, sharding.spec(("batch", "length")))

    def _entry(params, tokens_BT, segment_ids_BT, mask_BT) -> Scores:
        return score(
            params, config, tokens_BT, segment_ids_BT, mask_BT,
            temperature=temperature, chunk=chunk, dtype=dtype, backend=backend,
        )  # fmt: skip

    jitted = jax.jit(
        _entry,
        in_shardings=(qwen3.param_shardings(config, mesh), rows, rows, rows),
        out_shardings=Scores(rows, rows),
        donate_argnums=(),
    )

    def _run(params, tokens_BT, segment_ids_BT, mask_BT) -> Scores:
        with jax.set_mesh(mesh):
            return jitted(params, tokens_BT, segment_ids_BT, mask_BT)

    return _run
