"""Two processes learn what one learns, and hand the weights to their own engines' meshes."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from test_hosts import ended, start_two
from test_layers import ROOT

TRAIN = """
import json, sys
from dataclasses import replace
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from mas_jax.learning import hosts
hosts.initialize()
jax.config.update("jax_default_matmul_precision", "highest")
from test_update_devices import PARTED, PROGRAMME, WIDE
from tiny_learning import make_batch, make_params, make_traces
from mas_jax.learning import update
from mas_jax.learning.batch import globalise
from mas_jax.learning.teachers import Teacher
from mas_jax.learning.trainer import Trainer
from mas_jax.model import qwen3, sharding

mesh = sharding.make_mesh(data=2, fsdp=2)
rank, count = jax.process_index(), jax.process_count()
traces = [c for c in make_traces(120) if c.trace.role == "searcher"]
batch, num_micro = make_batch(traces, PROGRAMME)
rows = batch.tokens_MBT.shape[1] // count
batch = globalise(jax.tree.map(lambda x: x[:, rank * rows : (rank + 1) * rows], batch), mesh)
at = qwen3.param_shardings(PARTED, mesh)
place = jax.jit(lambda seed: qwen3.init(PARTED, jax.random.key(seed), dtype=jnp.float32),
                out_shardings=at)
settings = update.OptimizerSettings(
    learning_rate=1e-2, warmup_steps=0, schedule="constant", b1=0.9, b2=0.95, eps=1e-8,
    weight_decay=0.0, max_grad_norm=1.0, moment_dtype="float32")
trainer = Trainer(
    PROGRAMME, WIDE, mesh, update.make_optimizer(settings, PARTED, 5),
    {"teacher": Teacher("teacher", place(1), PARTED)}, updates_per_batch=1, whiten=True,
    ema_decay=0.9)
state, said = trainer.init(place(0)), []
for _ in range(5):
    scores = trainer.scores(state, batch, num_micro)
    state, found = trainer.update(state, batch, scores, num_micro)
    said.append([found["update/loss"], found["update/gradient_norm"]])
# devices the wrong way around, as a mesh on a TPU may order them
here = jax.local_devices()
locals_ = [jax.sharding.Mesh(np.asarray(here[i : i + 2])[::-1].reshape(1, 1, 2), mesh.axis_names)
           for i in range(0, len(here), 2)]
own = sharding.on_each(state.params, locals_, lambda m: qwen3.param_shardings(PARTED, m))
whole = jax.jit(lambda x: x, out_shardings=jax.NamedSharding(mesh, jax.P()))(state.params)
for on_one, mesh_of in zip(own, locals_, strict=True):
    for x, full in zip(jax.tree.leaves(on_one), jax.tree.leaves(whole), strict=True):
        assert x.sharding.mesh == mesh_of and x.is_fully_addressable
        np.testing.assert_array_equal(np.asarray(x), np.asarray(full.addressable_data(0)))
if rank == 0:
    leaves = [np.asarray(x.addressable_data(0)).ravel() for x in jax.tree.leaves(whole)]
    learned = {"said": said, "params": np.concatenate(leaves).tolist()}
    Path(sys.argv[1]).write_text(json.dumps(learned))
"""


@pytest.fixture(scope="module")
def learned(tmp_path_factory) -> dict[int, dict]:
    """What one process with four devices learns in five updates, and what two with two do."""
    folder = tmp_path_factory.mktemp("hosts")
    script = folder / "train.py"
    script.write_text(TRAIN)
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    subprocess.run(
        [sys.executable, str(script), str(folder / "1.json")], check=True, timeout=300,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "XLA_FLAGS": flags,
                          "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    for code, said, errors in ended(start_two(script, folder / "2.json")):
        assert code == 0, said + errors
    return {n: json.loads((folder / f"{n}.json").read_text()) for n in (1, 2)}


def test_losses_and_gradients_of_five_updates_are_those_of_one_process(learned):
    np.testing.assert_allclose(learned[2]["said"], learned[1]["said"], rtol=1e-5, atol=1e-6)
    losses = [loss for loss, _ in learned[1]["said"]]
    assert len(set(losses)) == 5  # each update changed something


def test_the_weights_after_them_are_too(learned):
    np.testing.assert_allclose(learned[2]["params"], learned[1]["params"], atol=1e-5)
