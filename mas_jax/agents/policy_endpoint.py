"""A local policy in an endpoint's place: chat messages in, a completion out, through `sample`.

Must not know: engines (`sample` is handed in), what is asked.
"""

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence

from mas_jax.agents.chat import THOUGHT_END, Chat, Conversation
from mas_jax.agents.protocol_team import Said
from mas_jax.records import SampleKey, Stop, StopReason


def policy_complete(
    sample: Callable[..., Awaitable], *, chat: Chat, policy: str, context: int
) -> Callable[..., Awaitable[Said]]:
    """The `complete` function of a desk at which a policy sits.

    Its thoughts, up to the last `</think>`, are not part of what it says. A request that leaves no
    room in the context is refused, which says so. Equal requests of one draw get equal answers.
    """
    tokenizer = chat.tokenizer
    stop = Stop(tokenizer.stop_ids)

    async def _complete(
        messages: Sequence[Mapping[str, str]], *, temperature: float, max_tokens: int,
        model: str = "", top_p: float = 1.0, draw: int = 0,
    ) -> Said:  # fmt: skip
        prompt = prompt_of(messages, chat)
        room = context - len(prompt)
        if room < 1:
            refusal = f"a prompt of {len(prompt)} tokens fills the context of {context}"
            return Said("", refusal, 0, 0, 0.0)
        name = hashlib.blake2b(repr(prompt).encode(), digest_size=8).hexdigest()
        key = SampleKey(0, "eval", 0, question=name, rollout=draw, path="offline", turn=0)
        (said,) = await sample(
            prompt, key=key, policy=policy, n=1, max_tokens=min(max_tokens, room),
            temperature=temperature, top_p=top_p, top_k=0, stop=stop,
        )  # fmt: skip
        text = tokenizer.decode([t for t in said.tokens if t not in tokenizer.stop_ids])
        text = text.rpartition(THOUGHT_END)[2].strip()
        is_cut = said.stop_reason in (StopReason.LENGTH, StopReason.CONTEXT)
        finish_reason = "length" if is_cut else "stop"
        return Said(text, None, len(prompt), len(said.tokens), 0.0, finish_reason)

    return _complete


def prompt_of(messages: Sequence[Mapping[str, str]], chat: Chat) -> tuple[int, ...]:
    """Ids to sample from after chat messages, all of which are outside text.

    Raises: ValueError unless they are a system message, if any, and then a user's and an
    assistant's in turn, the last a user's.
    """
    roles = [message["role"] for message in messages]
    system = messages[0]["content"] if roles[:1] == ["system"] else None
    rest = list(messages) if system is None else list(messages[1:])
    turns = len(rest) // 2 * ["user", "assistant"] + ["user"]
    if [message["role"] for message in rest] != turns:
        raise ValueError(
            f"messages of {roles}: want a system message or none, then user and assistant in turn, "
            "the last a user's"
        )
    said = [message["content"] for message in rest]
    examples = list(zip(said[:-1:2], said[1::2], strict=True))
    return Conversation(chat, said[-1], system, examples).prompt()
