"""Builds what a config says of a Collaborator and its Actor: team, policies, grading.

Must not know: scenes, how checkpoints are loaded.
"""

import dataclasses
import functools
import os
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ml_collections import ConfigDict

from mas_jax.agents.chat import Chat
from mas_jax.agents.collaboration import Collaboration, IsSame, load_texts
from mas_jax.agents.prompts import Prompts
from mas_jax.agents.setting import Budgets, Sampling, Team
from mas_jax.agents.speaker import Voice
from mas_jax.agents.topology import ACTOR, COLLABORATOR, TOPOLOGIES, Sizes, Topology, resampled
from mas_jax.records import Question
from mas_jax.rewards import integer_answer, math_answer, math_sets
from mas_jax.rewards.math_workers import FAILURES, Workers
from mas_jax.sampling.api import Client, Endpoint
from mas_jax.sampling.api_budget import Price
from mas_jax.sampling.policies import Policies, Remembering, endpoint_complete, endpoint_metrics
from mas_jax.sampling.replicas import Replicas

ACTOR_POLICY = "actor"  # the frozen one's name, in traces and among policies
# keys of config.collaboration that evaluation does not read
OF_TRAINING = ("reward_window", "actor_samples")
# what of an engine's settings changes roundings, and so perhaps a token
ENGINE_KEYS = ("dtype", "calls", "buckets", "page_size", "prefill_blocks", "decode_rows")
MOST_WORKERS = 8  # of those that grade, 1 GiB of address space each


@dataclass(frozen=True)
class Grading:
    """How answers of mathematics are taken: the answer of a solution, None without one, of its last
    `window` characters or, for 0, of all; whether two are one in a vote; rewards of predictions;
    what was counted in doing so; a second grader's verdict, None where there is none."""

    answer_of: Callable[..., str | None]
    is_same: IsSame
    reward: Callable[..., Awaitable]
    counts: Callable[[], Mapping[str, int]] = dict
    second: Callable[[Question, str], Awaitable[bool]] | None = None


def make_team(
    config: ConfigDict, name: str, sampling: Sampling, *, chats: Mapping[str, Chat | None],
    prompts: Prompts, grading: Grading, others: Mapping[str, str], training: bool,
) -> Team:  # fmt: skip
    """A team that is a topology: the configured policy as Collaborator, the Actor as itself.

    chats: by role. others: as in `Collaboration`. training: what the Collaborator says is under no
    control, and the reward is of so many solutions and so much of each as the config says.
    Raises: as `load_texts`.
    """
    c, a = config.collaboration, config.actor
    window, samples = (c.reward_window, c.actor_samples) if training else (0, 1)
    topology = resampled(_topology(config, name), samples)
    drawn = dict(temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k)
    voices = {
        COLLABORATOR: Voice(
            policy=config.model.policy, chat=chats[COLLABORATOR], max_tokens=c.max_tokens,
            context=c.context, **drawn,
        ),
        ACTOR: Voice(
            policy=ACTOR_POLICY, chat=chats[ACTOR], max_tokens=a.max_tokens,
            context=a.context, temperature=a.temperature, top_p=a.top_p, top_k=a.top_k,
        ),
    }  # fmt: skip
    return Team(
        name=name,
        chat=chats[COLLABORATOR],
        prompts=prompts,
        budgets=Budgets(**config.budgets.single),  # of searching, which no node does
        sampling=sampling,
        policies={role: voice.policy for role, voice in voices.items()},
        collaboration=Collaboration(
            topology,
            load_texts(c.prompts, topology),
            voices,
            vote_temperature=c.vote_temperature,
            answer_of=functools.partial(grading.answer_of, window=window),
            is_same=grading.is_same,
            control="none" if training else c.control,
            others=others,
            is_sampled=samples > 1,
        ),
    )


def _topology(config: ConfigDict, name: str) -> Topology:
    c = config.collaboration
    return TOPOLOGIES[name](Sizes(c.votes, c.debaters, c.rounds, c.experts))


def next_problems(questions: Sequence[Question]) -> dict[str, str]:
    """By uid the text of the question after it, the first after the last."""
    after = (*questions[1:], *questions[:1])
    return {q.uid: other.text for q, other in zip(questions, after, strict=True)}


def settings(config: ConfigDict, name: str) -> dict:
    """What evaluated episodes of a topology depend on beside weights, questions and sampling, as
    JSON values; not where answers are kept, nor where an endpoint stands."""
    c, a = config.collaboration.to_dict(), config.actor.to_dict()
    topology = _topology(config, name)
    for key in OF_TRAINING:
        del c[key]
    for key in ("checkpoint", "remember", "cache", "key_variable", "concurrency", "timeout_s",
                "retries", "price", "max_cost", "base_url"):  # fmt: skip
        del a[key]
    a["engine"] = {key: a["engine"][key] for key in ENGINE_KEYS}
    texts = dataclasses.asdict(load_texts(c["prompts"], topology))
    return {"collaboration": c, "actor": a, "prompts": texts}


def with_endpoint(config: ConfigDict, engines: Replicas) -> Policies:
    """The trained policy beside an Actor behind the configured endpoint.

    Raises: ValueError for a bad endpoint or a missing key; ModuleNotFoundError without `[api]`.
    """
    a = config.actor
    endpoint = Endpoint(
        a.base_url, a.key_variable, prices={a.model: Price(*a.price)} if a.price else {},
        max_cost=a.max_cost or None, concurrency=a.concurrency, timeout_s=a.timeout_s,
        retries=a.retries,
    )  # fmt: skip
    client = Client(endpoint, Path(a.cache) if a.cache else None)
    return Policies(
        engines, config.model.policy, {},
        complete=endpoint_complete(client.complete, model=a.model),
        endpoint=lambda: endpoint_metrics(client.counts),
    )  # fmt: skip


def with_frozen(
    config: ConfigDict, engines: Replicas, actor: Replicas, *, identity: Mapping[str, object]
) -> Policies:
    """The trained policy beside a frozen Actor's engines; identity: what its greedy answers depend
    on beside a request, as JSON values."""
    a = config.actor
    remember = Path(a.remember) if a.remember else None
    frozen = {ACTOR_POLICY: Remembering(actor, identity, remember)}
    return Policies(engines, config.model.policy, frozen)


async def _integer_reward(question: Question, predictions: tuple[str, ...]) -> tuple[float, ...]:
    """1.0 for every prediction that is a golden answer's integer, else 0.0."""
    return tuple(
        integer_answer.integer_match(text, question.golden_answers) for text in predictions
    )


async def _same_integer(first: str, second: str) -> bool:
    return integer_answer.same_integer(first, second)


def _integer(text: str, *, window: int) -> str | None:
    return integer_answer.extract(text[-window:])  # all of it for 0


INTEGERS = Grading(_integer, _same_integer, _integer_reward)  # of toy problems


def grading_by_set() -> Grading:
    """Of problems from files, each by its set's rule, in processes that start with the first answer
    and end with the reward, at the latest with this process."""
    workers = Workers(max(1, min(MOST_WORKERS, (os.cpu_count() or 1) // 2)))
    reward, kinds = math_sets.answer_reward(workers), ("jobs", "no answer", *FAILURES)
    weakref.finalize(reward, workers.close)
    return Grading(
        math_answer.graded_text,
        math_sets.vote_equality(workers),
        reward,
        lambda: {kind.replace(" ", "_"): workers.counts[kind] for kind in kinds},
        math_sets.second_grader(workers),
    )
