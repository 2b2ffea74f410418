"""A small model, three roles' packed traces and compiled gradients for the tests of learning."""

import functools
from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np

from mas_jax.learning import update
from mas_jax.learning.batch import TokenBatch, pack
from mas_jax.learning.credit import Credited
from mas_jax.learning.objective import Forward, Scores
from mas_jax.model import qwen3, sharding
from mas_jax.records import ROLES, Trace

CONFIG = qwen3.ModelConfig(
    vocab_size=40, num_layers=2, model_dim=16, ffw_dim=32, num_heads=2, num_kv_heads=1, head_dim=8,
    rope_theta=1e4, max_positions=64, qk_norm=True,
)  # fmt: skip
FORWARD = Forward(CONFIG, temperature=1.0, chunk=64, dtype="float32", remat="none", backend="auto")
ROWS, LENGTH = 8, 32  # of a micro-batch
MICRO = 4  # micro-batches in every batch, so that one program serves them all


@functools.cache
def mesh(num_devices: int = 1):
    return sharding.make_mesh(devices=jax.devices()[:num_devices], data=num_devices)


def make_params(seed: int, config: qwen3.ModelConfig = CONFIG) -> qwen3.Params:
    """Random parameters, larger than at the start of training so that distributions differ."""
    params = qwen3.init(config, jax.random.key(seed), dtype=jnp.float32)
    params["embed"] = 15 * params["embed"]
    return jax.device_put(params, qwen3.param_shardings(config, mesh()))


def make_traces(count: int = 24, *, seed: int = 0) -> list[Credited]:
    """Traces of the three roles in turn; a gap of nobody's between what each sampled twice."""
    rng = np.random.default_rng(seed)
    credited = []
    for index in range(count):
        role = list(ROLES)[index % 3]
        spans = [int(n) for n in rng.integers(1, 4, 4)]
        owners = np.repeat([0, ROLES[role], 0, ROLES[role]], spans)
        if index % 6 == 5:
            owners = np.append(owners, 0)  # the world has the last word
        trace = Trace(
            tokens=tuple(rng.integers(1, CONFIG.vocab_size, len(owners)).tolist()),
            owners=tuple(owners.tolist()),
            logprobs=tuple(np.where(owners > 0, -rng.random(len(owners)) - 2, 0.0).tolist()),
            question="q", rollout=index, role=role, path=role, policy="p", turns=(),
        )  # fmt: skip
        credited.append(Credited(trace, float(rng.random()), float(rng.normal()), False))
    return credited


def make_batch(credited, programme, *, rows: int = ROWS) -> tuple[TokenBatch, int]:
    """The traces packed into MICRO micro-batches of [rows, LENGTH], and how many are in use."""
    batch, num_micro, stats = pack(
        credited, programme, micro_rows=rows, length=LENGTH, agree=lambda n: n
    )
    assert (stats.too_long, num_micro <= MICRO) == (0, True)
    return pad_micro(batch), num_micro


def pad_micro(batch: TokenBatch) -> TokenBatch:
    more = MICRO - batch.tokens_MBT.shape[0]
    return jax.tree.map(lambda x: np.pad(x, ((0, more), (0, 0), (0, 0))), batch)


def as_rows(batch: TokenBatch) -> TokenBatch:
    """[M, B, T] as [M B, T] without empty rows."""
    used = batch.segment_ids_MBT.reshape(-1, LENGTH).any(axis=1)
    return jax.tree.map(lambda x: x.reshape(-1, LENGTH)[used], batch)


def from_rows(rows: TokenBatch, per_micro: int) -> tuple[TokenBatch, int]:
    """[R, T] with `per_micro` rows in each micro-batch of [ROWS, T], and how many are in use."""
    num_micro = -(-len(rows.tokens_MBT) // per_micro)

    def _spread(x):
        x = np.pad(x, ((0, num_micro * per_micro - len(x)), (0, 0)))
        x = x.reshape(num_micro, per_micro, LENGTH)
        return np.pad(x, ((0, MICRO - num_micro), (0, ROWS - per_micro), (0, 0)))

    return jax.tree.map(_spread, rows), num_micro


def changed(batch: TokenBatch, **arrays) -> TokenBatch:
    known = {field.name for field in fields(batch)}
    assert set(arrays) <= known
    return replace(batch, **arrays)


def logprobs_of(params, batch: TokenBatch, num_micro: int, forward: Forward = FORWARD, devices=1):
    """Log-probs [M, B, T] of the learned tokens."""
    return update.make_score(forward, mesh(devices))(params, batch, num_micro)[0]


def scores_of(**teachers_MBT) -> Scores:
    """Scores of an update that is the first on its batch."""
    return Scores(None, teachers_MBT, None, None, None)


@functools.cache
def gradients(programme: tuple, devices: int = 1):
    """Compiled gradients of a programme given as sorted items."""
    return update.make_gradients(dict(programme), FORWARD, mesh(devices), {})


def gradient_of(programme, params, batch, num_micro, scores, *, only=None, **factors):
    """Gradient and metrics, of one role's streams alone if `only`, or with factors by role."""
    weights = {role: jnp.float32(only in (None, role)) for role in programme}
    weights |= {role: jnp.float32(factor) for role, factor in factors.items()}
    run = gradients(tuple(programme.items()))
    return run(params, batch, scores, {}, num_micro, weights)


def norm(tree) -> float:
    return float(jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree))))


def largest_gap(left, right) -> float:
    """Largest difference of two pytrees' leaves."""
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)


def assert_bit_equal(left, right) -> None:
    jax.tree.map(np.testing.assert_array_equal, left, right)
