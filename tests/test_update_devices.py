"""One update on 1, 2, 4 and 8 devices: the same loss, gradient and metrics."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_credit import ROW
from tiny_learning import (
    CONFIG,
    FORWARD,
    largest_gap,
    make_batch,
    make_params,
    make_traces,
    norm,
    scores_of,
)

from mas_jax.learning import update
from mas_jax.learning.batch import globalise
from mas_jax.model import qwen3, sharding

PARTED = replace(CONFIG, num_heads=4, num_kv_heads=2)
WIDE = FORWARD._replace(config=PARTED)
PROGRAMME = {
    "searcher": replace(ROW, advantages=("group", "distillation"), beta=0.5, entropy_coef=0.1),
}
MESHES = {
    1: dict(data=1),
    2: dict(data=2),
    4: dict(data=2, fsdp=2),
    8: dict(data=2, fsdp=2, tensor=2),
}


@functools.cache
def gradient_on(num_devices: int):
    """Gradient, on the host, and metrics, with rows in two micro-batches."""
    mesh = sharding.make_mesh(devices=jax.devices()[:num_devices], **MESHES[num_devices])
    traces = [c for c in make_traces(120) if c.trace.role == "searcher"]
    batch, num_micro = make_batch(traces, PROGRAMME)
    assert num_micro == 2
    batch = globalise(batch, mesh)
    at = qwen3.param_shardings(PARTED, mesh)
    params, theirs = (jax.device_put(make_params(seed, PARTED), at) for seed in (0, 1))
    heard, _ = update.make_score(WIDE, mesh)(theirs, batch, num_micro)
    run = update.make_gradients(PROGRAMME, WIDE, mesh, {})
    weights = {"searcher": jnp.float32(1.0)}
    gradient, metrics = run(params, batch, scores_of(teacher=heard), {}, num_micro, weights)
    for x, where in zip(jax.tree.leaves(gradient), jax.tree.leaves(at), strict=True):
        assert x.sharding.is_equivalent_to(where, x.ndim)
    return jax.device_get((gradient, metrics))


@pytest.mark.parametrize(
    "num_devices", [*(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4)), 8]
)
def test_devices_change_neither_loss_nor_gradient_nor_metrics(num_devices):
    (want, want_metrics), (gradient, metrics) = gradient_on(1), gradient_on(num_devices)
    assert largest_gap(gradient, want) < 1e-5 < norm(want)
    for name, metric in want_metrics.items():
        np.testing.assert_allclose(metrics[name], metric, rtol=1e-5, atol=1e-5, err_msg=name)
