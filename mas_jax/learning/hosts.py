"""Several hosts as one run: how they find each other, what they agree on, and what is said when one
of them fails or dies.

One process a host. A process that dies takes the others with it (from C++, with no exception), so
the command runs its work in a child and the parent is there to say what happened. A process that
fails is still there to tell the others, through the service that brought them together.
Must not know: models, episodes, configs.
"""

import atexit
import collections
import contextlib
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import (
    distributed,  # the service's table, which no public name gives
    hardware_utils,  # nor jax's own search for chips
)
from jax.experimental import multihost_utils

HEARTBEAT_S = 30  # after so long without a sign of life a process is dead, and all others end
LISTEN_S = 1.0  # between looks for the failure of another process
LONGEST_S = 24 * 3600  # that processes wait for each other; a dead one is known long before
HEARD_S = 10  # how long a process that fails waits until all others know
RESUMABLE = 75  # exit code: the same command goes on (EX_TEMPFAIL of sysexits.h)
WORKER = "MAS_JAX_WORKER"  # set in the child that does the work
FAILED = "mas_jax/failed"  # of the service's table: under it, by process, what it raised
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
        # programs that reduce within a process, sent off one after another, were seen to block
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.distributed.initialize(
        **found, heartbeat_timeout_seconds=HEARTBEAT_S, shutdown_timeout_seconds=HEARTBEAT_S
    )


def interrupted_code() -> int:
    """Exit code after SIGTERM, with everything saved: 0 for a user's own process; `RESUMABLE` for
    one of several, which a cluster ended and has to start again."""
    return RESUMABLE if os.environ.get(WORKER) else 0


# --- what they agree on ---------------------------------------------------------------------------


_MEETINGS = itertools.count()


def gather(document: Any) -> list[Any]:
    """The JSON values that all processes give, in order of process. A collective.

    All meet first, however long one plays.
    """
    if jax.process_count() == 1:
        return [document]
    name = f"mas_jax/meeting/{next(_MEETINGS)}"
    distributed.global_state.client.wait_at_barrier(name, 1000 * LONGEST_S)
    own = np.frombuffer(json.dumps(document).encode(), np.uint8)
    sizes = np.ravel(multihost_utils.process_allgather(np.int32(len(own))))
    # few lengths, and so few programs
    padded = np.zeros(max(256, 1 << int(sizes.max() - 1).bit_length()), np.uint8)
    padded[: len(own)] = own
    texts = np.asarray(multihost_utils.process_allgather(padded))
    return [json.loads(t[:size].tobytes()) for t, size in zip(texts, sizes, strict=True)]


def introduce(mesh: jax.sharding.Mesh) -> None:
    """Lets the devices of every group that the mesh's axes make reduce together once. A collective.

    On CPUs the first collective of a group breaks off if not all of it is there within half a
    minute, and processes that compile differ by more; later ones wait.
    """
    if jax.process_count() == 1 or mesh.devices.flat[0].platform != "cpu":
        return
    names = [name for name, size in mesh.shape.items() if size > 1]
    for count in range(1, len(names) + 1):
        for axes in itertools.combinations(names, count):
            add = jax.shard_map(
                lambda x, axes=axes: jax.lax.psum(x, axes),
                mesh=mesh, in_specs=jax.P(), out_specs=jax.P(),
            )  # fmt: skip
            program = jax.jit(add).lower(np.float32(1)).compile()
            gather(None)
            jax.block_until_ready(program(np.float32(1)))


def first(decide: Callable[[], Any]) -> Any:
    """The JSON value that `decide` returns on process 0, on every process; no other calls it.

    For what all must see alike, such as what lies in a shared directory, of which another host's
    view may lag behind. A collective. Raises: on process 0, whatever `decide` does.
    """
    return gather(decide() if jax.process_index() == 0 else None)[0]


@contextlib.contextmanager
def together() -> Iterator[None]:
    """What one of several processes raises inside ends all, each with its words and exit code 1.

    Without this the others would wait in their next collective until its heartbeats stop, and then
    be told that the same command goes on. An exit with code 0 or `RESUMABLE` is no failure. A
    collective that breaks off is the death of another process, which the service names by its
    heartbeats when it ends this one too.
    """
    if jax.process_count() == 1:
        yield
        return
    done = threading.Event()
    listener = threading.Thread(target=_listen, args=(done,), daemon=True)
    listener.start()
    try:
        yield
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0, RESUMABLE):
            raise
        if _of_a_death(error):
            print(f"mas_jax: a collective broke off: {_one_line(error)}", file=sys.stderr)
            time.sleep(2 * HEARTBEAT_S)
        done.set()
        _tell(error)
        raise
    finally:
        done.set()
        listener.join()


def _tell(error: BaseException) -> None:
    """Lets the others know; afterwards this process ends without waiting for them again."""
    client = distributed.global_state.client
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        client.key_value_set(f"{FAILED}/{jax.process_index()}", _one_line(error))
        client.wait_at_barrier(FAILED, 1000 * HEARD_S)
    if jax.process_index() == 0:
        time.sleep(LISTEN_S)  # the service is in this process, and its end would abort the others
    atexit.register(_leave)  # before jax's own, which meets the others once more


def _listen(done: threading.Event) -> None:
    """Ends this process once another one has failed."""
    client = distributed.global_state.client
    while not done.wait(LISTEN_S):
        try:
            failed = client.key_value_dir_get(FAILED)
        except jax.errors.JaxRuntimeError:  # the service is gone, which ends this process too
            return
        if failed and not done.is_set():
            for key, text in failed:
                print(f"stopped: process {key.rpartition('/')[2]}: {text}", file=sys.stderr)
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                client.wait_at_barrier(FAILED, 1000 * HEARD_S)
            _leave()


def _leave() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)


def _of_a_death(error: BaseException | None) -> bool:
    """Whether a collective broke off because another process is gone."""
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError) and re.search(
            "Gloo|UNAVAILABLE|DEADLINE_EXCEEDED|[Cc]onnection|coordination service", str(error)
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def _one_line(error: BaseException) -> str:
    """Kind and words of an error, at most 1000 characters; of an exit its words alone."""
    kind = "" if isinstance(error, SystemExit) else f"{type(error).__name__}: "
    return " ".join(f"{kind}{error}".removeprefix("stopped: ").split())[:1000]


# --- what is said of a death ----------------------------------------------------------------------


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
    """Processes that a worker's last words name as dead: those that the coordination service does,
    a number a line after its words, else process 0 where the service, which is in it, is gone."""
    found: set[int] = set()
    for _, rest in re.findall(r"(stopped sending heartbeats\):)\s*\n((?:\S*\d+\s*\n)*)", said):
        found |= {int(re.search(r"\d+$", line)[0]) for line in rest.split()}
    if not found and "Failed to send RPC to coordination service" in said:
        return [0]
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
    command = shlex.join([sys.executable, *sys.argv])
    return (
        f"mas_jax: {who}.\n"
        f"mas_jax: last saved in {workdir}: {steps or 'nothing yet'}.\n"
        f"mas_jax: to go on, start the same command on every host: {command}"
    )
