"""The study: `python launch/study.py --list | --freeze | --run=CELL,... --seed=S,... | --table`.

Runs resume, and what has a record in --results is not run again; a cell first trains the policies
that it reads and that are not there. `--run=all` is the whole grid, main cells of all seeds first.
"""

import logging
import sys
from pathlib import Path

from absl import app, flags
from rich.console import Console

from mas_jax.agents import rollout
from mas_jax.learning import loop, process, study, study_freeze, study_grid, workdir
from mas_jax.learning.study_report import listing, read, tables

LIST = flags.DEFINE_bool("list", False, "the grid: every cell, its seeds, which have records")
FREEZE = flags.DEFINE_bool("freeze", False, "add the grid's new cells to the frozen ones")
RUN = flags.DEFINE_list("run", [], f"cells to run, groups of {sorted(study_grid.GROUPS)}, or 'all'")
SEED = flags.DEFINE_list("seed", [], "training seeds; by default all that the grid gives a cell")
REHEARSAL = flags.DEFINE_bool(
    "rehearsal", False, "run shrunk to minutes, all of it in --workdir; no part of the study"
)
TABLE = flags.DEFINE_bool("table", False, "tables of the records that are there, as Markdown")
RESULTS = flags.DEFINE_string("results", "notebooks/results", "where records are read and written")
WORKDIR = flags.DEFINE_string("workdir", "runs/study", "where policies and evaluations go")


def main(argv: list[str]) -> None:
    """Lists, runs or tabulates; a wrong name ends it with one line."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    if not (LIST.value or FREEZE.value or RUN.value or TABLE.value):
        raise app.UsageError("give --list, --run=CELL or --table")
    results = Path(RESULTS.value)
    if LIST.value:
        sys.stdout.write(listing(results))
    if FREEZE.value:
        new = study_freeze.freeze(study_freeze.FILE)
        sys.stdout.write(f"{len(new)} new cells in {study_freeze.FILE}\n")
    if RUN.value:
        try:
            jobs = study_grid.jobs(RUN.value, [int(seed) for seed in SEED.value])
        except ValueError as error:
            raise app.UsageError(str(error)) from error
        _run(jobs, results)
    if TABLE.value:
        try:
            runs = read(results, study_freeze.FILE)
        except ValueError as error:
            raise app.UsageError(str(error)) from error
        sys.stdout.write(tables(runs))


def _run(jobs: list[tuple[str, int]], results: Path) -> None:
    """Runs what can be run; a job that fails is named at the end and stops no other."""
    process.start()
    lab, failed = study.Lab(Path(WORKDIR.value), results, study_freeze.FILE), []
    if REHEARSAL.value:
        lab = study.rehearsal(Path(WORKDIR.value))
    for name, seed in jobs:
        try:
            study.run(name, seed, lab, Console())
        except loop.Interrupted as stop:
            raise SystemExit(f"{name}, seed {seed}: {stop}") from stop
        except (ValueError, rollout.TooManyFailures, workdir.InUse) as error:
            failed.append(f"{name}, seed {seed}: {error}")
            logging.error("%s", failed[-1])
    if failed:
        raise SystemExit("\n".join([f"{len(failed)} of {len(jobs)} runs failed:", *failed]))


if __name__ == "__main__":
    app.run(main)
