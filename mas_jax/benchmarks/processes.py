"""Benchmark sides as processes of their own, which answer one line of JSON for each command, and
whole benchmarks as such."""

import json
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).parents[2]
# glibc gives large arrays fresh pages on every allocation; huge pages make that cheap, for both
ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "JAX_PLATFORMS": "cpu"}


def _search_path() -> str:
    """PYTHONPATH of a worker: this checkout first."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


class Worker:
    """One side's process while the `with` block lasts: `python -m module side arguments`.

    python: the interpreter; another one's environment need not have this package installed.
    """

    def __init__(
        self, module: str, side: str, *, python: str = sys.executable, **arguments: object
    ) -> None:
        self._side = side
        self._process = subprocess.Popen(
            [python, "-m", module, side, json.dumps(arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": _search_path()},
        )  # fmt: skip
        self._read()  # until it is ready

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise RuntimeError(
                f"benchmark worker {self._side} ended with code {code}; its error is above "
                "(-9: out of memory)"
            )
        return json.loads(line)

    def ask(self, command: str) -> dict:
        """The worker's answer to one command."""
        self._process.stdin.write(command + "\n")
        return self._read()

    def close(self) -> dict:
        """The worker's last answer."""
        return self.ask("exit")


def answer(**fields: object) -> None:
    """Writes one line of JSON to the parent."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def peak_bytes() -> int:
    """This process's own peak; `ru_maxrss` would carry over the parent's from before the exec."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])


def _tell(function: Callable[..., None], arguments: tuple, told: Connection) -> None:
    """What the process of `apart` does; sends the error that ends it, None if there is none."""
    try:
        function(*arguments)
    finally:  # goes on to be printed
        error = sys.exc_info()[1]
        told.send(None if error is None else f"{type(error).__name__}: {error}")


def apart(function: Callable[..., None], *arguments: object) -> None:
    """Runs a function of a module in a new process, with the benchmarks' environment, to its end.

    Raises: RuntimeError with the error if it fails; its traceback is on the console.
    """
    context = multiprocessing.get_context("spawn")
    hears, told = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(function, arguments, told))
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)  # glibc and jax read it when the process starts
    try:
        process.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    told.close()  # so that a killed process is the end of the pipe
    try:
        error = hears.recv()
    except EOFError:
        error = "killed; -9: out of memory"
    process.join()
    if process.exitcode != 0:
        name = f"{function.__module__}.{function.__qualname__}"
        raise RuntimeError(f"{name} ended with code {process.exitcode}: {error}")
