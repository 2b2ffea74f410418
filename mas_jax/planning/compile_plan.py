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
from mas_jax.planning import compiler, memory, run_programs, worker
from mas_jax.planning.chips import GIB, Slice
from mas_jax.planning.cost import Cost, Kernel, Kernels, Reader, extrapolated
from mas_jax.planning.hlo import HBM, Instruction, Program


@dataclass(frozen=True)
class Workload:
    """What a question's episode makes of tokens, on average: read (prompts, passages, reports) and
    sampled ones, and positions of context while it samples.

    Default: METHODS 1.1, recorded input and output of a MultiAgent-OPD workflow, as if no prefix
    were shared; the context is the middle of a 4k conversation. view_tokens: what an episode's
    views hold beside its traces; the default is one protocol, by guess.
    """

    input_tokens: float = 9172.0
    output_tokens: float = 697.0
    context: int = 2048
    view_tokens: float = 600.0


@dataclass(frozen=True)
class Phase:
    """One program in a step. runs: how often in a step, each costing `cost` on a device.

    hbm_bytes: everything alive on a device meanwhile. tokens: of one run over the slice.
    model_flops: of one run over the slice, what the mathematics needs (METHODS 8.5). needed_bytes:
    that a device must read from HBM at least; of decoding. compile_s: 0 where another phase's
    program serves. error: why it could not be compiled, "" else.
    """

    name: str
    runs: float
    cost: Cost
    hbm_bytes: float
    tokens: float
    model_flops: float
    compile_s: float
    error: str = ""
    needed_bytes: float = 0.0

    @property
    def seconds(self) -> float:
        """Of all its runs in a step, at the chip's peaks."""
        return self.runs * self.cost.seconds

    def bound_mfu(self, place: Slice) -> float:
        """Model FLOPs over what the chips could do in that time."""
        peak = place.peak_flops * len(place.devices)
        return self.model_flops / (peak * self.cost.seconds) if self.cost.seconds else 0.0

    def roof_frac(self, place: Slice) -> float:
        """Of its time, what reading the bytes that it needs would take; 0 where nobody counted."""
        roof = self.needed_bytes / place.hbm_bandwidth
        return roof / self.cost.seconds if self.cost.seconds else 0.0

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


def layer_params(config: qwen3.ModelConfig) -> float:
    """Parameters in the matmuls of all layers."""
    layer = config.model_dim * (
        (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim + 3 * config.ffw_dim
    )
    return float(config.num_layers * layer)


def head_params(config: qwen3.ModelConfig) -> float:
    """Parameters of the output head."""
    return float(config.vocab_size * config.model_dim)


def matmul_params(config: qwen3.ModelConfig) -> float:
    """Parameters in matmuls, one head included, the embedding lookup not."""
    return layer_params(config) + head_params(config)


def forward_flops(
    config: qwen3.ModelConfig, rows: float, length: float, *, scored_frac: float
) -> float:
    """Model FLOPs of a forward pass over full rows: matmuls and the causal half of attention; the
    head on the share of tokens that are scored.

    Source: METHODS 8.5; backward is twice as much.
    """
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * length**2
    matmuls = layer_params(config) + scored_frac * head_params(config)
    return rows * (2 * matmuls * length + attention)


def splash_kernels(config: qwen3.ModelConfig) -> Kernels:
    """Work of the splash kernels: every causal tile of a row, segments not skipped.

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
        flops = matmuls[kind] * 2 * size * attended.shape[-2] / 2
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
    """The phases of a step, each as soon as its program is there.

    only: of `run.program_names`, () for all.
    """
    held, names = sum(run.held.values()), [n for n in run.program_names if not only or n in only]
    if held > run.place.hbm_bytes:  # nothing to compile for: no program has room
        words = f"{held / GIB:.1f} GiB are held by the run itself"
        yield from (Phase(name, 1.0, Cost(), held, 0.0, 0.0, 0.0, words) for name in names)
        return
    for name in names:
        yield from _engine(run, workload) if name == "engine" else _training(run, name, workload)


def num_episodes(run: run_programs.Run) -> int:
    """Of a step."""
    return run.config.train.questions * run.config.train.group_size


def num_micro(run: run_programs.Run, workload: Workload) -> int:
    """Micro-batches that a step's tokens fill, or those of its views, whichever needs more."""
    t = run.config.train
    tokens = num_episodes(run) * (workload.input_tokens + workload.output_tokens)
    rows = tokens / t.row_length
    if run.view_length:
        viewed = tokens + num_episodes(run) * workload.view_tokens
        rows = max(rows, viewed / run.view_length)
    return math.ceil(rows / t.micro_rows)


def batch_bytes(run: run_programs.Run, workload: Workload) -> float:
    """That a device holds of a step's batch and of what was scored for it.

    Eight arrays of a number for each position, four of views, one of each score, and a critic's
    values, advantages and returns; micro-batches are filled up to a power of two.
    """
    t, filled = run.config.train, 1 << (num_micro(run, workload) - 1).bit_length()
    rows = filled * t.micro_rows / (run.mesh.shape["data"] * run.mesh.shape["fsdp"])
    scores = sum(name.startswith("score of") for name in run.lower if name != run_programs.START)
    arrays = 8 + scores + 3 * ("gae" in run.lower)
    views = 2 * (run.view_length + t.row_length) if run.view_length else 0
    return 4 * rows * (arrays * t.row_length + views)


def _training(run: run_programs.Run, name: str, workload: Workload) -> Iterator[Phase]:
    """Scores, gradients, the optimizer or the resharding, and what else the same program does: the
    score of the start, and each role's own gradient every some steps."""
    t, micro = run.config.train, num_micro(run, workload)
    runs = t.updates_per_batch if name in ("gradients", "optimizer") else 1.0
    if name == "gae":  # compiled for fewer micro-batches; each costs the same
        runs = micro / run_programs.NUM_MICRO
    some = math.ceil(t.drift_frac * micro)
    uses = [(name, runs, some if name == run_programs.START else micro)]
    scores = [n for n in run.lower if n.startswith("score")]
    if some and scores and name == scores[0] != run_programs.START:
        uses.append((run_programs.START, 1.0, some))
    if name == "gradients" and t.role_gradient_interval:
        uses.append(("each role's gradient", run.num_roles / t.role_gradient_interval, micro))
    try:
        program, seconds = worker.optimised(run, name)
    except compiler.DoesNotFit as error:
        yield _without_room(run, name, runs, error)
        return
    peak = memory.peak_bytes(program)
    for use, often, turns in uses:
        yield _use(run, workload, program, peak, (use, often, turns, seconds))
        seconds = 0.0


def _without_room(
    run: run_programs.Run, name: str, runs: float, error: compiler.DoesNotFit
) -> Phase:
    """A phase that the compiler found no room for, alone or beside what the run holds."""
    held = sum(run.held.values())
    needed = max(held, error.needed) if error.with_arguments else held + error.needed
    return Phase(name, runs, Cost(), needed, 0.0, 0.0, 0.0, str(error))


def _use(
    run: run_programs.Run, workload: Workload, program: Program, peak: float,
    use: tuple[str, float, int, float],
) -> Phase:  # fmt: skip
    """The phase (name, runs, micro-batches of a run, seconds of compiling) that a program makes."""
    name, runs, micro, seconds = use
    t = run.config.train
    learned = workload.output_tokens / (workload.input_tokens + workload.output_tokens)
    batch_parts = run.mesh.shape["data"] * run.mesh.shape["fsdp"]
    tokens_micro = t.micro_rows * t.row_length
    reader = Reader(
        program, run.place, run.coords,
        turns={
            "jit(_score)/while": micro, "jit(_gradients)/while": micro,
            "shard_map/while": math.ceil(tokens_micro * learned / batch_parts / t.chunk),
        },
        kernels=splash_kernels(run.model),
    )  # fmt: skip
    is_pass = "gradient" in name or name.startswith("score")
    passes = micro * (3.0 if "gradient" in name else 1.0) if is_pass else 0.0
    flops = passes * forward_flops(run.model, t.micro_rows, t.row_length, scored_frac=learned)
    if "gradient" in name and run.view_length:  # a teacher's forward pass over the rows of views
        scored = learned * t.row_length / run.view_length
        flops += micro * forward_flops(
            run.model, t.micro_rows, run.view_length, scored_frac=scored
        )  # fmt: skip
    hbm = sum(run.held.values()) + peak
    if name == "gae":  # works on all micro-batches at once
        hbm += (num_micro(run, workload) / run_programs.NUM_MICRO - 1) * peak
    if name == "optimizer":
        hbm += run.held["weights"]  # the gradient
    if name != "resharding":
        hbm += batch_bytes(run, workload)
    tokens = micro * tokens_micro if is_pass else 0.0
    return Phase(name, runs, reader.cost(), hbm, tokens, flops, seconds)


def _engine(run: run_programs.Run, workload: Workload) -> Iterator[Phase]:
    """The engine's one program as its two kinds of work: a pass over a full budget of prompts, and
    one more token of every row; and a validation's share of a step.

    Its layers are unrolled, so it is compiled with one and with two of them.
    """
    s, held, model, t = run.settings, sum(run.held.values()), run.model, run.config.train
    try:
        (one, one_s), (two, two_s) = (worker.optimised(run, "engine", n) for n in (1, 2))
    except compiler.DoesNotFit as error:
        yield _without_room(run, "engine", 1.0, error)
        return
    first, both = (_engine_cost(run, workload, (one, two), steps) for steps in (0, 1))
    again = both.plus(first, -1.0)
    hbm = held + memory.peak_bytes(two)
    prefill_tokens = s.prefill_blocks * s.page_size
    context, parts = min(workload.context, s.context), run.sampler_mesh.shape["tensor"]
    attended = 4 * model.num_layers * model.num_heads * model.head_dim * context
    item = 2 if s.dtype == "bfloat16" else 4
    kv = 2 * model.num_layers * model.num_kv_heads * model.head_dim * s.decode_rows * context

    def _runs(episodes: float) -> tuple[float, float]:
        prefills = episodes * workload.input_tokens / prefill_tokens / run.num_engines
        decodes = episodes * workload.output_tokens / s.decode_rows / run.num_engines
        return prefills, max(0.0, decodes - prefills)  # each pass gives every row a token too

    def _flops(tokens: float, drawn: float) -> float:  # the engines all do the same at once
        matmuls = 2 * (tokens * layer_params(model) + drawn * head_params(model))
        return run.num_engines * (matmuls + tokens * attended)

    prefills, decodes = _runs(num_episodes(run))
    tokens = prefill_tokens + s.decode_rows
    flops = _flops(tokens, s.decode_rows + s.prefill_blocks)
    all_tokens = float(tokens * run.num_engines)
    yield Phase("prefill", prefills, first, hbm, all_tokens, flops, one_s + two_s)
    rows, needed = s.decode_rows, item * (matmul_params(model) + kv) / parts
    yield Phase(
        "decode", decodes, again, hbm, float(rows * run.num_engines), _flops(rows, rows), 0.0,
        needed_bytes=needed,
    )  # fmt: skip
    if t.validation_interval:
        prefills, decodes = _runs(t.validation_questions * t.validation_runs)
        cost = Cost().plus(first, prefills).plus(again, decodes)
        yield Phase("validation", 1.0 / t.validation_interval, cost, hbm, 0.0, 0.0, 0.0)


def _engine_cost(
    run: run_programs.Run, workload: Workload, programs: tuple[Program, Program], steps: int
) -> Cost:
    """Of the engine's pass and so many tokens more, from programs of one and two layers."""
    s, model = run.settings, run.model
    kernels = paged_kernels(
        model, context=min(workload.context, s.context), parts=run.sampler_mesh.shape["tensor"],
        rows=s.decode_rows + s.prefill_blocks, itemsize=2 if s.dtype == "bfloat16" else 4,
    )  # fmt: skip
    one, two = (
        Reader(program, run.place, run.sampler_coords, {"jit(_run)/while": steps}, kernels).cost()
        for program in programs
    )
    return extrapolated(one, two, model.num_layers)
