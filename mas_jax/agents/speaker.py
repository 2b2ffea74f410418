"""One agent of a topology: its conversation with a policy, by token ids or, at an endpoint, text.

Must not know: topologies, what is said to whom and why.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mas_jax.agents.agent import Play
from mas_jax.agents.chat import Chat, Conversation, Strand
from mas_jax.records import NOBODY, ROLES, UNTOLD, Stop, Trace, Turn

_THOUGHT, _THOUGHT_END = "<think>", "</think>"


@dataclass(frozen=True)
class Voice:
    """How a role speaks. policy: name of its weights. chat: of a policy with token ids; None for an
    endpoint, which takes and gives text. context: tokens of a conversation with room for max_tokens
    more, whatever they turn out to be; without that room nothing is said. An endpoint sees to its
    own.
    """

    policy: str
    chat: Chat | None
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    context: int


# words -> why they are not what was asked for, "" if they are
Fault = Callable[[str], str]


class Speaker:
    """What one agent says in one episode."""

    def __init__(self, play: Play, agent: str, role: str, voice: Voice) -> None:
        self._play, self._agent, self._role, self._voice = play, agent, role, voice
        self._num_said = 0
        self._conversation: Conversation | None = None
        self._messages: list[Mapping[str, str]] = []
        self._untold: list[Trace] = []
        play.agents.append(self)

    async def say(
        self,
        system: str,
        text: str,
        *,
        action: str,
        wave: int,
        temperature: float | None,
        fault: Fault,
    ) -> str | None:
        """What the policy says to a text, without its thoughts; None if there is no room for it.

        system: of the first text; "" for none. wave: all that speak in it speak at once.
        temperature: in place of the voice's own.
        """
        temperature = self._voice.temperature if temperature is None else temperature
        ask = self._say_text if self._voice.chat is None else self._say_tokens
        said = await ask(system, text, action, wave, temperature, fault)
        if said is not None:
            self._num_said += 1
            self._play.turns_used += 1
        return said

    async def _say_tokens(
        self, system: str, text: str, action: str, wave: int, temperature: float, fault: Fault
    ) -> str | None:
        v = self._voice
        if self._conversation is None:
            self._conversation = Conversation(v.chat, text, system or None)
        else:
            self._conversation.extend(text)
        prompt, stop_ids = self._conversation.prompt(), v.chat.tokenizer.stop_ids
        if len(prompt) + v.max_tokens > v.context:
            return None
        (sample,) = await self._play.world.sample(
            prompt, key=self._play.key(self._agent, self._num_said), policy=v.policy, n=1,
            max_tokens=v.max_tokens, temperature=temperature, top_p=v.top_p, top_k=v.top_k,
            stop=Stop(stop_ids),
        )  # fmt: skip
        ended = sample.tokens[-1:] and sample.tokens[-1] in stop_ids
        said = aloud(v.chat.tokenizer.decode(sample.tokens[:-1] if ended else sample.tokens))
        reason = fault(said)
        self._conversation.append(
            sample, owner=ROLES[self._role], action="invalid" if reason else action,
            reason=reason, wave=wave,
        )  # fmt: skip
        return said

    async def _say_text(
        self, system: str, text: str, action: str, wave: int, temperature: float, fault: Fault
    ) -> str:
        v = self._voice
        if system and not self._messages:
            self._messages.append({"role": "system", "content": system})
        self._messages.append({"role": "user", "content": text})
        reply = await self._play.world.complete(
            tuple(self._messages), key=self._play.key(self._agent, self._num_said),
            policy=v.policy, max_tokens=v.max_tokens, temperature=temperature,
        )  # fmt: skip
        said = aloud(reply.text)
        self._messages.append({"role": "assistant", "content": said})
        reason = "refused" if reply.is_refused else fault(said)
        start, end = reply.input_tokens, reply.input_tokens + reply.output_tokens
        turn = Turn(
            start, end, "invalid" if reason else action, reply.stop_reason, reason, wave=wave,
            text=reply.text,
        )  # fmt: skip
        strand = Strand(
            tokens=[UNTOLD] * end,
            owners=[NOBODY] * start + [ROLES[self._role]] * reply.output_tokens,
            logprobs=[0.0] * end,
            turns=[turn],
        )
        self._untold.append(self._trace(strand, f"{self._agent}/{self._num_said}"))
        return said

    def traces(self) -> list[Trace]:
        """A Trace for each strand of the conversation; at an endpoint for each of its answers."""
        strands = [] if self._conversation is None else self._conversation.strands
        said = [self._trace(strand, self._agent) for strand in strands if strand.turns]
        return self._untold + said

    def _trace(self, strand: Strand, path: str) -> Trace:
        return self._play.trace(strand, role=self._role, path=path, policy=self._voice.policy)


def aloud(text: str) -> str:
    """What others read of a text: nothing up to its last thought, nor from one that was cut short,
    no space around it."""
    return text.rpartition(_THOUGHT_END)[2].partition(_THOUGHT)[0].strip()
