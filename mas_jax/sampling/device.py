"""What the engine keeps on its device or mesh, and the device calls with host arrays around them.

Compiles each program once, counts work and time; programs and shapes are of `calls.py`.
Dimensions: as in `programs.py`. Must not know: callers, futures, why a row is there.
"""

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mas_jax.model import int8, paged_attention, qwen3
from mas_jax.sampling import calls
from mas_jax.sampling.engine_settings import EngineSettings, check_settings
from mas_jax.sampling.scheduler import Block, Sequence


@dataclass
class EngineMetrics:
    """Counts since the engine was made; seconds are of device calls, compilation apart.

    near_tokens: drawn so near a boundary that another rounding may draw another token.
    compilations: at most the number of programs; a call of other shapes is an error.
    """

    requests: int = 0
    sequences: int = 0
    generated_tokens: int = 0
    mixed_calls: int = 0
    prefill_calls: int = 0
    prefill_tokens: int = 0
    prefill_places: int = 0
    decode_calls: int = 0
    decode_tokens: int = 0
    decode_places: int = 0
    near_tokens: int = 0
    compilations: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    compile_s: float = 0.0


class Decoded(NamedTuple):
    """Results for rows: tokens [B, I], log-probs [B, I], tokens taken [B], forced of these [B]."""

    tokens_BI: np.ndarray
    logprobs_BI: np.ndarray
    taken_B: np.ndarray
    num_forced_B: np.ndarray


class Device:
    """Parameters and page pool of one policy, and the calls on them."""

    def __init__(
        self, config: qwen3.ModelConfig, settings: EngineSettings, *, mesh: Mesh | None
    ) -> None:
        check_settings(settings)
        self.config, self.settings, self.metrics = config, settings, EngineMetrics()
        self.mesh = mesh
        # seconds of calls that ended, and when the one under way began: one tuple, since a thread
        # writes what another reads
        self._worked: tuple[float, float | None] = (0.0, None)
        self._programs: dict[tuple[str, int], jax.stages.Compiled] = {}
        here = paged_attention.choose("auto") == "ragged_paged"
        self.is_ragged = settings.calls == "ragged" or (settings.calls == "auto" and here)
        self._by_layer = calls.by_layer(config, settings, mesh)
        self.reset_pool()

    def reset_pool(self) -> None:
        """A new pool of zeros, see `calls.pool_shapes`."""
        self._pool = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding),
            calls.pool_shapes(self.config, self.settings, self.mesh, is_ragged=self.is_ragged),
        )

    def set_params(self, params: qwen3.Params) -> None:
        """Takes new weights from wherever they lie, split by layer; a value head stays behind."""
        params = {name: value for name, value in params.items() if name != "value_head"}
        if self.mesh is not None:
            params = jax.device_put(params, calls.shardings(params, self.config, self.mesh))
        with self._in_mesh():
            self._params = self._by_layer(params)

    @property
    def busy_s(self) -> float:
        """Seconds of device calls so far, the one under way included, compilation apart."""
        ended_s, since = self._worked
        return ended_s if since is None else ended_s + time.perf_counter() - since

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters as they are kept, over all devices of the mesh."""
        return int8.num_bytes(self._params)

    def temporary_bytes(self, kind: str, bucket: int) -> int:
        """Bytes that a program takes a device beside its arguments and results.

        Raises: KeyError for one that no call has needed yet.
        """
        return self._programs[kind, bucket].memory_analysis().temp_size_in_bytes

    def _in_mesh(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    # programs

    async def _call(self, kind: str, bucket: int, *args) -> tuple[list[np.ndarray], float]:
        """`_run` in a thread: meanwhile the event loop's coroutines go on. Its arguments are made
        before, since a coroutine may cancel a sequence at any time."""
        return await asyncio.to_thread(self._run, kind, bucket, *args)

    def _run(self, kind: str, bucket: int, *args) -> tuple[list[np.ndarray], float]:
        """Results of one device call after the pool, as numpy, and its seconds; compiles once for
        a kind and bucket."""
        args = (self._params, self._pool, *args)
        start = time.perf_counter()
        if (kind, bucket) not in self._programs:
            self._programs[kind, bucket] = calls.lower_call(
                kind, self.config, self.mesh, args
            ).compile()
            self.metrics.compilations += 1
            self.metrics.compile_s += time.perf_counter() - start
            start = time.perf_counter()
        ended_s, _ = self._worked
        self._worked = ended_s, start
        try:
            self._pool, *results = self._programs[kind, bucket](*args)
            results = [np.asarray(x) for x in results]
        finally:
            seconds = time.perf_counter() - start
            self._worked = ended_s + seconds, None
        return results, seconds

    # calls

    async def prefill(self, bucket: int, work: list[Block]) -> tuple[np.ndarray, np.ndarray]:
        """The token and log-prob after each block [B]."""
        s, m = self.settings, self.metrics
        drawing = calls.drawing([block.sequence for block in work], s.prefill_blocks)
        results, seconds = await self._call(
            "prefill", bucket, calls.blocks(s, bucket, work), drawing
        )
        m.prefill_calls += 1
        m.prefill_tokens += sum(len(block.tokens) for block in work)
        m.prefill_places += s.prefill_blocks * s.page_size
        m.prefill_s += seconds
        return self._after_blocks(work, *results)

    def _after_blocks(self, work: list[Block], token_B, logprob_B, is_near_B):
        """Token and log-prob after each block; counts the near ones among those that matter."""
        draws_B = [block.sequence is not None for block in work]
        self.metrics.near_tokens += int(is_near_B[: len(work)][draws_B].sum())
        return token_B, logprob_B

    async def decode(
        self,
        bucket: int,
        work: list[Sequence],
        limits: list[int],
        pause_V: np.ndarray,
        min_active: int,
    ) -> Decoded:
        """Tokens of sequences, at most `limits` each; arguments as in `programs.decode`."""
        s, m = self.settings, self.metrics
        rows = calls.rows(s, bucket, work, limits)
        drawing = calls.drawing(work, s.decode_rows)
        (tokens_BI, logprobs_BI, taken_B, near_B, num_steps), seconds = await self._call(
            "decode", bucket, rows, drawing, pause_V, np.int32(min_active)
        )
        m.decode_calls += 1
        m.near_tokens += int(near_B.sum())
        m.decode_tokens += int(taken_B.sum())
        m.decode_places += s.decode_rows * int(num_steps)
        m.decode_s += seconds
        return Decoded(tokens_BI, logprobs_BI, taken_B, rows.num_forced_B)

    async def mixed(
        self,
        blocks: list[Block],
        work: list[Sequence],
        limits: list[int],
        pause_V: np.ndarray,
    ) -> tuple[tuple[np.ndarray, np.ndarray], Decoded]:
        """What `prefill` gives for the blocks and `decode` for the sequences, from one call."""
        s, m = self.settings, self.metrics
        flat_work = [
            ((sequence.tokens[sequence.num_cached - sequence.num_prompt],), sequence.num_cached,
             sequence.pages)
            for sequence in work
        ] + [(b.tokens, (len(b.table) - 1) * s.page_size, b.table) for b in blocks]  # fmt: skip
        flat = calls.flat(s, flat_work)
        drawn_by = [*work, *[None] * (s.decode_rows - len(work)), *(b.sequence for b in blocks)]
        drawing = calls.drawing(drawn_by, s.decode_rows + s.prefill_blocks)
        rows = calls.rows(s, s.context, work, limits)
        results, seconds = await self._call("mixed", s.context, flat, rows, drawing, pause_V)
        tokens_BI, logprobs_BI, taken_B, near_B, num_steps, *after_blocks = results
        m.mixed_calls += 1
        m.near_tokens += int(near_B.sum())
        m.prefill_tokens += sum(len(block.tokens) for block in blocks)
        m.prefill_places += s.prefill_blocks * s.page_size
        m.decode_tokens += int(taken_B.sum())
        m.decode_places += s.decode_rows * int(num_steps)
        m.decode_s += seconds
        decoded = Decoded(tokens_BI, logprobs_BI, taken_B, rows.num_forced_B)
        return self._after_blocks(blocks, *after_blocks), decoded
