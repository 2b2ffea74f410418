"""Workers that grade: hard limits, replacement, use from threads and event loops, a clean end."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from conftest import ROOT

from mas_jax.records import FailureKind, Question, WorldError
from mas_jax.rewards.math_sets import make_job
from mas_jax.rewards.math_workers import Graded, Limits, Workers

HOSTILE = "hostile_grading:misbehave"
LIMITS = Limits(cpu_s=1, wall_s=3.0, memory_bytes=2**30, max_chars=10_000)


@pytest.fixture(scope="module")
def workers():
    with Workers(1, limits=LIMITS, target=HOSTILE) as found:
        found.grade("yes")  # what starts up does so here
        yield found


def children() -> set[int]:
    """Processes of this process."""
    listed = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "pid=,args="], capture_output=True, text=True
    )
    lines = [line.split(None, 1) for line in listed.stdout.splitlines()]
    return {int(pid) for pid, args in lines if "math_workers" in args}


@pytest.mark.parametrize(
    ("job", "failure"),
    [
        ("spin", "time"),
        ("sleep", "time"),
        ("hoard", "memory"),
        ("die", "crash"),
        ("raise", "error"),
        ("overflow", "error"),
        ("x" * 20_000, "length"),
    ],
)
def test_what_comes_to_a_limit_is_wrong_and_counted_and_the_next_job_is_graded(
    workers, job, failure
):
    before = workers.counts[failure]
    assert workers.grade(job) == Graded(False, failure)
    assert workers.counts[failure] == before + 1
    assert workers.grade("yes") == Graded(True)
    assert workers.grade("no") == Graded(False)


def test_what_a_grader_prints_is_no_verdict(workers):
    assert workers.grade("print") == Graded(False)
    assert workers.grade("yes") == Graded(True)


def test_no_file_is_written(tmp_path, monkeypatch):
    path = tmp_path / "file"
    monkeypatch.setenv("HOSTILE_FILE", str(path))
    with Workers(1, limits=LIMITS, target=HOSTILE) as workers:
        assert workers.grade("write").failure in ("crash", "error")
    assert not path.exists() or path.read_text() == ""


def test_a_job_does_not_pay_for_what_those_before_it_left(workers):
    workers.grade("yes")
    assert workers.grade("hoard if used") == Graded(True)


def test_other_workers_grade_while_one_hangs():
    with Workers(2, limits=Limits(cpu_s=1, wall_s=6.0), target=HOSTILE) as workers:
        naps = [workers.submit("nap") for _ in range(2)]  # one each: both have started then
        assert [nap.result() for nap in naps] == [Graded(True)] * 2
        hanging = workers.submit("sleep")
        assert [workers.grade("yes").is_correct for _ in range(20)] == [True] * 20
        assert not hanging.done()
        assert hanging.result() == Graded(False, "time")


def test_a_worker_that_dies_between_jobs_costs_none():
    before = children()
    with Workers(1, limits=LIMITS, target=HOSTILE) as workers:
        assert workers.grade("yes") == Graded(True)
        (worker,) = children() - before
        os.kill(worker, signal.SIGKILL)  # as the kernel does when memory is short
        assert workers.grade("yes") == Graded(True)
        assert workers.counts == {"jobs": 2}
        assert worker not in children()


def test_jobs_come_from_threads_and_event_loops_alike(workers):
    found = {}

    def from_thread(name):
        found[name] = workers.grade(name)

    threads = [threading.Thread(target=from_thread, args=(name,)) for name in ("yes", "no")]
    for thread in threads:
        thread.start()

    async def from_loop():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.01)

        ticking = asyncio.ensure_future(tick())
        graded = await asyncio.gather(*map(workers.grade_async, ("yes", "spin", "no")))
        ticking.cancel()
        return graded, ticks

    graded, ticks = asyncio.run(from_loop())
    for thread in threads:
        thread.join()
    assert found == {"yes": Graded(True), "no": Graded(False)}
    assert graded == [Graded(True), Graded(False, "time"), Graded(False)]
    assert ticks > 5  # the loop ran on while a worker spun for a second


def test_a_waiter_that_is_cancelled_takes_no_other_with_it(workers):
    async def main():
        hanging = asyncio.ensure_future(workers.grade_async("spin"))
        waiting = asyncio.ensure_future(workers.grade_async("no"))
        await asyncio.sleep(0.05)
        hanging.cancel()
        waiting.cancel()
        return await workers.grade_async("yes")

    assert asyncio.run(main()) == Graded(True)


def test_signals_of_the_process_that_asks_stay_as_they_are(workers):
    before = [signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGXCPU)]
    workers.grade("spin")
    after = [signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGXCPU)]
    assert after == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_closing_finishes_what_is_queued_and_leaves_no_process():
    there = children()
    workers = Workers(2, limits=LIMITS, target=HOSTILE)
    futures = [workers.submit("yes") for _ in range(10)]
    workers.close()
    assert [future.result().is_correct for future in futures] == [True] * 10
    assert workers.counts == {"jobs": 10}
    assert children() <= there
    workers.close()
    with pytest.raises(RuntimeError, match="closed"):
        workers.submit("yes")


def test_an_error_is_not_kept_waiting_for_what_is_queued():
    with pytest.raises(KeyError), Workers(1, limits=LIMITS, target=HOSTILE) as workers:
        first = workers.submit("yes")
        queued = [workers.submit("spin") for _ in range(500)]
        first.result()
        raise KeyError
    assert sum(future.cancelled() for future in queued) >= 498


def test_workers_end_with_a_process_that_never_closed_them():
    code = (
        "from mas_jax.rewards.math_workers import Workers\n"
        f"workers = Workers(1, target={HOSTILE!r})\n"
        "workers.grade('yes')\n"
        "print(workers._threads[0].name)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_worker_that_cannot_start_is_a_failure_of_the_world():
    with Workers(1, limits=LIMITS, target="hostile_grading:nothing") as workers:
        with pytest.raises(WorldError, match=r"did not start.*nothing") as caught:
            workers.grade("yes")
        assert caught.value.kind == FailureKind.REWARD
        assert workers.counts == {}


def test_no_workers_are_an_error():
    with pytest.raises(ValueError, match="at least 1"):
        Workers(0)


# what models have written, and worse; each takes a real grader a limit, or is simply wrong
ENDLESS = [r"9^{9^{9^{9}}}", "99999999999!", r"\binom{10^{9}}{5\cdot 10^{8}}", "(" * 4000 + "1"]
HARMLESS = [
    r"\frac{" * 100 + "1" + r"}{2}" * 100,
    "1" * 9000,
    r"\prod_{k=1}^{100000} k",
    "__import__('os')._exit(0)",
    "\x00",
]


@pytest.mark.parametrize("grader", ["first", "second"])
def test_a_hostile_expression_costs_one_verdict(grader):
    question = Question("u", "math", "?", ("5",))
    with Workers(1, limits=Limits(cpu_s=1)) as workers:
        for text in ENDLESS:
            assert workers.grade(make_job(question, text, grader=grader)) == Graded(False, "time")
        for text in HARMLESS:
            assert not workers.grade(make_job(question, text, grader=grader)).is_correct
        assert workers.grade(make_job(question, "x = 5", grader=grader)) == Graded(True)
        assert workers.counts["time"] >= len(ENDLESS)
        assert workers.counts["jobs"] == len(ENDLESS) + len(HARMLESS) + 1


def test_the_time_limit_is_of_work_not_of_waiting_for_a_processor():
    # three spinning workers share two cores or one: each still gets its second, so that verdicts
    # do not depend on what else a machine does
    with Workers(3, limits=Limits(cpu_s=1, wall_s=120.0), target=HOSTILE) as workers:
        start = time.process_time()
        graded = [workers.submit("spin") for _ in range(3)]
        assert [one.result() for one in graded] == [Graded(False, "time")] * 3
        assert time.process_time() - start < 1  # nor is it the asking process that works
