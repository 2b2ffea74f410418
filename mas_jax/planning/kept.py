"""Plans that are kept: a record each, with its figures and what was printed.

Must not know: flags, how anything was compiled.
"""

import json
from pathlib import Path

from mas_jax.files import write_json
from mas_jax.planning import calibration, chips, compile_plan, report

RECORDS = Path(__file__).parent / "records" / "plans"
COLUMNS = (
    "plan", "slice", "tokens a row, rows a device, remat", "engines", "HBM GiB", "train MFU",
    "score MFU", "decode of roof", "longest wait", "questions/hour", "chip-hours",
)  # fmt: skip


def figures(plan: compile_plan.Plan, *, steps: int) -> dict:
    """What a plan says, in a record; of times nothing where a program could not be compiled.

    score_bound_mfu: of the first program that scores. longest_wait_frac: by phase that computes.
    """
    place, phases = plan.run.place, {phase.name: phase for phase in plan.phases}
    found = dict(
        is_fitting=plan.fits, is_compiled=True, hbm_gib=round(plan.hbm_bytes / chips.GIB, 1),
        compile_s=round(sum(phase.compile_s for phase in plan.phases)),
        advice=report.advice(plan),
    )  # fmt: skip
    if any(phase.error for phase in plan.phases):
        return found
    score = next(phase for name, phase in phases.items() if name.startswith("score"))
    return found | dict(
        train_bound_mfu=round(phases["gradients"].bound_mfu(place), 3),
        score_bound_mfu=round(score.bound_mfu(place), 3),
        decode_roof_frac=round(phases["decode"].roof_frac(place), 3),
        longest_wait_frac={
            name: round(phases[name].exposed_frac, 3)
            for name in ("gradients", score.name, "prefill", "decode")
        },
        share={n: round(p.seconds / plan.step_s, 3) for n, p in phases.items()},
        bound_step_s=round(plan.step_s, 2),
        bound_questions_per_hour=round(plan.questions_per_hour),
        bound_chip_hours=round(plan.chip_hours(steps), 1),
    )  # fmt: skip


def keep(
    name: str, plan: compile_plan.Plan, *, steps: int, config: str, changes: list[str], text: str
) -> Path:
    """Writes the record of a plan of all programs. config: its file; changes: as "mesh.tensor=1";
    text: what was printed."""
    place, t = plan.run.place, plan.run.config.train
    record = dict(
        config=config, changes=changes, stage=plan.run.stage, slice=place.name, steps=steps,
        mesh=t.mesh.to_dict(), row_length=t.row_length, micro_rows=t.micro_rows, remat=t.remat,
        engine_devices=plan.run.sampler_mesh.size, decode_rows=plan.run.settings.decode_rows,
        hbm_of_gib=round(place.hbm_bytes / chips.GIB, 1),
        **figures(plan, steps=steps), printed=text.splitlines(),
    )  # fmt: skip
    RECORDS.mkdir(parents=True, exist_ok=True)
    path = RECORDS / f"{name}.json"
    write_json(path, record)
    return path


def read() -> list[dict]:
    """All records, by name."""
    return [json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))]


def both(record: dict, name: str, form: str, *, is_rate: bool = True) -> str:
    """A bound and its calibrated figure, which is smaller for a rate and larger for a cost."""
    value, known = record[name], calibration.read_calibration(record["slice"])
    if known is None:
        return f"{value:{form}} / -"
    scale = known.ratio if is_rate else 1 / known.ratio
    return f"{value:{form}} / {value * scale:{form}}"


def row(record: dict) -> str:
    """A line of the README's table: bound / calibrated."""
    place = f"{record['hbm_gib']:.1f} of {record['hbm_of_gib']:.0f}"
    mesh = record["mesh"]
    rows = record["micro_rows"] // (mesh["data"] * mesh["fsdp"])
    cells = [
        f"{record['config']}, {record['stage']}", record["slice"],
        f"{record['row_length']:,}, {rows}, {record['remat']}",
        f"{record['decode_rows']} rows on {record['engine_devices']}", place,
    ]  # fmt: skip
    if "train_bound_mfu" not in record:
        return "| " + " | ".join([*cells, *["-"] * 6]) + " |"
    longest, worst = max((frac, name) for name, frac in record["longest_wait_frac"].items())
    cells += [
        both(record, "train_bound_mfu", ".2f"), both(record, "score_bound_mfu", ".2f"),
        f"{record['decode_roof_frac']:.2f}", f"{100 * longest:.0f}%, {worst}",
        both(record, "bound_questions_per_hour", ",.0f"),
        both(record, "bound_chip_hours", ",.0f", is_rate=False),
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def markdown() -> str:
    """The table of all records."""
    head = "| " + " | ".join(COLUMNS) + " |"
    return "\n".join([head, "| " + " | ".join(["---"] * len(COLUMNS)) + " |", *map(row, read())])
