"""Toy mathematics: problems of two or three steps with numbers from 0 to 12, and their language.

Somebody has a number, and each step's verb says what becomes of it: "mira has 7 then gains 5 then
lends 3 , how many". Four operations have four clear verbs and two obscure ones each: a reader who
takes an obscure verb for another operation computes well and is wrong, until somebody says which
operation it is. No result leaves 0 to 12, and a reader's that would stops there. Unlike those of
modular arithmetic, which a model of a million parameters did not learn in 1,500 updates, results
grow and fall with what they are computed from. All words are single tokens, a boxed number too.
Must not know: prompts, who reads or computes.
"""

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mas_jax.data.tokenizer import WordTokenizer
from mas_jax.data.world_text import CHAT_ROLES
from mas_jax.records import Question

LARGEST = 12
NUMBERS = tuple(map(str, range(LARGEST + 1)))
OPERATIONS = ("plus", "minus", "times", "from")
# operation -> its verbs: first the clear ones, then the obscure ones
_CLEAR, _OBSCURE = 4, 2
VERBS: dict[str, tuple[str, ...]] = {
    "plus": ("gains", "finds", "adds", "receives", "accrues", "inherits"),
    "minus": ("loses", "spends", "drops", "sells", "lends", "waives"),
    "times": ("multiplies", "repeats", "copies", "stacks", "scales", "compounds"),
    "from": ("reverses", "completes", "mirrors", "inverts", "offsets", "pledges"),
}
# of an operation's number, first and last
RANGES = {"plus": (1, 6), "minus": (1, 6), "times": (2, 3), "from": (6, 12)}
OPERATION_OF = {verb: operation for operation, verbs in VERBS.items() for verb in verbs}
OBSCURE = tuple(verb for verbs in VERBS.values() for verb in verbs[_CLEAR:])
NAMES = ("mira", "olan", "petra", "quill", "rosa", "sven", "tomas", "ulla", "vera", "wim", "xeno",
         "yara")  # fmt: skip
# of problems, solutions, hints and comments
OTHER_WORDS = ("has", "then", ",", "how", "many", "is", ";", "|", "right", "think", "first", "read",
               "it", "twice")  # fmt: skip
SPLITS = ("train", "validation", "test")

_PROBLEM = re.compile(r"(?P<name>\w+) has (?P<start>\d+)(?P<steps>(?: then \w+ \d+)+) , how many")
_STEP = re.compile(r" then (\w+) (\d+)")


@dataclass(frozen=True)
class Step:
    """One operation with its number."""

    operation: str
    number: int


def compute(operation: str, value: int, number: int) -> int:
    """`value operation number`, no less than 0 and no more than LARGEST; "from" takes the value
    from the number. Raises: ValueError for another operation."""
    return min(max(_unbounded(operation, value, number), 0), LARGEST)


def _unbounded(operation: str, value: int, number: int) -> int:
    match operation:
        case "plus":
            return value + number
        case "minus":
            return value - number
        case "times":
            return value * number
        case "from":
            return number - value
    raise ValueError(f"{operation!r} is no operation; choose from {OPERATIONS}")


@dataclass(frozen=True)
class Problem:
    """A problem: who has what number at first, and each step's verb and number."""

    name: str
    start: int
    acts: tuple[tuple[str, int], ...]

    @property
    def text(self) -> str:
        """The wording."""
        steps = "".join(f" then {verb} {number}" for verb, number in self.acts)
        return f"{self.name} has {self.start}{steps} , how many"

    @property
    def steps(self) -> tuple[Step, ...]:
        """What the verbs mean."""
        return tuple(Step(OPERATION_OF[verb], number) for verb, number in self.acts)

    @property
    def answer(self) -> int:
        """The number at the end."""
        return results(self.start, self.steps)[-1]


def results(start: int, steps: Sequence[Step]) -> list[int]:
    """The number at first and after each step."""
    values = [start]
    for step in steps:
        values.append(compute(step.operation, values[-1], step.number))
    return values


def parse_problem(text: str) -> Problem | None:
    """The problem of a wording; None for another text."""
    match = _PROBLEM.fullmatch(text)
    if match is None:
        return None
    acts = tuple((verb, int(number)) for verb, number in _STEP.findall(match["steps"]))
    if any(verb not in OPERATION_OF or number > LARGEST for verb, number in acts):
        return None
    return Problem(match["name"], int(match["start"]), acts)


def draw_problem(rng: np.random.Generator) -> Problem:
    """A problem of two or three steps, whose results all lie between 0 and LARGEST; a step that
    would leave them is drawn again."""
    value = start = int(rng.integers(LARGEST + 1))
    acts, num_steps = [], rng.integers(2, 4)
    while len(acts) < num_steps:
        operation = OPERATIONS[rng.integers(len(OPERATIONS))]
        verb = VERBS[operation][rng.integers(_CLEAR + _OBSCURE)]
        first, last = RANGES[operation]
        number = int(rng.integers(first, last + 1))
        result = _unbounded(operation, value, number)
        if 0 <= result <= LARGEST:
            acts.append((verb, number))
            value = result
    return Problem(NAMES[rng.integers(len(NAMES))], start, tuple(acts))


def draw_problems(seed: int, count: int, *, without: Collection[str] = ()) -> list[Problem]:
    """`count` different problems of a seed, none of whose texts is in `without`."""
    rng, found = np.random.default_rng(seed), {}
    while len(found) < count:
        problem = draw_problem(rng)
        if problem.text not in without:
            found.setdefault(problem.text, problem)
    return list(found.values())


@dataclass(frozen=True)
class Arithmetic:
    """The problems of a seed as questions, by split; no text is in two of them."""

    seed: int
    questions: Mapping[str, tuple[Question, ...]]

    @property
    def fingerprint(self) -> str:
        """Digest of all problems with their answers, in order."""
        rows = [[s, q.text, q.golden_answers] for s in SPLITS for q in self.questions[s]]
        return hashlib.blake2b(json.dumps(rows).encode(), digest_size=16).hexdigest()


def make_arithmetic(seed: int, *, train: int, held_out: int) -> Arithmetic:
    """`train` problems to train on, and `held_out` each to validate and to test on.

    Datasets are named for the number of steps. Raises: ValueError for a count below 1.
    """
    if min(train, held_out) < 1:
        raise ValueError(f"train={train}, held_out={held_out}; want at least 1 problem of each")
    # test first, so that the number of training problems changes none of those that are compared
    sizes = {"test": held_out, "validation": held_out, "train": train}
    problems = iter(draw_problems(seed, sum(sizes.values())))
    questions = {
        split: tuple(_question(split, number, next(problems)) for number in range(size))
        for split, size in sizes.items()
    }
    return Arithmetic(seed, questions)


def _question(split: str, number: int, problem: Problem) -> Question:
    steps = len(problem.acts)
    dataset = f"arithmetic{steps}"
    return Question(
        uid=f"{dataset}/{split}/{number}",
        dataset=dataset,
        text=problem.text,
        golden_answers=(str(problem.answer),),
        hops=steps,
    )


def boxed(number: int) -> str:
    """A final answer."""
    return rf"\boxed{{{number}}}"


def make_arithmetic_tokenizer(prompt_words: Collection[str]) -> WordTokenizer:
    """A token for each word of the problems, of plans and solutions, and of the toy prompts."""
    words = {*NUMBERS, *map(boxed, range(LARGEST + 1)), *OPERATIONS, *OPERATION_OF, *NAMES}
    words |= set(OTHER_WORDS)
    return WordTokenizer.from_words(sorted(words | set(prompt_words)), bare=CHAT_ROLES)
