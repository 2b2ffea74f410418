"""What the engine keeps on its device or mesh, and the device calls with host arrays around them.

Builds the fixed shapes of each call from blocks and sequences, compiles each program once, counts
work and time. Dimensions: as in `programs.py`. Must not know: callers, futures, why a row is there.
"""

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mas_jax.model import paged_attention, qwen3, sharding
from mas_jax.sampling import mixed, programs
from mas_jax.sampling.scheduler import Block, Sequence


@dataclass(frozen=True)
class EngineSettings:
    """Shapes of the engine's device calls.

    calls: "dense" for prefill and decode apart on gathered arrays, two programs a bucket; "ragged"
    for both in one call through the paged kernel, one program in all; "auto" is ragged on TPU.
    context: positions a sequence may have. buckets: context sizes that programs are made for, the
    last one `context`; all multiples of page_size. prefill_blocks, decode_rows: rows of one call
    (a block is a page of tokens); decode_steps: most tokens a row takes in one call. num_pages:
    pages of the pool, whose bytes are 2 x layers x kv heads x head dim x page_size x itemsize each.
    """

    context: int
    buckets: tuple[int, ...]
    num_pages: int
    page_size: int = 16
    prefill_blocks: int = 32
    decode_rows: int = 64
    decode_steps: int = 16
    max_stop_ids: int = 4
    min_active_share: float = 0.6
    dtype: str = "float32"
    calls: str = "auto"


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


def check_settings(settings: EngineSettings) -> None:
    """Raises: ValueError for sizes that do not fit together."""
    s = settings
    if s.calls not in ("auto", "dense", "ragged"):
        raise ValueError(f"calls={s.calls!r} is unknown; choose 'auto', 'dense' or 'ragged'")
    if list(s.buckets) != sorted(set(s.buckets)) or not s.buckets or s.buckets[-1] != s.context:
        raise ValueError(f"buckets={s.buckets} must rise and end at context={s.context}")
    if any(b % s.page_size for b in s.buckets):
        raise ValueError(f"buckets={s.buckets} must be multiples of page_size={s.page_size}")
    needed = s.context // s.page_size + 1
    if s.num_pages < needed:
        raise ValueError(
            f"num_pages={s.num_pages} cannot hold one sequence of context={s.context}; "
            f"wanted at least {needed}"
        )


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
        self._mesh = mesh
        self._programs: dict[tuple[str, int], Callable] = {}
        here = paged_attention.choose("auto") == "ragged_paged"
        self.is_ragged = settings.calls == "ragged" or (settings.calls == "auto" and here)
        self.reset_pool()

    def reset_pool(self) -> None:
        """A new pool of zeros, laid out as `programs.Pool`, or as `mixed.Pool` for ragged calls."""
        s, c = self.settings, self.config
        if self.is_ragged:
            lanes = paged_attention.HEAD_DIM_LANES
            head_dim = -(-c.head_dim // lanes) * lanes
            shape = (s.num_pages, s.page_size, 2 * c.num_kv_heads, head_dim)
            self._pool = [self._zeros(shape, mixed.POOL_AXES) for _ in range(c.num_layers)]
        else:
            keys = (s.num_pages, c.num_kv_heads, c.head_dim, s.page_size)
            values = (s.num_pages, c.num_kv_heads, s.page_size, c.head_dim)
            self._pool = [
                (self._zeros(keys, programs.KEY_AXES), self._zeros(values, programs.VALUE_AXES))
                for _ in range(c.num_layers)
            ]

    def _zeros(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> jax.Array:
        place = None
        if self._mesh is not None:
            place = sharding.named(self._mesh, shape, axes, name="page pool")
        return jnp.zeros(shape, self.settings.dtype, device=place)

    def set_params(self, params: qwen3.Params) -> None:
        """Takes new weights from wherever they lie, split by layer; a value head stays behind."""
        params = {name: value for name, value in params.items() if name != "value_head"}
        if self._mesh is not None:
            params = jax.device_put(params, qwen3.param_shardings(self.config, self._mesh))
        with self._in_mesh():
            self._params = self._split(params)

    @functools.cached_property
    def _split(self) -> Callable[[qwen3.Params], qwen3.Params]:
        """Compiled: parameters with a list of layers, since decode steps unroll them, and fused
        where no dimension of them is split over devices; matrices in the dtype they are used in."""
        is_split = self._mesh is not None and self._mesh.size > 1

        def _layer(params, index):
            layer = jax.tree.map(lambda x: x[index], params["layers"])
            return layer if is_split else qwen3.fuse_layer(layer)

        def _by_layer(params):
            masks = qwen3.decay_mask(self.config)  # True for matrices, which are cast at use anyway
            params = jax.tree.map(
                lambda x, is_matrix: x.astype(self.settings.dtype) if is_matrix else x,
                params,
                masks,
            )
            layers = [_layer(params, index) for index in range(self.config.num_layers)]
            angles = qwen3.rotary(self.config, jnp.arange(self.settings.context))
            return params | {"layers": layers, "rotary": angles}

        return jax.jit(_by_layer)

    def _in_mesh(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)

    # programs

    def _entry(self, kind: str) -> Callable:
        """The program of a kind as a function of (params, pool, ...)."""
        function = {
            "prefill": programs.prefill,
            "decode": programs.decode,
            "mixed": functools.partial(mixed.mixed, backend="auto"),
        }[kind]

        def _run(params, pool, *rest):
            return function(params, self.config, pool, *rest)

        return _run

    def _compile(self, kind: str, args: tuple) -> Callable:
        """AOT compilation with the pool donated; on a mesh, host-made arguments are replicated."""
        if self._mesh is None:
            return jax.jit(self._entry(kind), donate_argnums=(1,)).lower(*args).compile()
        everywhere = NamedSharding(self._mesh, PartitionSpec())
        params_at, pool_at = (jax.tree.map(lambda x: x.sharding, a) for a in args[:2])
        rest_at = jax.tree.map(lambda _: everywhere, args[2:])
        num_results = {"prefill": 3, "decode": 5, "mixed": 8}[kind]
        jitted = jax.jit(
            self._entry(kind),
            in_shardings=(params_at, pool_at, *rest_at),
            out_shardings=(pool_at, *[everywhere] * num_results),
            donate_argnums=(1,),
        )
        with self._in_mesh():
            return jitted.lower(*args).compile()

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
            self._programs[kind, bucket] = self._compile(kind, args)
            self.metrics.compilations += 1
            self.metrics.compile_s += time.perf_counter() - start
            start = time.perf_counter()
        self._pool, *results = self._programs[kind, bucket](*args)
        results = [np.asarray(x) for x in results]
        return results, time.perf_counter() - start

    # arrays

    def _drawing(self, sequences: list[Sequence | None], rows: int) -> programs.Drawing:
        """How each row draws; rows without a sequence draw anything."""
        key_B2 = np.zeros((rows, 2), np.uint32)
        temperature_B, top_p_B = np.ones(rows, np.float32), np.ones(rows, np.float32)
        top_k_B = np.zeros(rows, np.int32)
        for row, sequence in enumerate(sequences):
            if sequence is not None:
                r = sequence.request
                key_B2[row] = sequence.key_data
                temperature_B[row], top_p_B[row], top_k_B[row] = r.temperature, r.top_p, r.top_k
        return programs.Drawing(key_B2, temperature_B, top_p_B, top_k_B)

    def _rows(self, bucket: int, work: list[Sequence], limits: list[int]) -> programs.Rows:
        s = self.settings
        rows, pages, steps = s.decode_rows, bucket // s.page_size, s.decode_steps
        token_B, position_B, limit_B, num_forced_B = (np.zeros(rows, np.int32) for _ in range(4))
        table_BU = np.zeros((rows, pages), np.int32)
        forced_BI = np.zeros((rows, steps), np.int32)
        stop_BQ = np.full((rows, s.max_stop_ids), -1, np.int32)
        limit_B[: len(limits)] = limits
        for row, sequence in enumerate(work):
            generated = sequence.num_cached - sequence.num_prompt
            token_B[row], position_B[row] = sequence.tokens[generated], sequence.num_cached
            forced = sequence.tokens[generated + 1 :][:steps]
            forced_BI[row, : len(forced)], num_forced_B[row] = forced, len(forced)
            held = sequence.pages[:pages]
            table_BU[row, : len(held)] = held
            stop_ids = sequence.request.stop.token_ids
            stop_BQ[row, : len(stop_ids)] = stop_ids
        return programs.Rows(
            token_B, position_B, table_BU, limit_B, forced_BI, num_forced_B, stop_BQ
        )

    def _blocks(self, bucket: int, work: list[Block]) -> programs.Blocks:
        s = self.settings
        rows, pages = s.prefill_blocks, bucket // s.page_size
        tokens_BT = np.zeros((rows, s.page_size), np.int32)
        count_B, page_B = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        table_BU = np.zeros((rows, pages), np.int32)
        for row, block in enumerate(work):
            count_B[row] = len(block.tokens)
            tokens_BT[row, : len(block.tokens)] = block.tokens
            page_B[row] = len(block.table) - 1
            table_BU[row, : len(block.table)] = block.table
        return programs.Blocks(tokens_BT, count_B, page_B, table_BU)

    # calls

    async def prefill(self, bucket: int, work: list[Block]) -> tuple[np.ndarray, np.ndarray]:
        """The token and log-prob after each block [B]."""
        s, m = self.settings, self.metrics
        drawing = self._drawing([block.sequence for block in work], s.prefill_blocks)
        results, seconds = await self._call("prefill", bucket, self._blocks(bucket, work), drawing)
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
        rows = self._rows(bucket, work, limits)
        drawing = self._drawing(work, s.decode_rows)
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
        flat = mixed.make_flat(
            flat_work,
            num_tokens=s.decode_rows + s.prefill_blocks * s.page_size,
            num_rows=s.decode_rows + s.prefill_blocks,
            num_pages=s.context // s.page_size,
            page_size=s.page_size,
        )
        drawn_by = [*work, *[None] * (s.decode_rows - len(work)), *(b.sequence for b in blocks)]
        drawing = self._drawing(drawn_by, s.decode_rows + s.prefill_blocks)
        rows = self._rows(s.context, work, limits)
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
