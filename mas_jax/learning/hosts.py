"""Several hosts as one run: how they find each other, what they agree on, and what is said when one
of them dies.

One process a host. A process that dies takes the others with it (from C++, with no exception), so
the command runs its work in a child and the parent is there to say what happened.
Must not know: models, episodes, configs.
"""

import collections
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from jax._src import hardware_utils  # jax's own search for chips, which no public name gives
from jax.experimental import multihost_utils

HEARTBEAT_S = 30  # after so long without a sign of life a process is dead, and all others end
RESUMABLE = 75  # exit code: the same command goes on (EX_TEMPFAIL of sysexits.h)
WORKER = "MAS_JAX_WORKER"  # set in the child that does the work
ADDRESS = ("MAS_JAX_COORDINATOR", "MAS_JAX_NUM_PROCESSES", "MAS_JAX_PROCESS_ID")


def cluster(environment: Mapping[str, str]) -> dict | None:
    """Arguments of `jax.distributed.initialize` for this process; None where it is alone.

    Read off MAS_JAX_COORDINATOR (host:port), MAS_JAX_NUM_PROCESSES and MAS_JAX_PROCESS_ID where
    they are set; else jax finds out itself, on SLURM (more than one task), on GKE
    (TPU_WORKER_HOSTNAMES names several) and on a TPU VM (which has chips on its PCI bus).
    Raises: ValueError if some of the three variables are set and others not, or are no numbers.
    """
    given = [environment.get(name, "") for name in ADDRESS]
    if any(given):
        address, count, number = given
        if not (":" in address and count.isdigit() and number.isdigit()) or int(number) >= int(
            count
        ):
            raise ValueError(
                f"{', '.join(ADDRESS)} are {given}; wanted HOST:PORT, how many processes there "
                "are, and which of them this is, from 0 on, or none of the three"
            )
        return dict(coordinator_address=address, num_processes=int(count), process_id=int(number))
    slurm = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or "1"
    if "SLURM_JOB_ID" in environment and int(slurm) > 1:
        return {}
    if "," in environment.get("TPU_WORKER_HOSTNAMES", ""):
        return {}
    if environment.get("JAX_PLATFORMS", "") not in ("", "tpu"):
        return None
    chips, _ = hardware_utils.num_available_tpu_chips_and_device_id()
    return {} if chips else None


def initialize() -> None:
    """Joins the other processes, if there are any; before anything else of jax. Raises: as
    `cluster`."""
    found = cluster(os.environ)
    if found is None:
        return
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        **found, heartbeat_timeout_seconds=HEARTBEAT_S, shutdown_timeout_seconds=HEARTBEAT_S
    )


def interrupted_code() -> int:
    """Exit code after SIGTERM, with everything saved: 0 for a user's own process; `RESUMABLE` for
    one of several, which a cluster ended and has to start again."""
    return RESUMABLE if os.environ.get(WORKER) else 0


def first(value: float) -> float:
    """What process 0 has, on every process: for what all must decide alike. A collective."""
    if jax.process_count() == 1:
        return value
    words = np.frombuffer(np.float64(value).tobytes(), np.uint32)  # jax would round a float64
    heard = np.asarray(multihost_utils.broadcast_one_to_all(words), np.uint32)
    return type(value)(np.frombuffer(heard.tobytes(), np.float64)[0])


def last_steps(workdir: Path) -> dict[str, int]:
    """Newest saved step of each stage that has one, in the order in which stages were begun."""
    found = {}
    stages = [path for path in workdir.glob("*/checkpoints") if path.is_dir()]
    for path in sorted(stages, key=lambda path: path.stat().st_ctime):
        steps = [int(step.name) for step in path.iterdir() if step.name.isdigit()]
        if steps:
            found[path.parent.name] = max(steps)
    return found


def dead_processes(said: str) -> list[int]:
    """Processes that the coordination service names as dead: a number a line after its words."""
    found: set[int] = set()
    for _, rest in re.findall(r"(stopped sending heartbeats\):)\s*\n((?:\S*\d+\s*\n)*)", said):
        found |= {int(re.search(r"\d+$", line)[0]) for line in rest.split()}
    return sorted(found)


def supervise(workdir: Path) -> int | None:
    """Runs this command again as a child, and its exit code; None in that child, and where there is
    but one process, which do the work.

    A child that was killed or aborted is reported: which process, the last step that was saved, the
    command that goes on; then the code is `RESUMABLE`. Any other code is passed on.
    """
    if os.environ.get(WORKER) or cluster(os.environ) is None:
        return None
    child = subprocess.Popen(
        [sys.executable, *sys.argv], env=os.environ | {WORKER: "1"}, stderr=subprocess.PIPE,
        text=True, errors="replace",
    )  # fmt: skip
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: child.send_signal(number))
    tail: collections.deque[str] = collections.deque(maxlen=400)
    for line in child.stderr:
        sys.stderr.write(line)
        sys.stderr.flush()
        tail.append(line)
    code = child.wait()
    if 0 <= code < 128:
        return code
    print(_report(code, "".join(tail), workdir), file=sys.stderr, flush=True)
    return RESUMABLE


def _report(code: int, said: str, workdir: Path) -> str:
    """What to say of a worker that was killed or aborted."""
    found = cluster(os.environ) or {}
    own = found.get("process_id", os.environ.get("SLURM_PROCID", os.environ.get("TPU_WORKER_ID")))
    others = [task for task in dead_processes(said) if str(task) != str(own)]
    number = -code if code < 0 else code - 128
    names = {s.value: s.name for s in signal.Signals}
    how = f"ended by {names.get(number, f'signal {number}')}"
    if others:
        who = f"process {', '.join(map(str, others))} died; process {own} {how} because of it"
    else:
        who = f"process {'?' if own is None else own} {how}"
    saved = last_steps(workdir)
    steps = ", ".join(f"{stage} step {step}" for stage, step in saved.items())
    command = shlex.join(["python", *sys.argv])
    return (
        f"mas_jax: {who}.\n"
        f"mas_jax: last saved in {workdir}: {steps or 'nothing yet'}.\n"
        f"mas_jax: to go on, start the same command on every host: {command}"
    )
