"""Continuous batching over a paged key/value pool: `await engine.sample(...)` from any coroutine.

The engine knows token ids and, for stop strings only, the text of a token; never a chat. On CPU
sampling is schedule-invariant: equal requests draw equal tokens whatever else runs (see
`scheduler.py`).
Must not know: roles, templates, rewards.
"""

import asyncio
import functools
import hashlib
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh

from mas_jax.model import qwen3
from mas_jax.records import FailureKind, Sample, SampleKey, Stop, StopReason, WorldError
from mas_jax.sampling.device import Decoded, Device, EngineMetrics
from mas_jax.sampling.engine_settings import EngineSettings
from mas_jax.sampling.pages import PagePool
from mas_jax.sampling.scheduler import Block, Limits, Request, Scheduler, Sequence, State

TURNS_TO_WAIT = 4  # of the event loop before a device call, for coroutines that just got an answer


def key_data(key: SampleKey, candidate: int) -> tuple[int, int]:
    """Two 32-bit words that a candidate's randomness starts from; positions are folded in later."""
    fields = (*vars(key).values(), candidate)
    digest = hashlib.blake2b(repr(fields).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


class Engine:
    """One policy on one device or mesh, sampled from by many coroutines of one event loop.

    decode: the text of token ids, for stop strings. Raises: ValueError for impossible settings.
    """

    def __init__(
        self,
        config: qwen3.ModelConfig,
        params: qwen3.Params,
        settings: EngineSettings,
        *,
        policy: str,
        decode: Callable[[list[int]], str],
        mesh: Mesh | None = None,
    ) -> None:
        self.config, self.settings, self.policy = config, settings, policy
        self.device = Device(config, settings, mesh=mesh)
        self._decode = decode
        self._pause_masks: dict[frozenset[str], np.ndarray] = {}
        self._driver: asyncio.Task | None = None
        self._futures: dict[Sequence, asyncio.Future] = {}
        limits = Limits(
            page_size=settings.page_size,
            prefill_blocks=settings.prefill_blocks,
            decode_rows=settings.decode_rows,
            decode_steps=settings.decode_steps,
            # a ragged call costs what its tokens cost: one bucket
            buckets=settings.buckets[-1:] if self.device.is_ragged else settings.buckets,
        )
        self.scheduler = Scheduler(PagePool(settings.num_pages), limits)
        self._num_versions = 0
        self.set_params(params)

    @property
    def metrics(self) -> EngineMetrics:
        """Counts since the engine was made."""
        return self.device.metrics

    @property
    def num_replacements(self) -> int:
        """How often its weights have been replaced since it was made: never, of a frozen policy."""
        return self._num_versions - 1

    # weights

    def set_params(self, params: qwen3.Params) -> None:
        """Samples from these weights from now on; nothing that the old ones computed is used again.

        Raises: RuntimeError while generations are under way.
        """
        if self.scheduler.has_work:
            raise RuntimeError(
                f"policy {self.policy!r}: new weights while generations run; let them finish first"
            )
        self._num_versions += 1
        self.scheduler.version = f"{self.policy}@{self._num_versions}"
        self.scheduler.pool.withdraw_all()
        self.device.reset_pool()  # a NaN of the old weights would reach masked places of new rows
        self.device.set_params(params)

    # requests

    async def sample(  # nine arguments: the contract of DESIGN §3
        self,
        prompt: tuple[int, ...],
        *,
        key: SampleKey,
        policy: str,
        n: int,
        max_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        stop: Stop,
    ) -> list[Sample]:
        """n continuations of a prompt; see DESIGN §3. Cancelling the caller cancels them.

        Raises: ValueError for a bad request, naming it; WorldError if the device call failed.
        """
        request = Request(tuple(prompt), key, max_tokens, temperature, top_p, top_k, stop)
        self._check(request, policy, n)
        self.metrics.requests += 1
        loop = asyncio.get_running_loop()
        futures = []
        for candidate in range(n):
            sequence = Sequence(request, candidate, key_data(key, candidate))
            self._futures[sequence] = loop.create_future()
            futures.append(self._futures[sequence])
            self.scheduler.add(sequence)
        sequences = list(self._futures)[-n:]
        if self._driver is None or self._driver.done():
            self._driver = loop.create_task(self._drive())
            self._driver.add_done_callback(self._driver_ended)
        try:
            return list(await asyncio.gather(*futures))
        except asyncio.CancelledError:
            for sequence in sequences:
                self.scheduler.cancel(sequence)
                self._futures.pop(sequence, None)
            raise

    def _check(self, request: Request, policy: str, n: int) -> None:
        """Raises: ValueError that names the request."""
        r, context = request, self.settings.context
        problems = {
            f"policy {policy!r} is not {self.policy!r}, which this engine holds": (
                policy != self.policy
            ),
            "the prompt is empty": not r.prompt,
            f"n={n} is below 1": n < 1,
            f"max_tokens={r.max_tokens} is below 1": r.max_tokens < 1,
            f"temperature={r.temperature} is below 0": not r.temperature >= 0,
            f"top_p={r.top_p} is outside (0, 1]": not 0 < r.top_p <= 1,
            f"top_k={r.top_k} is below 0 (0: no limit)": r.top_k < 0,
            f"{len(r.prompt)} prompt tokens and max_tokens={r.max_tokens} exceed the context of "
            f"{context}": len(r.prompt) + r.max_tokens > context,
            f"a prompt token is outside 0..{self.config.vocab_size - 1}": bool(r.prompt)
            and not 0 <= min(r.prompt) <= max(r.prompt) < self.config.vocab_size,
            f"{len(r.stop.token_ids)} stop tokens; settings.max_stop_ids="
            f"{self.settings.max_stop_ids}": len(r.stop.token_ids) > self.settings.max_stop_ids,
            f"stop strings {r.stop.strings} must be non-empty and end in ASCII": not all(
                s and s[-1].isascii() for s in r.stop.strings
            ),
        }
        for problem, is_there in problems.items():
            if is_there:
                raise ValueError(f"sample request {r.key}: {problem}")

    # the driver

    async def _drive(self) -> None:
        """Runs device calls until no generation is left."""
        while self.scheduler.has_work:
            for _ in range(TURNS_TO_WAIT):
                await asyncio.sleep(0)
            if self.scheduler.has_work:
                await self._run_one_call()

    def _driver_ended(self, driver: asyncio.Task) -> None:
        """If the driver failed, every waiting caller learns why: a failure of the device is one of
        the world, anything else is our own fault. The engine can be used again."""
        error = None if driver.cancelled() else driver.exception()
        if error is None:
            return
        if isinstance(error, jax.errors.JaxRuntimeError):
            error = WorldError(FailureKind.SAMPLER, f"policy {self.policy!r}: {error}")
        for sequence, future in list(self._futures.items()):
            self.scheduler.cancel(sequence)
            if not future.done():
                future.set_exception(error)
        self._futures.clear()
        self.scheduler.pool.withdraw_all()
        self.device.reset_pool()  # the failed call may have taken the old one

    async def _run_one_call(self) -> None:
        """The next device call. Meanwhile coroutines read their answers, search, and make or cancel
        requests, which the scheduler considers before the call after."""
        if self.device.is_ragged:
            blocks, work = self.scheduler.next_mixed()
            limits, pause_V = self._limits(work, self.settings.context), self._pause_mask(work)
            drawn, decoded = await self.device.mixed(blocks, work, limits, pause_V)
            self._prefilled(blocks, *drawn)
            self._decoded(work, decoded)
            return
        kind, bucket, work = self.scheduler.next_call()
        if kind == "prefill":
            self._prefilled(work, *await self.device.prefill(bucket, work))
            return
        # leave early to refill only if there is something to refill with
        most, min_active = int(self.settings.min_active_share * len(work)), 1
        if self.scheduler.num_others(bucket, work) >= len(work) - most:
            min_active = most
        limits, pause_V = self._limits(work, bucket), self._pause_mask(work)
        self._decoded(work, await self.device.decode(bucket, work, limits, pause_V, min_active))

    def _limits(self, sequences: list[Sequence], bucket: int) -> list[int]:
        return [self.scheduler.steps_left(sequence, bucket) for sequence in sequences]

    def _prefilled(self, blocks: list[Block], token_B: np.ndarray, logprob_B: np.ndarray) -> None:
        """Gives each sequence whose prompt is complete its first token."""
        row_of = {id(block.sequence): row for row, block in enumerate(blocks)}
        for sequence in self.scheduler.prefilled(blocks):
            if not sequence.tokens:  # otherwise it was pre-empted, and drew this token before
                row = row_of[id(sequence)]
                self._append(sequence, [int(token_B[row])], [float(logprob_B[row])])

    def _decoded(self, sequences: list[Sequence], decoded: Decoded) -> None:
        """Gives each sequence what its row took, without what was forced."""
        for row, sequence in enumerate(sequences):
            if sequence.state is not State.READY:
                continue  # cancelled during the call
            taken, forced = int(decoded.taken_B[row]), int(decoded.num_forced_B[row])
            sequence.num_cached += taken
            new = slice(min(forced, taken), taken)
            tokens, logprobs = decoded.tokens_BI[row, new], decoded.logprobs_BI[row, new]
            self._append(sequence, tokens.tolist(), logprobs.tolist())

    def _pause_mask(self, sequences: list[Sequence]) -> np.ndarray:
        """True for tokens [V] whose text holds the last character of a stop string in use."""
        ends = frozenset(string[-1] for s in sequences for string in s.request.stop.strings)
        if ends not in self._pause_masks:
            texts = self._token_texts if ends else []
            mask_V = np.zeros(self.config.vocab_size, bool)
            for token, text in enumerate(texts):
                mask_V[token] = any(end in text for end in ends)
            self._pause_masks[ends] = mask_V
        return self._pause_masks[ends]

    @functools.cached_property
    def _token_texts(self) -> list[str]:
        return [self._decode([token]) for token in range(self.config.vocab_size)]

    def _append(self, sequence: Sequence, tokens: list[int], logprobs: list[float]) -> None:
        """Adds what a call drew, and ends the sequence where it has to end."""
        sequence.tokens += tokens
        sequence.logprobs += logprobs
        reason = self._stop_reason(sequence) if tokens else None
        if reason is None:
            return
        self.scheduler.finish(sequence, reason)
        self.metrics.sequences += 1
        self.metrics.generated_tokens += len(sequence.tokens)
        future = self._futures.pop(sequence, None)
        if future is not None and not future.done():
            future.set_result(Sample(tuple(sequence.tokens), tuple(sequence.logprobs), reason))

    def _stop_reason(self, sequence: Sequence) -> StopReason | None:
        """Why the sequence ends with its newest token; a call never goes past such a token."""
        request, last = sequence.request, sequence.tokens[-1]
        if last in request.stop.token_ids:
            return StopReason.TOKEN
        if request.stop.strings and self._pause_mask([sequence])[last]:
            text = self._decode(sequence.tokens)
            if any(string in text for string in request.stop.strings):
                return StopReason.STRING
        if len(sequence.tokens) >= request.max_tokens:
            return StopReason.LENGTH
        return None
