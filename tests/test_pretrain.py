"""Supervised training on traces: packing, the loss, and that it learns."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mas_jax.learning import pretrain as pt
from mas_jax.model import qwen3, sharding
from mas_jax.records import Trace

CONFIG = dataclasses.replace(
    qwen3.PRESETS["toy-1m"], vocab_size=32, num_layers=2, model_dim=32, ffw_dim=64, head_dim=16
)
SETTINGS = pt.PretrainSettings(
    steps=40, rows=8, length=32, learning_rate=1e-2, warmup_steps=5, weight_decay=0.01,
    max_grad_norm=1.0, chunk=64, seed=0,
)  # fmt: skip


def make_trace(tokens, owners, question="q") -> Trace:
    return Trace(
        tokens=tuple(tokens), owners=tuple(owners), logprobs=(0.0,) * len(tokens),
        question=question, rollout=0, role="searcher", path="searcher", policy="p", turns=(),
    )  # fmt: skip


def copying_traces(count: int) -> list[Trace]:
    """Four tokens of context, then the same four as sampled ones."""
    rng = np.random.default_rng(0)
    words = rng.integers(1, 32, (count, 4)).tolist()
    return [make_trace([*w, 0, *w], [0] * 5 + [2] * 4) for w in words]


def make_params(seed=0):
    return qwen3.init(CONFIG, jax.random.key(seed), dtype=jnp.float32)


def test_first_fit_packing_by_hand():
    # rows of 5: the third trace fits into row 0 behind the first, the fourth nowhere
    traces = [make_trace([i] * n, [0] * (n - 1) + [1]) for i, n in ((1, 3), (2, 4), (3, 2), (4, 3))]
    batch, num_packed = pt.pack(traces, 2, 5)
    assert num_packed == 3
    np.testing.assert_array_equal(batch.tokens_BT, [[1, 1, 1, 3, 3], [2, 2, 2, 2, 0]])
    np.testing.assert_array_equal(batch.segment_ids_BT, [[1, 1, 1, 2, 2], [1, 1, 1, 1, 0]])
    np.testing.assert_array_equal(
        batch.sampled_BT, np.asarray([[0, 0, 1, 0, 1], [0, 0, 0, 1, 0]], bool)
    )


def test_a_trace_longer_than_a_row_is_named():
    with pytest.raises(ValueError, match="searcher for 'long' has 9 tokens; rows have 8"):
        pt.pack([make_trace([1] * 9, [1] * 9, "long")], 2, 8)


def test_the_loss_is_that_of_each_trace_alone_over_its_sampled_tokens():
    traces = copying_traces(5)
    batch, _ = pt.pack(traces, 3, 20)
    params = make_params()
    total, count = pt.nll_sum(params, CONFIG, batch, chunk=8)
    want = 0.0
    for trace in traces:
        log_TV = jax.nn.log_softmax(qwen3.logits(params, CONFIG, jnp.asarray([trace.tokens]))[0])
        want -= sum(float(log_TV[t - 1, trace.tokens[t]]) for t in range(5, 9))
    assert count == 20
    np.testing.assert_allclose(total, want, rtol=1e-5)


def test_nobodys_tokens_are_context_only():
    traces = copying_traces(4)
    relabelled = [dataclasses.replace(t, owners=(0,) * 9) for t in traces]
    batch, _ = pt.pack(relabelled, 2, 20)
    total, count = pt.nll_sum(make_params(), CONFIG, batch, chunk=8)
    assert (float(total), int(count)) == (0.0, 0)


def test_batches_are_the_same_every_time_and_use_every_trace():
    traces = [make_trace([i + 1] * 8, [1] * 8) for i in range(31)]
    settings = dataclasses.replace(SETTINGS, steps=4, rows=4, length=32)  # 16 traces a batch
    first, second = (list(pt.batches(traces, settings)) for _ in range(2))
    assert len(first) == 4
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a.tokens_BT, b.tokens_BT)
    counts = np.bincount(np.concatenate([b.tokens_BT[:, ::8].ravel() for b in first]))[1:]
    assert counts.sum() == 64  # two passes of 31 and two of the third
    assert set(counts) <= {2, 3}


def losses_on(shape, steps):
    """Loss of each step of a training on a mesh."""
    num_devices = int(np.prod(list(shape.values())))
    mesh = sharding.make_mesh(**shape, devices=jax.devices()[:num_devices])
    losses = []
    pt.pretrain(
        make_params(), CONFIG, copying_traces(64), dataclasses.replace(SETTINGS, steps=steps),
        mesh=mesh, on_step=lambda step, loss: losses.append(loss),
    )  # fmt: skip
    return losses


def test_training_learns_to_copy():
    losses = losses_on(dict(data=1), 40)
    assert len(losses) == 40
    assert losses[0] == pytest.approx(np.log(32), rel=0.1)
    assert losses[-1] < 0.75 * losses[0]


@pytest.mark.slow
def test_every_mesh_learns_the_same():
    one, many = losses_on(dict(data=1), 6), losses_on(dict(data=2, fsdp=2, tensor=2), 6)
    np.testing.assert_allclose(one, many, rtol=1e-4)


def test_a_loss_that_is_not_finite_names_its_step():
    params = make_params()
    params["embed"] = params["embed"].at[3].set(jnp.inf)
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    with pytest.raises(FloatingPointError, match="at step 0"):
        pt.pretrain(
            params, CONFIG, copying_traces(64), SETTINGS, mesh=mesh, on_step=lambda *_: None
        )
