"""Problems to train on: those that an Actor solves sometimes, in a seeded order.

The Actor and the grader are injected: whether the one is an endpoint or a local policy makes no
difference here. What is known of each problem stands in a file, a record a line, from which an
interrupted selection goes on. Must not know: prompts, engines, endpoints.
"""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mas_jax.agents.agent import run_all
from mas_jax.agents.rollout import TooManyFailures
from mas_jax.data import problems
from mas_jax.data.questions import words
from mas_jax.records import Problem, Question, WorldError

FORMAT = 1
MIN_FAILURES = 10  # fewer are an endpoint's bad moment

Ask = Callable[[Problem, int], Awaitable[str]]  # (problem, number of the sample) -> the solution
Grade = Callable[[Problem, tuple[str, ...]], Awaitable[tuple[float, ...]]]


@dataclass(frozen=True)
class Criteria:
    """Which problems: of these levels, of which a share in (0, most] of the samples is right; the
    first `count` in the order that the seed makes. METHODS §3.2 infers all of it; how the authors
    chose their 1,000 hard problems is not known."""

    levels: tuple[int, ...] = (3, 4, 5)
    samples: int = 8
    most: float = 0.5
    count: int = 1000
    seed: int = 0

    def takes(self, right: int) -> bool:
        """Whether a problem with so many right samples is wanted."""
        return 0 < right <= self.most * self.samples


@dataclass(frozen=True)
class Selection:
    """problems: in order, with how many samples of each were right. looked_at: problems that have a
    record; failed: of those that this run asked, which have none since the world failed."""

    problems: tuple[tuple[Problem, int], ...]
    looked_at: int
    failed: int


def check(criteria: Criteria) -> None:
    """Raises: ValueError for criteria that no problem could meet, naming the value."""
    if not criteria.levels or criteria.samples < 1 or criteria.count < 1:
        raise ValueError(
            f"levels={criteria.levels}, samples={criteria.samples}, count={criteria.count}; want "
            "at least one of each"
        )
    if not 0 < criteria.most <= 1 or criteria.most * criteria.samples < 1:
        raise ValueError(
            f"most={criteria.most} of samples={criteria.samples}: no number of right samples is "
            "above 0 and within it; raise one of the two"
        )


def in_order(found: Sequence[Problem], criteria: Criteria) -> tuple[Problem, ...]:
    """The problems of the wanted levels in the seed's order, which nothing else decides but which
    problems there are.

    Raises: ValueError if there are none.
    """
    wanted = sorted((p for p in found if p.level in criteria.levels), key=lambda p: p.uid)
    if not wanted:
        levels = sorted({problem.level for problem in found})
        raise ValueError(f"no problem has a level of {criteria.levels}; there are {levels}")
    order = np.random.default_rng(criteria.seed).permutation(len(wanted))
    return tuple(wanted[index] for index in order)


def asked_nowhere_else(found: Sequence[Problem], others: Iterable[Question]) -> tuple[Problem, ...]:
    """The problems that none of the others, such as test problems, asks in the same words."""
    elsewhere = {words(other.text) for other in others}
    return tuple(problem for problem in found if words(problem.text) not in elsewhere)


class Records:
    """How often the Actor was right, by problem: a JSONL file with a header that says which Actor.

    actor: JSON values; all that solutions depend on. samples: of each problem. A line that a kill
    cut is removed. Raises: ValueError for the file of another Actor or one that is no such file.
    """

    def __init__(self, path: Path, *, actor: Mapping, samples: int) -> None:
        self.path, self.right = path, {}
        header = {"format": FORMAT, "actor": dict(actor), "samples": samples}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        whole = path.read_bytes().split(b"\n")[:-1]
        os.truncate(path, sum(len(line) + 1 for line in whole))
        if not whole:
            path.write_text(json.dumps(header) + "\n")
            return
        try:
            first, *records = map(json.loads, whole)
            self.right = {record["problem"]: record["right"] for record in records}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no file of pass counts ({error!r}); delete it") from error
        if first != header:
            raise ValueError(
                f"{path} is of {first}, not of {header}; give another path, or delete the file"
            )

    def add(self, problem: Problem, right: int) -> None:
        """Notes a problem, on disk when this returns."""
        with self.path.open("a") as file:
            file.write(json.dumps({"problem": problem.uid, "right": right}) + "\n")
        self.right[problem.uid] = right


async def select(
    found: Sequence[Problem],
    ask: Ask,
    grade: Grade,
    records: Records,
    criteria: Criteria,
    *,
    concurrency: int,
    failure_frac: float,
    tell: Callable[[int, int, int], None] = lambda *_: None,
) -> Selection:
    """Asks the Actor for samples of one problem after another until enough are selected.

    The selection is that of the first problems in order that meet the criteria, so it does not
    depend on concurrency or interruptions; some problems behind the last may be asked as well.
    concurrency: problems at once. tell(selected, looked at, failed): called after each problem.
    Raises: TooManyFailures once more than failure_frac of this run's problems failed, and
    MIN_FAILURES; what is recorded stays. ValueError as `check` and `in_order`.
    """
    check(criteria)
    ordered = in_order(found, criteria)
    front = _Front(ordered, records, criteria)
    asked, failures = 0, []
    waiting = iter(ordered)

    async def _look_at(problem: Problem) -> None:
        nonlocal asked
        try:
            records.add(problem, await _count_right(problem, ask, grade, criteria.samples))
        except WorldError as error:
            failures.append(str(error))
            front.failed.add(problem.uid)
        asked += 1
        front.advance()
        tell(len(front.selected), len(records.right), len(failures))
        if len(failures) >= MIN_FAILURES and len(failures) > failure_frac * asked:
            raise TooManyFailures(
                f"{len(failures)} of {asked} problems failed, such as: {failures[0]}; "
                f"{len(records.right)} are in {records.path}, and the same command goes on"
            )

    async def _worker() -> None:
        for problem in waiting:  # shared: each is drawn once
            if front.is_done():
                return
            if problem.uid not in records.right:
                await _look_at(problem)

    front.advance()
    await run_all(_worker() for _ in range(concurrency))
    chosen = tuple((problem, records.right[problem.uid]) for problem in front.selected)
    return Selection(chosen[: criteria.count], len(records.right), len(failures))


class _Front:
    """How far the order is known without a gap, and what is selected up to there."""

    def __init__(self, ordered: Sequence[Problem], records: Records, criteria: Criteria) -> None:
        self.selected: list[Problem] = []
        self.failed: set[str] = set()
        self._ordered, self._records, self._criteria = ordered, records, criteria
        self._at = 0

    def advance(self) -> None:
        """Takes in what has become known."""
        while self._at < len(self._ordered):
            problem = self._ordered[self._at]
            right = self._records.right.get(problem.uid)
            if right is None and problem.uid not in self.failed:
                return
            if right is not None and self._criteria.takes(right):
                self.selected.append(problem)
            self._at += 1

    def is_done(self) -> bool:
        """Whether enough are selected."""
        return len(self.selected) >= self._criteria.count


async def _count_right(problem: Problem, ask: Ask, grade: Grade, samples: int) -> int:
    """Right ones among the Actor's samples. Raises: the first WorldError, once all have ended."""
    asked = await asyncio.gather(
        *(ask(problem, number) for number in range(samples)), return_exceptions=True
    )
    for solution in asked:
        if isinstance(solution, BaseException):
            raise solution
    return round(sum(await grade(problem, tuple(asked))))


def write(selection: Selection, path: Path, criteria: Criteria) -> None:
    """Writes the selected problems as training reads them, each with its pass rate."""
    problems.write_jsonl(
        path,
        (
            problems.as_line(problem, {"actor_right": right, "actor_samples": criteria.samples})
            for problem, right in selection.problems
        ),
    )
