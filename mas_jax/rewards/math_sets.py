"""Whether a problem is solved: what counts as right in each set of problems, and both graders side
by side.

Integers of AIME, AMC and GSM8K are compared exactly, numbers of Minerva without their units and by
relative size, lists of OlympiadBench without order and its one rounded answer within its tolerance;
all else is `is_equivalent`'s. Must not know: where solutions come from, models.
"""

import asyncio
import dataclasses
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from mas_jax.records import Problem, Question
from mas_jax.rewards import math_equal
from mas_jax.rewards.math_answer import graded_text, is_equivalent
from mas_jax.rewards.math_workers import Workers

GRADERS = ("first", "second")

_MAX_DIGITS = 100  # of a number that is read as one
_THOUSANDS = re.compile(r"\{,\}|,\\!\s*|,")
_EXACT = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?|[+-]?\d+(?:\.\d*)?|[+-]?\.\d+")
_TIMES_TEN = r"(?:\\times|\\cdot|\u00d7|\*)\s*10\s*\^\s*"
_QUANTITY = re.compile(
    r"([+-]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*|\.\d+))(?:[eE]([+-]?\d+)|"
    rf"\s*{_TIMES_TEN}(?:\{{\s*([+-]?\d+)\s*\}}|([+-]?\d)))?"
)
_POWER = re.compile(r"([+-]?)10\s*\^\s*(?:\{\s*([+-]?\d+)\s*\}|(\d))")
# of a unit behind a number: exponents and commands, and what remains then
_EXPONENT = re.compile(r"\^\s*(?:\{[^{}]*\}|[+-]?\d|\\circ|\\prime)")
_UNIT_COMMAND = re.compile(
    r"\\(?:mathrm|text|textrm|textbf|mbox|operatorname|rm)\s*\{[^{}]*\}|\\[,;:! %]"
    r"|\\(?:quad|qquad|cdot|mu|Omega|AA|odot|circ|prime)(?![A-Za-z])|_\s*\{?\s*\\odot\s*\}?"
)
_UNIT = re.compile(r"[A-Za-z\u00c5\u00b5\u03a9\u00b0%\s~/.*()]*")
_SEPARATOR = re.compile(
    r"\\(?:text|mbox|mathrm)\s*\{\s*,?\s*(?:and|or)\s*\}|\s(?:and|or)\s|\\q?quad|;"
)


@dataclass(frozen=True)
class Job:
    """A prediction to be graded, as workers get it. grader: of GRADERS; the rest as `Problem`."""

    dataset: str
    golds: Sequence[str]
    prediction: str
    tolerance: float = 0.0
    is_multiple: bool = False
    grader: str = "first"


def make_job(problem: Question, prediction: str, *, grader: str = "first") -> dict:
    """The job of grading a prediction, as JSON values. A question that is no `Problem` has no rule
    but its dataset's. Raises: ValueError for another grader."""
    if grader not in GRADERS:
        raise ValueError(f"grader={grader!r}; there are {GRADERS}")
    is_problem = isinstance(problem, Problem)
    job = Job(
        dataset=problem.dataset,
        golds=list(problem.golden_answers),
        prediction=prediction,
        tolerance=problem.tolerance if is_problem else 0.0,
        is_multiple=problem.is_multiple if is_problem else False,
        grader=grader,
    )
    return dataclasses.asdict(job)


def grade(job: Mapping) -> bool:
    """What the workers call: the verdict of a job's grader."""
    found = Job(**job)
    return is_solved(found) if found.grader == "first" else second_opinion(found)


def is_solved(job: Job) -> bool:
    """Whether a prediction is right by its set's rule, for any of the golden answers."""
    rule = RULES.get(job.dataset, _by_value)
    return any(rule(gold, job.prediction, job) for gold in job.golds)


def second_opinion(job: Job) -> bool:
    """The verdict of `math_equal` alone, without the set's rule, as published tables have it."""
    return any(math_equal.math_equal(gold, job.prediction) for gold in job.golds)


def _by_value(gold: str, prediction: str, job: Job) -> bool:
    return is_equivalent(gold, prediction)


def exact(text: str) -> Fraction | None:
    """The value of a plain decimal number such as "033", "33.0", "1,000" or "\\$10{,}000", None for
    all else, and above 100 digits."""
    plain = _THOUSANDS.sub(",", text.strip().strip("$").removeprefix("\\$").strip().rstrip("."))
    if len(plain) > _MAX_DIGITS or not _EXACT.fullmatch(plain):
        return None
    return Fraction(plain.replace(",", "").rstrip("."))


def _by_integer(gold: str, prediction: str, job: Job) -> bool:
    """AIME, AMC, GSM8K: two plain numbers by value, so that 033 is 33, and neither 3300 nor 33.001
    is; what is written otherwise as any answer."""
    numbers = exact(gold), exact(prediction)
    return numbers[0] == numbers[1] if None not in numbers else is_equivalent(gold, prediction)


def quantity(text: str) -> float | None:
    """The value of a number with or without a unit, which is not looked at: "4.5e33",
    "4.5 \\times 10^{33} \\text{ erg/s}", "1.6 cm", "-1./3". None for all else."""
    plain = text.strip().strip("$").strip().rstrip(".")
    if power := _POWER.match(plain):
        number, rest = f"{power[1]}1e{power[2] or power[3]}", plain[power.end() :]
    elif match := _QUANTITY.match(plain):
        number = f"{match[1].replace(',', '')}e{match[2] or match[3] or match[4] or 0}"
        rest = plain[match.end() :]
    else:
        return math_equal.number(math_equal.normalise(text))
    if not _is_unit(rest):
        return math_equal.number(math_equal.normalise(text))
    value = float(number)
    return value if math.isfinite(value) else None


def _is_unit(rest: str) -> bool:
    """Whether what stands behind a number is a unit or nothing; in "4t" or "2 \\pi" it is not."""
    if rest[:1].isalpha():
        return False
    return bool(_UNIT.fullmatch(_UNIT_COMMAND.sub(" ", _EXPONENT.sub("", rest))))


def _by_quantity(gold: str, prediction: str, job: Job) -> bool:
    """Minerva: numbers within 1e-4 of the answer's size, the tolerance of the field's grader, since
    most answers are physical quantities from 1e-27 to 1e45; units are not compared. Golden answers
    that are no numbers hold numpy's names and stray dollar signs, which LaTeX does not."""
    numbers = quantity(gold), quantity(prediction)
    if None not in numbers and not gold.strip()[-1].isalpha():  # 7.6 Z has a variable, no unit
        return math.isclose(*numbers, rel_tol=math_equal.TOLERANCE)
    one, other = (text.replace("np.", "\\").replace("$", "") for text in (gold, prediction))
    return is_equivalent(one, other)


def answers(text: str) -> list[str]:
    """The answers that a text lists: between commas, semicolons, "and" and "or" that stand in no
    brackets, without braces around the whole; what holds a \\pm is two."""
    plain = text.replace("$", "").strip().rstrip(".").strip()
    inside = re.fullmatch(r"\\(?:left\s*\\)?\{(.*?)(?:\\right\s*)?\\\}", plain, re.DOTALL)
    plain = _SEPARATOR.sub(",", inside[1] if inside else plain)
    found = []
    for part in math_equal.split(plain, ","):
        signs = ("+", "-") if "\\pm" in part else ("",)
        found += [re.sub(r"\\pm(?![a-z])", sign, part).strip() for sign in signs]
    return found


def _by_list(gold: str, prediction: str, job: Job) -> bool:
    """OlympiadBench: several answers in any order, each once; a number within the tolerance, which
    is absolute, as its judge has it; else by value, without the unit.

    Source: OpenBMB/OlympiadBench, its scoring judge; there too a list of another length is wrong.
    """
    wanted = answers(gold)
    if job.is_multiple and len(wanted) > 1:
        return math_equal.unordered(wanted, answers(prediction), _same)
    numbers = quantity(gold), quantity(prediction)
    if job.tolerance and None not in numbers:
        # 1e-9 of the size: 4.3 - 4.2 is a little more than 0.1 in floats
        slack = job.tolerance + 1e-9 * abs(numbers[0])
        return abs(numbers[0] - numbers[1]) <= slack
    return is_equivalent(gold.replace("$", ""), prediction.replace("$", ""))


def _same(gold: str, prediction: str) -> bool:
    return gold.replace(" ", "") == prediction.replace(" ", "") or is_equivalent(gold, prediction)


Rule = Callable[[str, str, Job], bool]
RULES: dict[str, Rule] = {
    "aime24": _by_integer,
    "amc23": _by_integer,
    "amc83": _by_integer,
    "gsm8k": _by_integer,
    "minerva_math": _by_quantity,
    "olympiadbench": _by_list,
}


def answer_reward(workers: Workers) -> Callable[..., Awaitable]:
    """A reward function of answers, for `World`: 1.0 where one is right by its set's rule, else
    0.0, also for "" or where grading came to a limit; the workers' counts say how often, "no
    answer" for ""."""

    async def _reward(question: Question, predictions: tuple[str, ...]) -> tuple[float, ...]:
        async def _one(prediction: str) -> float:
            if not prediction:
                workers.note("no answer")
                return 0.0
            return float((await workers.grade_async(make_job(question, prediction))).is_correct)

        return tuple(await asyncio.gather(*map(_one, predictions)))

    return _reward


def solution_reward(workers: Workers, *, window: int = 0) -> Callable[..., Awaitable]:
    """As `answer_reward`, of whole solutions, whose last box is the answer. window: as in
    `graded_text`."""
    by_answer = answer_reward(workers)

    async def _reward(question: Question, solutions: tuple[str, ...]) -> tuple[float, ...]:
        found = (graded_text(solution, window=window) or "" for solution in solutions)
        return await by_answer(question, tuple(found))

    return _reward


def vote_equality(workers: Workers) -> Callable[[str, str], Awaitable[bool]]:
    """Whether two answers are one in a vote: equal as plain numbers or as written, else
    `is_equivalent` either way, since an equation x = 5 is answered by 5; a limit of grading is no.
    A set's own rule is not asked: it knows which of the two is right."""

    async def _is_same(first: str, second: str) -> bool:
        numbers = exact(first), exact(second)
        if first == second or None not in numbers:
            return first == second or numbers[0] == numbers[1]
        for gold, prediction in ((first, second), (second, first)):
            job = dataclasses.asdict(Job("", (gold,), prediction))
            if (await workers.grade_async(job)).is_correct:
                return True
        return False

    return _is_same


def second_grader(workers: Workers) -> Callable[[Question, str], Awaitable[bool]]:
    """The verdict of the second grader on an answer; a limit of grading is no."""

    async def _is_right(question: Question, prediction: str) -> bool:
        return (
            await workers.grade_async(make_job(question, prediction, grader="second"))
        ).is_correct

    return _is_right


@dataclass(frozen=True)
class Opinions:
    """What both graders say of one prediction."""

    question: str
    golds: tuple[str, ...]
    prediction: str
    first: bool
    second: bool


@dataclass(frozen=True)
class Agreement:
    """How many predictions both graders, one, or none take as right, and which they differ on."""

    both: int
    neither: int
    only_first: tuple[Opinions, ...]
    only_second: tuple[Opinions, ...]

    def text(self, *, examples: int) -> str:
        """Counts, and so many examples of each kind of disagreement, as lines."""
        only = {"first": self.only_first, "second": self.only_second}
        total = self.both + self.neither + sum(map(len, only.values()))
        lines = [
            f"graders agree on {self.both + self.neither} of {total}: right {self.both}, wrong "
            f"{self.neither}; only the first says right {len(self.only_first)}, only the second "
            f"{len(self.only_second)}"
        ]
        for name, found in only.items():
            for one in found[:examples]:
                lines.append(
                    f"  only the {name}: {one.question}: {' or '.join(one.golds)!r:.80} against "
                    f"{one.prediction!r:.80}"
                )
        return "\n".join(lines)


def agreement(opinions: Iterable[Opinions]) -> Agreement:
    """Counts and lists where the graders differ."""
    found: dict[tuple[bool, bool], list[Opinions]] = {}
    for one in opinions:
        found.setdefault((one.first, one.second), []).append(one)
    return Agreement(
        both=len(found.get((True, True), ())),
        neither=len(found.get((False, False), ())),
        only_first=tuple(found.get((True, False), ())),
        only_second=tuple(found.get((False, True), ())),
    )


async def ask_both(problem: Question, prediction: str, workers: Workers) -> Opinions:
    """Both graders' verdicts on a prediction; a limit of either costs its own verdict alone."""
    first, second = await asyncio.gather(
        *(workers.grade_async(make_job(problem, prediction, grader=name)) for name in GRADERS)
    )
    return Opinions(
        problem.uid, problem.golden_answers, prediction, first.is_correct, second.is_correct
    )
