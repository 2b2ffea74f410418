"""Evaluates the teams of a config with one policy: records, summary.json, a table.

Must not know: how the policy was trained.
"""

import asyncio
import dataclasses
import hashlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from ml_collections import ConfigDict
from rich.console import Console

from mas_jax.agents import rollout
from mas_jax.agents.setting import Run, Team, World
from mas_jax.config import validate
from mas_jax.evaluation import records_file, report
from mas_jax.evaluation.records_file import Plan
from mas_jax.evaluation.run import Job, evaluate
from mas_jax.evaluation.statistics import score_episode
from mas_jax.learning import assembly
from mas_jax.records import Episode
from mas_jax.sampling.engine import Engine


def _settings(config: ConfigDict, name: str, directory: Path, scene: assembly.Scene) -> dict:
    """What a team's episodes depend on, as JSON values: a resume with other values is refused."""
    weights = hashlib.blake2b(digest_size=16)
    for path in sorted(directory.glob("*.safetensors")):
        weights.update(path.read_bytes())
    return json.loads(
        json.dumps(
            {
                "weights": weights.hexdigest(),
                "world": scene.world.fingerprint,
                "tokenizer": scene.tokenizer.fingerprint,
                "prompts": dataclasses.asdict(scene.prompts),
                "model": config.model.to_dict(),
                "retriever": config.retriever.to_dict(),
                "budgets": config.budgets[name].to_dict(),
                "sampling": config.sampling.to_dict(),
                "seed": config.seed,
            }
        )
    )


def _player(config: ConfigDict, team: Team, engine: Engine, scene: assembly.Scene):
    """The `play` function of `evaluation.run.evaluate`."""
    world = World(engine.sample, scene.retriever.search, assembly.exact_match_reward)
    run = Run(seed=config.seed, purpose="eval", step=0)
    limits = rollout.Limits(**config.rollout)

    def _play(jobs: Sequence[Job]) -> AsyncIterator[Episode]:
        return rollout.play(jobs, team, world=world, run=run, limits=limits)

    return _play


def run(config: ConfigDict, workdir: Path, console: Console) -> dict:
    """The summary of every team of `config.evaluation`, also in workdir/summary.json.

    Records are workdir/TEAM.jsonl; what they hold already is not played again.
    Raises: ValueError for a bad config, or records of another evaluation.
    """
    validate(config)
    start = time.perf_counter()
    directory = assembly.checkpoint_directory(config)
    tokenizer = assembly.load_tokenizer(directory)
    scene = assembly.make_scene(config, tokenizer)
    assembly.check_chat(config, scene.chat, directory)
    model, params = assembly.load_policy(config, directory)
    engine = assembly.make_engine(config, model, params, tokenizer)
    questions = assembly.spread(
        scene.world.questions[config.evaluation.split], config.evaluation.num_questions
    )
    workdir.mkdir(parents=True, exist_ok=True)
    results = []
    for name in config.evaluation.teams:
        team = assembly.make_team(config, name, scene)
        plan = Plan(
            name, questions, config.evaluation.num_runs, _settings(config, name, directory, scene)
        )
        path = workdir / f"{name}.jsonl"
        play = _player(config, team, engine, scene)
        asyncio.run(
            evaluate(
                plan, path, play, console=console, log_interval_s=config.evaluation.log_interval_s
            )
        )
        scores = [score_episode(episode) for episode in records_file.read(path, plan)]
        results.append((plan, scores))
    summary = report.summary(results, k=config.evaluation.num_runs)
    summary["engine"] = dataclasses.asdict(engine.metrics) | {
        "prompt_tokens": engine.scheduler.num_prompt_tokens,
        "shared_tokens": engine.scheduler.num_shared_tokens,
        "preemptions": engine.scheduler.num_preemptions,
    }
    summary["retriever"] = dict(scene.retriever.counts)
    summary["wall_s"] = time.perf_counter() - start
    (workdir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    console.print(report.tables(summary))
    console.print(f"written to {workdir / 'summary.json'} after {summary['wall_s']:.0f} s")
    return summary
