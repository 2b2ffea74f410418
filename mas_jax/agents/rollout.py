"""Plays many episodes at once over an injected world, and holds the one error boundary.

What `World`'s functions raise, or return in a wrong shape, is a failure of the world: the episode
keeps its traces, has reward None and a `Failure`; a judge's costs its score alone. Outcomes of the
policy are ordinary episodes. An exception of our own code is neither: it propagates.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mas_jax.agents.agent import Play, run_all
from mas_jax.agents.setting import JudgeJob, Run, Team, World
from mas_jax.agents.teams import PLAYS
from mas_jax.records import (
    Episode,
    Failure,
    FailureKind,
    Judgement,
    Passage,
    Question,
    Reply,
    Sample,
    SampleKey,
    SearchFailure,
    WorldError,
)
from mas_jax.rewards import terms


@dataclass(frozen=True)
class Limits:
    """concurrent: episodes in progress at once. The run stops once more than failure_frac of its
    finished episodes failed, or had no search or no judgement that did not, of which there must be
    at least min_episodes, or no others in the end."""

    concurrent: int
    failure_frac: float
    min_episodes: int


class TooManyFailures(Exception):
    """The world failed too many episodes for the run to go on."""


def play(
    jobs: Iterable[tuple[Question, int]], team: Team, *, world: World, run: Run, limits: Limits
) -> AsyncIterator[Episode]:
    """Episodes of (question, rollout) jobs; order and errors as in `play_jobs`."""

    async def _play_one(question: Question, rollout: int) -> list[Episode]:
        return [await play_episode(question, rollout, team, world=world, run=run)]

    return play_jobs(jobs, _play_one, limits=limits)


async def play_jobs(
    jobs: Iterable[tuple[Question, int]],
    play_one: Callable[[Question, int], Awaitable[Sequence[Episode]]],
    *,
    limits: Limits,
) -> AsyncIterator[Episode]:
    """The episodes of every job, in the order in which jobs finish.

    Jobs are drawn as places become free. Leaving the iterator early cancels what is in progress.
    Raises: TooManyFailures; whatever a bug in an agent raises.
    """
    if limits.concurrent < 1:
        raise ValueError(f"concurrent={limits.concurrent}: must be at least 1")
    jobs = iter(jobs)
    finished: asyncio.Queue[Episode | asyncio.Task] = asyncio.Queue()

    async def _work() -> None:
        for job in jobs:  # shared by all workers: each is drawn once
            for episode in await play_one(*job):
                finished.put_nowait(episode)

    workers = [asyncio.ensure_future(_work()) for _ in range(limits.concurrent)]
    for worker in workers:
        worker.add_done_callback(finished.put_nowait)
    try:
        num_working, num_episodes, failures = len(workers), 0, []
        while num_working:
            item = await finished.get()
            if isinstance(item, asyncio.Future):
                item.result()  # raises what stopped the worker
                num_working -= 1
                continue
            num_episodes += 1
            failures += [] if (failure := _failure(item)) is None else [failure]
            yield item
            if num_episodes >= limits.min_episodes:
                _stop_above(limits.failure_frac, failures, num_episodes)
        if len(failures) == num_episodes:
            _stop_above(limits.failure_frac, failures, num_episodes)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def play_episode(
    question: Question, rollout: int, team: Team, *, world: World, run: Run
) -> Episode:
    """One episode; a failure of the world is part of it."""
    state = Play(question, rollout, team=team, world=guarded(world), run=run)
    predictions, correct, outcome, failure = (), (), "failure", None
    judgements = ()
    try:
        endings = await PLAYS[team.name](state)
        predictions = tuple(ending.text for ending in endings)
        outcomes = [ending.outcome for ending in endings]
        outcome = "answered" if "answered" in outcomes else outcomes[0]
        correct = await state.world.reward(question, predictions)
        if state.world.judge is not None:
            judgements = await _judge(state)
    except WorldError as error:
        failure = Failure(error.kind, str(error))
    return Episode(
        question=question.uid,
        rollout=rollout,
        team=team.name,
        traces=state.traces(),
        predictions=predictions,
        correct=correct,
        reward=None if failure is not None else sum(correct) / len(correct),
        num_searches=state.num_searches,
        failed_searches=state.failed_searches,
        turns_used=state.turns_used,
        outcome=outcome,
        failure=failure,
        retrieved=tuple(sorted(state.retrieved)),
        judgements=judgements,
        reward_error=_reward_error(team, correct),
    )


def _reward_error(team: Team, correct: Sequence[float]) -> float | None:
    """Of a reward that several solutions measure; of no other is it known."""
    is_sampled = team.collaboration is not None and team.collaboration.is_sampled
    return terms.sampling_error(correct) if is_sampled and correct else None


async def _judge(state: Play) -> tuple[Judgement, ...]:
    """The judgement of each finished subtask, asked for at once, in order of paths."""

    async def _score(job: JudgeJob) -> Judgement:
        key = SampleKey(
            **vars(state.run), question=state.question.uid, rollout=state.rollout,
            path=f"{job.path}/judge", turn=0,
        )  # fmt: skip
        try:
            return await state.world.judge(job, key=key)
        except WorldError as error:
            logging.warning("%s of %s has no judgement: %s", job.path, state.question.uid, error)
            return Judgement(job.path, None)

    return tuple(await run_all(_score(job) for job in sorted(state.jobs, key=lambda j: j.path)))


def _failure(episode: Episode) -> Failure | None:
    """What the world failed in an episode; also where it ended and every search or judgement of it
    failed."""
    if episode.failure is None and 0 < episode.num_searches == episode.failed_searches:
        return Failure(FailureKind.RETRIEVER, "every search of an episode failed")
    scores = [judgement.score for judgement in episode.judgements]
    if episode.failure is None and scores and set(scores) == {None}:
        return Failure(FailureKind.JUDGE, "every judgement of an episode failed")
    return episode.failure


def _stop_above(failure_frac: float, failures: Sequence[Failure], num_episodes: int) -> None:
    if len(failures) <= failure_frac * num_episodes:
        return
    lines = []
    for kind in FailureKind:
        messages = [failure.message for failure in failures if failure.kind == kind]
        if messages:
            lines.append(f"{kind.value}: {len(messages)}, such as {messages[0]!r}")
    raise TooManyFailures(
        f"{len(failures)} of {num_episodes} episodes failed, more than {failure_frac:g} of them; "
        + "; ".join(lines)
    )


# --- the boundary ---------------------------------------------------------------------------------


def guarded(world: World) -> World:
    """The same functions, which raise WorldError alone: of their own, or of the kind whose function
    raised anything else or returned what it must not."""

    async def _sample(prompt: tuple[int, ...], **request: object) -> list[Sample]:
        return await _boundary(
            FailureKind.SAMPLER,
            lambda: world.sample(prompt, **request),
            lambda samples: _check_samples(samples, request["n"]),
        )

    async def _search(queries: list[str], k: int) -> list[list[Passage] | SearchFailure]:
        return await _boundary(
            FailureKind.RETRIEVER,
            lambda: world.search(queries, k),
            lambda results: _check_results(results, len(queries), k),
        )

    async def _reward(question: Question, predictions: tuple[str, ...]) -> tuple[float, ...]:
        return await _boundary(
            FailureKind.REWARD,
            lambda: world.reward(question, predictions),
            lambda values: _checked_rewards(values, len(predictions)),
        )

    async def _judge(job: JudgeJob, *, key: SampleKey) -> Judgement:
        return await _boundary(
            FailureKind.JUDGE,
            lambda: world.judge(job, key=key),
            lambda judgement: _check_judgement(judgement, job.path),
        )

    async def _complete(messages: Sequence[Mapping[str, str]], **request: object) -> Reply:
        return await _boundary(
            FailureKind.API, lambda: world.complete(messages, **request), lambda reply: reply
        )

    return World(
        _sample, _search, _reward,
        judge=None if world.judge is None else _judge,
        complete=None if world.complete is None else _complete,
    )  # fmt: skip


async def _boundary(
    kind: FailureKind, call: Callable[[], Awaitable], check: Callable[[object], object]
) -> object:
    """The only place that catches every exception. Cancellation is none and passes through."""
    try:
        return check(await call())
    except WorldError:
        raise
    except Exception as error:
        raise WorldError(kind, f"{type(error).__name__}: {error}") from error


def _check_samples(samples: Sequence[Sample], n: int) -> Sequence[Sample]:
    if len(samples) != n:
        raise ValueError(f"{len(samples)} samples for n={n}")
    for sample in samples:
        if len(sample.tokens) != len(sample.logprobs):
            raise ValueError(f"{len(sample.tokens)} tokens with {len(sample.logprobs)} log-probs")
        if not all(map(math.isfinite, sample.logprobs)):
            raise ValueError("a sampled token's log-prob is not finite; look at the weights")
    return samples


def _check_results(
    results: Sequence[list[Passage] | SearchFailure], num_queries: int, k: int
) -> Sequence[list[Passage] | SearchFailure]:
    if len(results) != num_queries:
        raise ValueError(f"{len(results)} results for {num_queries} queries")
    for result in results:
        if isinstance(result, SearchFailure):
            continue
        if len(result) > k:
            raise ValueError(f"{len(result)} passages for k={k}")
        for passage in result:
            (passage.title + passage.text).encode()  # no tokenizer takes a lone surrogate
    return results


def _check_judgement(judgement: Judgement, path: str) -> Judgement:
    if judgement.path != path:
        raise ValueError(f"a judgement of {judgement.path!r} for {path!r}")
    if judgement.score is not None and not 0.0 <= judgement.score <= 1.0:
        raise ValueError(f"judgement {judgement.score} is outside [0, 1]")
    return judgement


def _checked_rewards(values: Sequence[float], num_predictions: int) -> tuple[float, ...]:
    values = tuple(float(value) for value in values)
    if len(values) != num_predictions or not all(map(math.isfinite, values)):
        raise ValueError(f"rewards {values} for {num_predictions} predictions")
    return values
