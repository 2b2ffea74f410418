"""Tries meshes, rows a device, remat policies and pools, and compiles what arithmetic lets through.

Must not know: flags.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ml_collections import ConfigDict

from mas_jax.model import qwen3
from mas_jax.planning import compile_plan, fitting, run_programs
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
    """The most promising candidates compiled, the fastest that fit first. say: is told of each."""
    fit, large = fitting.promising(config, model, place, stage)
    say(
        f"{len(fit) + len(large)} candidates, {len(large)} too large by arithmetic, {most} to "
        "compile"
    )
    found = []
    for one in fit[:most]:
        new = tried(one, model, place, stage, workload)
        found.append(new)
        say(f"{one.name}: bound_mfu {new.mfu:.2f} in {new.phase.compile_s:.0f} s {new.phase.error}")
    return sorted(found, key=lambda t: (t.max_pages == 0, -t.mfu))


def lines(found: list[Tried], place: Slice) -> list[str]:
    """The best few, one a line, with the settings that make them."""
    text = []
    for one in found:
        t = one.guess.config.train
        room = f"room for num_pages={one.max_pages}" if one.max_pages else "DOES NOT FIT"
        text.append(
            f"bound_mfu {one.mfu:.2f}, {one.rate:,.0f} tokens/s/chip, "
            f"{one.phase.hbm_bytes / GIB:.1f} of {place.hbm_bytes / GIB:.1f} GiB, {room}: "
            f"--config.train.mesh.fsdp={t.mesh.fsdp} --config.train.mesh.tensor={t.mesh.tensor} "
            f"--config.train.micro_rows={t.micro_rows} --config.train.remat={t.remat}"
        )
    return text
