"""A plan as people read it: a table of phases, what the memory is for, and what to change.

Must not know: how anything was found out.
"""

from mas_jax.planning.calibration import Calibration
from mas_jax.planning.chips import GIB
from mas_jax.planning.compile_plan import Phase, Plan

# what holds memory -> the settings that make it smaller
KNOBS = {
    "weights": "a larger train.mesh.fsdp, or train.param_dtype=bfloat16",
    "optimizer state": "a larger train.mesh.fsdp, or train.optimizer.moment_dtype=bfloat16",
    "the start, as reference": "a larger train.mesh.fsdp",
    "average of the weights": "a larger train.mesh.fsdp",
    "the sampler's weights": "a larger mesh.tensor, or engine.weights=int8",
    "page pool": "fewer engine.num_pages, or a larger mesh.tensor",
}
OTHER_KNOB = "a larger train.mesh.fsdp"
PROGRAM_KNOBS = (
    "train.micro_rows no more than one row a device, a shorter train.row_length, "
    "train.remat=full, a smaller train.chunk, or a larger train.mesh.tensor"
)
COLUMNS = (
    "phase", "runs", "HBM GiB", "TFLOP", "GB", "ICI GB", "wait %", "longest %", "seconds",
    "share %", "tokens/s/chip", "bound_mfu", "roof %",
)  # fmt: skip


def rows(plan: Plan) -> list[list[str]]:
    """A line a phase, in the order of `COLUMNS`: FLOPs and bytes of one run on a device."""
    total, place = plan.step_s, plan.run.place
    lines = []
    for p in plan.phases:
        moved = sum(c.num_bytes for c in p.cost.collectives.values())
        rate = p.tokens / p.cost.seconds / place.num_chips if p.cost.seconds else 0.0
        lines.append([
            p.name, f"{p.runs:.3g}", f"{p.hbm_bytes / GIB:.1f}", f"{p.cost.flops / 1e12:.2f}",
            f"{p.cost.num_bytes / 1e9:.2f}", f"{moved / 1e9:.2f}",
            f"{100 * p.cost.exposed_s / p.cost.seconds:.0f}" if p.cost.seconds else "-",
            f"{100 * p.exposed_frac:.0f}" if p.cost.seconds else "-",
            f"{p.seconds:.2f}", f"{100 * p.seconds / total:.0f}" if total else "-",
            f"{rate:,.0f}" if p.tokens else "-",
            f"{p.bound_mfu(place):.2f}" if p.model_flops and p.cost.seconds else "-",
            f"{100 * p.roof_frac(place):.0f}" if p.needed_bytes else "-",
        ])  # fmt: skip
    return lines


def text(plan: Plan, *, steps: int, calibration: Calibration | None) -> str:
    """The table, the totals, an estimate, and what to change where something does not fit."""
    table = [list(COLUMNS), *rows(plan)]
    widths = [max(len(line[i]) for line in table) for i in range(len(COLUMNS))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    ]
    lines.insert(1, "-" * len(lines[0]))
    place, t = plan.run.place, plan.run.config.train
    lines += [
        "",
        f"mesh data={t.mesh.data} fsdp={t.mesh.fsdp} tensor={t.mesh.tensor}, "
        f"{plan.run.num_engines} engines of {plan.run.sampler_mesh.size} devices, "
        f"{t.questions} questions x {t.group_size}",
        f"memory: {plan.hbm_bytes / GIB:.1f} of {place.hbm_bytes / GIB:.1f} GiB a device",
        *(f"  {value / GIB:6.2f} GiB {name}" for name, value in by_size(plan)),
        f"at the chips' peaks a step takes {plan.step_s:.1f} s, "
        f"{plan.questions_per_hour:,.0f} questions an hour, and {steps} steps "
        f"{plan.chip_hours(steps):,.0f} chip-hours; a real run takes longer",
    ]
    if calibration and plan.step_s:
        lines.append(estimate(plan, steps=steps, calibration=calibration))
    return "\n".join(lines + advice(plan))


def estimate(plan: Plan, *, steps: int, calibration: Calibration) -> str:
    """What a real run may reach, if it reaches the same part of its bound as a measured one."""
    place, ratio = plan.run.place, calibration.ratio
    mfus = ", ".join(
        f"{phase.name} {ratio * phase.bound_mfu(place):.2f}"
        for phase in plan.phases
        if phase.name.startswith(("score of", "gradients")) and phase.model_flops and phase.seconds
    )
    return (
        f"calibrated (an estimate: {ratio:.2f} of the bound, as {calibration.source} reached): "
        f"a step takes {plan.step_s / ratio:.1f} s, {ratio * plan.questions_per_hour:,.0f} "
        f"questions an hour, {steps} steps {plan.chip_hours(steps) / ratio:,.0f} chip-hours"
        + (f"; MFU {mfus}" if mfus else "")
    )


def by_size(plan: Plan) -> list[tuple[str, float]]:
    """What a device holds through the run, largest first."""
    return sorted(plan.run.held.items(), key=lambda item: -item[1])


def advice(plan: Plan) -> list[str]:
    """What does not fit: by how much, which tensors, which settings. One line a phase, or one for
    all where the run's own arrays are too many already."""
    held, room = sum(plan.run.held.values()), plan.run.place.hbm_bytes
    if held <= room:
        return [_advice(plan, phase) for phase in plan.phases if not plan.has_room(phase)]
    knobs = [
        f"{name} ({size / GIB:.1f} GiB): try {KNOBS.get(name, OTHER_KNOB)}"
        for name, size in by_size(plan)[:3]
    ]
    return [
        f"DOES NOT FIT: the run itself holds {held / GIB:.1f} GiB a device, "
        f"{(held - room) / GIB:.1f} too many; most of it is " + "; ".join(knobs)
    ]


def _advice(plan: Plan, phase: Phase) -> str:
    place, held = plan.run.place, sum(plan.run.held.values())
    own = phase.hbm_bytes - held
    over = phase.hbm_bytes - place.hbm_bytes
    largest, size = by_size(plan)[0]
    if own > size:
        what, knob = f"its own work ({own / GIB:.1f} GiB)", PROGRAM_KNOBS
    else:
        what = f"{largest} ({size / GIB:.1f} GiB)"
        knob = KNOBS.get(largest, OTHER_KNOB)
    return (
        f"DOES NOT FIT: {phase.name} needs {phase.hbm_bytes / GIB:.1f} GiB a device, "
        f"{over / GIB:.1f} too many; most of it is {what}: try {knob}"
    )
