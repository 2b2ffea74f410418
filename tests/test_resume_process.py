"""The training command killed with SIGKILL and SIGTERM and given again: the same final policies."""

import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from small_runs import SMALL, save_start, weights, written

pytestmark = pytest.mark.slow  # a start takes ten seconds of a core


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return save_start(tmp_path_factory.mktemp("start") / "policy")


COMMAND = [
    sys.executable, "launch/train.py", "--config=configs/toy.py", "--config.certify.ignore=True",
    *(f"--config.{name}={value}" for name, value in SMALL.items()),
    "--config.engine.decode_rows=64", "--config.engine.prefill_blocks=64",
]  # fmt: skip
ENVIRONMENT = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0",
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
    "PYTHONPATH": str(ROOT),
}
STAGES = ("teacher", "student")


def launch(start, place):
    """The training command, its log in place.log."""
    with place.with_suffix(".log").open("a") as log:
        return subprocess.Popen(
            [*COMMAND, f"--config.model.checkpoint={start}", f"--workdir={place}"],
            cwd=ROOT, env=ENVIRONMENT, stdout=log, stderr=log,
        )  # fmt: skip


def wait_for(process, condition):
    """Returns once the condition holds; fails if the process ends before."""
    while not condition():
        assert process.poll() is None, "the process ended first"
        time.sleep(0.001)


def has_entries(directory):
    return directory.is_dir() and any(directory.iterdir())


@pytest.fixture(scope="module")
def finished(start, tmp_path_factory):
    """The workdir of a process that nothing disturbs; it runs beside the first test of it."""
    place = tmp_path_factory.mktemp("finished") / "run"
    process = launch(start, place)
    yield process, place
    process.kill()
    process.wait()


def assert_same_result(place, finished):
    process, reference = finished
    assert process.wait() == 0, reference.with_suffix(".log").read_text()
    for stage in STAGES:
        assert weights(place / stage / "policy") == weights(reference / stage / "policy")
        lines, wanted = written(place / stage), written(reference / stage)
        assert [line["step"] for line in lines] == [0, 1]
        for line, other in zip(lines, wanted, strict=True):
            for name in other.keys() - {n for n in other if n.startswith("engine/")}:
                assert line[name] == other[name], name
    certificates = [(p / "teacher/certificate.json").read_text() for p in (place, reference)]
    assert certificates[0] == certificates[1]
    leftovers = [path.name for path in place.rglob("*partial*")]
    assert not leftovers


def test_the_process_killed_in_a_save_and_terminated_ends_with_the_same_policies(
    start, finished, tmp_path
):
    place = tmp_path / "run"
    log = place.with_suffix(".log")
    process = launch(start, place)
    wait_for(process, lambda: has_entries(place / "teacher/checkpoints"))
    process.send_signal(signal.SIGKILL)
    process.wait()
    process = launch(start, place)
    wait_for(process, lambda: len(list((place / "teacher/tensorboard").iterdir())) == 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0, log.read_text()
    assert re.search(r"teacher: saved at step [12] of 2", log.read_text())
    assert not (place / "teacher/policy").exists()
    process = launch(start, place)
    assert process.wait() == 0, log.read_text()
    assert_same_result(place, finished)


@pytest.mark.parametrize("seed", range(3))
def test_the_process_killed_at_random_moments_ends_with_the_same_policies(
    start, finished, tmp_path, seed
):
    rng, place = random.Random(seed), tmp_path / "run"
    log = place.with_suffix(".log")
    assert finished[0].wait() == 0
    begin = time.monotonic()
    assert launch(start, tmp_path / "timed").wait() == 0
    whole_s = time.monotonic() - begin
    codes = []
    while len(codes) < 8 and 0 not in codes[-1:]:
        process = launch(start, place)
        try:
            codes.append(process.wait(timeout=rng.uniform(0.3, 0.9) * whole_s))
        except subprocess.TimeoutExpired:
            process.send_signal(rng.choice((signal.SIGKILL, signal.SIGTERM)))
            codes.append(-1 if process.wait() == 0 else process.returncode)
    assert set(codes) <= {0, -1, -signal.SIGTERM, -signal.SIGKILL}, log.read_text()
    assert len(codes) > 1
    assert launch(start, place).wait() == 0, log.read_text()
    assert_same_result(place, finished)
