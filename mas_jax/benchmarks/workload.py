"""Recorded sampling workloads: which prompts, how many tokens each, and what had to come first."""

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from mas_jax.records import Sample, SampleKey


@dataclass(frozen=True)
class Recorded:
    """One request of an episode. lengths: tokens of each candidate; after: indices, within the
    episode, of the requests that had ended when it was made."""

    prompt: tuple[int, ...]
    lengths: tuple[int, ...]
    after: tuple[int, ...]


Workload = list[list[Recorded]]  # requests by episode


class Recorder:
    """A `sample` function that hands on to another and keeps what passes."""

    def __init__(self, sample: Callable[..., Awaitable[list[Sample]]]) -> None:
        self._sample = sample
        self._episodes: dict[tuple[str, int], list[Recorded | None]] = {}

    async def sample(self, prompt: tuple[int, ...], *, key: SampleKey, **knobs) -> list[Sample]:
        """`sample` of the function inside."""
        requests = self._episodes.setdefault((key.question, key.rollout), [])
        index = len(requests)
        after = tuple(i for i, request in enumerate(requests) if request is not None)
        requests.append(None)
        samples = await self._sample(prompt, key=key, **knobs)
        requests[index] = Recorded(tuple(prompt), tuple(len(s.tokens) for s in samples), after)
        return samples

    def workload(self) -> Workload:
        """What has been recorded, episodes in order of their questions and rollouts."""
        return [self._episodes[name] for name in sorted(self._episodes)]


def write(workload: Workload, path: Path) -> None:
    """Writes a workload as JSON."""
    path.write_text(json.dumps([[dataclasses.astuple(r) for r in e] for e in workload]))


def read(path: Path) -> Workload:
    """The workload that `write` wrote."""
    return [
        [Recorded(tuple(p), tuple(n), tuple(a)) for p, n, a in episode]
        for episode in json.loads(path.read_text())
    ]


def num_tokens(workload: Workload) -> int:
    """Tokens that are generated in all."""
    return sum(sum(r.lengths) for episode in workload for r in episode)


async def replay(
    workload: Workload, request: Callable[[tuple[int, int], Recorded], Awaitable]
) -> None:
    """Runs request((episode, index), recorded) for every request, as soon as what it waited for
    when it was recorded has ended; all episodes at once."""

    async def _one(done: list[asyncio.Event], name: tuple[int, int], recorded: Recorded) -> None:
        for index in recorded.after:
            await done[index].wait()
        await request(name, recorded)
        done[name[1]].set()

    async def _episode(number: int, requests: list[Recorded]) -> None:
        done = [asyncio.Event() for _ in requests]
        await asyncio.gather(*(_one(done, (number, i), r) for i, r in enumerate(requests)))

    await asyncio.gather(*(_episode(number, e) for number, e in enumerate(workload)))
