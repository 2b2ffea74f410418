"""What a run needs on TPUs, by their own compiler, before they are rented:
`python launch/plan.py --config=configs/opd.py --topology=v5p:2x2x2`.

With `--search` other meshes, rows a device and remat policies beside the config's; `--calibrate`
plans two published runs instead, `--table` many models and slices (it goes on where it stopped);
`--keep=NAME` writes a record that the README shows.
Needs the extra `plan` (libtpu), no TPU. Every time is what the chips' peaks allow, or is called
calibrated. Ends with code 3 where something does not fit.
"""

import functools
import sys
from pathlib import Path

from absl import app, flags
from ml_collections import config_flags
from rich.console import Console

from mas_jax.config_rules import check_correction, validate
from mas_jax.model import qwen3
from mas_jax.planning import (
    calibration,
    chips,
    compile_plan,
    compiler,
    kept,
    report,
    run_programs,
    table,
)
from mas_jax.planning import search as searching

CONFIG = config_flags.DEFINE_config_file("config", None, "config file, such as configs/opd.py")
TOPOLOGY = flags.DEFINE_string("topology", "v5p:2x2x2", f"CHIP:SHAPE, of {sorted(chips.CHIPS)}")
MODEL = flags.DEFINE_string("model", "", f"one of {sorted(qwen3.PRESETS)}; default: the config's")
STAGE = flags.DEFINE_string("stage", "", "a stage of the config; default: its last")
ONLY = flags.DEFINE_list("only", [], "programs to compile, such as gradients,engine")
INPUT = flags.DEFINE_float("input_tokens", 9172, "read in an episode, on average")
OUTPUT = flags.DEFINE_float("output_tokens", 697, "sampled in an episode, on average")
VIEW = flags.DEFINE_float("view_tokens", 600, "that an episode's privileged texts have")
SEARCH = flags.DEFINE_integer("search", 0, "compile so many candidates, print the best")
KEEP = flags.DEFINE_string("keep", "", "write the plan as the record of this name")
CALIBRATE = flags.DEFINE_bool("calibrate", False, "plan the published runs, write the record")
TABLE = flags.DEFINE_bool("table", False, "plan the cells that have no record, print all")


def model_of(name: str, checkpoint: str) -> qwen3.ModelConfig:
    """The preset of a name, or of the checkpoint's, whose assets are of one size. Raises:
    ValueError for neither."""
    if checkpoint.startswith("asset:"):
        checkpoint = ""
    name = name or checkpoint.rstrip("/").rpartition("/")[2].lower() or "toy-1m"
    if name not in qwen3.PRESETS:
        name = name.removesuffix("-instruct")
    if name not in qwen3.PRESETS:
        raise ValueError(f"--model: {name!r} is none of {sorted(qwen3.PRESETS)}")
    return qwen3.PRESETS[name]


def main(argv: list[str]) -> None:
    """Compiles the programs of a step one after another, and prints the plan."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    compiler.start_compiler()
    config, console = CONFIG.value, Console(stderr=True)
    if CALIBRATE.value:
        records = [calibration.calibrate(published) for published in calibration.PUBLISHED]
        calibration.keep(records)
        print("\n".join(calibration.lines(records)))
        return
    if TABLE.value:
        table.fill(console.print)
        print(table.markdown())
        return
    if config is None:
        raise app.UsageError("--config is missing; for example --config=configs/opd.py")
    if KEEP.value and (ONLY.value or SEARCH.value):
        raise app.UsageError("--keep is of a plan of all programs; leave out --only and --search")
    workload = compile_plan.Workload(INPUT.value, OUTPUT.value, view_tokens=VIEW.value)
    try:
        validate(config, has_weights=False)
        check_correction(config)
        stage = STAGE.value or config.train.stages[-1]
        if stage not in config.stages:
            raise ValueError(f"--stage={stage!r} is none of {sorted(config.stages)}")
        place = chips.make_slice(TOPOLOGY.value)
        config = run_programs.fit_mesh(config, place)
        model = model_of(MODEL.value, config.model.checkpoint)
        run = run_programs.make_run(config, model, place, stage)
        if unknown := set(ONLY.value) - set(run.program_names):
            raise ValueError(
                f"--only: {sorted(unknown)} are none of the programs {list(run.program_names)}"
            )
    except (ValueError, ModuleNotFoundError) as error:
        raise app.UsageError(str(error)) from error
    if SEARCH.value:
        found = searching.search(
            config,
            model,
            place,
            stage,
            workload,
            most=SEARCH.value,
            say=functools.partial(console.print, soft_wrap=True),
        )
        known = calibration.read_calibration(TOPOLOGY.value)
        print("\n".join(searching.lines(found, place, known)))
        sys.exit(0 if any(one.max_pages for one in found) else 3)
    phases = []
    with console.status("compiling") as status:
        for phase in compile_plan.make_plan(run, workload, only=tuple(ONLY.value)):
            phases.append(phase)
            console.print(f"{phase.name}: compiled in {phase.compile_s:.0f} s {phase.error}")
            status.update(f"compiling, {len(phases)} done")
    plan = compile_plan.Plan(run, workload, tuple(phases))
    known, steps = calibration.read_calibration(TOPOLOGY.value), config.stages[stage].steps
    text = report.text(plan, steps=steps, calibration=known)
    print(text)
    if KEEP.value:
        flag = flags.FLAGS["config"]
        file = Path(config_flags.get_config_filename(flag)).name
        changes = [f"{k}={v}" for k, v in config_flags.get_override_values(flag).items()]
        kept.keep(KEEP.value, plan, steps=steps, config=file, changes=changes, text=text)
    sys.exit(0 if plan.fits else 3)


if __name__ == "__main__":
    app.run(main)
