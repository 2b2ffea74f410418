"""What a training step needs and costs on a slice, by the real TPU compiler: memory, FLOPs, bytes,
collectives, seconds, and from these questions an hour and chip-hours.

Every figure of time is an estimate by the chip's peaks (for each instruction the slower of compute
and memory, plus the collectives that nothing covers), so utilisations are named `bound_mfu`: a real
chip reaches less.
Must not know: tables, flags.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from mas_jax.model import qwen3
from mas_jax.planning import compiler, run_programs
from mas_jax.planning.chips import Slice
from mas_jax.planning.cost import Cost, Kernel, Kernels, Reader, extrapolated
from mas_jax.planning.hlo import HBM, Instruction


@dataclass(frozen=True)
class Workload:
    """What a question's episode makes of tokens, on average: read (prompts, passages, reports) and
    sampled ones, and positions of context while it samples.

    Default: METHODS 1.1, recorded input and output of a MultiAgent-OPD workflow, as if no prefix
    were shared; the context is the middle of a 4k conversation.
    """

    input_tokens: float = 9172.0
    output_tokens: float = 697.0
    context: int = 2048


@dataclass(frozen=True)
class Phase:
    """One program in a step. runs: how often in a step, each costing `cost` on a device.

    hbm_bytes: everything alive on a device meanwhile. tokens: of one run over the slice.
    model_flops: of one run over the slice, what the mathematics needs (METHODS 8.5).
    error: why it could not be compiled, "" else.
    """

    name: str
    runs: float
    cost: Cost
    hbm_bytes: float
    tokens: float
    model_flops: float
    compile_s: float
    error: str = ""

    @property
    def seconds(self) -> float:
        """Of all its runs in a step, at the chip's peaks."""
        return self.runs * self.cost.seconds

    def bound_mfu(self, place: Slice) -> float:
        """Model FLOPs over what the chips could do in that time."""
        peak = place.peak_flops * len(place.devices)
        return self.model_flops / (peak * self.cost.seconds) if self.cost.seconds else 0.0

    @property
    def exposed_frac(self) -> float:
        """Longest stretch in which it waits for one kind of collective, over its time."""
        longest = max((c.longest_exposed_s for c in self.cost.collectives.values()), default=0.0)
        return longest / self.cost.seconds if self.cost.seconds else 0.0


@dataclass(frozen=True)
class Plan:
    """A stage's step on a slice."""

    run: run_programs.Run
    workload: Workload
    phases: tuple[Phase, ...]

    @property
    def step_s(self) -> float:
        """Seconds of a step at the chips' peaks: the phases follow each other."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def hbm_bytes(self) -> float:
        """Of the phase that needs most."""
        return max(phase.hbm_bytes for phase in self.phases)

    def has_room(self, phase: Phase) -> bool:
        """Whether a phase could be compiled and fits into a device beside what is held."""
        return not phase.error and phase.hbm_bytes <= self.run.place.hbm_bytes

    @property
    def fits(self) -> bool:
        """Whether every phase has room."""
        return all(self.has_room(phase) for phase in self.phases)

    @property
    def questions_per_hour(self) -> float:
        """At the chips' peaks; 0 where a phase could not be compiled."""
        return 3600 * self.run.config.train.questions / self.step_s if self.step_s else 0.0

    def chip_hours(self, steps: int) -> float:
        """Of so many steps at the chips' peaks."""
        return steps * self.step_s / 3600 * self.run.place.num_chips


def matmul_params(config: qwen3.ModelConfig) -> float:
    """Parameters in matmuls, one head included, the embedding lookup not."""
    layer = config.model_dim * (
        (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim + 3 * config.ffw_dim
    )
    return float(config.num_layers * layer + config.vocab_size * config.model_dim)


def forward_flops(config: qwen3.ModelConfig, rows: float, length: float) -> float:
    """Model FLOPs of a forward pass over full rows: matmuls and the causal half of attention.

    Source: METHODS 8.5; backward is twice as much.
    """
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * length**2
    return rows * (2 * matmul_params(config) * length + attention)


def splash_kernels(config: qwen3.ModelConfig, length: int) -> Kernels:
    """Work of the splash kernels on rows of a length: every causal tile, segments not skipped.

    Forward two matmuls over each pair, gradients of q three, of k and v four, as they form the
    scores again.
    """
    matmuls = {"fwd": 2, "dq": 3, "dkv": 4}

    def _kernel(one: Instruction) -> Kernel | None:
        if "tpu_custom_call" not in one.attributes or "splash" not in one.name:
            return None
        kind = next(kind for kind in ("dkv", "dq", "fwd") if kind in one.name)
        # beside it there are sums of each query, which the kernel keeps as wide as a lane
        wide = [a for a in one.arrays if a.shape[-1] == config.head_dim]
        attended = max(wide, key=lambda a: a.size)
        # the gradients of keys and values have those heads, and every query head took part in them
        size = attended.size * (config.num_heads / config.num_kv_heads if kind == "dkv" else 1)
        flops = matmuls[kind] * 2 * size * length / 2
        moved = 3 * sum(a.num_bytes for a in one.arrays if a.space == HBM)
        return Kernel(flops, moved)

    return _kernel


def paged_kernels(
    model: qwen3.ModelConfig, *, context: int, parts: int, rows: int, itemsize: int
) -> Kernels:
    """Work of the ragged paged kernel, of whose pool XLA sees no byte: each row's keys and values
    once, and two matmuls over each pair of a token and a position. parts: of the heads."""
    kv_bytes = 2 * model.num_kv_heads / parts * model.head_dim * itemsize

    def _kernel(one: Instruction) -> Kernel | None:
        if "tpu_custom_call" not in one.attributes:
            return None
        # the result is [tokens, heads, head dim]; decode rows have a token each, blocks a page
        tokens = max(one.arrays, key=lambda a: a.size).shape[0]
        num_rows = min(tokens, rows)
        flops = 4 * tokens * model.num_heads / parts * model.head_dim * context
        return Kernel(flops, num_rows * context * kv_bytes)

    return _kernel


def make_plan(
    run: run_programs.Run, workload: Workload, *, only: tuple[str, ...] = ()
) -> Iterator[Phase]:
    """The phases of a step, each as soon as it is compiled.

    only: of `run.program_names`, () for all.
    """
    for name in run.lower:
        if not only or name in only:
            yield _training(run, name, workload)
    if not only or "engine" in only:
        yield from _engine(run, workload)


def num_episodes(run: run_programs.Run) -> int:
    """Of a step."""
    return run.config.train.questions * run.config.train.group_size


def num_micro(run: run_programs.Run, workload: Workload) -> int:
    """Micro-batches that a step's tokens fill."""
    t = run.config.train
    tokens = num_episodes(run) * (workload.input_tokens + workload.output_tokens)
    return math.ceil(tokens / (t.micro_rows * t.row_length))


def _training(run: run_programs.Run, name: str, workload: Workload) -> Phase:
    """Scores, gradients, the optimizer or the resharding."""
    t, held = run.config.train, sum(run.held.values())
    micro = num_micro(run, workload)
    tokens_micro = t.micro_rows * t.row_length
    learned = workload.output_tokens / (workload.input_tokens + workload.output_tokens)
    on_device = tokens_micro * learned / (run.mesh.shape["data"] * run.mesh.shape["fsdp"])
    is_pass = name == "gradients" or name.startswith("score")
    passes = {"gradients": 3.0}.get(name, 1.0) * micro if is_pass else 0.0
    model_flops = passes * forward_flops(run.model, t.micro_rows, t.row_length)
    runs = t.updates_per_batch if name in ("gradients", "optimizer") else 1
    tokens = micro * tokens_micro if is_pass else 0.0
    try:
        compiled = compiler.compile_for_tpu(run.lower[name]())
    except compiler.DoesNotFit as error:
        needed = max(held, error.needed)  # the compiler's figure has the arguments in it
        return Phase(name, runs, Cost(), needed, tokens, model_flops, 0.0, str(error))
    reader = Reader(
        compiled.program, run.place, run.coords,
        turns={
            "jit(_score)/while": micro, "jit(_gradients)/while": micro,
            "shard_map/while": math.ceil(on_device / t.chunk),
        },
        kernels=splash_kernels(run.model, t.row_length),
    )  # fmt: skip
    m = compiled.memory
    # eight arrays of a batch, whose micro-batches are filled up to a power of two
    micro_rows = (1 << (micro - 1).bit_length()) * t.micro_rows
    rows = micro_rows / (run.mesh.shape["data"] * run.mesh.shape["fsdp"]) if is_pass else 0
    batch = 8 * 4 * rows * t.row_length
    gradient = run.held["weights"] if name == "optimizer" else 0.0
    hbm = held + m.temporaries + m.results + m.code + batch + gradient
    return Phase(name, runs, reader.cost(), hbm, tokens, model_flops, compiled.seconds)


def _engine(run: run_programs.Run, workload: Workload) -> Iterator[Phase]:
    """The engine's one program as its two kinds of work: a pass over a full budget of prompts, and
    one more token of every row.

    Its layers are unrolled, so it is compiled with one and with two of them.
    """
    s, held, model = run.settings, sum(run.held.values()), run.model
    prefill_tokens = s.prefill_blocks * s.page_size
    episodes = num_episodes(run) / run.num_engines
    prefills = episodes * workload.input_tokens / prefill_tokens
    # each pass gives every row a token too
    decodes = max(0.0, episodes * workload.output_tokens / s.decode_rows - prefills)
    try:
        compiled = [
            compiler.compile_for_tpu(run_programs.lower_engine(run, layers)) for layers in (1, 2)
        ]
    except compiler.DoesNotFit as error:
        for name, runs in (("prefill", prefills), ("decode", decodes)):
            needed = max(held, error.needed)
            yield Phase(name, runs, Cost(), needed, 0.0, 0.0, 0.0, str(error))
        return
    context = min(workload.context, s.context)
    kernels = paged_kernels(
        model, context=context, parts=run.sampler_mesh.shape["tensor"],
        rows=s.decode_rows + s.prefill_blocks, itemsize=2 if s.dtype == "bfloat16" else 4,
    )  # fmt: skip

    def _cost(steps: float) -> Cost:
        one, two = (
            Reader(c.program, run.place, run.sampler_coords, {"jit(_run)/while": steps}, kernels)
            for c in compiled
        )
        return extrapolated(one.cost(), two.cost(), model.num_layers)

    first, both = _cost(0), _cost(1)
    memory = compiled[1].memory
    hbm = held + memory.temporaries + memory.results + memory.code
    compile_s = sum(c.seconds for c in compiled)
    attended = 4 * model.num_layers * model.num_heads * model.head_dim * context
    for name, runs, cost, tokens in (
        ("prefill", prefills, first, prefill_tokens + s.decode_rows),
        ("decode", decodes, both.plus(first, -1.0), s.decode_rows),
    ):
        all_tokens = float(tokens * run.num_engines)  # the engines all do the same at once
        flops = all_tokens * (2 * matmul_params(model) + attended)
        yield Phase(name, runs, cost, hbm, all_tokens, flops, compile_s)
