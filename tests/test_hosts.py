"""How the processes of a run find each other, and what is said when one of them dies."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time

import pytest
from test_layers import ROOT

from mas_jax.learning import hosts

AT = {"MAS_JAX_COORDINATOR": "a:1", "MAS_JAX_NUM_PROCESSES": "4", "MAS_JAX_PROCESS_ID": "3"}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({"JAX_PLATFORMS": "cpu"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, {}),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"TPU_WORKER_HOSTNAMES": "one"}, None),
        ({"TPU_WORKER_HOSTNAMES": "one,two"}, {}),
        (AT, dict(coordinator_address="a:1", num_processes=4, process_id=3)),
    ],
)
def test_a_cluster_is_read_off_the_environment(environment, found):
    assert hosts.cluster({"JAX_PLATFORMS": "cpu"} | environment) == found


@pytest.mark.parametrize(
    "changes",
    [
        {"MAS_JAX_PROCESS_ID": ""},
        {"MAS_JAX_PROCESS_ID": "4"},
        {"MAS_JAX_NUM_PROCESSES": "four"},
        {"MAS_JAX_COORDINATOR": "here"},
    ],
)
def test_half_a_description_is_an_error(changes):
    with pytest.raises(ValueError, match=r"MAS_JAX_COORDINATOR, MAS_JAX_NUM_PROCESSES.*HOST:PORT"):
        hosts.cluster(AT | changes)


def test_the_newest_saved_step_of_each_stage_is_found(tmp_path):
    assert hosts.last_steps(tmp_path) == {}
    for name in ("teacher/checkpoints/10", "teacher/checkpoints/20", "student/checkpoints/5",
                 "student/checkpoints/15.tmp", "student/policy"):  # fmt: skip
        (tmp_path / name).mkdir(parents=True)
        time.sleep(0.01)
    assert hosts.last_steps(tmp_path) == {"teacher": 20, "student": 5}


def test_the_dead_are_read_off_the_services_last_words():
    said = (
        "E UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\n"
        "1\n/job:jax_worker/replica:0/task:12\nThe tasks have crashed. Check 3 logs.\n"
    )
    assert hosts.dead_processes(said) == [1, 12]
    assert hosts.dead_processes("3\ntask:4 is well\n") == []
    lost = "UNAVAILABLE: Failed to send RPC to coordination service. Either the leader task was"
    assert hosts.dead_processes(lost) == [0]
    assert hosts.dead_processes(said + lost) == [1, 12]


SUPERVISED = """
import os, signal, sys, time
from pathlib import Path
from mas_jax.learning import hosts
hosts.HEARTBEAT_S = 3
code = hosts.supervise(Path(sys.argv[1]))
if code is not None:
    sys.exit(code)
hosts.initialize()
import jax, numpy as np
from jax.experimental import multihost_utils
rank, count = jax.process_index(), jax.process_count()
assert hosts.gather([0.1, "x" * 300 * rank]) == [[0.1, "x" * 300 * n] for n in range(count)]
assert hosts.first(lambda: {"rank": rank}) == {"rank": 0}
way, one = sys.argv[2], rank == int(sys.argv[3])
with hosts.together():
    if one and way.startswith("killed"):
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    if one and way == "fails":
        raise ValueError("no such file")
    if way == "refused":
        sys.exit(0)
    if way.endswith("in a collective"):
        multihost_utils.process_allgather(np.ones(3))
    hosts.gather(rank)
    os._exit(5)
"""


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return f"localhost:{probe.getsockname()[1]}"


def start_two(script, *arguments) -> list[subprocess.Popen]:
    """The script as two processes of two devices that join."""
    return start(script, *arguments, processes=2, devices=2)


def start(script, *arguments, processes: int, devices: int) -> list[subprocess.Popen]:
    """The script as processes that join, each with so many devices."""
    address = free_address()
    return [
        subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments)],
            env=os.environ | dict(
                PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}", JAX_PLATFORMS="cpu",
                MAS_JAX_COORDINATOR=address, MAS_JAX_NUM_PROCESSES=str(processes),
                MAS_JAX_PROCESS_ID=str(process),
                XLA_FLAGS=f"--xla_force_host_platform_device_count={devices} "
                "--xla_backend_optimization_level=0",
            ),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for process in range(processes)
    ]  # fmt: skip


def ended(processes: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each."""
    try:
        said = [process.communicate(timeout=900) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(p.returncode, *texts) for p, texts in zip(processes, said, strict=True)]


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "run.py"
    path.write_text(SUPERVISED)
    return path


@pytest.mark.parametrize(
    ("way", "dead", "count"),
    [
        ("killed", 1, 2),
        ("killed in a collective", 1, 2),
        ("killed in a collective", 0, 2),
        *(
            pytest.param(way, dead, 4, marks=pytest.mark.slow)
            for way, dead in (
                ("killed", 2), ("killed in a collective", 2), ("killed in a collective", 0)
            )
        ),
    ],
)  # fmt: skip
def test_a_dead_process_ends_the_others_and_everyone_says_how_to_go_on(
    tmp_path, script, way, dead, count
):
    (tmp_path / "runs" / "student" / "checkpoints" / "40").mkdir(parents=True)
    started = start(script, tmp_path / "runs", way, dead, processes=count, devices=2)
    results = ended(started)
    said = [errors for _, _, errors in results]
    assert [code for code, _, _ in results] == [hosts.RESUMABLE] * count, "".join(said)
    for other in set(range(count)) - {dead}:
        # the dead one alone, though by now the others end too
        assert f"process {dead} died; process {other} ended by SIGABRT because of it" in said[other]
    assert f"mas_jax: process {dead} ended by SIGKILL.\n" in said[dead]
    for errors in said:
        assert f"last saved in {tmp_path / 'runs'}: student step 40" in errors
        command = shlex.join([sys.executable, str(script), str(tmp_path / "runs"), way, str(dead)])
        assert f"start the same command on every host: {command}\n" in errors


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_of_one_process_ends_all_with_its_words(tmp_path, script, failing):
    results = ended(start_two(script, tmp_path, "fails", failing))
    said = [errors for _, _, errors in results]
    assert [code for code, _, _ in results] == [1, 1], "".join(said)
    assert "\nValueError: no such file\n" in said[failing]
    assert f"stopped: process {failing}: ValueError: no such file\n" in said[1 - failing]
    assert not any("to go on" in errors for errors in said)


def test_an_end_that_was_meant_is_passed_on(tmp_path, script):
    for code, _, errors in ended(start_two(script, tmp_path, "refused", 0)):
        assert code == 0
        assert "mas_jax:" not in errors


def test_a_single_process_has_no_parent(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert hosts.supervise(tmp_path) is None


def test_sigterm_reaches_the_worker(tmp_path):
    script = tmp_path / "wait.py"
    script.write_text(
        SUPERVISED.split("hosts.initialize()")[0]
        + "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "print('ready', flush=True)\ntime.sleep(60)\nsys.exit(1)\n"
    )
    processes = start_two(script, tmp_path)
    for process in processes:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
    assert [code for code, _, _ in ended(processes)] == [0, 0]


def test_an_interrupted_worker_asks_to_be_started_again(monkeypatch):
    monkeypatch.delenv(hosts.WORKER, raising=False)
    assert hosts.interrupted_code() == 0
    monkeypatch.setenv(hosts.WORKER, "1")
    assert hosts.interrupted_code() == hosts.RESUMABLE
