"""The training command on several processes: the tokens of one process, checkpoints that any number
of processes goes on from, and deaths after which the command that they print goes on."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from small_runs import SMALL, save_start, weights
from test_hosts import ended, start

from mas_jax import metrics
from mas_jax.learning import hosts, kept_episodes

SETTINGS = {
    **SMALL,
    "train.questions": 4,
    "certify.ignore": True,
    # at least 64 rows always: what a request draws does not depend on what else is asked
    "engine.decode_rows": 64,
    "engine.prefill_blocks": 64,
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_start(tmp_path_factory.mktemp("start") / "policy")


@pytest.fixture
def train(policy, monkeypatch):
    """Starts the command in a workdir as processes with so many devices each."""
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")

    def _train(place: Path, processes: int, devices: int, **changes) -> list[subprocess.Popen]:
        mesh = {"train.mesh.data": processes, "train.mesh.fsdp": devices}
        rows = {"train.micro_rows": max(4, processes * devices)}
        changed = {name.replace("__", "."): value for name, value in changes.items()}
        values = {**SETTINGS, "model.checkpoint": policy, **mesh, **rows, **changed}
        return start(
            ROOT / "launch" / "train.py", f"--config={ROOT / 'configs' / 'toy.py'}",
            f"--workdir={place}", "--keep_episodes",
            *(f"--config.{name}={value}" for name, value in values.items()),
            processes=processes, devices=devices,
        )  # fmt: skip

    return _train


def finished(processes: list[subprocess.Popen]) -> list[str]:
    """What each process said on its way to its end, which must be a good one."""
    results = ended(processes)
    assert [code for code, _, _ in results] == [0] * len(results), "".join(e for *_, e in results)
    return [errors for _, _, errors in results]


def equal_tokens(place: Path, other: Path) -> dict[int, float]:
    """Share of the sampled tokens that are equal, by step."""
    ours, theirs = (kept_episodes.read(run) for run in (place, other))
    assert ours.keys() == theirs.keys()
    pairs = {step: kept_episodes.equal_tokens(ours[step], theirs[step]) for step in ours}
    assert all(count > 0 for _, count in pairs.values())
    return {step: equal / count for step, (equal, count) in pairs.items()}


def steps(stage: Path) -> list[int]:
    return [line["step"] for line in metrics.read(stage / "metrics.jsonl")]


def forget_the_end(place: Path, stage: str) -> bytes:
    """Takes the policy of a stage away, which its last checkpoint holds; its weights."""
    before = weights(place / stage / "policy")
    shutil.rmtree(place / stage / "policy")
    return before


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_draw_the_tokens_of_one_which_goes_on_from_their_checkpoint(
    train, tmp_path, processes
):
    short = dict(train__stages="('teacher',)", stages__teacher__steps=1)
    several, one = tmp_path / "several", tmp_path / "one"
    finished(train(several, processes, 1, **short))
    finished(train(one, 1, 1, **short))
    assert equal_tokens(several / "teacher", one / "teacher") == {0: 1.0}
    before = forget_the_end(several, "teacher")
    (said,) = finished(train(several, 1, 1, **short))
    assert "teacher: going on from step 1" in said
    assert weights(several / "teacher/policy") == before
    assert steps(several / "teacher") == [0]


@pytest.mark.slow
def test_both_stages_on_two_processes_of_four_devices_and_back_and_forth(train, tmp_path):
    two, one = tmp_path / "two", tmp_path / "one"
    finished(train(two, 2, 4))
    finished(train(one, 1, 4))
    for place in (two, one):
        certificate = json.loads((place / "teacher/certificate.json").read_text())
        assert certificate["accuracy"].keys() == {"start", "teacher"}
        assert steps(place / "teacher") == steps(place / "student") == [0, 1]
    for stage in ("teacher", "student"):
        shares = equal_tokens(two / stage, one / stage)
        print(stage, shares)
        assert shares.keys() == {0, 1}
    assert equal_tokens(two / "teacher", one / "teacher")[0] == 1.0
    # from either's last checkpoint, and from the one before it, on as many processes as the other
    for place, processes in ((two, 1), (one, 2)):
        before = forget_the_end(place, "student")
        said = finished(train(place, processes, 4))
        assert all("student: going on from step 2" in errors for errors in said)
        assert weights(place / "student/policy") == before
        forget_the_end(place, "student")
        shutil.rmtree(place / "student/checkpoints/2")
        said = finished(train(place, processes, 4))
        assert all("student: going on from step 1" in errors for errors in said)
        assert steps(place / "student") == [0, 1]


# --- deaths ---------------------------------------------------------------------------------------


def worker_of(parent: subprocess.Popen) -> int:
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    (worker,) = map(int, children)
    return worker


def go_on(said: list[str]) -> list[subprocess.Popen]:
    """The very command that every process printed, with each one's environment."""
    (command,) = {
        re.search(r"to go on, start the same command on every host: (.*)", errors)[1]
        for errors in said
    }
    python, script, *arguments = shlex.split(command)
    assert python == sys.executable
    return start(script, *arguments, processes=len(said), devices=1)


@pytest.mark.slow
@pytest.mark.parametrize("dead", [0, 1])
def test_after_a_death_in_training_the_command_that_is_printed_goes_on(train, tmp_path, dead):
    place = tmp_path / "run"
    short = dict(train__stages="('teacher',)", stages__teacher__steps=12)
    processes = train(place, 2, 1, **short)
    while not (place / "teacher/checkpoints/1").exists():
        assert all(process.poll() is None for process in processes)
        time.sleep(0.05)
    victim = worker_of(processes[dead])
    os.kill(victim, signal.SIGSTOP)  # the other one waits in a collective of its step
    time.sleep(3)
    os.kill(victim, signal.SIGKILL)
    results = ended(processes)
    said = [errors for _, _, errors in results]
    assert [code for code, _, _ in results] == [hosts.RESUMABLE] * 2, "".join(said)
    assert f"process {dead} ended by SIGKILL" in said[dead]
    assert f"process {dead} died; process {1 - dead} ended by SIGABRT" in said[1 - dead]
    saved = {re.search(r"last saved in .*: teacher step (\d+)\.", errors)[1] for errors in said}
    for errors in finished(go_on(said)):
        assert f"teacher: going on from step {max(saved)}" in errors
    assert steps(place / "teacher") == list(range(12))
