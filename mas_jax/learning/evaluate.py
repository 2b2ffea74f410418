"""Evaluates systems, each a team with the weights of a directory: records, summary.json, a table.

Must not know: how the weights were trained.
"""

import asyncio
import dataclasses
import json
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
from ml_collections import ConfigDict
from rich.console import Console

from mas_jax.agents import rollout
from mas_jax.agents.prompts import load_stepwise
from mas_jax.agents.setting import Run
from mas_jax.agents.topology import COLLABORATOR
from mas_jax.collaboration_rules import TOPOLOGIES
from mas_jax.config_rules import validate
from mas_jax.evaluation import (
    answers_told,
    bootstrap,
    ledger,
    plots,
    published,
    records_file,
    report,
    significance,
    taxonomy,
)
from mas_jax.evaluation.records_file import Plan
from mas_jax.evaluation.report import Grid
from mas_jax.evaluation.run import Job, Play, evaluate
from mas_jax.evaluation.statistics import COSTS, EpisodeScore, score_episode
from mas_jax.files import write_json
from mas_jax.learning import assembly, collaboration, cost, hosts
from mas_jax.learning.privileged import digest, read_texts
from mas_jax.records import Episode
from mas_jax.sampling.policies import Policies
from mas_jax.sampling.replicas import Replicas


@dataclass(frozen=True)
class System:
    """A team with weights: what tables call it, and where its policy lies in the HF layout.

    caps: budgets of the team that it plays under instead of the config's, as (name, value) pairs.
    """

    name: str
    team: str
    directory: Path
    caps: tuple[tuple[str, int], ...] = ()


# what a cap means: searches stop at it; the action that ends an agent still costs its tokens
CAPPED = {"searches": "at most {} searches", "tokens": "ending after {} tokens"}


def under_caps(config: ConfigDict, systems: Sequence[System]) -> list[System]:
    """The systems as they are, and again under each cap of `evaluation.caps` on an episode's
    searches or tokens: compared at equal cost, beside how they play freely."""
    capped = [
        dataclasses.replace(
            system, name=f"{system.name}, {CAPPED[kind].format(cap)}", caps=((f"all_{kind}", cap),)
        )
        for kind in ("searches", "tokens")
        for cap in config.evaluation.caps[kind]
        for system in systems
    ]
    return [*systems, *capped]


def _with_caps(config: ConfigDict, system: System) -> ConfigDict:
    """The config with the system's caps among its team's budgets."""
    if not system.caps:
        return config
    config = config.copy_and_resolve_references()
    config.budgets[system.team].update(dict(system.caps))
    return config


@dataclass(frozen=True)
class Prepared:
    """An evaluation that is ready to play: systems and their plans, and what they play with.

    notes: what they read behind each question.
    """

    config: ConfigDict
    workdir: Path
    scene: assembly.Scene
    engines: Replicas | Policies
    plans: Mapping[System, Plan]
    notes: Mapping[str, str]

    def path(self, system: System) -> Path:
        """The records of a system."""
        return self.workdir / f"{system.name.replace(',', '').replace(' ', '_')}.jsonl"


# what of the engine's settings changes roundings, and so perhaps a token
_ENGINE_KEYS = ("dtype", "calls", "buckets", "page_size", "prefill_blocks", "decode_rows")


def _settings(
    config: ConfigDict, system: System, scene: assembly.Scene, notes: Mapping[str, str]
) -> dict:
    """What a system's episodes depend on, as JSON values: a resume with other values is refused."""
    model = config.model.to_dict()
    del model["checkpoint"], model["stepwise"]
    values = {
        "weights": assembly.weights_digest(system.directory),
        **scene.identity,
        "tokenizer": scene.tokenizer.fingerprint,
        "prompts": dataclasses.asdict(scene.prompts),
        "model": model,
        "retriever": config.retriever.to_dict(),
        "engine": {key: config.engine[key] for key in _ENGINE_KEYS},
        "mesh": config.mesh.to_dict(),
        "sampling": config.sampling.to_dict(),
        "seed": config.seed,
        **({"notes": digest(notes)} if config.evaluation.privileged else {}),
    }
    if config.model.stepwise:
        values["stepwise"] = dataclasses.asdict(load_stepwise(config.model.prompts))
    if system.team in TOPOLOGIES:
        values |= collaboration.settings(config, system.team)
        if config.actor.kind == "policy":
            values["actor_weights"] = assembly.weights_digest(assembly.actor_directory(config))
    else:
        values["budgets"] = config.budgets[system.team].to_dict()
    return json.loads(json.dumps(values))  # tuples as the records will hold them


def _notes(config: ConfigDict, scene: assembly.Scene) -> dict[str, str]:
    """What teams read behind each question: the texts of `privileged`, if they are to."""
    if not config.evaluation.privileged:
        return {}
    questions = scene.questions[config.evaluation.split]
    return read_texts(config.privileged, questions, seed=config.seed)


def _make_plan(
    config: ConfigDict, system: System, scene: assembly.Scene, notes: Mapping[str, str]
) -> Plan:
    """The questions of the config's split, the same number of each dataset, for a system."""
    e = config.evaluation
    questions = assembly.spread(scene.questions[e.split], e.num_questions)
    settings = _settings(_with_caps(config, system), system, scene, notes)
    return Plan(system.team, questions, e.num_runs, settings, system.name)


def prepare(config: ConfigDict, workdir: Path) -> Prepared:
    """Loads and builds everything, and looks at the records that are there.

    Raises: ValueError for a bad config, a checkpoint that does not fit, or records of another
    evaluation; FileNotFoundError for a missing file.
    """
    validate(config)
    directory = assembly.checkpoint_directory(config)
    tokenizer = assembly.load_tokenizer(directory)
    scene = assembly.make_scene(config, tokenizer)
    assembly.check_chat(scene.chat, directory)
    for name in config.evaluation.teams:  # what its prompts lack is said now
        assembly.make_team(config, name, scene)
    engines = assembly.make_policies(config, directory, tokenizer)
    systems = [System(name, name, directory) for name in config.evaluation.teams]
    return prepare_systems(config, workdir, systems, scene, engines)


def prepare_systems(
    config: ConfigDict, workdir: Path, systems: Sequence[System], scene: assembly.Scene,
    engines: Replicas | Policies,
) -> Prepared:  # fmt: skip
    """An evaluation of these systems on the config's split. Raises: as `prepare`."""
    notes = _notes(config, scene)
    plans = {
        system: _make_plan(config, system, scene, notes) for system in under_caps(config, systems)
    }
    sets = sorted({q.dataset for plan in plans.values() for q in plan.questions})
    if config.evaluation.published and not set(sets) & set(published.SETS):
        raise ValueError(
            f"evaluation.published=True, but the questions are of {sets} and published numbers of "
            f"{published.SETS}; set it to False"
        )
    prepared = Prepared(config, workdir, scene, engines, plans, notes)
    for system, plan in plans.items():
        records_file.resume(prepared.path(system), plan)
    return prepared


def _player(prepared: Prepared, system: System) -> Play:
    """The `play` function of `evaluation.run.evaluate` for a system, whose weights it loads."""
    config, scene, engines = prepared.config, prepared.scene, prepared.engines
    world = assembly.make_play_world(scene, engines)
    team = assembly.make_team(_with_caps(config, system), system.team, scene)
    team = dataclasses.replace(team, notes=prepared.notes)
    run = Run(seed=config.seed, purpose="eval", step=0)
    limits = rollout.Limits(**config.rollout)

    def _play(jobs: Sequence[Job]) -> AsyncIterator[Episode]:
        engines.set_params(assembly.load_params(config, system.directory))
        return rollout.play(jobs, team, world=world, run=run, limits=limits)

    return _play


def play_now(
    config: ConfigDict, scene: assembly.Scene, engines: Replicas | Policies, team_name: str,
    *, num_questions: int, num_runs: int, step: int,
) -> tuple[Plan, list[EpisodeScore]]:  # fmt: skip
    """Plays validation questions with the weights that the engines hold; nothing is recorded.

    Every host plays its share of the questions, and has the scores of all. A collective.
    """
    questions = assembly.spread(scene.questions["validation"], num_questions)
    plan = Plan(team_name, questions, num_runs, {})
    share = questions[jax.process_index() :: jax.process_count()]
    jobs = [(question, index) for question in share for index in range(num_runs)]
    world = assembly.make_play_world(scene, engines)
    team = assembly.make_team(config, team_name, scene)
    run = Run(seed=config.seed, purpose="eval", step=step)
    limits = rollout.Limits(**config.rollout)

    async def _play() -> list[EpisodeScore]:
        episodes = rollout.play(jobs, team, world=world, run=run, limits=limits)
        return [score_episode(episode) async for episode in episodes]

    by_host = hosts.gather([dataclasses.asdict(score) for score in asyncio.run(_play())])
    return plan, [EpisodeScore(**_tuples(score)) for scores in by_host for score in scores]


def _tuples(score: dict) -> dict:
    """The fields of a score whose pairs JSON made lists."""
    return score | {"retrieved": tuple((name, title) for name, title in score["retrieved"])}


def _seconds(workdir: Path) -> dict[str, float]:
    """Seconds of device calls, times devices, that playing each system took, over all calls."""
    path = workdir / "accelerator_s.json"
    return json.loads(path.read_text()) if path.exists() else {}


def accelerator_s(workdir: Path) -> float:
    """The sum of `_seconds` of an evaluation's directory."""
    return sum(_seconds(workdir).values())


def _add_seconds(prepared: Prepared, system: System, seconds: float) -> None:
    """Keeps what a call took, since the next one plays only what is missing; a killed call's
    seconds are lost."""
    kept = _seconds(prepared.workdir)
    num_devices = math.prod(prepared.config.mesh.values())  # of an engine
    kept[system.name] = kept.get(system.name, 0.0) + num_devices * seconds
    write_json(prepared.workdir / "accelerator_s.json", kept)


def play(prepared: Prepared, console: Console) -> dict[str, tuple[Plan, list[EpisodeScore]]]:
    """Plays what the records lack; every system's plan and scores by its name."""
    results = {}
    for system, plan in prepared.plans.items():
        path, before = prepared.path(system), prepared.engines.metrics
        asyncio.run(
            evaluate(
                plan, path, _player(prepared, system),
                console=console, log_interval_s=prepared.config.evaluation.log_interval_s,
            )
        )  # fmt: skip
        after = prepared.engines.metrics
        seconds = sum(after[name] - before[name] for name in ("prefill_s", "decode_s"))
        _add_seconds(prepared, system, seconds)
        results[system.name] = plan, [score_episode(e) for e in records_file.read(path, plan)]
    return results


Results = Mapping[str, tuple[Plan, Sequence[EpisodeScore]]]


def _compare(results: Results) -> list[Grid]:
    """Every system less the first: over all sets, and on each with Holm's correction."""
    means = {name: bootstrap.question_means(*result) for name, result in results.items()}
    first, *others = means
    return [
        report.set_grid(
            {
                "all, macro": significance.over_all(means[other], means[first]),
                **significance.over_sets(means[other], means[first]),
            },
            title=f"{other} less {first}, avg@{results[first][0].num_runs} in points, 95% interval",
        )
        for other in others
    ]


def _plot(prepared: Prepared, results: Results, summary: Mapping) -> None:
    """Every system's accuracy, with its interval, against what it spent: two plots."""
    intervals = {
        name: bootstrap.interval(bootstrap.question_means(*result))
        for name, result in results.items()
    }
    for cost_name, names in COSTS.items():
        points = [
            plots.Point(
                name, found.difference, found.low, found.high,
                sum(summary["teams"][name]["per_workflow"][part] for part in names),
            )
            for name, found in intervals.items()
        ]  # fmt: skip
        plots.accuracy_against_cost(
            prepared.workdir / f"accuracy_against_{cost_name}.png", points,
            accuracy=f"avg@{summary['num_runs']}", cost=f"{cost_name} a workflow",
        )  # fmt: skip


def _follow(prepared: Prepared) -> list[Grid]:
    """Where answers got lost, a column for each system; what each role of each system cost; what
    training the weights cost, for each that a run of ours made."""
    chat, categories, entries = prepared.scene.chat, {}, []
    accelerator_s = _seconds(prepared.workdir)
    for system, plan in prepared.plans.items():
        path, questions = prepared.path(system), {q.uid: q for q in plan.questions}
        if system.team not in TOPOLOGIES:  # of what was searched, reported and selected
            categories[system.name] = [
                taxonomy.categorise(episode, questions[episode.question], chat=chat)
                for episode in records_file.read(path, plan)
            ]
        entries += ledger.play_entries(
            system.name, records_file.read(path, plan), accelerator_s=accelerator_s[system.name]
        )
    num_workflows = len(plan.questions) * plan.num_runs
    trained = {directory: cost.of_policy(directory) for directory in
               sorted({system.directory for system in prepared.plans})}  # fmt: skip
    return [
        *([taxonomy.grid(categories, title="What became of the episodes")] if categories else []),
        ledger.grid(
            entries, title="Cost a workflow by role", num_workflows=num_workflows, are_parts=False
        ),
        *(
            ledger.grid(
                spent, title=f"Cost of training {directory}, sums", num_workflows=1, are_parts=True
            )
            for directory, spent in trained.items()
            if spent
        ),
    ]


def _answers_told(prepared: Prepared) -> dict[str, dict[str, int]]:
    """By system with a Collaborator: how often it told the answer, to itself too in a debate."""
    return {
        system.name: answers_told.count(
            records_file.read(prepared.path(system), plan),
            {q.uid: q for q in plan.questions},
            prepared.scene.tokenizer,
        )
        for system, plan in prepared.plans.items()
        if COLLABORATOR in TOPOLOGIES.get(system.team, ())
    }


def run(prepared: Prepared, console: Console) -> dict:
    """The summary of every system, also in workdir/summary.json and on the console.

    Records are workdir/SYSTEM.jsonl; what they hold already is not played again. All tables, with
    where answers got lost and what each role cost, are in workdir/tables.md and tables.tex too.
    `engine`, `retriever` and `graded` count what this call played.
    """
    start = time.perf_counter()
    results = play(prepared, console)
    summary = report.summary(list(results.values()), k=prepared.config.evaluation.num_runs)
    summary["engine"] = prepared.engines.metrics
    summary["retriever"] = dict(prepared.scene.retriever.counts)
    summary["graded"] = dict(prepared.scene.graded)
    summary["answers_told"] = _answers_told(prepared)
    summary["play_s"] = time.perf_counter() - start
    path = prepared.workdir / "summary.json"
    path.write_text(json.dumps(summary, indent=1) + "\n")
    more = [*_compare(results), *_follow(prepared)]
    _plot(prepared, results, summary)
    # seven sets beside each system's name and origin: too wide for a terminal
    wide = [published.beside(summary)] if prepared.config.evaluation.published else []
    for name, text, one in (
        ("tables.md", report.markdown(summary), report.to_markdown),
        ("tables.tex", report.latex(summary), report.to_latex),
    ):
        (prepared.workdir / name).write_text("\n".join([text, *map(one, [*more, *wide])]))
    console.print(report.tables(summary))
    console.print(*(report.to_rich(grid) for grid in more))
    if wide:
        console.print(f"published numbers beside these: {prepared.workdir}/tables.md")
    console.print(f"written to {path} after {summary['play_s']:.0f} s of play")
    return summary
