"""A view of a trace: the same sampled tokens behind a prompt that says more.

A text is put by ids inside the user's turn that opens the conversation, in front of its end marker.
All ids around it are as they were played: nothing is encoded again, moved or left out.
Must not know: what the text says, models, losses.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mas_jax.agents.chat import Chat
from mas_jax.records import Trace


@dataclass(frozen=True)
class View:
    """Ids of a trace with more inside: `size` of them stand at `at`, the others as in the trace."""

    tokens: tuple[int, ...]
    at: int
    size: int

    def place(self, position: int) -> int:
        """Where the trace's token at a position stands in the view."""
        return position if position < self.at else position + self.size


def insert(trace: Trace, ids: Sequence[int], chat: Chat, *, num_examples: int = 0) -> View:
    """The view of a trace whose opening user's turn ends with these ids.

    num_examples: exchanges before that turn. Raises: ValueError if the trace does not open with
    such a turn, or a token before its end was sampled.
    """
    at = opening_end(trace.tokens, chat, num_examples=num_examples)
    first = min((turn.start for turn in trace.turns), default=len(trace.tokens))
    if at > first:
        raise ValueError(
            f"the opening of {trace.path} of {trace.question!r} ends at token {at}, behind the "
            f"first sampled one at {first}; is num_examples={num_examples} right?"
        )
    return View((*trace.tokens[:at], *ids, *trace.tokens[at:]), at, len(ids))


def opening_end(tokens: Sequence[int], chat: Chat, *, num_examples: int) -> int:
    """Position of the end marker of the user's turn that opens a conversation.

    Markers are control tokens, which no text can forge. Raises: ValueError if there is no such
    turn.
    """
    (start,), (end,) = chat.start, chat.end
    number = 2 * num_examples + bool(chat.template.opening)
    starts = [i for i, token in enumerate(tokens) if token == start]
    user = chat.tokenizer.encode("user")
    for begin in starts[number : number + 1]:
        if list(tokens[begin + 1 : begin + 1 + len(user)]) == list(user) and end in tokens[begin:]:
            return begin + tokens[begin:].index(end)
    raise ValueError(
        f"no user's turn stands after {number} messages in a trace of {len(tokens)} tokens under "
        f"the template {chat.template.name!r}"
    )
