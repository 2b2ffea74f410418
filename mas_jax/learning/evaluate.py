"""Evaluates systems, each a team with the weights of a directory: records, summary.json, a table.

Must not know: how the weights were trained.
"""

import asyncio
import dataclasses
import json
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import jax
from ml_collections import ConfigDict
from rich.console import Console

from mas_jax.agents import rollout
from mas_jax.agents.prompts import load_stepwise
from mas_jax.agents.setting import Run
from mas_jax.collaboration_rules import TOPOLOGIES
from mas_jax.config_rules import validate
from mas_jax.data.questions import spread
from mas_jax.evaluation import (
    published,
    records_file,
)
from mas_jax.evaluation.records_file import Plan
from mas_jax.evaluation.run import Job, Play, evaluate
from mas_jax.evaluation.statistics import EpisodeScore, score_episode
from mas_jax.files import write_json
from mas_jax.learning import (
    collaboration,
    evaluation_report,
    hosts,
    policy_files,
    samplers,
    scenes,
    systems,
    teams,
)
from mas_jax.learning.privileged import digest, read_texts
from mas_jax.learning.systems import Prepared, Results, System
from mas_jax.learning.workdir import only_run
from mas_jax.records import Episode
from mas_jax.sampling.policies import Policies
from mas_jax.sampling.replicas import Replicas


def _settings(
    config: ConfigDict, system: System, scene: scenes.Scene, notes: Mapping[str, str]
) -> dict:
    """What a system's episodes depend on, as JSON values: a resume with other values is refused."""
    model = config.model.to_dict()
    del model["checkpoint"], model["stepwise"]
    values = {
        "weights": policy_files.weights_digest(system.directory),
        **scene.identity,
        "tokenizer": scene.tokenizer.fingerprint,
        "prompts": dataclasses.asdict(scene.prompts),
        "model": model,
        "retriever": config.retriever.to_dict(),
        "engine": {key: config.engine[key] for key in collaboration.ENGINE_KEYS},
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
            actor = policy_files.actor_directory(config)
            values["actor_weights"] = policy_files.weights_digest(actor)
    else:
        values["budgets"] = config.budgets[system.team].to_dict()
    return json.loads(json.dumps(values))  # tuples as the records will hold them


def _notes(config: ConfigDict, scene: scenes.Scene) -> dict[str, str]:
    """What teams read behind each question: the texts of `privileged`, if they are to."""
    if not config.evaluation.privileged:
        return {}
    questions = scene.questions[config.evaluation.split]
    return read_texts(config.privileged, questions, seed=config.seed)


def _make_plan(
    config: ConfigDict, system: System, scene: scenes.Scene, notes: Mapping[str, str]
) -> Plan:
    """The questions of the config's split, the same number of each dataset, for a system."""
    e = config.evaluation
    questions = spread(scene.questions[e.split], e.num_questions)
    settings = _settings(systems.as_played(config, system), system, scene, notes)
    return Plan(system.team, questions, e.num_runs, settings, system.name)


def prepare(config: ConfigDict, workdir: Path) -> Prepared:
    """Loads and builds everything, and looks at the records that are there.

    Raises: ValueError for a bad config, a checkpoint that does not fit, or records of another
    evaluation; FileNotFoundError for a missing file.
    """
    validate(config)
    directory = policy_files.checkpoint_directory(config)
    tokenizer = policy_files.load_tokenizer(directory)
    scene = scenes.make_scene(config, tokenizer)
    policy_files.check_chat(scene.chat, directory)
    for name in config.evaluation.teams:  # what its prompts lack is said now
        teams.make_team(config, name, scene)
    engines = samplers.make_policies(config, directory, tokenizer)
    named = [System(name, name, directory) for name in config.evaluation.teams]
    return prepare_systems(config, workdir, named, scene, engines)


def prepare_systems(
    config: ConfigDict, workdir: Path, named: Sequence[System], scene: scenes.Scene,
    engines: Replicas | Policies,
) -> Prepared:  # fmt: skip
    """An evaluation of these systems, and of their variants, on the config's split.

    Raises: as `prepare`.
    """
    notes = _notes(config, scene)
    plans = {
        system: _make_plan(config, system, scene, notes)
        for system in systems.variants(config, named)
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
    world = teams.make_play_world(scene, engines)
    team = teams.make_team(systems.as_played(config, system), system.team, scene)
    team = dataclasses.replace(team, notes=prepared.notes)
    run = Run(seed=config.seed, purpose="eval", step=0)
    limits = rollout.Limits(**config.rollout)

    def _play(jobs: Sequence[Job]) -> AsyncIterator[Episode]:
        engines.set_params(samplers.load_params(config, system.directory))
        return rollout.play(jobs, team, world=world, run=run, limits=limits)

    return _play


def play_now(
    config: ConfigDict, scene: scenes.Scene, engines: Replicas | Policies, team_name: str,
    *, num_questions: int, num_runs: int, step: int,
) -> tuple[Plan, list[EpisodeScore]]:  # fmt: skip
    """Plays validation questions with the weights that the engines hold; nothing is recorded.

    Every host plays its share of the questions, and has the scores of all. A collective.
    """
    questions = spread(scene.questions["validation"], num_questions)
    plan = Plan(team_name, questions, num_runs, {})
    share = questions[jax.process_index() :: jax.process_count()]
    jobs = [(question, index) for question in share for index in range(num_runs)]
    world = teams.make_play_world(scene, engines)
    team = teams.make_team(config, team_name, scene)
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


def accelerator_s(workdir: Path) -> float:
    """The sum of `seconds_of` of an evaluation's directory."""
    return sum(evaluation_report.seconds_of(workdir).values())


def _add_seconds(prepared: Prepared, system: System, seconds: float) -> None:
    """Keeps what a call took, since the next one plays only what is missing; a killed call's
    seconds are lost."""
    kept = evaluation_report.seconds_of(prepared.workdir)
    num_devices = math.prod(prepared.config.mesh.values())  # of an engine
    kept[system.name] = kept.get(system.name, 0.0) + num_devices * seconds
    write_json(prepared.workdir / "accelerator_s.json", kept)


def play(prepared: Prepared, console: Console) -> dict[str, tuple[Plan, list[EpisodeScore]]]:
    """Plays what the records lack; every system's plan and scores by its name.

    Raises: `workdir.InUse` if another run plays into the same directory.
    """
    with only_run(prepared.workdir):
        return _play_all(prepared, console)


def _play_all(prepared: Prepared, console: Console) -> dict[str, tuple[Plan, list[EpisodeScore]]]:
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


def _with_matched_votes(
    prepared: Prepared, results: Results, console: Console
) -> tuple[Prepared, dict[str, tuple[Plan, list[EpisodeScore]]]]:
    """The same with self-consistency at the tokens of a team, once that team was played."""
    config, scores = prepared.config, {name: found for name, (_, found) in results.items()}
    system = systems.matched_votes(config, list(prepared.plans), scores)
    plan = _make_plan(config, system, prepared.scene, prepared.notes)
    more = play(dataclasses.replace(prepared, plans={system: plan}), console)
    return dataclasses.replace(prepared, plans={**prepared.plans, system: plan}), more


def run(prepared: Prepared, console: Console) -> dict:
    """The summary of every system, also in workdir/summary.json and on the console.

    Records are workdir/SYSTEM.jsonl; what they hold already is not played again. All tables are in
    workdir/tables.md and tables.tex too. `engine`, `retriever` and `graded` count what this call
    played.
    """
    start = time.perf_counter()
    results = play(prepared, console)
    if prepared.config.evaluation.matched_votes:
        prepared, more = _with_matched_votes(prepared, results, console)
        results |= more
    played = {
        "engine": prepared.engines.metrics,
        "retriever": dict(prepared.scene.retriever.counts),
        "graded": dict(prepared.scene.graded),
        "play_s": time.perf_counter() - start,
    }
    return evaluation_report.write(prepared, results, played, console)
