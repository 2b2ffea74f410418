"""Processes that grade, with hard limits of time and memory, so that an expression without end
costs one wrong verdict and one count.

A worker is `python -m mas_jax.rewards.math_workers`, started afresh and never forked: it reads a
job a line from its stdin and answers a line. Its CPU seconds and its memory are the kernel's to
limit (memory on Linux only), the time on the wall is watched from outside. No signal is set in the
process that asks, so that jobs may come from any thread and any event loop.
Must not know: what is graded, and how.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import importlib
import json
import os
import queue
import resource
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from mas_jax.records import FailureKind, WorldError

TARGET = "mas_jax.rewards.math_sets:grade"
START_S = 120.0  # until a worker has loaded what it needs, on a machine that does much else
READY = b"ready\n"
FAILURES = ("time", "memory", "crash", "error", "length")  # kinds of `Graded.failure`


@dataclass(frozen=True)
class Limits:
    """What one job may use. cpu_s: seconds of a processor, whole ones; wall_s: seconds that pass,
    for a job that waits; memory_bytes: address space of a worker; max_chars: of a job as JSON."""

    cpu_s: int = 5
    wall_s: float = 60.0
    memory_bytes: int = 2**30
    max_chars: int = 10_000


@dataclass(frozen=True)
class Graded:
    """A verdict. failure: why there was none and False stands for it, "" where there was one:
    "time", "memory", "crash" (the worker died), "error" (its target raised) or "length"."""

    is_correct: bool
    failure: str = ""


class Workers:
    """Grades jobs in processes of their own, `with Workers(2) as workers: …`.

    target: "module:function", which takes a job, a JSON value, and returns a bool; it is called in
    the worker. counts: jobs done, under "jobs", failures by kind, and what `note` is told. A worker
    that dies or is ended is replaced. Starts on the first job.
    """

    def __init__(self, count: int, *, limits: Limits = Limits(), target: str = TARGET) -> None:
        if count < 1:
            raise ValueError(f"{count} workers: want at least 1")
        self.limits, self.target = limits, target
        self.counts: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._num = count
        self._threads: list[threading.Thread] = []
        self._closed = False

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:  # nobody waits for what is queued
            with contextlib.suppress(queue.Empty):
                while True:
                    self._jobs.get_nowait()[1].cancel()
        self.close()

    def note(self, kind: str) -> None:
        """Counts what made no job, such as a solution without an answer."""
        with self._lock:
            self.counts[kind] += 1

    def submit(self, job: Any) -> "concurrent.futures.Future[Graded]":
        """Queues a job. The future raises WorldError of kind REWARD if no worker can be started.

        Raises: RuntimeError after `close`.
        """
        future: concurrent.futures.Future[Graded] = concurrent.futures.Future()
        text = json.dumps(job)
        with self._lock:
            if self._closed:
                raise RuntimeError("these workers are closed; make new ones")
            if not self._threads:
                self._threads = [
                    threading.Thread(target=self._serve, daemon=True) for _ in range(self._num)
                ]
                for thread in self._threads:
                    thread.start()
            self._jobs.put((text, future))
        return future

    def grade(self, job: Any) -> Graded:
        """The verdict on a job, waited for. Raises: as `submit` and its future."""
        return self.submit(job).result()

    async def grade_async(self, job: Any) -> Graded:
        """The verdict on a job, while others of the event loop run. Raises: as `grade`."""
        return await asyncio.wrap_future(self.submit(job))

    def close(self) -> None:
        """Ends the workers when the jobs that are queued are done. May be called again."""
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        """One thread's life: a worker at a time, jobs one after another."""
        process = None
        while (taken := self._jobs.get()) is not None:
            text, future = taken
            if not future.set_running_or_notify_cancel():
                continue
            try:
                graded, process = self._grade(text, process)
            except Exception as error:  # the caller's to see
                future.set_exception(error)
                process = None
                continue
            with self._lock:
                self.counts["jobs"] += 1
                if graded.failure:
                    self.counts[graded.failure] += 1
            future.set_result(graded)
        if process is not None:
            process.end()

    def _grade(self, text: str, process: "_Process | None") -> tuple[Graded, "_Process | None"]:
        """The verdict, and the worker if it lives. What a used worker failed at for want of memory
        or life is tried once more by a fresh one, so that no job pays for those before it."""
        if len(text) > self.limits.max_chars:
            return Graded(False, "length"), process
        while True:
            if process is None:
                process = _Process(self.target, self.limits)
            is_fresh = process.jobs == 0
            graded = process.ask(text)
            if graded.failure in ("", "error"):
                return graded, process
            process.end()
            process = None
            if is_fresh or graded.failure == "time":
                return graded, None


class _Process:
    """One worker. jobs: how many it was asked."""

    def __init__(self, target: str, limits: Limits) -> None:
        self.jobs, self._limits = 0, limits
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mas_jax.rewards.math_workers", target,
             json.dumps(dataclasses.asdict(limits))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,  # an interrupt at the terminal is not for it
            env=os.environ | {
                "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
                "PYTHONHASHSEED": "0",  # sympy's orders depend on it
            },
        )  # fmt: skip
        if self._line(START_S) != READY:
            words = self._last_words()
            raise WorldError(FailureKind.REWARD, f"a grading process did not start: {words}")

    def ask(self, text: str) -> Graded:
        """The verdict on a job, or which limit kept it from one."""
        self.jobs += 1
        try:
            self._process.stdin.write(text.encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            return Graded(False, "crash")
        answer = self._line(self._limits.wall_s)
        if answer is None:
            return Graded(False, "time")
        if not answer.endswith(b"\n"):  # it died: of its CPU time, or otherwise
            return Graded(False, "time" if self._ended_by_cpu() else "crash")
        return Graded(**json.loads(answer))

    def end(self) -> None:
        """Kills it, whatever it does, and waits until it is gone."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError):  # a job that it never read
                stream.close()

    def _line(self, wait_s: float) -> bytes | None:
        """A line of its stdout; without its end if the process ended, None if it takes too long."""
        found, last = b"", time.monotonic() + wait_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not found.endswith(b"\n"):
                if not selector.select(max(0.0, last - time.monotonic())):
                    return None
                piece = os.read(self._process.stdout.fileno(), 65536)
                if not piece:
                    return found
                found += piece
        return found

    def _ended_by_cpu(self) -> bool:
        return self._process.wait() == -signal.SIGXCPU

    def _last_words(self) -> str:
        self._process.kill()
        _, errors = self._process.communicate()
        return " ".join(errors.decode(errors="replace").split()[-60:])


def _limit_memory(memory_bytes: int) -> None:
    """Of address space; nothing is written into files, a core least of all."""
    if sys.platform == "linux":  # elsewhere the kernel refuses or ignores it
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _limit_cpu(cpu_s: int) -> None:
    """From now on: the kernel ends the process when it has used so many seconds more."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    last = int(used.ru_utime + used.ru_stime) + cpu_s + 1  # whole seconds, and those begun count
    resource.setrlimit(resource.RLIMIT_CPU, (last, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _verdict(function, job: Any) -> Mapping:
    try:
        return dataclasses.asdict(Graded(bool(function(job))))
    except MemoryError:
        return dataclasses.asdict(Graded(False, "memory"))
    except Exception:  # whatever sympy raises on what a model wrote
        return dataclasses.asdict(Graded(False, "error"))


def _say(answers: TextIO, line: str) -> None:
    answers.write(line)
    answers.flush()


def main() -> None:
    """A worker's life: jobs from stdin until it is closed."""
    limits = Limits(**json.loads(sys.argv[2]))
    # what a parser prints must not be taken for an answer
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    module, _, name = sys.argv[1].partition(":")
    function = getattr(importlib.import_module(module), name)
    _limit_memory(limits.memory_bytes)
    _say(answers, READY.decode())
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # nobody reads it from here on
    for line in sys.stdin:
        job = json.loads(line)
        _limit_cpu(limits.cpu_s)
        _say(answers, json.dumps(_verdict(function, job)) + "\n")


if __name__ == "__main__":
    main()
