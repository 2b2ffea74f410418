"""Scripted players of toy mathematics, which read the toy prompts: the source of first traces.

A player computes without error and reads by its flaws: an obscure verb as another operation, always
the same one. What it is told in operations it follows, so that a right plan makes a right answer
and a wrong plan a wrong one. Must not know: tokens other than through the chat, topologies, models.
"""

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence

import numpy as np

from mas_jax.agents.chat import Chat
from mas_jax.data.arithmetic import (
    OBSCURE,
    OPERATION_OF,
    OPERATIONS,
    Problem,
    Step,
    boxed,
    parse_problem,
    results,
)
from mas_jax.records import Sample, SampleKey, StopReason
from mas_jax.rewards.integer_answer import extract

VAGUE = ("think first", "read it twice")
RIGHT = "right"
_MESSAGE = re.compile(r"<\|im_start\|>(user|assistant)(.*?)(?:<\|im_end\|>|$)", re.DOTALL)
_STEP = re.compile(rf"({'|'.join(OPERATIONS)}) (\d+)")
# the first word of a toy prompt, and where it puts other agents' words
_TOLD = re.compile(r"(?:with|as) ?(.*)")
_DONE = re.compile(r"done ?(.*?)(?: comment ?(.*))?$")
_OTHERS = re.compile(r"others (.*) again")


@dataclasses.dataclass(frozen=True)
class MathFlaws:
    """Probabilities of a player's habits; the defaults are a perfect player.

    misread_obscure: an obscure verb is read as `mistaken` says. misread_any: any verb as one of the
    other operations. skip_step: the last step is left out. plan, approve: of a hint or comment,
    that it is a plan, or the word that all is right; else it is vague. persuaded: by the first of
    the others' solutions that ends otherwise.
    """

    misread_obscure: float = 0.0
    misread_any: float = 0.0
    skip_step: float = 0.0
    plan: float = 1.0
    approve: float = 0.0
    persuaded: float = 0.0


def mistaken(verb: str) -> str:
    """The operation that an obscure verb is taken for."""
    return OPERATIONS[(OPERATIONS.index(OPERATION_OF[verb]) + 1) % len(OPERATIONS)]


def solution(start: int, steps: Sequence[Step]) -> str:
    """The steps worked out, and the boxed answer."""
    values = results(start, steps)
    lines = [
        f"{value} {step.operation} {step.number} is {result}"
        for value, step, result in zip(values, steps, values[1:], strict=False)
    ]
    return f"{' ; '.join(lines)} {boxed(values[-1])}"


def plan(steps: Sequence[Step]) -> str:
    """The operations with their numbers, in order."""
    return " then ".join(f"{step.operation} {step.number}" for step in steps)


def read_plan(text: str) -> tuple[Step, ...]:
    """The steps that a text names, () if it names none."""
    return tuple(Step(operation, int(number)) for operation, number in _STEP.findall(text))


class Player:
    """One player's next words. Raises: ValueError for a text that is no toy prompt."""

    def __init__(self, flaws: MathFlaws, seed: int) -> None:
        self._flaws, self._rng = flaws, np.random.default_rng(seed)

    def say(self, heard: Sequence[str], said: Sequence[str]) -> str:
        """What is said to the last of the user's texts, after what was said to those before."""
        kind, _, rest = heard[0].strip().partition(" ")
        problem = parse_problem(rest.partition(" , how many")[0] + " , how many")
        if problem is None:
            raise ValueError(f"no player of toy mathematics is told {heard[0]!r}")
        if len(heard) > 1:
            return self._reconsider(heard[-1], said[-1])
        told = rest.partition(" , how many")[2].strip()
        match kind:
            case "hint" | "assign":
                return self._advise(problem, approves=False)
            case "judge":
                return self._advise(problem, approves=True)
            case "solve":
                words = _TOLD.fullmatch(told)
                return self._follow(problem, words[1] if words else "")
            case "revise":
                draft, comment = _DONE.fullmatch(told).groups()
                steps = read_plan(comment or "")
                return self._follow(problem, comment) if steps else draft
        raise ValueError(f"no player of toy mathematics is told {heard[0]!r}")

    def _happens(self, probability: float) -> bool:
        return bool(self._rng.random() < probability)

    def _read(self, problem: Problem) -> tuple[Step, ...]:
        """The steps as the player understands them."""
        steps = []
        for verb, number in problem.acts:
            operation = OPERATION_OF[verb]
            if verb in OBSCURE and self._happens(self._flaws.misread_obscure):
                operation = mistaken(verb)
            if self._happens(self._flaws.misread_any):
                others = [name for name in OPERATIONS if name != operation]
                operation = others[self._rng.integers(len(others))]
            steps.append(Step(operation, number))
        return tuple(steps[:-1] if self._happens(self._flaws.skip_step) else steps)

    def _follow(self, problem: Problem, words: str) -> str:
        """The solution by the steps of somebody's words, or of the problem where they name none."""
        return solution(problem.start, read_plan(words) or self._read(problem))

    def _advise(self, problem: Problem, *, approves: bool) -> str:
        """A hint, or a comment on a solution, which may also approve of it."""
        draw = self._rng.random()
        if draw < self._flaws.plan:
            return plan(self._read(problem))
        if approves and draw < self._flaws.plan + self._flaws.approve:
            return RIGHT
        return VAGUE[self._rng.integers(len(VAGUE))]

    def _reconsider(self, heard: str, own: str) -> str:
        """One's own solution, or the first of the others' that ends otherwise."""
        others = _OTHERS.fullmatch(heard.strip())
        if others is None:
            raise ValueError(f"no player of toy mathematics is told {heard!r}")
        differing = [
            text for text in others[1].split(" | ") if extract(text) not in (None, extract(own))
        ]
        if differing and self._happens(self._flaws.persuaded):
            return differing[0].strip()
        return own.strip()


@dataclasses.dataclass(frozen=True)
class MathScript:
    """A `sample` function for the toy prompts of topologies; flaws: by name of the policy."""

    chat: Chat
    flaws: Mapping[str, MathFlaws]

    async def sample(
        self, prompt: tuple[int, ...], *, key: SampleKey, policy: str, n: int, **unused: object
    ) -> list[Sample]:
        """n continuations with the end of the turn; log-probs 0. Raises: as `Player`."""
        turns = _MESSAGE.findall(self.chat.tokenizer.decode(prompt))
        heard = [text for role, text in turns if role == "user"]
        said = [text for role, text in turns if role == "assistant" and text]
        samples = []
        for candidate in range(n):
            fields = (*dataclasses.astuple(key), policy, candidate)
            seed = int.from_bytes(hashlib.blake2b(repr(fields).encode(), digest_size=8).digest())
            text = Player(self.flaws[policy], seed).say(heard, said)
            ids = (*self.chat.tokenizer.encode(f" {text}"), *self.chat.end)
            samples.append(Sample(ids, (0.0,) * len(ids), StopReason.TOKEN))
        return samples
