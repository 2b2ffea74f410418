"""The oracle as a `sample` function: it reads a toy prompt and answers as its role would.

What plays through the real chat, teams and index this way are complete episodes: the ceiling of
each team, and, with flaws, the traces that the toy starting policy learns from.
Must not know: models, engines, budgets.
"""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Mapping, Sequence

from mas_jax.agents.chat import Chat
from mas_jax.agents.oracle import (
    Flaws,
    answerer_action,
    follow,
    imperfect,
    informed,
    leader_action,
    searcher_action,
    single_action,
)
from mas_jax.agents.prompts import Prompts
from mas_jax.data.world import World
from mas_jax.records import Passage, Sample, SampleKey, StopReason

_MESSAGE = re.compile(r"<\|im_start\|>(user|assistant)(.*?)(?:<\|im_end\|>|$)", re.DOTALL)
_REPORT = re.compile(r" (s\d+) : (.*?)(?= ; s\d+ : |$)")
_EVIDENCE = re.compile(r"(.*?) from((?: s\d+ : .*)| nothing)")


@dataclasses.dataclass(frozen=True)
class ScriptedSampler:
    """A `sample` function for the toy prompts; flaws: its mistakes, drawn from a request's key."""

    world: World
    chat: Chat
    prompts: Prompts
    flaws: Flaws

    async def sample(
        self, prompt: tuple[int, ...], *, key: SampleKey, n: int, **unused: object
    ) -> list[Sample]:
        """n continuations, ended by their closing tag; their log-probs are 0.

        Raises: ValueError for a prompt that no role of the toy team sees.
        """
        turns = _MESSAGE.findall(self.chat.tokenizer.decode(prompt))
        heard = [text for role, text in turns if role == "user"]
        said = [text for role, text in turns if role == "assistant"]
        samples = []
        for candidate in range(n):
            fields = (*dataclasses.astuple(key), candidate)
            seed = int.from_bytes(hashlib.blake2b(repr(fields).encode(), digest_size=8).digest())
            text = self._act(heard, said, seed)
            ids = tuple(self.chat.tokenizer.encode_template(text))
            samples.append(Sample(ids, (0.0,) * len(ids), StopReason.STRING))
        return samples

    def _act(self, heard: Sequence[str], said: Sequence[str], seed: int) -> str:
        """The action of the role that the first message speaks to."""
        role, _, task = heard[0].strip().partition(" ")
        task, *parts = task.split(" | ")  # a single agent's question, and the protocol behind it
        sections = self._about(task, dict(part.split(" ", 1) for part in parts))
        mistakes = imperfect(informed(self.flaws, sections), seed)
        forced = heard[-1].endswith(
            (self.prompts.report_now, self.prompts.select_now, self.prompts.answer_now)
        )
        if role in ("search", "find"):
            passages = [p for text in heard[1:] for p in self._passages(text)]
            num_searches = sum("<search>" in text for text in said)
            if role == "search":
                return searcher_action(
                    self.world, task, passages, num_searches, must_report=forced, mistakes=mistakes
                )
            return single_action(
                self.world, task, passages, num_searches, must_answer=forced,
                told=sections.get("answer", ""), mistakes=mistakes,
            )  # fmt: skip
        if role == "lead":
            reports = dict(pair for text in heard[1:] for pair in _REPORT.findall(text))
            reports = {name: self._without_note(text) for name, text in reports.items()}
            return leader_action(self.world, task, reports, must_select=forced, mistakes=mistakes)
        match = _EVIDENCE.fullmatch(task)
        if role != "answer" or match is None:
            raise ValueError(f"no role of the toy team is told {heard[0]!r}")
        evidence = [text for _, text in _REPORT.findall(match[2])]
        return answerer_action(self.world, match[1], evidence, mistakes=mistakes)

    def _about(self, task: str, sections: Mapping[str, str]) -> Mapping[str, str]:
        """The sections of a protocol that names what the question asks about, else none."""
        named = [step.subject for step in follow(self.world, task, ())]
        text = " ".join(sections.values())
        return sections if any(name in text for name in named) else {}

    def _without_note(self, text: str) -> str:
        return text.removesuffix(self.prompts.select_now)

    def _passages(self, observation: str) -> list[Passage]:
        """The passages of an observation; titles and texts are told apart by the corpus."""
        shown = (text.strip() for text in observation.split("|"))
        return [self._by_contents[text] for text in shown if text in self._by_contents]

    @functools.cached_property
    def _by_contents(self) -> dict[str, Passage]:
        return {f"{p.title} {p.text}": p for p in self.world.passages}
