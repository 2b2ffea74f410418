"""Tries meshes, rows a device, remat policies and pools, and compiles what arithmetic lets through.

Must not know: flags.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ml_collections import ConfigDict

from mas_jax.model import qwen3
from mas_jax.planning import compile_plan, fitting, run_programs
from mas_jax.planning.calibration import Calibration
from mas_jax.planning.chips import GIB, Slice


@dataclass(frozen=True)
class Tried:
    """A candidate whose gradients were compiled: tokens/s a chip and MFU by the bound, and the
    pages that would fit beside it, 0 where it does not."""

    guess: fitting.Guess
    phase: compile_plan.Phase
    rate: float
    mfu: float
    max_pages: int


def tried(
    one: fitting.Guess, model: qwen3.ModelConfig, place: Slice, stage: str,
    workload: compile_plan.Workload,
) -> Tried:  # fmt: skip
    """A candidate with its gradients compiled."""
    run = run_programs.make_run(one.config, model, place, stage)
    phase = next(iter(compile_plan.make_plan(run, workload, only=("gradients",))))
    seconds = phase.cost.seconds
    rate = phase.tokens / seconds / place.num_chips if seconds else 0.0
    free = fitting.HEADROOM * place.hbm_bytes - phase.hbm_bytes + run.held["page pool"]
    pages = max(0, int(free // fitting.page_bytes(one.config, model)))
    return Tried(one, phase, rate, phase.bound_mfu(place), pages if not phase.error else 0)


def search(
    config: ConfigDict, model: qwen3.ModelConfig, place: Slice, stage: str,
    workload: compile_plan.Workload, *, most: int, say: Callable[[str], None],
) -> list[Tried]:  # fmt: skip
    """The most promising candidates compiled, the fastest that fit first; none where none should
    fit. say: is told of each."""
    pool = fitting.sized_pool(config, model, positions=workload.context).engine.num_pages
    fit, large = fitting.promising(
        config, model, place, stage, least_pages=pool, headroom=fitting.ALL
    )
    say(
        f"{len(fit) + len(large)} candidates, {len(large)} too large by arithmetic, "
        f"{min(most, len(fit))} to compile"
    )
    if not fit:
        say(
            f"the smallest, {large[0].name}, needs {large[0].total / GIB:.1f} of "
            f"{place.hbm_bytes / GIB:.1f} GiB a device, {large[0].held / GIB:.1f} of them held "
            "through the run: take a larger slice, a smaller model or a shorter train.row_length"
        )
    found = []
    for one in fit[:most]:
        new = tried(one, model, place, stage, workload)
        found.append(new)
        say(f"{one.name}: bound_mfu {new.mfu:.2f} in {new.phase.compile_s:.0f} s {new.phase.error}")
    return sorted(found, key=lambda t: (t.max_pages == 0, -t.mfu))


def lines(found: list[Tried], place: Slice, calibration: Calibration | None) -> list[str]:
    """The best few, one a line, with the settings that make them."""
    text = []
    for one in found:
        c = one.guess.config
        t, room = c.train, f"room for num_pages={one.max_pages}"
        pages = min(c.engine.num_pages, one.max_pages or c.engine.num_pages)
        speed = f"bound_mfu {one.mfu:.2f}"
        if calibration is not None:
            speed += f" (calibrated {calibration.ratio * one.mfu:.2f})"
        if not one.max_pages:
            room = f"DOES NOT FIT{f' ({one.phase.error})' if one.phase.error else ''}"
        text.append(
            f"{speed}, {one.rate:,.0f} tokens/s/chip, "
            f"{one.phase.hbm_bytes / GIB:.1f} of {place.hbm_bytes / GIB:.1f} GiB, {room}: "
            f"--config.train.mesh.data=1 --config.train.mesh.fsdp={t.mesh.fsdp} "
            f"--config.train.mesh.tensor={t.mesh.tensor} --config.train.micro_rows={t.micro_rows} "
            f"--config.train.remat={t.remat} --config.engine.num_pages={pages}"
        )
    return text
