"""Token-exact conversations, and the only file that knows a chat template.

A conversation grows by token ids: template text and outside text are encoded once when they are
added, sampled ids are kept as they were drawn. Where a template rewrites the past (Qwen3 drops
earlier thoughts), what the model would be shown no longer begins with what was sampled: then a new
sequence starts, in which the past is nobody's, and the old one keeps the sampled ids.
Must not know: roles, actions, budgets.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mas_jax.data.tokenizer import Tokenizer
from mas_jax.records import NOBODY, Sample, StopReason, Turn

START, END = "<|im_start|>", "<|im_end|>"
THOUGHT_START, THOUGHT_END = "<think>", "</think>"


@dataclass(frozen=True)
class ChatTemplate:
    """A member of the ChatML family.

    separator: between a role's name and its text. after: what follows the end of a turn.
    opening: the system message of a conversation that brings none. prefill: put before every
    generation, gone from the history. drops_thoughts: whether the history
    shows an assistant's turn only from behind its last `</think>`.
    """

    name: str
    separator: str
    after: str
    opening: str = ""
    prefill: str = ""
    drops_thoughts: bool = False


INSTRUCT = ChatTemplate("qwen-instruct", separator="\n", after="\n")
QWEN25 = ChatTemplate(
    "qwen2.5-instruct",
    separator="\n",
    after="\n",
    opening="You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
)
QWEN25_MATH = replace(
    QWEN25,
    name="qwen2.5-math",
    opening="Please reason step by step, and put your final answer within \\boxed{}.",
)
THINKING = ChatTemplate("qwen3-thinking", separator="\n", after="\n", drops_thoughts=True)
NOT_THINKING = ChatTemplate(
    "qwen3-not-thinking",
    separator="\n",
    after="\n",
    prefill=f"{THOUGHT_START}\n\n{THOUGHT_END}\n\n",
    drops_thoughts=True,
)
# the toy policy's: every text begins with a space, so that words keep their tokens
TOY = ChatTemplate("toy", separator="", after="")
SMOLLM2 = ChatTemplate(
    "smollm2",
    separator="\n",
    after="\n",
    opening="You are a helpful AI assistant named SmolLM, trained by Hugging Face",
)
TEMPLATES = {
    t.name: t for t in (INSTRUCT, QWEN25, QWEN25_MATH, THINKING, NOT_THINKING, TOY, SMOLLM2)
}


@dataclass(frozen=True)
class Chat:
    """A tokenizer with a template: the pieces that conversations are built of, as ids."""

    tokenizer: Tokenizer
    template: ChatTemplate
    start: tuple[int, ...]
    end: tuple[int, ...]
    after: tuple[int, ...]
    answer: tuple[int, ...]  # begins an assistant's turn
    prefill: tuple[int, ...]

    def message(self, role: str, text: str) -> tuple[int, ...]:
        """Ids of a whole message of outside text.

        The role's name and the text are encoded together, as a full render does: "\\n" and a text
        that starts with "\\n" may be one token. No control token can come from `text`.
        """
        body = tuple(self.tokenizer.encode(role + self.template.separator + text))
        return self.start + body + self.end + self.after

    def closing(self, sampled: Sequence[int]) -> tuple[int, ...]:
        """Template ids after sampled ids; the end of turn only if it was not itself sampled."""
        ended = tuple(sampled[-len(self.end) :]) == self.end
        return self.after if ended else self.end + self.after

    def shown(self, sampled: tuple[int, ...]) -> tuple[int, ...]:
        """What the history shows of an assistant's turn.

        Dropping line ends behind a thought can cut a token; only then is a remainder re-encoded,
        and it is nobody's.
        """
        if not self.template.drops_thoughts:
            return sampled
        (mark,) = self.tokenizer.encode_template(THOUGHT_END)
        if mark not in sampled:
            return sampled
        rest = sampled[len(sampled) - sampled[::-1].index(mark) :]
        while rest:
            text = self.tokenizer.decode(rest[:1])
            kept = text.lstrip("\n")
            if kept == text:
                break
            rest = (tuple(self.tokenizer.encode(kept)) if kept else ()) + rest[1:]
        return rest


def make_chat(tokenizer: Tokenizer, template: ChatTemplate) -> Chat:
    """The ids of a template's pieces under a tokenizer."""

    def _ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode_template(text)) if text else ()

    return Chat(
        tokenizer=tokenizer,
        template=template,
        start=_ids(START),
        end=_ids(END),
        after=_ids(template.after),
        answer=_ids(f"{START}assistant{template.separator}"),
        prefill=_ids(template.prefill),
    )


@dataclass
class Strand:
    """One unbroken sequence: tokens, owners, log-probs (0.0 where nobody sampled) and turns."""

    tokens: list[int] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def add(self, tokens: Sequence[int]) -> None:
        """Appends ids that nobody sampled."""
        self.tokens += tokens
        self.owners += [NOBODY] * len(tokens)
        self.logprobs += [0.0] * len(tokens)

    def add_sample(self, sample: Sample, owner: int) -> None:
        """Appends sampled ids, verbatim."""
        self.tokens += sample.tokens
        self.owners += [owner] * len(sample.tokens)
        self.logprobs += sample.logprobs


class Conversation:
    """One agent's conversation: opened by a prompt, then generations and outside text in turn.

    `strands` holds it token by token; more than one where the template rewrote the past.
    """

    def __init__(
        self,
        chat: Chat,
        text: str,
        system: str | None = None,
        examples: Sequence[tuple[str, str]] = (),
    ) -> None:
        """examples: exchanges (user, assistant) before the prompt; nobody's tokens."""
        self._chat = chat
        self._history: list[int] = []  # all closed turns, as the model is shown them next
        self._sampled: tuple[int, ...] | None = None  # of a generation that is not yet closed
        self.strands = [Strand()]
        if system is None:
            system = chat.template.opening or None
        if system is not None:
            self._add_message("system", system)
        for said_to, said in examples:
            self._add_message("user", said_to)
            self._add_message("assistant", said)
        self._add_message("user", text)

    def prompt(self) -> tuple[int, ...]:
        """Ids to sample from."""
        assert self._sampled is None, "outside text must come between two generations"
        return (*self.strands[-1].tokens, *self._chat.answer, *self._chat.prefill)

    def append(
        self, sample: Sample, *, owner: int, action: str, reason: str = "", wave: int | None = None
    ) -> None:
        """Adds what was sampled from `prompt()`, verbatim, as one turn of `owner`."""
        assert self._sampled is None, "outside text must come between two generations"
        strand = self.strands[-1]
        strand.add(self._chat.answer + self._chat.prefill)
        start = len(strand.tokens)
        strand.add_sample(sample, owner)
        strand.turns.append(
            Turn(start, len(strand.tokens), action, sample.stop_reason, reason=reason, wave=wave)
        )
        self._sampled = sample.tokens

    def note_search(self, query: str, found: Sequence[str]) -> None:
        """Notes at the last turn, a search, what it asked and the ids of what it found."""
        turns = self.strands[-1].turns
        turns[-1] = replace(turns[-1], query=query, found=tuple(found))

    def note_dropped(self, number: int) -> None:
        """Notes at the last turn how many entries of a history its prompt left out."""
        turns = self.strands[-1].turns
        turns[-1] = replace(turns[-1], dropped=number)

    def extend(self, text: str) -> None:
        """Closes the last generation and adds outside text as a user's message."""
        if self._sampled is not None:
            self._close()
        self._add_message("user", text)

    def length_after(self, text: str) -> int:
        """Number of ids that `prompt()` would have after `extend(text)`."""
        ahead = self.fork()
        ahead.extend(text)
        return len(ahead.prompt())

    def fork(self) -> "Conversation":
        """An independent copy."""
        other = copy.copy(self)
        other._history = list(self._history)
        other.strands = [
            Strand(list(s.tokens), list(s.owners), list(s.logprobs), list(s.turns))
            for s in self.strands
        ]
        return other

    def _add_message(self, role: str, text: str) -> None:
        ids = self._chat.message(role, text)
        self._history += ids
        self.strands[-1].add(ids)

    def _close(self) -> None:
        """Ends the turn; starts a new strand if the history differs from what was sampled."""
        closing = self._chat.closing(self._sampled)
        self._history += self._chat.answer + self._chat.shown(self._sampled) + closing
        self.strands[-1].add(closing)
        if self.strands[-1].tokens != self._history:
            self.strands.append(Strand())
            self.strands[-1].add(self._history)
        self._sampled = None


# --- start-up check -------------------------------------------------------------------------------

# texts that have caught template code out: line ends and spaces at the borders, nothing at all
_OUTSIDE = ("What is it?", "\nfirst", "\n\n two  ", "last \n", " \t\r\nmixed\r\n", " ", "")
# what a policy may have said; never a line end first, which a full render would merge
_SAID = ("<search>a b</search>", " spaced \n", "plain\n\n", "two\n\nparts", ".", "\ttab ", "x")
_THOUGHTS = ("", f"{THOUGHT_START}\nwhy\n{THOUGHT_END}\n\n", f"{THOUGHT_START}{THOUGHT_END}\n\n\n")

Render = Callable[[list[dict[str, str]]], Sequence[int]]


def hf_render(tokenizer: object, *, thinking: bool | None = None) -> Render:
    """`render` of a transformers tokenizer: its own chat template, up to the next generation.

    thinking: passed on as `enable_thinking`, which only some templates know; None passes nothing.
    """
    switches = {} if thinking is None else {"enable_thinking": thinking}

    def _render(messages: list[dict[str, str]]) -> list[int]:
        ids = tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, **switches
        )
        # transformers 5 returns a BatchEncoding where 4 returned the list
        return list(ids["input_ids"] if isinstance(ids, Mapping) else ids)

    return _render


def check_template(tokenizer: Tokenizer, template: ChatTemplate, render: Render) -> None:
    """Compares conversations of 1 to 6 turns, id by id, with a full render of the model's template.

    Raises: ValueError naming turn, position and both texts at the first difference.
    """
    chat = make_chat(tokenizer, template)
    for system in (None, "You are brief.", "\n odd \n"):
        for shift in range(len(_OUTSIDE)):
            for thought in _THOUGHTS:
                _check_conversation(chat, system, shift, thought, render)


def _check_conversation(
    chat: Chat, system: str | None, shift: int, thought: str, render: Render
) -> None:
    first = _OUTSIDE[shift]
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": first})
    conversation = Conversation(chat, first, system)
    for turn in range(1, 7):
        _compare(chat, conversation.prompt(), tuple(render(list(messages))), turn)
        said = thought + _SAID[(shift + turn) % len(_SAID)]
        ids = tuple(chat.tokenizer.encode_template(said))
        sample = Sample(ids, (0.0,) * len(ids), StopReason.STRING)
        conversation.append(sample, owner=1, action="search")
        text = _OUTSIDE[(shift + turn) % len(_OUTSIDE)]
        conversation.extend(text)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": text}]


def _compare(chat: Chat, ours: tuple[int, ...], theirs: tuple[int, ...], turn: int) -> None:
    if ours == theirs:
        return
    pairs = zip(ours, theirs, strict=False)
    shorter = min(len(ours), len(theirs))
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    near = slice(max(0, at - 8), at + 8)
    raise ValueError(
        f"chat template {chat.template.name!r} is not the model's own: turn {turn}, position {at}: "
        f"ours {ours[near]} {chat.tokenizer.decode(ours[near])!r}, "
        f"the model's {theirs[near]} {chat.tokenizer.decode(theirs[near])!r}; "
        "choose the template that the model was trained with"
    )
