"""Evaluates the teams of a config with one policy: records, summary.json, a table.

Must not know: how the policy was trained.
"""

import asyncio
import dataclasses
import hashlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ml_collections import ConfigDict
from rich.console import Console

from mas_jax.agents import rollout
from mas_jax.agents.setting import Run, World
from mas_jax.config import validate
from mas_jax.evaluation import records_file, report
from mas_jax.evaluation.records_file import Plan
from mas_jax.evaluation.run import Job, Play, evaluate
from mas_jax.evaluation.statistics import score_episode
from mas_jax.learning import assembly
from mas_jax.records import Episode
from mas_jax.sampling.replicas import Replicas


@dataclass(frozen=True)
class Prepared:
    """An evaluation that is ready to play: plans and teams by name, and what they play with."""

    config: ConfigDict
    workdir: Path
    scene: assembly.Scene
    engines: Replicas
    plans: Mapping[str, Plan]

    def path(self, name: str) -> Path:
        """The records of a team."""
        return self.workdir / f"{name}.jsonl"


# what of the engine's settings changes roundings, and so perhaps a token
_ENGINE_KEYS = ("dtype", "calls", "buckets", "page_size", "prefill_blocks", "decode_rows")


def _settings(config: ConfigDict, name: str, directory: Path, scene: assembly.Scene) -> dict:
    """What a team's episodes depend on, as JSON values: a resume with other values is refused."""
    weights = hashlib.blake2b(digest_size=16)
    for path in sorted(directory.glob("*.safetensors")):
        weights.update(path.read_bytes())
    values = {
        "weights": weights.hexdigest(),
        "world": scene.world.fingerprint,
        "tokenizer": scene.tokenizer.fingerprint,
        "encoder": scene.encoder.fingerprint,
        "prompts": dataclasses.asdict(scene.prompts),
        "model": config.model.to_dict(),
        "retriever": config.retriever.to_dict(),
        "engine": {key: config.engine[key] for key in _ENGINE_KEYS},
        "mesh": config.mesh.to_dict(),
        "budgets": config.budgets[name].to_dict(),
        "sampling": config.sampling.to_dict(),
        "seed": config.seed,
    }
    return json.loads(json.dumps(values))  # tuples as the records will hold them


def prepare(config: ConfigDict, workdir: Path) -> Prepared:
    """Loads and builds everything, and looks at the records that are there.

    Raises: ValueError for a bad config, a checkpoint that does not fit, or records of another
    evaluation; FileNotFoundError for a missing file.
    """
    validate(config)
    directory = assembly.checkpoint_directory(config)
    tokenizer = assembly.load_tokenizer(directory)
    scene = assembly.make_scene(config, tokenizer)
    assembly.check_chat(config, scene.chat, directory)
    engines = assembly.make_engines(config, directory, tokenizer)
    e = config.evaluation
    questions = assembly.spread(scene.world.questions[e.split], e.num_questions)
    plans = {
        name: Plan(name, questions, e.num_runs, _settings(config, name, directory, scene))
        for name in e.teams
    }
    prepared = Prepared(config, workdir, scene, engines, plans)
    for name, plan in plans.items():
        records_file.resume(prepared.path(name), plan)
    return prepared


def _player(prepared: Prepared, name: str) -> Play:
    """The `play` function of `evaluation.run.evaluate` for a team."""
    config, scene = prepared.config, prepared.scene
    world = World(prepared.engines.sample, scene.retriever.search, assembly.exact_match_reward)
    team = assembly.make_team(config, name, scene)
    run = Run(seed=config.seed, purpose="eval", step=0)
    limits = rollout.Limits(**config.rollout)

    def _play(jobs: Sequence[Job]) -> AsyncIterator[Episode]:
        return rollout.play(jobs, team, world=world, run=run, limits=limits)

    return _play


def run(prepared: Prepared, console: Console) -> dict:
    """The summary of every team of the config, also in workdir/summary.json and on the console.

    Records are workdir/TEAM.jsonl; what they hold already is not played again. `engine` and
    `retriever` count what this call played.
    """
    start = time.perf_counter()
    evaluation = prepared.config.evaluation
    results = []
    for name, plan in prepared.plans.items():
        path = prepared.path(name)
        asyncio.run(
            evaluate(
                plan, path, _player(prepared, name),
                console=console, log_interval_s=evaluation.log_interval_s,
            )
        )  # fmt: skip
        results.append((plan, [score_episode(e) for e in records_file.read(path, plan)]))
    summary = report.summary(results, k=evaluation.num_runs)
    summary["engine"] = prepared.engines.metrics
    summary["retriever"] = dict(prepared.scene.retriever.counts)
    summary["play_s"] = time.perf_counter() - start
    path = prepared.workdir / "summary.json"
    path.write_text(json.dumps(summary, indent=1) + "\n")
    console.print(report.tables(summary))
    console.print(f"written to {path} after {summary['play_s']:.0f} s of play")
    return summary
