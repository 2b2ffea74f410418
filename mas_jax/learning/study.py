"""Runs a cell of the study with one seed: trains what it needs, evaluates, writes one record.

A run that was interrupted goes on; one whose record is there is not run again. Workdir:
CELL/seed_S/ holds the stage and its evaluation. Must not know: what cells change, tables.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from ml_collections import ConfigDict
from rich.console import Console

from mas_jax import metrics
from mas_jax.config_rules import validate
from mas_jax.evaluation import ledger
from mas_jax.evaluation import study as records
from mas_jax.evaluation.records_file import Plan
from mas_jax.evaluation.statistics import (
    EpisodeScore,
    accuracy_by_dataset,
    cost_per_workflow,
    invalid_action_frac,
    macro_average,
)
from mas_jax.learning import assembly, cost, evaluate, pipeline, revision
from mas_jax.learning.study_freeze import check, start_directory, weights_digest
from mas_jax.learning.study_grid import CAPS, CELLS, Cell, Change, make_config, nothing

# what a record keeps of every step, under the names of metrics.jsonl
CURVES = (
    "rollout/em", "rollout/reward", "rollout/searches", "rollout/valid_action_frac",
    "rollout/searcher/distinct_queries_frac", "rollout/searcher/report_length",
    "update/searcher/entropy", "update/searcher/kl_to_teacher", "update/searcher/kl_to_start",
    "update/leader/entropy", "update/answerer/entropy", "update/gradient_norm",
)  # fmt: skip
CAPPED_RUNS = 1  # of each question under a cap; there are four without one

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Lab:
    """Where runs happen: policies and evaluations in workdir, records in results.

    frozen: the grid on disk that a cell must agree with, None for runs that are no part of the
    study. change: made to every config after the cell's own.
    """

    workdir: Path
    results: Path
    frozen: Path | None
    change: Change = nothing

    def directory(self, cell: str, seed: int) -> Path:
        """Where a run of a cell is, or will be."""
        return self.workdir / cell / f"seed_{seed}"


def rehearsal(directory: Path) -> Lab:
    """A lab for a small live run, minutes on two cores: shows the machinery, measures nothing."""

    def _shrink(config: ConfigDict) -> None:
        for stage in config.stages.values():
            stage.steps = 3
        config.train.update(dict(questions=4, group_size=4, candidates=2))
        config.evaluation.update(dict(num_questions=14, num_runs=2))

    return Lab(directory / "runs", directory / "results", None, _shrink)


def run(name: str, seed: int, lab: Lab, console: Console) -> dict:
    """The record of a cell and a seed; first runs the cells whose policies it reads.

    Raises: ValueError if the cell is not as it was frozen; as `pipeline.run`.
    """
    if lab.frozen is not None:
        check(lab.frozen, name)
    found = records.read(lab.results).get(name, {}).get(seed)
    if found is not None:
        console.print(f"{name}, seed {seed}: its record is in {lab.results}")
        return found
    cell = CELLS[name]
    for other in {cell.teacher, cell.policy} - {"", "own", "start"}:
        run(other, seed, lab, console)
    logger.info("%s, seed %d: %s", name, seed, cell.what)
    directory = lab.directory(name, seed)
    config = make_config(cell, seed)
    lab.change(config)
    config.model.checkpoint = str(start_directory(cell.start))
    if cell.teacher:
        config.teacher.checkpoint = str(_policy(lab, cell.teacher, seed))
    if cell.policy == "own":
        prepared = pipeline.prepare(config, directory)
        policy = pipeline.run(prepared, console)[config.train.stages[-1]]
        scene, engines = prepared.scene, prepared.engines
    else:
        start = Path(config.model.checkpoint)
        policy = start if cell.policy == "start" else _policy(lab, cell.policy, seed)
        config.teacher.checkpoint = str(start)  # of rows that nothing trains by
        validate(config)
        tokenizer = assembly.load_tokenizer(start)
        scene = assembly.make_scene(config, tokenizer)
        engines = assembly.make_engines(config, start, tokenizer)
    plays = _play(config, cell, directory / "evaluation", policy, scene, engines, console)
    record = _record(config, cell, seed, directory, plays, scene)
    records.append(lab.results, record)
    return record


def _policy(lab: Lab, name: str, seed: int) -> Path:
    """The policy that a cell's last stage trained."""
    stage = make_config(CELLS[name], seed).train.stages[-1]
    return lab.directory(name, seed) / stage / "policy"


def _play(
    config: ConfigDict, cell: Cell, workdir: Path, policy: Path, scene: assembly.Scene, engines,
    console: Console,
) -> dict[str, dict]:  # fmt: skip
    """The system's evaluations by name: as it plays freely, and once under each cap."""
    found = {}
    system = evaluate.System(cell.name, cell.team, policy)
    for name in ("free", *CAPS):
        one = config.copy_and_resolve_references()
        played = system
        if name != "free":
            one.evaluation.num_runs = CAPPED_RUNS
            caps = ((f"all_{name}", CAPS[name]),)
            played = dataclasses.replace(system, name=f"{cell.name} {name}", caps=caps)
        prepared = evaluate.prepare_systems(one, workdir, [played], scene, engines)
        found[name] = _describe(*evaluate.play(prepared, console)[played.name])
    return found


def _describe(plan: Plan, scores: Sequence[EpisodeScore]) -> dict:
    """One evaluation as JSON: `right` has a digit a question, how many of its runs were right."""
    num_right = {question.uid: 0 for question in plan.questions}
    for score in scores:
        num_right[score.question] += score.correct
    right: dict[str, str] = {}
    for question in plan.questions:
        digits = right.get(question.dataset, "")
        right[question.dataset] = digits + str(num_right[question.uid])
    by_family = accuracy_by_dataset(plan, scores, k=plan.num_runs)
    return {
        "num_runs": plan.num_runs,
        "right": right,
        "avg": macro_average(by_family, "avg"),
        "pass_at_k": macro_average(by_family, "pass_at_k"),
        "all_at_k": macro_average(by_family, "all_at_k"),
        "per_workflow": cost_per_workflow(scores),
        "invalid_action_frac": invalid_action_frac(scores),
        "failures": sum(score.failure != "" for score in scores),
    }


def _record(
    config: ConfigDict, cell: Cell, seed: int, directory: Path, plays: Mapping[str, dict],
    scene: assembly.Scene,
) -> dict:  # fmt: skip
    steps, spent = [], ()
    if cell.policy == "own":
        stage = directory / config.train.stages[-1]
        steps, spent = metrics.read(stage / metrics.FILE), cost.of_stage(stage)
    total = ledger.total(spent)
    train_s = sum(step["time/step_s"] for step in steps)
    made_with = revision.describe()
    return {
        "cell": cell.name,
        "seed": seed,
        "team": cell.team,
        "world": scene.world.fingerprint,
        "start": weights_digest(start_directory(cell.start)),
        "git": made_with["git"],
        "devices": made_with["num_devices"],
        "plays": dict(plays),
        "training": {
            "searches": total.searches,
            "input_tokens": total.input_tokens,
            "output_tokens": total.output_tokens,
            "training_tokens": total.training_tokens,
        },
        "train_s": train_s,
        "evaluation_accelerator_s": evaluate.accelerator_s(directory / "evaluation"),
        "curves": {
            name: [round(step[name], 5) if name in step else None for step in steps]
            for name in CURVES
            if any(name in step for step in steps)
        },
    }
