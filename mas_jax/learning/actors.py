"""An Actor alone with a problem: a model behind an endpoint, or a policy in our own engine.

Both are shown the same words. Must not know: what solutions are for, how they are graded.
"""

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from ml_collections import ConfigDict

from mas_jax.agents.chat import Chat, Conversation
from mas_jax.agents.prompts import fill
from mas_jax.config_rules import validate
from mas_jax.learning import collaboration, policy_files, samplers
from mas_jax.records import Problem, SampleKey, Stop
from mas_jax.sampling.api import Client
from mas_jax.sampling.engine_settings import EngineSettings


@dataclass(frozen=True)
class Words:
    """What an Actor is shown; `{question}` of the user's message is the problem."""

    system: str
    user: str


SOLVE = Words(  # METHODS §3.1, in our words
    "You solve mathematics problems. Reason step by step and put the final answer into \\boxed{}.",
    "{question}\n\nReason step by step and give the final answer in \\boxed{}.",
)


@dataclass(frozen=True)
class Drawing:
    """How solutions are drawn. seed: of a policy of our own; an endpoint has its own chance."""

    temperature: float
    max_tokens: int
    seed: int


@dataclass(frozen=True)
class Actor:
    """identity: all that its solutions depend on, as JSON values. ask(problem, number of the
    sample): a solution, whole or cut; raises WorldError where the world failed."""

    identity: Mapping
    ask: Callable[[Problem, int], Awaitable[str]]


def remote(client: Client, model: str, drawing: Drawing, words: Words = SOLVE) -> Actor:
    """A model of an endpoint. With the client's cache its samples repeat; a refusal is a solution
    without an answer."""

    async def _ask(problem: Problem, sample: int) -> str:
        messages = [
            {"role": "system", "content": words.system},
            {"role": "user", "content": fill(words.user, {"question": problem.text})},
        ]
        said = await client.complete(
            messages, model=model, temperature=drawing.temperature,
            max_tokens=drawing.max_tokens, sample=sample,
        )  # fmt: skip
        return said.text

    identity = _identity(drawing, words, base_url=client.endpoint.base_url, model=model)
    del identity["seed"]  # nothing that is sent depends on it
    return Actor(identity, _ask)


@dataclass(frozen=True)
class Local:
    """A policy in engines of this host: its sample function, chat, name and context, and what its
    greedy choices depend on beside the prompt, as JSON values."""

    sample: Callable[..., Awaitable]
    chat: Chat
    policy: str
    context: int
    identity: Mapping


def load_local(config: ConfigDict) -> Local:
    """The frozen Actor of a config whose `actor.kind` is "policy", else its model.

    Raises: as `validate` and `samplers.make_engines`; ValueError for a checkpoint whose chat
    template is another.
    """
    validate(config, has_weights=False)
    if config.actor.kind == "policy":
        voice, engine, policy = config.actor, config.actor.engine, collaboration.ACTOR_POLICY
        directory, make = policy_files.actor_directory(config), samplers.make_actor_engines
        speak = policy_files.actor_chat
    else:
        voice, engine, policy = config.model, config.engine, config.model.policy
        directory, make = policy_files.checkpoint_directory(config), samplers.make_engines
        speak = policy_files.policy_chat
    tokenizer = policy_files.load_tokenizer(directory)
    chat = speak(config, tokenizer)
    policy_files.check_chat(chat, directory)
    known = policy_files.policy_identity(
        directory, dtype=voice.dtype, settings=EngineSettings(**engine)
    )
    identity = {**known, "template": voice.template, "context": engine.context}
    sample = make(config, directory, tokenizer).sample
    return Local(sample, chat, policy, engine.context, identity)


def local(config: ConfigDict, drawing: Drawing, words: Words = SOLVE) -> Actor:
    """The policy of `load_local` as an Actor. Raises: as that."""
    own = load_local(config)
    ask = sampled(own.sample, own.chat, drawing, words, policy=own.policy, context=own.context)
    return Actor(_identity(drawing, words, **own.identity), ask)


def sampled(
    sample: Callable[..., Awaitable],
    chat: Chat,
    drawing: Drawing,
    words: Words,
    *,
    policy: str,
    context: int,
) -> Callable[[Problem, int], Awaitable[str]]:
    """`ask` by an engine's `sample` function. A problem that leaves no room for a token is
    answered with nothing."""
    stop = Stop(chat.tokenizer.stop_ids)

    async def _ask(problem: Problem, number: int) -> str:
        text = fill(words.user, {"question": problem.text})
        prompt = Conversation(chat, text, system=words.system).prompt()
        room = min(drawing.max_tokens, context - len(prompt))
        if room < 1:
            return ""
        key = SampleKey(drawing.seed, "eval", 0, problem.uid, number, "actor", 0)
        (said,) = await sample(
            prompt, key=key, policy=policy, n=1, max_tokens=room,
            temperature=drawing.temperature, top_p=1.0, top_k=0, stop=stop,
        )  # fmt: skip
        tokens = [token for token in said.tokens if token not in chat.tokenizer.stop_ids]
        return chat.tokenizer.decode(tokens)

    return _ask


def _identity(drawing: Drawing, words: Words, **names: str | int | list[str]) -> dict:
    return {**names, **dataclasses.asdict(drawing), **dataclasses.asdict(words)}
