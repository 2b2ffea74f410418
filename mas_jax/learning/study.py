"""Runs a cell of the study with one seed: trains what it needs, evaluates, writes one record.

A run that was interrupted goes on; one whose record is there is not run again. Workdir:
CELL/seed_S/ holds the stage and its evaluation. Must not know: what cells change, tables.
"""

import asyncio
import dataclasses
import json
import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict
from rich.console import Console

from mas_jax import metrics
from mas_jax.agents import protocol_files
from mas_jax.agents.protocol_oracle import Oracle, local
from mas_jax.agents.protocol_roles import Limits
from mas_jax.agents.protocol_team import Desk
from mas_jax.collaboration_rules import TOPOLOGIES
from mas_jax.config_rules import validate
from mas_jax.evaluation import answers_told, ledger, records_file
from mas_jax.evaluation import study as records
from mas_jax.evaluation.records_file import Plan
from mas_jax.evaluation.statistics import (
    EpisodeScore,
    accuracy_by_dataset,
    cost_per_workflow,
    invalid_action_frac,
    macro_average,
)
from mas_jax.learning import cost, evaluate, pipeline, policy_files, revision, samplers, scenes
from mas_jax.learning.privileged import digest as texts_digest
from mas_jax.learning.study_cells import Cell, Change, make_config, nothing
from mas_jax.learning.study_freeze import (
    check,
    describe,
    digest,
    start_directory,
    weights_digest,
)
from mas_jax.learning.study_grid import CAPPED_RUNS, CAPS, CELLS, PROTOCOL_SKILL
from mas_jax.sampling.policies import Policies
from mas_jax.sampling.replicas import Replicas

# what a record keeps of every step, under the names of metrics.jsonl
CURVES = (
    "rollout/em", "rollout/reward", "rollout/searches", "rollout/valid_action_frac",
    "rollout/searcher/distinct_queries_frac", "rollout/searcher/report_length",
    "update/searcher/entropy", "update/searcher/kl_to_teacher", "update/searcher/kl_to_start",
    "update/leader/entropy", "update/answerer/entropy", "update/gradient_norm",
    "update/searcher/divergence", "privileged/protocols", "privileged/rollouts",
    "rollout/searcher/length", "style/unigram_drift", "style/bigram_drift", "leak/marker_frac",
    "leak/answer_frac", "update/collaborator/entropy", "update/collaborator/kl_to_start",
    "rollout/collaborator/length",
)  # fmt: skip
PLAYS = ("free", *(f"{kind}_{cap}" for kind, caps in CAPS.items() for cap in caps))


def plays_of(cell: Cell) -> tuple[str, ...]:
    """The evaluations of a cell: without searches there is no cap on them."""
    return ("free",) if cell.team in TOPOLOGIES else PLAYS


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
        config.train.update(dict(questions=4, candidates=2))
        if not config.train.tree.trees:  # whose shape says how large a group is
            config.train.group_size = 4
        config.evaluation.update(dict(num_questions=14, num_runs=2))
        for engine in (config.engine, config.actor.engine):
            engine.buckets = (engine.context,)  # to compile others takes longer than to play

    return Lab(directory / "runs", directory / "results", None, _shrink)


@dataclasses.dataclass(frozen=True)
class _Ready:
    """A cell that can be played: its config, whose policy, and what it plays with."""

    config: ConfigDict
    policy: Path
    scene: scenes.Scene
    engines: Replicas | Policies


def run(name: str, seed: int, lab: Lab, console: Console) -> dict:
    """The record of a cell and a seed; first trains the policies that it reads.

    A record that lacks evaluations gets them. Raises: ValueError if the cell is not as it was
    frozen; as `pipeline.run`.
    """
    if lab.frozen is not None:
        check(lab.frozen, name)
    cell = CELLS[name]
    found = records.read(lab.results).get(name, {}).get(seed)
    missing = [play for play in plays_of(cell) if found is None or play not in found["plays"]]
    if not missing:
        console.print(f"{name}, seed {seed}: its record is in {lab.results}")
        return found
    logger.info("%s, seed %d: %s", name, seed, cell.what)
    ready = _prepare(cell, seed, lab, console)
    directory = lab.directory(name, seed)
    evaluation = directory / "evaluation"
    before_s = evaluate.accelerator_s(evaluation)
    plays = _play(ready, cell, evaluation, missing, console)
    if found is None:
        record = _record(ready, cell, seed, directory) | {"plays": plays}
    else:
        spent_s = evaluate.accelerator_s(evaluation) - before_s
        record = dict(found) | {
            "plays": found["plays"] | plays,
            "evaluation_accelerator_s": found["evaluation_accelerator_s"] + spent_s,
        }
    records.append(lab.results, record)
    return record


def _prepare(cell: Cell, seed: int, lab: Lab, console: Console) -> _Ready:
    """Trains what the cell needs and is not there yet, whether or not it has a record."""
    for other in cell.needs:
        if not (_policy(lab, other, seed) / "config.json").exists():
            if lab.frozen is not None:
                check(lab.frozen, other)
            _prepare(CELLS[other], seed, lab, console)
    config = make_config(cell, seed)
    lab.change(config)
    start = start_directory(cell.start)
    config.model.checkpoint = f"asset:{cell.start}_policy"  # in any checkout the same
    if cell.protocols:
        path = str(_protocols(config, cell.protocols, lab))
        config.privileged.protocols = path
        if config.trajectories:
            config.trajectories = path
    if cell.teacher:
        config.teacher.checkpoint = str(_policy(lab, cell.teacher, seed))
    if cell.actor:
        config.actor.checkpoint = str(_policy(lab, cell.actor, seed))
    if cell.policy == "own":
        prepared = pipeline.prepare(config, lab.directory(cell.name, seed))
        policy = pipeline.run(prepared, console)[config.train.stages[-1]]
        return _Ready(config, policy, prepared.scene, prepared.engines)
    policy = start if cell.policy == "start" else _policy(lab, cell.policy, seed)
    config.teacher.checkpoint = str(start)  # of rows that nothing trains by
    validate(config)
    tokenizer = policy_files.load_tokenizer(start)
    scene = scenes.make_scene(config, tokenizer)
    return _Ready(config, policy, scene, samplers.make_policies(config, start, tokenizer))


def _protocols(config: ConfigDict, writer: str, lab: Lab) -> Path:
    """The file of this writer's protocols of the world's training and test questions, made if it is
    not there; see `Cell.protocols`. Two runs may both make it: it comes whole, and the same."""
    path = lab.workdir / "protocols" / f"world_{config.world.seed}_{writer}.jsonl"
    if path.exists():
        return path
    scene = scenes.make_scene(config, policy_files.load_tokenizer(start_directory("study")))
    *how, style = writer.split("-")
    oracle, limits = Oracle(scene.world, PROTOCOL_SKILL, style), Limits()
    desk = Desk(
        local(oracle, limits), scene.retriever.search, model=writer, limits=limits,
        normalise_style="raw" not in how, is_alone="alone" in how,
    )  # fmt: skip
    questions = [*scene.questions["train"], *scene.questions["test"]]
    part = path.with_suffix(f".{os.getpid()}")
    part.unlink(missing_ok=True)  # of a killed run that had this number
    asyncio.run(
        protocol_files.build(
            questions, [desk], part, concurrency=8, failure_frac=0.0, tell=lambda *_: None
        )
    )
    missing = len(questions) - len(protocol_files.read(part))
    if missing:
        raise ValueError(f"{missing} of {len(questions)} questions have no record in {part}")
    part.replace(path)
    return path


def _policy(lab: Lab, name: str, seed: int) -> Path:
    """The policy that a cell's last stage trained, or will."""
    stage = make_config(CELLS[name], seed).train.stages[-1]
    return lab.directory(name, seed) / stage / "policy"


def _play(
    ready: _Ready, cell: Cell, workdir: Path, names: Sequence[str], console: Console
) -> dict[str, dict]:
    """Evaluations of these names: "free", or under a cap."""
    found = {}
    for name in names:
        config = ready.config.copy_and_resolve_references()
        system = evaluate.System(cell.name, cell.team, ready.policy)
        if name != "free":
            config.evaluation.num_runs = CAPPED_RUNS
            kind, _, cap = name.partition("_")
            changes = ((f"budgets.{cell.team}.all_{kind}", int(cap)),)
            system = dataclasses.replace(system, name=f"{cell.name} {name}", changes=changes)
        prepared = evaluate.prepare_systems(config, workdir, [system], ready.scene, ready.engines)
        found[name] = _describe(*evaluate.play(prepared, console)[system.name])
        if cell.team in TOPOLOGIES:
            found[name] |= _parties(prepared, system)
    return found


def _parties(prepared: evaluate.Prepared, system: evaluate.System) -> dict:
    """What each party of a topology's play spent, sums over all problems; and in how many episodes
    the Collaborator told the answer, which can only be seen where the problem does not hold it."""
    plan = prepared.plans[system]
    episodes = list(records_file.read(prepared.path(system), plan))
    entries = ledger.play_entries("", episodes, accelerator_s=0.0)
    questions = {question.uid: question for question in plan.questions}
    return {
        "tokens": {
            entry.role: {"input": entry.input_tokens, "output": entry.output_tokens}
            for entry in entries
        },
        "answers": answers_told.count(episodes, questions, prepared.scene.tokenizer),
    }


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


def _record(ready: _Ready, cell: Cell, seed: int, directory: Path) -> dict:
    """Everything of a record but its plays."""
    steps, spent, made_with = [], [], revision.describe()
    if cell.policy == "own":
        for stage in ready.config.train.stages:
            steps += metrics.read(directory / stage / metrics.FILE)
            spent += cost.of_stage(directory / stage)
        made_with = json.loads((directory / "revision.json").read_text())
    total, frozen = ledger.total(spent), describe(cell)
    return {
        "cell": cell.name,
        "seed": seed,
        "team": cell.team,
        "frozen": digest(frozen),
        "world": frozen["world"],
        "start": weights_digest(start_directory(cell.start)),
        "git": made_with["git"],
        "changed_files": len(made_with["changed_files"]),
        "devices": made_with["num_devices"],
        **_read_records(ready.config, cell),
        "training": {
            "searches": total.searches,
            "input_tokens": total.input_tokens,
            "output_tokens": total.output_tokens,
            "training_tokens": total.training_tokens,
        },
        "train_s": sum(step["time/step_s"] for step in steps),
        "evaluation_accelerator_s": evaluate.accelerator_s(directory / "evaluation"),
        "curves": {
            name: [_rounded(step.get(name)) for step in steps]
            for name in CURVES
            if any(name in step for step in steps)
        },
    }


def _read_records(config: ConfigDict, cell: Cell) -> dict[str, str]:
    """Names the protocols or trajectories that a cell read."""
    if not cell.protocols:
        return {}
    read = {
        uid: json.dumps(found, sort_keys=True)
        for uid, found in protocol_files.read_protocols(Path(config.privileged.protocols)).items()
    }
    return {"protocols": texts_digest(read)}


def _rounded(value: float | None) -> float | None:
    """As JSON can hold it: a skipped update has norms that are no numbers."""
    return None if value is None or not math.isfinite(value) else round(value, 5)
