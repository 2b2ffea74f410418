"""An agent whose every turn answers a prompt of its own: the opening, and what happened since.

Each turn is a conversation, and so a trace, of one user's turn. Where the history is too long, the
oldest of it is left out and counted, never the opening.
Must not know: which actions there are, what the history is searched in.
Source: SDAR's step-wise search prompts (METHODS 2.5).
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from mas_jax.agents.actions import Action
from mas_jax.agents.agent import Agent, Play, shortened
from mas_jax.agents.chat import Conversation, Strand
from mas_jax.agents.prompts import Message, fill
from mas_jax.records import Sample


class StepwiseAgent(Agent):
    """As `Agent`, whose team has the texts of a history."""

    def __init__(self, play: Play, role: str, path: str, *, actions: Sequence[str]) -> None:
        super().__init__(play, role, path, actions=actions)
        self._texts = play.team.stepwise
        self._opening: Message | None = None
        self._history: list[str] = []  # of the searches and mistakes so far, oldest first
        self._dropped = 0  # entries of it that the next prompt leaves out
        self._strands: list[Strand] = []  # of earlier turns

    def hear(self, message: Message) -> None:
        """Begins the next turn's prompt, from the opening or with an observation added.

        An observation is shortened as `Agent.hear` does it, as if it were the only one; then the
        oldest are left out until the prompt leaves room for a generation.
        """
        if self._opening is None:
            self._opening, message = message, Message("")
        elif message.text:
            marker = self.play.team.prompts.truncated
            items = shortened(message.items, lambda kept: self._fits(message, kept), marker)
            self._history.append(self._entry(message, items))
        kept = list(self._history)
        while kept and not self._leaves_room(kept, message.note):
            kept.pop(0)
        self._dropped = len(self._history) - len(kept)
        if self.conversation is not None:
            self._strands += self.conversation.strands
        self.conversation = self._begin(kept, message.note)

    def take(
        self, sample: Sample, allowed: Collection[str], *, known_ids: Collection[str] = (),
        max_subtasks: int = 0,
    ) -> Action | None:  # fmt: skip
        """As `Agent.take`; the turn notes how much of the history its prompt left out."""
        action = super().take(sample, allowed, known_ids=known_ids, max_subtasks=max_subtasks)
        self.conversation.note_dropped(self._dropped)
        return action

    @property
    def strands(self) -> list[Strand]:
        """Of every turn, one each."""
        return [*self._strands, *super().strands]

    def _entry(self, message: Message, items: Sequence[str]) -> str:
        """What the history says of the last turn: a search and what it found, or what was wrong."""
        found, query = replace(message, note="").render(items), self._last_query
        return fill(self._texts.looked_up, {"query": query, "found": found}) if query else found

    @property
    def _last_query(self) -> str:
        """What the last turn searched for, "" if it did not."""
        (*_, turn) = self.conversation.strands[-1].turns
        return turn.query

    def _begin(self, history: Sequence[str], note: str) -> Conversation:
        opening = self._opening
        text = replace(opening, note="").render(opening.items)
        if history:
            items = self._texts.separator.join(history)
            text += fill(self._texts.history, {"items": items})
        text += note + opening.note  # a protocol ends the user's turn, as in a view of the trace
        return Conversation(self.play.team.chat, text, examples=opening.examples)

    def _leaves_room(self, history: Sequence[str], note: str) -> bool:
        team = self.play.team
        length = len(self._begin(history, note).prompt())
        return length + team.sampling.max_tokens[self.role] <= team.budgets.context

    def _fits(self, message: Message, items: Sequence[str]) -> bool:
        told = self.play.team.chat.tokenizer.encode(message.separator.join(items))
        if len(told) > self.play.team.budgets.observation:
            return False
        return self._leaves_room([self._entry(message, items)], message.note)
