"""What both sides of the loop benchmark play and train on: recorded tokens, questions, sequences.

The starting policy plays Stage II's questions once; what it said, by sampling key, is the script.
Later plays ask a model to generate as many tokens as the script has, and hand the script's tokens
to the agents, so that episodes are equal whatever the model, its size or the order of its calls.
Must not know: models, devices, who generates.
"""

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np

from mas_jax.benchmarks import update_workload
from mas_jax.records import Sample, SampleKey, StopReason

QUIET_TURNS = 8  # turns of the event loop without a request, after which no agent can go on

Script = dict[str, list[Sample]]
Request = tuple[tuple[int, ...], SampleKey, list[Sample]]  # prompt, key, what it is answered with


def name(key: SampleKey) -> str:
    """A key as the script's JSON has it."""
    return json.dumps(dataclasses.astuple(key))


def write(script: Script, path: Path) -> None:
    """Stores a script."""
    path.write_text(json.dumps({k: [dataclasses.astuple(s) for s in v] for k, v in script.items()}))


def read(path: Path) -> Script:
    """The script that `write` stored."""
    return {
        key: [Sample(tuple(t), tuple(p), StopReason(reason)) for t, p, reason in samples]
        for key, samples in json.loads(path.read_text()).items()
    }


class Recorder:
    """A `sample` function that hands on to another and keeps the script."""

    def __init__(self, sample: Callable[..., Awaitable[list[Sample]]]) -> None:
        self._sample, self.script = sample, {}

    async def sample(self, prompt: tuple[int, ...], *, key: SampleKey, **knobs) -> list[Sample]:
        """`sample` of the function inside."""
        samples = await self._sample(prompt, key=key, **knobs)
        self.script[name(key)] = samples
        return samples


def scripted(
    script: Script, generate: Callable[[Request], Awaitable[None]]
) -> Callable[..., Awaitable[list[Sample]]]:
    """A `sample` function that answers from the script once `generate` has made as many tokens."""

    async def _sample(prompt: tuple[int, ...], *, key: SampleKey, **knobs) -> list[Sample]:
        samples = script[name(key)]
        await generate((tuple(prompt), key, samples))
        return samples

    return _sample


async def nothing(request: Request) -> None:
    """A generator that takes no time: what is left of a play is the host's own."""


class Waves:
    """Static batching: requests wait until no agent can go on without an answer, then all go at
    once, and nobody goes on before the last has ended. One for each event loop."""

    def __init__(self, run: Callable[[list[Request]], Awaitable[None]]) -> None:
        self._run, self._waiting, self._driver = run, [], None
        self._searches = 0

    async def generate(self, request: Request) -> None:
        """Returns when the request's wave has ended."""
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((request, done))
        if self._driver is None or self._driver.done():
            self._driver = asyncio.ensure_future(self._drive())
        waited = await asyncio.wait([done, self._driver], return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            [driver] = waited[0]
            driver.result()  # raises what stopped it

    def watched(self, search: Callable[..., Awaitable]) -> Callable[..., Awaitable]:
        """The same search; its callers count as agents that can go on."""

        async def _search(queries: Sequence[str], k: int):
            self._searches += 1
            try:
                return await search(queries, k)
            finally:
                self._searches -= 1

        return _search

    async def _drive(self) -> None:
        while self._waiting:
            quiet, known = 0, len(self._waiting)
            while quiet < QUIET_TURNS:
                # a search runs in a thread: leave it the processor
                await asyncio.sleep(0.0005 if self._searches else 0)
                quiet = 0 if self._searches or len(self._waiting) > known else quiet + 1
                known = len(self._waiting)
            wave, self._waiting = self._waiting, []
            await self._run([request for request, _ in wave])
            for _, done in wave:
                done.set_result(None)


# --- sequences, as a trainer that pads reads them -------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sequences:
    """A batch of padded sequences, one a trace, the prompt ends before the first sampled token.

    sampled_NC: which completion tokens the role sampled. is_distilled_N: whose advantage is the
    teacher's log-ratio instead of `batch.advantages_N`.
    """

    batch: update_workload.Batch
    sampled_NC: np.ndarray
    is_distilled_N: np.ndarray


def pad(traces: Sequence, advantages: Sequence[float], *, distilled: str) -> Sequences:
    """Traces (`records.Trace`) as sequences: prompts on the left and completions on the right,
    padded to the longest of all, as TRL does. distilled: role with a teacher's signal."""
    owned = [np.asarray(t.owners) > 0 for t in traces]
    first_N = [int(np.argmax(o)) for o in owned]
    num_prompt = max(first_N)
    num_completion = max(len(t.tokens) - f for t, f in zip(traces, first_N, strict=True))
    shapes = (len(traces), num_prompt), (len(traces), num_completion)
    prompt_NP, prompt_mask_NP = (np.zeros(shapes[0], np.int32) for _ in range(2))
    completion_NC, completion_mask_NC, sampled_NC = (np.zeros(shapes[1], np.int32) for _ in "abc")
    logprobs_NC = np.zeros(shapes[1], np.float32)
    for n, (trace, first) in enumerate(zip(traces, first_N, strict=True)):
        rest = len(trace.tokens) - first
        prompt_NP[n, num_prompt - first :] = trace.tokens[:first]
        prompt_mask_NP[n, num_prompt - first :] = 1
        completion_NC[n, :rest] = trace.tokens[first:]
        completion_mask_NC[n, :rest] = 1
        sampled_NC[n, :rest] = owned[n][first:]
        logprobs_NC[n, :rest] = trace.logprobs[first:]
    batch = update_workload.Batch(
        prompt_NP, prompt_mask_NP, completion_NC, completion_mask_NC,
        np.asarray(advantages, np.float32), logprobs_NC,
    )  # fmt: skip
    return Sequences(batch, sampled_NC, np.asarray([t.role == distilled for t in traces]))


def write_sequences(found: Sequences, directory: Path) -> None:
    """Stores sequences for the trainer's process."""
    update_workload.write(found.batch, directory / "batch.npz")
    np.savez(
        directory / "roles.npz", sampled_NC=found.sampled_NC, is_distilled_N=found.is_distilled_N
    )


def read_sequences(directory: Path) -> Sequences:
    """What `write_sequences` stored."""
    return Sequences(
        update_workload.read(directory / "batch.npz"), **np.load(directory / "roles.npz")
    )


def trimmed(found: Sequences, rows: int) -> list[Sequences]:
    """Micro-batches of about equal lengths, each without the columns that none of it uses."""
    sizes_N = found.batch.prompt_mask_NP.sum(1) + found.batch.completion_mask_NC.sum(1)
    order_N, parts = np.argsort(sizes_N, kind="stable"), []
    for start in range(0, len(order_N), rows):
        index = order_N[start : start + rows]
        fields = {key: x[index] for key, x in vars(found.batch).items()}
        before = found.batch.prompt_mask_NP.shape[1] - int(fields["prompt_mask_NP"].sum(1).max())
        after = int(fields["completion_mask_NC"].sum(1).max())
        for key, x in fields.items():
            fields[key] = x[:, before:] if key.endswith("_NP") else x
            fields[key] = x[:, :after] if key.endswith("_NC") else fields[key]
        batch = update_workload.Batch(**fields)
        parts.append(Sequences(batch, found.sampled_NC[index, :after], found.is_distilled_N[index]))
    return parts


def cut(found: Sequences, rows: int) -> list[Sequences]:
    """Micro-batches as TRL makes them: in order, all as wide as the widest of the batch."""
    starts = range(0, len(found.is_distilled_N), rows)
    return [
        Sequences(
            update_workload.Batch(**{k: x[i : i + rows] for k, x in vars(found.batch).items()}),
            found.sampled_NC[i : i + rows],
            found.is_distilled_N[i : i + rows],
        )
        for i in starts
    ]


def positions(parts: Sequence[Sequences]) -> int:
    """Places that a forward pass over all micro-batches computes, padding included."""
    return sum(p.batch.prompt_ids_NP.size + p.batch.completion_ids_NC.size for p in parts)
