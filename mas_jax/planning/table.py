"""One record for each model and slice: does a run fit, and how fast can it be.

A record is written as soon as its cell is planned, so that a table of many hours goes on where it
stopped. Must not know: flags.
"""

import json
from collections.abc import Callable
from pathlib import Path

from mas_jax.config import pod_config
from mas_jax.model import qwen3
from mas_jax.planning import chips, compile_plan, fitting, kept, run_programs

RECORDS = Path(__file__).parent / "records" / "table"
MODELS = ("qwen3-4b", "qwen3-1.7b", "qwen3-8b", "qwen3-32b")
SLICES = ("v5p:2x2x2", "v6e:4x4", "v5p:4x4x4", "v5e:4x4", "v6e:8x8", "tpu7x:2x2x2")
# the row of Qwen3-4B, then the columns of two slices, then the rest
CELLS = sorted(
    ((model, place) for model in MODELS for place in SLICES),
    key=lambda cell: (
        cell[0] != MODELS[0], SLICES.index(cell[1]) // 2, MODELS.index(cell[0]),
        SLICES.index(cell[1]),
    ),
)  # fmt: skip
LENGTH, DECODE_ROWS, STEPS = 4096, 128, 200
COLUMNS = (
    "model", "slice", "fits", "HBM GiB", "mesh, rows a device, remat", "train MFU", "score MFU",
    "decode of roof", "questions/hour", "chip-hours",
)  # fmt: skip


def path_of(model: str, topology: str) -> Path:
    """Where a cell's record lies."""
    return RECORDS / f"{model}_{topology.replace(':', '_')}.json"


def make_record(model_name: str, topology: str) -> dict:
    """Plans Stage II of METHODS 1.3 at 4k context, 128 sequences an engine, in the settings that
    arithmetic likes best; what it rules out is not compiled."""
    place, model = chips.make_slice(topology), qwen3.PRESETS[model_name]
    config = pod_config(fsdp=len(place.devices), tensor=1)
    config.engine.update(dict(context=LENGTH, buckets=(2048, LENGTH), decode_rows=DECODE_ROWS))
    config.train.row_length = LENGTH
    workload = compile_plan.Workload()
    config = fitting.sized_pool(config, model, positions=workload.context)
    config.mesh.tensor = fitting.engine_tensor(config, model, place)
    fit, large = fitting.promising(
        config,
        model,
        place,
        "student",
        least_pages=config.engine.num_pages,
        headroom=fitting.HEADROOM,
    )
    one = fit[0] if fit else large[0]
    t = one.config.train
    record = dict(
        model=model_name, slice=topology, mesh=dict(t.mesh.to_dict()),
        rows_a_device=t.micro_rows // (t.mesh.data * t.mesh.fsdp), remat=t.remat,
        engine_tensor=config.mesh.tensor, num_pages=config.engine.num_pages,
        decode_rows=DECODE_ROWS, row_length=LENGTH,
        hbm_of_gib=round(place.hbm_bytes / chips.GIB, 1),
    )  # fmt: skip
    if one.total > place.hbm_bytes:
        hbm = round(one.total / chips.GIB, 1)
        return record | dict(is_fitting=False, is_compiled=False, hbm_gib=hbm)
    run = run_programs.make_run(one.config, model, place, "student")
    only = ("score of teacher", "gradients", "engine")
    plan = compile_plan.Plan(run, workload, tuple(compile_plan.make_plan(run, workload, only=only)))
    return record | kept.figures(plan, steps=STEPS)


def fill(say: Callable[[str], None], *, only: tuple[str, ...] = ()) -> None:
    """Plans the cells that have no record yet. only: slices, () for all."""
    RECORDS.mkdir(parents=True, exist_ok=True)
    for model, topology in CELLS:
        path = path_of(model, topology)
        if path.exists() or (only and topology not in only):
            continue
        say(f"{model} on {topology}")
        try:
            record = make_record(model, topology)
        except (ValueError, RuntimeError) as error:  # one cell's trouble is not the table's
            say(f"{model} on {topology}: {error}")
            continue
        path.write_text(json.dumps(record, indent=1) + "\n")


def read() -> list[dict]:
    """The records that there are, in the order of the cells."""
    paths = [path_of(*cell) for cell in CELLS]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def row(record: dict) -> str:
    """A line of the README's table: bound / calibrated."""
    place = f"{record['hbm_gib']:.1f} of {record['hbm_of_gib']:.0f}"
    mesh = record["mesh"]
    chosen = f"fsdp {mesh['fsdp']}, tensor {mesh['tensor']}, {record['rows_a_device']}, "
    chosen += record["remat"]
    cells = [record["model"], record["slice"], "yes" if record["is_fitting"] else "no", place]
    if "train_bound_mfu" not in record:
        return "| " + " | ".join([*cells, chosen, "-", "-", "-", "-", "-"]) + " |"
    cells += [
        chosen, kept.both(record, "train_bound_mfu", ".2f"),
        kept.both(record, "score_bound_mfu", ".2f"), f"{record['decode_roof_frac']:.2f}",
        kept.both(record, "bound_questions_per_hour", ",.0f"),
        kept.both(record, "bound_chip_hours", ",.0f", is_rate=False),
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def markdown() -> str:
    """The table of all records."""
    head = "| " + " | ".join(COLUMNS) + " |"
    return "\n".join([head, "| " + " | ".join(["---"] * len(COLUMNS)) + " |", *map(row, read())])
