"""Checkpoints: exact, committed before the old one goes, and never silently wrong."""

import gc
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from mas_jax.learning.checkpoint import Checkpointer
from mas_jax.learning.checkpoint_contents import DamagedCheckpoint, content_digest
from mas_jax.model.sharding import make_mesh

# reads that Orbax gives up halfway, because a file is damaged, leave coroutines that complain
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, mask=None))


@pytest.fixture(scope="module", autouse=True)
def leave_no_such_coroutines():
    yield
    gc.collect()


def training_state(seed: int) -> dict:
    """Parameters (f32, bf16, a scalar), AdamW's state, a step, a raw PRNG key, empty nodes."""
    draws = np.random.default_rng(seed)
    params = {
        "embed": jnp.asarray(draws.normal(size=(64, 48)), jnp.float32),
        "layers": {"wq_LDH": jnp.asarray(draws.normal(size=(2, 48, 16)), jnp.bfloat16)},
        "scale": jnp.float32(draws.normal()),
    }
    opt_state = jax.tree.map(lambda x: x + 1, OPTIMIZER.init(params))
    key = jax.random.key_data(jax.random.key(seed))
    return dict(params=params, opt_state=opt_state, step=jnp.int32(seed), key=key, none=None)


def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def assert_bitwise_equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        assert a.dtype == b.dtype and a.shape == b.shape, path
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path


def save_steps(directory: Path, steps, *, keep: int = 9, values=None) -> None:
    with Checkpointer(directory, keep=keep) as checkpointer:
        for step in steps:
            value = None if values is None else values[step]
            checkpointer.save(step, training_state(step), {"at": step}, value=value)


def flip_bit(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(bytes(content))


def test_a_state_comes_back_bitwise_with_its_metadata(tmp_path):
    state = training_state(3)
    meta = {"config": {"lr": 1e-6, "roles": ["leader"]}, "position": 17, "note": "é\n"}
    with Checkpointer(tmp_path / "run", keep=1) as checkpointer:
        assert checkpointer.restore(abstract(state)) is None
        assert not (tmp_path / "run").exists(), "a reader changes nothing"
        checkpointer.save(3, state, meta, value=None)
    with Checkpointer(tmp_path / "run", keep=1) as checkpointer:
        restored = checkpointer.restore(abstract(state))
    assert (restored.step, restored.meta) == (3, meta)
    assert_bitwise_equal(restored.state, state)
    assert isinstance(restored.state["opt_state"][1][0], optax.ScaleByAdamState)


def test_the_newest_and_the_best_are_kept(tmp_path):
    # values by step: 2 is the best until 5 equals it, and of equals the newest counts
    values = {1: 0.1, 2: 0.7, 3: None, 4: 0.3, 5: 0.7, 6: None}
    seen = []
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        for step, value in values.items():
            checkpointer.save(step, training_state(step), {}, value=value)
            checkpointer.wait()
            seen.append((checkpointer.steps, checkpointer.best))
    assert seen == [
        ((1,), 1),
        ((1, 2), 2),
        ((2, 3), 2),
        ((2, 3, 4), 2),
        ((4, 5), 5),
        ((5, 6), 5),
    ]
    # a new process knows the values from the files alone
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        assert checkpointer.restore(abstract(training_state(6))).step == 6
        checkpointer.save(7, training_state(7), {}, value=0.2)
        checkpointer.wait()
        assert (checkpointer.steps, checkpointer.best) == ((5, 7), 5)
        best = checkpointer.restore_step("best", abstract(training_state(5)))
    assert best.step == 5
    assert_bitwise_equal(best.state, training_state(5))


def test_an_old_checkpoint_stays_until_the_new_one_is_committed(tmp_path):
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(0, training_state(0), {}, value=None)
        checkpointer.wait()
        polls_before_commit = 0
        for step in range(1, 5):
            checkpointer.save(step, training_state(step), {}, value=None)
            while step not in (steps := checkpointer.steps):
                polls_before_commit += 1
                # the second look: the listing may have begun just before the commit
                assert step - 1 in steps or step in checkpointer.steps
            checkpointer.wait()
            assert checkpointer.steps == (step,)
    assert polls_before_commit, "every save was committed before it returned"


def test_a_saved_state_may_be_donated_at_once(tmp_path):
    count_up = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = training_state(1) | {"large": jnp.zeros((512, 4096))}
    want = jax.tree.map(np.array, state)
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, state, {}, value=None)
        later = count_up(state)
        assert all(x.is_deleted() for x in jax.tree.leaves(state)), "the buffers were reused"
        for _ in range(20):  # writing over them while the save goes on
            later = count_up(later)
        checkpointer.wait()
        restored = checkpointer.restore(abstract(later))
    assert_bitwise_equal(restored.state, want)


def test_the_step_saved_or_restored_last_is_not_saved_again_and_older_ones_are_refused(tmp_path):
    with Checkpointer(tmp_path, keep=3) as checkpointer:
        checkpointer.save(4, training_state(4), {"first": True}, value=None)
        checkpointer.save(4, training_state(4), {"first": False}, value=None)
        assert checkpointer.restore(abstract(training_state(4))).meta == {"first": True}
        with pytest.raises(ValueError, match=r"step 3 is not newer than step 4"):
            checkpointer.save(3, training_state(3), {}, value=None)
    with Checkpointer(tmp_path, keep=3) as stranger:
        with pytest.raises(ValueError, match=r"step 4 is not newer than step 4"):
            stranger.save(4, training_state(4), {}, value=None)
        with pytest.raises(ValueError, match=r"value=nan"):
            stranger.save(5, training_state(5), {}, value=float("nan"))


def test_a_failed_save_is_raised_and_the_one_before_stays(tmp_path):
    state = {"a": jax.random.normal(jax.random.key(0), (512, 1024))}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, state, {}, value=0.5)
        checkpointer.wait()
        try:  # no file may be longer than 1 MB, as on a full disk
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
            checkpointer.save(2, state, {}, value=0.9)
            with pytest.raises(Exception, match="File too large"):
                checkpointer.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert (checkpointer.steps, checkpointer.best) == ((1,), 1)
        checkpointer.save(2, state, {}, value=0.1)
        checkpointer.wait()
        assert (checkpointer.steps, checkpointer.best) == ((1, 2), 1)
        assert checkpointer.restore(abstract(state)).step == 2


SAVE_UNTIL_KILLED = """
import os, sys
import jax, jax.numpy as jnp
from mas_jax.learning.checkpoint import Checkpointer

def state(step):
    return {"a": jnp.full((256, 1024), step, jnp.float32), "b": (jnp.int32(step), None)}

def abstract(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

def run(directory):
    with Checkpointer(directory, keep=2) as checkpointer:
        found = checkpointer.restore(jax.tree.map(abstract, state(0)))
        step = 0 if found is None else found.step
        while True:
            step += 1
            checkpointer.save(step, state(step), {"at": step}, value=float(step % 5))
            print("committed", max(checkpointer.steps, default=0), flush=True)

for line in sys.stdin:  # every run is a fork of this process, which has imported, not started, jax
    child = os.fork()
    if child == 0:
        run(line.strip())
    print("pid", child, flush=True)
    os.waitpid(child, 0)
    print("gone", flush=True)
"""


def start(program: str, *arguments, devices: int = 1) -> subprocess.Popen:
    """A Python process of its own, with pipes to and from it."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": flags},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def save_until_killed(starter: subprocess.Popen, directory: Path, seconds: float) -> int:
    """Kill a run `seconds` after its first save began; the last step it said was committed."""
    starter.stdin.write(f"{directory}\n")
    starter.stdin.flush()
    said = {}
    while len(said) < 2:
        line = starter.stdout.readline()
        assert line, starter.stderr.read()
        said |= dict([line.split()])
    time.sleep(seconds)
    os.kill(int(said["pid"]), signal.SIGKILL)
    while (line := starter.stdout.readline()) != "gone\n":
        said |= dict([line.split()])
    return int(said["committed"])


def test_a_run_killed_at_any_moment_leaves_a_whole_checkpoint_not_older_than_committed(tmp_path):
    chance = random.Random(5)
    zero = {"a": jnp.zeros((256, 1024)), "b": (jnp.int32(0), None)}
    newest, unfinished = 0, 0
    starter = start(SAVE_UNTIL_KILLED)
    for _ in range(6):  # each run goes on where the kill of the one before left it
        committed = save_until_killed(starter, tmp_path, chance.uniform(0, 0.5))
        unfinished += len(list(tmp_path.glob("*tmp*")))
        with Checkpointer(tmp_path, keep=2) as checkpointer:
            restored = checkpointer.restore(abstract(zero))
        step = 0 if restored is None else restored.step
        assert step >= max(committed, newest)
        newest = step
        if restored is not None:
            assert restored.meta == {"at": step}
            want = {"a": jnp.full((256, 1024), step, jnp.float32), "b": (jnp.int32(step), None)}
            assert_bitwise_equal(restored.state, want)
    starter.communicate()
    assert newest > 0 and unfinished > 0, "six kills, and none met a save in the middle"
    with Checkpointer(tmp_path, keep=2) as checkpointer:  # the next save cleans up after them
        checkpointer.restore(abstract(zero))
        checkpointer.save(newest + 1, zero, {}, value=None)
        checkpointer.wait()
        assert {path.name for path in tmp_path.iterdir()} == set(map(str, checkpointer.steps))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with whole checkpoints of steps 1 and 2; a test undoes what it damages."""
    directory = tmp_path_factory.mktemp("saved")
    save_steps(directory, (1, 2))
    return directory


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def restore_or_fall_back(directory: Path, caplog) -> int:
    """Restore, check that what came back is what was saved, and that a fall-back was said."""
    caplog.clear()
    with Checkpointer(directory, keep=9) as checkpointer:
        restored = checkpointer.restore(abstract(training_state(0)))
    assert_bitwise_equal(restored.state, training_state(restored.step))
    assert restored.meta == {"at": restored.step}
    said = [r for r in caplog.records if r.name.startswith("mas_jax") and r.levelno >= 30]
    if restored.step == 1:
        assert len(said) == 1 and "\n" not in said[0].getMessage()
        assert "step 2" in said[0].getMessage() and "step 1" in said[0].getMessage()
    else:
        assert restored.step == 2 and not said
    return restored.step


def test_a_flipped_bit_in_any_file_never_gives_wrong_values(saved, caplog):
    chance = random.Random(11)
    files = files_of(saved / "2")
    outcomes = {}
    for k in range(30):
        # every file in turn, and the largest ones, which hold the arrays, once more
        path = files[k] if k < len(files) else chance.choice(sorted(files, key=size)[-3:])
        if size(path) == 0:
            continue
        bit = chance.randrange(8 * size(path))
        flip_bit(path, bit)
        outcomes[path.name, bit] = restore_or_fall_back(saved, caplog)
        flip_bit(path, bit)
    assert len(outcomes) >= 20
    assert list(outcomes.values()).count(1) >= 10, outcomes
    assert restore_or_fall_back(saved, caplog) == 2


def size(path: Path) -> int:
    return path.stat().st_size


@pytest.mark.parametrize("damage", ["absent", "half"])
def test_a_missing_or_truncated_file_never_gives_wrong_values(saved, caplog, damage):
    fallen_back = set()
    for path in files_of(saved / "2"):
        content = path.read_bytes()
        path.unlink()
        if damage == "half":
            path.write_bytes(content[: len(content) // 2])
        if restore_or_fall_back(saved, caplog) == 1:
            fallen_back.add(path.relative_to(saved / "2").parts[0])
        path.write_bytes(content)
    assert fallen_back >= {"index", "state"}
    assert restore_or_fall_back(saved, caplog) == 2


def test_files_that_do_not_belong_change_nothing(saved, caplog):
    for folder in [saved, *(path for path in (saved / "2").rglob("*") if path.is_dir())]:
        (folder / "stray").write_bytes(b"\x00" * 9)
        assert restore_or_fall_back(saved, caplog) == 2
        (folder / "stray").unlink()


def test_swapped_array_files_and_a_renamed_checkpoint_are_noticed(tmp_path, caplog):
    save_steps(tmp_path, (1, 2, 3))
    shutil.rmtree(tmp_path / "3" / "state")
    shutil.copytree(tmp_path / "1" / "state", tmp_path / "3" / "state")
    with Checkpointer(tmp_path, keep=3) as checkpointer:
        assert checkpointer.restore(abstract(training_state(0))).step == 2
        (tmp_path / "2").rename(tmp_path / "4")
        assert checkpointer.restore(abstract(training_state(0))).step == 1
    assert "leaves do not match their digest" in caplog.text
    assert "it is the checkpoint of step 2" in caplog.text


def test_a_leaf_lost_from_the_table_of_contents_is_noticed(saved, caplog):
    # Orbax then gives back what was asked for, a ShapeDtypeStruct, in the place of the array
    table = saved / "2" / "state" / "_METADATA"
    whole = table.read_bytes()
    table.write_bytes(whole.replace(b"params.scale", b"params.scalf"))
    assert table.read_bytes() != whole
    assert restore_or_fall_back(saved, caplog) == 1
    assert "no contents for params.scale" in caplog.text
    table.write_bytes(whole)


def test_after_a_fall_back_the_damaged_step_is_saved_again(tmp_path):
    save_steps(tmp_path, (1, 2, 3), values={1: 0.5, 2: 0.1, 3: 0.9})
    flip_bit(tmp_path / "3" / "index" / "metadata", 40)
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        assert checkpointer.best == 1
        assert checkpointer.restore(abstract(training_state(0))).step == 2
        assert checkpointer.steps == (1, 2, 3), "reading removes nothing"
        checkpointer.save(3, training_state(3), {"again": True}, value=0.2)
        checkpointer.wait()
        assert (checkpointer.steps, checkpointer.best) == ((1, 2, 3), 1)
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        assert checkpointer.restore(abstract(training_state(0))).meta == {"again": True}


def test_only_damaged_checkpoints_are_an_error_that_names_them(tmp_path):
    save_steps(tmp_path, (1, 2))
    for step in (1, 2):
        shutil.rmtree(tmp_path / str(step) / "state")
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        with pytest.raises(ValueError, match=r"no checkpoint is whole: step 2 \(.*step 1 \("):
            checkpointer.restore(abstract(training_state(0)))
        with pytest.raises(DamagedCheckpoint, match=r"2 is damaged"):
            checkpointer.restore_step(2, abstract(training_state(0)))
        with pytest.raises(ValueError, match=r"no checkpoint of step 7; there are \[1, 2\]"):
            checkpointer.restore_step(7, abstract(training_state(0)))


def test_a_state_of_another_shape_or_dtype_is_an_error_that_names_the_leaf(saved):
    state = training_state(0)
    wider = state | {"step": jnp.zeros((2,), jnp.int32)}
    other = state | {"params": state["params"] | {"scale": jnp.bfloat16(1)}}
    more = state | {"extra": jnp.zeros(3)}
    fewer = {name: leaf for name, leaf in state.items() if name != "key"}
    with Checkpointer(saved, keep=9) as checkpointer:
        for wrong, message in [
            (wider, r"step: saved int32\[\], wanted int32\[2\]"),
            (other, r"params.scale: saved float32\[\], wanted bfloat16\[\]"),
            (more, r"extra: saved nothing, wanted float32\[3\]"),
            (fewer, r"key: saved, not wanted"),
            (jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state), "no sharding"),
        ]:
            target = wrong if message == "no sharding" else abstract(wrong)
            with pytest.raises(ValueError, match=message):
                checkpointer.restore(target)
        # a reader may ask for a part
        part = checkpointer.restore_step(2, abstract({"params": state["params"]}))
    assert_bitwise_equal(part.state, {"params": training_state(2)["params"]})


def test_only_arrays_of_numbers_can_be_saved(tmp_path):
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        for leaf in (jax.random.key(0), np.zeros(3), 1.0):
            with pytest.raises(ValueError, match=r"state leaf a\.0: wanted a jax.Array"):
                checkpointer.save(1, {"a": [leaf]}, {}, value=None)
        with pytest.raises(ValueError, match=r"both named 'a\.b'"):
            checkpointer.save(1, {"a": {"b": jnp.ones(1)}, "a.b": jnp.ones(1)}, {}, value=None)
        assert checkpointer.steps == ()


def sharded(tree, devices: int, *, rows: tuple[str, ...]):
    """Matrices split over rows by the mesh axes `rows` (and columns by `tensor`), rest copied."""
    mesh = make_mesh(
        data=1, fsdp=max(1, devices // 2), tensor=min(2, devices), devices=jax.devices()[:devices]
    )

    def sharding(x):
        axes = (rows, "tensor") if x.ndim == 2 and x.shape[0] % 8 == 0 else ()
        return NamedSharding(mesh, PartitionSpec(*axes))

    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(x)), tree
    )


def test_a_checkpoint_moves_between_numbers_of_devices(tmp_path):
    params = training_state(1)["params"]
    state = {"w": params["embed"], "b": params["layers"]["wq_LDH"], "step": jnp.int32(1)}
    for step, (devices, next_devices) in enumerate([(8, 4), (4, 1), (1, 8)]):
        here = sharded(state, devices, rows=("fsdp",))
        placed = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), state, here)
        assert len(placed["w"].sharding.device_set) == devices
        with Checkpointer(tmp_path, keep=1) as checkpointer:
            checkpointer.restore(here)
            checkpointer.save(step, placed, {}, value=None)
            checkpointer.wait()
            there = sharded(state, next_devices, rows=("data", "fsdp"))
            restored = checkpointer.restore(there)
        assert restored.step == step
        assert_bitwise_equal(restored.state, state)
        for got, want in zip(jax.tree.leaves(restored.state), jax.tree.leaves(there), strict=True):
            assert got.sharding == want.sharding


RESTORE_TOGETHER = """
import sys
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
jax.config.update("jax_cpu_collectives_implementation", "gloo")
rank, port, own, shared = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)
from mas_jax.learning.checkpoint import Checkpointer
split = NamedSharding(jax.make_mesh((4,), ("fsdp",)), PartitionSpec("fsdp"))
abstract = {"a": jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=split)}
with Checkpointer(own, keep=2) as checkpointer:
    print("own", checkpointer.restore(abstract).step, flush=True)
with Checkpointer(shared, keep=2) as checkpointer:
    restored = checkpointer.restore(abstract)
    checkpointer.save(3, jax.tree.map(jnp.negative, restored.state), {}, value=None)
    checkpointer.wait()
    print("shared", restored.step, checkpointer.steps, flush=True)
"""


def test_two_processes_agree_when_one_of_them_meets_damage(tmp_path):
    state = {"a": jnp.arange(128, dtype=jnp.float32).reshape(8, 16)}
    with Checkpointer(tmp_path / "0", keep=2) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state, {}, value=None)
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    shutil.rmtree(tmp_path / "1" / "2" / "state" / "d")  # process 1 cannot read its step 2
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    runs = [
        start(RESTORE_TOGETHER, rank, port, tmp_path / str(rank), tmp_path / "0", devices=2)
        for rank in (0, 1)
    ]
    try:
        for run in runs:
            said, errors = run.communicate(timeout=60)
            lines = [line for line in said.splitlines() if line.startswith(("own", "shared"))]
            assert lines == ["own 1", "shared 2 (2, 3)"], errors
    finally:
        for run in runs:
            run.kill()
    with Checkpointer(tmp_path / "0", keep=2) as checkpointer:
        restored = checkpointer.restore(abstract(state))
    assert_bitwise_equal(restored.state, {"a": -state["a"]})


# the digest


def mix(x: int) -> int:
    """The bijection of the digest, on Python's integers."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) % 2**32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) % 2**32
    return x ^ (x >> 16)


@pytest.mark.parametrize("dtype", ["float32", "int32", "bfloat16", "uint8", "bool"])
def test_the_digest_is_its_definition(dtype):
    draws = np.random.default_rng(0)
    x = jnp.asarray(draws.normal(size=(3, 2, 5)) * 3, dtype)
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize]
    words = np.asarray(x).reshape(-1).view(unsigned).tolist()
    want = [
        sum(mix(word ^ mix((position + seed) % 2**32)) for position, word in enumerate(words))
        % 2**32
        for seed in (0x9E3779B9, 0x7F4A7C15)
    ]
    assert content_digest(x).tolist() == want


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 63), st.integers(0, 31), st.integers(0, 2**32 - 1))
def test_every_flipped_bit_changes_both_halves_of_the_digest(position, bit, seed):
    words = np.random.default_rng(seed).integers(0, 2**32, size=64, dtype=np.uint32)
    flipped = words.copy()
    flipped[position] ^= np.uint32(1 << bit)
    assert (content_digest(jnp.asarray(words)) != content_digest(jnp.asarray(flipped))).all()


def test_the_digest_sees_order_and_sign_of_zero_but_not_the_sharding():
    x = jnp.arange(64, dtype=jnp.float32).reshape(8, 8)
    of = lambda y: tuple(content_digest(y).tolist())  # noqa: E731
    assert len({of(x), of(x.T), of(x[::-1]), of(-x), of(x.at[0, 0].set(-0.0))}) == 5
    for devices in (1, 2, 4, 8):
        placed = jax.device_put(x, sharded(x, devices, rows=("fsdp",)).sharding)
        assert of(placed) == of(x)
