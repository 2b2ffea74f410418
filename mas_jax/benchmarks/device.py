"""One accelerator: training, scoring, prefill and decode against roofs measured in the same run.

Qwen3 shapes with random weights in bfloat16 (masters and second moments of training in float32).
The roofs are measured first: FLOP/s of a large matmul and bytes/s of a large copy. MFU counts
matmuls and causal attention once (METHODS 8.5), no rematerialisation, over the matmul's FLOP/s.
Prefill is the engine's own, of distinct prompts; its share is of the same roof. Decode is the
engine's, of rows with full contexts; its roof is the time to read weights, keys and values once a
step at the copy's bytes/s. A part that does not fit is reported as such, and after the time limit
none is begun. Must not know: peers, other chips' figures.
"""

import asyncio
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from mas_jax.benchmarks import step
from mas_jax.files import write_json
from mas_jax.model import qwen3, scoring, sharding
from mas_jax.records import SampleKey, Stop, WorldError
from mas_jax.sampling.engine import Engine
from mas_jax.sampling.engine_settings import EngineSettings

MODELS = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b")
LIMIT_S = 8 * 60.0
RUNS = 3


@dataclass(frozen=True)
class Shape:
    """Sizes of the work. rows x length: scored at once, and of a training micro-batch, of which an
    update has `micro`. prompts of `context` less `new` tokens are prefilled, then as many rows
    decode `new` tokens each. matmul: side of the roof's square; copied_bytes: of its copy.
    """

    rows: int
    length: int
    micro: int
    chunk: int
    remat: str
    prompts: int
    decode_rows: int
    context: int
    new: int
    page_size: int
    prefill_blocks: int
    decode_steps: int
    matmul: int
    copied_bytes: int


SHAPE = Shape(
    rows=4, length=4096, micro=2, chunk=2048, remat="full", prompts=16, decode_rows=128,
    context=2048, new=64, page_size=16, prefill_blocks=256, decode_steps=16, matmul=8192,
    copied_bytes=2**31,
)  # fmt: skip
SMALL = Shape(
    rows=2, length=64, micro=2, chunk=64, remat="full", prompts=4, decode_rows=4, context=64,
    new=8, page_size=8, prefill_blocks=8, decode_steps=4, matmul=256, copied_bytes=2**20,
)  # fmt: skip


def measure_roofs(shape: Shape, dtype: str) -> dict[str, float]:
    """FLOP/s of a matmul of random squares, bytes/s of a copy (read and written): best of ten."""
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(key, (shape.matmul,) * 2, dtype) for key in keys)
    matmul = jax.jit(lambda a, b: jnp.matmul(a, b))
    count = shape.copied_bytes // 4
    copy = jax.jit(lambda x: x + 1.0)
    x = jnp.zeros(count, jnp.float32)
    return {
        "flops_per_s": 2 * shape.matmul**3 / min(step.timed(lambda: matmul(a, b), 10)),
        "bytes_per_s": 2 * 4 * count / min(step.timed(lambda: copy(x), 10)),
    }


@dataclass(frozen=True)
class Model:
    """A model's shape on one device, the work, the roofs and the dtype of matmuls."""

    config: qwen3.ModelConfig
    shape: Shape
    roofs: dict[str, float]
    dtype: str

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh of the first device."""
        return sharding.make_mesh(devices=jax.devices()[:1])

    def params(self) -> qwen3.Params:
        """Random weights in the dtype of the matmuls, made on the device."""
        at = qwen3.param_shardings(self.config, self.mesh)
        made = jax.jit(
            lambda key: qwen3.init(self.config, key, dtype=jnp.dtype(self.dtype)), out_shardings=at
        )
        return made(jax.random.key(0))

    def mfu(self, flops: float, seconds: float) -> float:
        """Share of the matmul's roof."""
        return flops / seconds / self.roofs["flops_per_s"]


def score(m: Model) -> dict[str, float]:
    """Log-probs and entropies of full rows."""
    s = m.shape
    run = scoring.make_score(
        m.config, m.mesh, temperature=1.0, chunk=s.chunk, dtype=jnp.dtype(m.dtype), backend="auto"
    )
    batch = step.make_batch(m.config.vocab_size, (1, s.rows, s.length), s.length)
    arrays = [jnp.asarray(x[0]) for x in (batch.tokens_MBT, batch.segment_ids_MBT)]
    params, mask_BT = m.params(), jnp.ones((s.rows, s.length), bool)
    seconds = statistics.median(step.timed(lambda: run(params, *arrays, mask_BT), RUNS))
    flops = step.forward_flops(m.config, [s.length] * s.rows, with_head=True)
    return {"tokens_per_s": s.rows * s.length / seconds, "mfu": m.mfu(flops, seconds)}


def train(m: Model) -> dict[str, float]:
    """One GRPO update of full rows: gradients over its micro-batches, AdamW."""
    s = m.shape
    trainer = step.make_trainer(m.config, m.mesh, dtype=m.dtype, remat=s.remat, chunk=s.chunk)
    run = step.make_update(trainer, (s.micro, s.rows, s.length), s.length)
    seconds = statistics.median(step.timed(run, RUNS))
    num_rows = s.micro * s.rows
    flops = 3 * step.forward_flops(m.config, [s.length] * num_rows, with_head=True)
    return {"tokens_per_s": num_rows * s.length / seconds, "mfu": m.mfu(flops, seconds)}


def _sample_s(engine: Engine, params: qwen3.Params, prompts: list[tuple], n: int, new: int) -> list:
    """Seconds of sampling `n` continuations of each prompt, nothing shared between runs."""

    async def _all() -> None:
        requests = (
            engine.sample(
                prompt, key=SampleKey(0, "eval", 0, str(row), 0, "", 0), policy="p", n=n,
                max_tokens=new, temperature=1.0, top_p=1.0, top_k=0, stop=Stop(),
            )
            for row, prompt in enumerate(prompts)
        )  # fmt: skip
        await asyncio.gather(*requests)

    seconds = []
    for _ in range(RUNS + 1):
        engine.set_params(params)
        start = time.perf_counter()
        asyncio.run(_all())
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def decode_rows(config: qwen3.ModelConfig, shape: Shape, *, itemsize: int, limit: int) -> int:
    """The shape's rows, halved until weights and keys and values, both twice (the engine splits the
    former by layer, and gathers the latter where it has no paged kernel), take 0.8 of the limit."""
    rows, weights = shape.decode_rows, itemsize * qwen3.param_count(config)
    while rows > 1 and 2 * (weights + rows * _kv_bytes(config, itemsize) * shape.context) > (
        0.8 * limit
    ):
        rows //= 2
    return rows


def _kv_bytes(config: qwen3.ModelConfig, itemsize: int) -> int:
    """Bytes of a position's keys and values."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize


def sample(m: Model) -> dict[str, float]:
    """The engine's prefill of distinct prompts, and its decode of rows that continue one prompt."""
    s, size = m.shape, jnp.dtype(m.dtype).itemsize
    memory = jax.devices()[0].memory_stats() or {}  # a CPU tells none
    if "bytes_limit" in memory:
        rows = decode_rows(m.config, s, itemsize=size, limit=memory["bytes_limit"])
        s = replace(s, decode_rows=rows)
    pages = -(-s.context // s.page_size)
    engine = Engine(
        m.config, params := m.params(),
        EngineSettings(
            context=s.context, buckets=(s.context,), num_pages=(s.decode_rows + 1) * pages + 1,
            page_size=s.page_size, prefill_blocks=s.prefill_blocks, decode_rows=s.decode_rows,
            decode_steps=s.decode_steps, dtype=m.dtype,
        ),
        policy="p", decode=lambda tokens: "", mesh=m.mesh,
    )  # fmt: skip
    rng, length = np.random.default_rng(0), s.context - s.new
    shape = (s.prompts, length)
    prompts = [tuple(p) for p in rng.integers(0, m.config.vocab_size, shape).tolist()]
    _sample_s(engine, params, prompts[:1], s.decode_rows, s.new)  # compiles both programs
    prefill_s = statistics.median(_sample_s(engine, params, prompts, 1, 1))
    both_s = _sample_s(engine, params, prompts[:1], s.decode_rows, s.new)
    first_s = _sample_s(engine, params, prompts[:1], s.decode_rows, 1)
    steps = s.new - 1
    step_s = (statistics.median(both_s) - statistics.median(first_s)) / steps
    flops = step.forward_flops(m.config, [length] * s.prompts, with_head=False)
    read = size * qwen3.param_count(m.config)
    read += s.decode_rows * _kv_bytes(m.config, size) * (length + s.new / 2)
    floor_s = read / m.roofs["bytes_per_s"]
    return {
        "prefill_tokens_per_s": s.prompts * length / prefill_s,
        "prefill_share": m.mfu(flops, prefill_s),
        "decode_tokens_per_s": s.decode_rows / step_s,
        "decode_share": floor_s / step_s,
        "decode_rows": s.decode_rows,
    }


PARTS: dict[str, Callable[[Model], dict[str, float]]] = {
    "scoring": score, "training": train, "sampling": sample,
}  # fmt: skip


def run_part(part: Callable[[Model], dict[str, float]], m: Model) -> dict:
    """A part's figures and seconds, or why the device could not run it: {"failed": a line}."""
    start = time.perf_counter()
    try:
        found = part(m)
    except (jax.errors.JaxRuntimeError, WorldError) as error:  # most often memory
        found = {"failed": str(error).splitlines()[0][:300]}
    return found | {"seconds": time.perf_counter() - start}


def run(models: list[str], shape: Shape, out: Path, *, dtype: str, limit_s: float) -> dict:
    """The record, written to `out` after each part; parts after the limit are {"skipped": ...}."""
    start, device = time.perf_counter(), jax.devices()[0]
    record = {
        "device": device.device_kind, "platform": device.platform, "jax": jax.__version__,
        "dtype": dtype, "shape": asdict(shape), "roofs": measure_roofs(shape, dtype), "models": {},
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    for name in models:
        model = Model(qwen3.PRESETS[name], shape, record["roofs"], dtype)
        found = record["models"][name] = {}
        for part, measure in PARTS.items():
            used = time.perf_counter() - start
            if used > limit_s:
                found[part] = {"skipped": f"{limit_s:.0f} s were over"}
            else:
                found[part] = run_part(measure, model)
            record["seconds"] = time.perf_counter() - start
            write_json(out, record)
    return record


HEADINGS = (
    "model", "scoring tok/s", "MFU", "training tok/s", "MFU", "prefill tok/s", "of the roof",
    "decode tok/s", "of the roof",
)  # fmt: skip
CELLS = {
    "scoring": (("tokens_per_s", "mfu"),),
    "training": (("tokens_per_s", "mfu"),),
    "sampling": (
        ("prefill_tokens_per_s", "prefill_share"), ("decode_tokens_per_s", "decode_share")
    ),
}  # fmt: skip


def table(record: dict) -> Table:
    """The results for the console; a part without figures says why in the line below it."""
    roofs = record["roofs"]
    result = Table(
        title=f"{record['device']}, {record['dtype']}: matmul {roofs['flops_per_s'] / 1e12:.2f} "
        f"TFLOP/s, copy {roofs['bytes_per_s'] / 1e9:,.0f} GB/s"
    )
    for heading in HEADINGS:
        result.add_column(heading, justify="left" if heading == "model" else "right")
    for name, parts in record["models"].items():
        cells = [name]
        for part, pairs in CELLS.items():
            for rate, share in pairs:
                found = parts[part]
                has = rate in found
                cells.append(f"{found[rate]:,.0f}" if has else "-")
                cells.append(f"{found[share]:.2f}" if has else "-")
        result.add_row(*cells)
    return result


def main(out: Path, sizes: list[str] | None) -> None:
    """Runs on the first device, at most 8 minutes and the part then under way.

    sizes: presets; without one, and with an accelerator, Qwen3 0.6B, 1.7B and 4B. On a CPU the
    same code runs tiny work on the presets that are named. Raises: ValueError otherwise.
    """
    # before the first use of the device: training a 4B model needs more than the default share
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    is_cpu = jax.default_backend() == "cpu"
    unknown = set(sizes or ()) - set(qwen3.PRESETS)
    if unknown or (is_cpu and not sizes):
        raise ValueError(
            f"unknown sizes {sorted(unknown)}; choose from {sorted(qwen3.PRESETS)}"
            if unknown
            else "no accelerator here; --sizes=toy-1m runs the same code on the CPU"
        )
    shape, dtype = (SMALL, "float32") if is_cpu else (SHAPE, "bfloat16")
    console = Console(width=150)
    record = run(list(sizes or MODELS), shape, out, dtype=dtype, limit_s=LIMIT_S)
    console.print(table(record))
    for name, parts in record["models"].items():
        for part, found in parts.items():
            if "failed" in found or "skipped" in found:
                console.print(f"{name}, {part}: {found.get('failed') or found['skipped']}")
    console.print(f"written to {out}, {record['seconds']:,.0f} s")
