"""Several processes learn what one learns on the same batch, hand the weights to their own engines'
meshes, write one checkpoint together and take one up that others wrote."""

from pathlib import Path

import jax
import numpy as np
import pytest
from test_hosts import ended, start

from mas_jax.learning.checkpoint import Checkpointer
from mas_jax.model import sharding

TRAIN = """
import sys
from dataclasses import replace
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from mas_jax.learning import hosts
hosts.initialize()
jax.config.update("jax_default_matmul_precision", "highest")
from test_update_devices import PARTED, PROGRAMME, WIDE
from tiny_learning import make_batch, make_params, make_traces
from mas_jax.learning import update
from mas_jax.learning.checkpoint import Checkpointer
from mas_jax.learning.batch import globalise
from mas_jax.learning.teachers import Teacher
from mas_jax.learning.trainer import Trainer
from mas_jax.model import qwen3, sharding

folder, others, sizes = Path(sys.argv[1]), sys.argv[2], [int(x) for x in sys.argv[3].split("x")]
mesh = sharding.make_mesh(**dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)))
hosts.introduce(mesh)
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
whole_on = jax.jit(lambda x: x, out_shardings=jax.NamedSharding(mesh, jax.P()))
if others:  # what another number of processes saved: each checks all of it
    with Checkpointer(others, keep=1) as checkpoints:
        restored = checkpoints.restore(trainer.abstract_state)
    found = jax.tree.leaves(whole_on(restored.state))
    saved = np.load(Path(others).with_suffix(".npz"))
    assert restored.step == 5 and len(found) == len(saved.files) > 20
    for n, x in enumerate(found):
        np.testing.assert_array_equal(np.asarray(x.addressable_data(0)), saved[f"{n:03d}"])
state, said = trainer.init(place(0)), []
for _ in range(5):
    scores = trainer.scores(state, batch, num_micro)
    state, found = trainer.update(state, batch, scores, num_micro)
    said.append([found["update/loss"], found["update/gradient_norm"]])
# devices the wrong way around, as a mesh on a TPU may order them
here = jax.local_devices()
width = min(2, len(here))
locals_ = [
    jax.sharding.Mesh(np.asarray(here[i : i + width])[::-1].reshape(1, 1, width), mesh.axis_names)
    for i in range(0, len(here), width)]
own = sharding.on_each(state.params, locals_, lambda m: qwen3.param_shardings(PARTED, m))
whole = whole_on(state.params)
for on_one, mesh_of in zip(own, locals_, strict=True):
    for x, full in zip(jax.tree.leaves(on_one), jax.tree.leaves(whole), strict=True):
        assert x.sharding.mesh == mesh_of and x.is_fully_addressable
        np.testing.assert_array_equal(np.asarray(x), np.asarray(full.addressable_data(0)))
with Checkpointer(folder, keep=1) as checkpoints:
    checkpoints.save(5, state, {"learned": said}, value=None)
saved = [np.asarray(x.addressable_data(0)) for x in jax.tree.leaves(whole_on(state))]
if rank == 0:
    np.savez(folder.with_suffix(".npz"), **{f"{n:03d}": x for n, x in enumerate(saved)})
"""


@pytest.fixture(scope="module")
def learn(tmp_path_factory):
    """Has processes with so many devices each learn for five updates, after they have compared what
    `others` saved with what they restore of it; their checkpoints."""
    folder = tmp_path_factory.mktemp("hosts")
    script = folder / "train.py"
    script.write_text(TRAIN)

    def _learn(processes, devices, mesh, others: Path | str = "") -> Path:
        place = folder / f"{processes}x{devices}_{mesh}"
        if not place.exists():
            started = start(script, place, others, mesh, processes=processes, devices=devices)
            for code, said, errors in ended(started):
                assert code == 0, said + errors
        return place

    return _learn


@pytest.fixture(scope="module")
def one(learn) -> Path:
    """What one process with four devices learns."""
    return learn(1, 4, "2x2x1")


# four processes with four devices each, and with one; the other way around back to one
SEVERAL = [
    (2, 2, "2x2x1"),
    *(pytest.param(4, n, mesh, marks=pytest.mark.slow) for n, mesh in ((1, "2x2x1"), (4, "2x4x2"))),
]


def learned(place: Path) -> tuple[list, list]:
    """Losses and norms of gradients of the five updates; leaves of the state after them."""
    index = Checkpointer(place, keep=1).index(5)
    leaves = np.load(place.with_suffix(".npz"))
    return index["meta"]["learned"], [leaves[name] for name in sorted(leaves.files)]


@pytest.mark.parametrize(("processes", "devices", "mesh"), SEVERAL)
def test_losses_and_gradients_of_five_updates_are_those_of_one_process(
    learn, one, processes, devices, mesh
):
    want, want_leaves = learned(one)
    said, leaves = learned(learn(processes, devices, mesh, one))
    np.testing.assert_allclose(said, want, rtol=1e-5, atol=1e-6)
    assert len({loss for loss, _ in want}) == 5  # each update changed something
    for leaf, wanted in zip(leaves, want_leaves, strict=True):
        np.testing.assert_allclose(leaf, wanted, atol=1e-5)


@pytest.mark.parametrize(("processes", "devices", "mesh"), SEVERAL)
def test_a_checkpoint_of_several_processes_is_written_once_and_restored_by_one(
    learn, one, processes, devices, mesh
):
    place = learn(processes, devices, mesh, one)
    _, leaves = learned(place)
    index = Checkpointer(place, keep=1).index(5)
    at = jax.NamedSharding(sharding.make_mesh(devices=jax.devices()[:1]), jax.P())
    abstract = {
        name: jax.ShapeDtypeStruct(x["shape"], x["dtype"], sharding=at)
        for name, x in index["leaves"].items()
    }
    restored = Checkpointer(place, keep=1).restore(abstract).state
    for name, leaf in zip(index["leaves"], leaves, strict=True):
        np.testing.assert_array_equal(restored[name], leaf, err_msg=name)
    # every process wrote a part of its own, none of them the whole; on a busy machine a part was
    # seen to hold half of its bytes again, so that the sum of the parts says nothing
    state, alone = place / "5" / "state", one / "5" / "state"
    parts = {path.name: written(path) for path in state.glob("ocdbt.process_*")}
    assert sorted(parts) == [f"ocdbt.process_{n}" for n in range(processes)]
    assert min(parts.values()) > 0.3 * sum(parts.values()) / processes
    assert min(parts.values()) < 0.8 * written(alone / "ocdbt.process_0")
    assert written(state / "d") == pytest.approx(written(alone / "d"), rel=0.1)
    assert len(list(place.glob("*"))) == 1


def written(folder: Path) -> int:
    """Bytes in the files of a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
