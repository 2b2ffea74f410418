"""Makes the toy starting policy: flawed scripted episodes, supervised training, an HF directory.

The policy shall behave as an instruct model does: it follows the formats, yet stops after the first
hop, drops words, hands on whole questions and reads unreliably, because its traces do. The flaws
were set by looking at the oracle and at the untrained teams, never at a training method.
"""

import asyncio
import dataclasses
import json
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
from rich.console import Console

from mas_jax.agents import rollout
from mas_jax.agents.oracle import Flaws
from mas_jax.agents.protocol import FIELDS, render, select
from mas_jax.agents.protocol_oracle import STYLES, Oracle, local
from mas_jax.agents.protocol_roles import Limits
from mas_jax.agents.protocol_team import Desk, work_on
from mas_jax.agents.scripted import ScriptedSampler
from mas_jax.agents.setting import Run, World
from mas_jax.data.questions import spread
from mas_jax.data.tokenizer import WordTokenizer, make_toy_tokenizer
from mas_jax.learning import policy_files, scenes, teams
from mas_jax.learning.pretrain import PretrainSettings, held_out_loss, pretrain
from mas_jax.model import hf, qwen3, sharding
from mas_jax.records import Episode, Question, Trace
from mas_jax.rewards.exact_match import exact_match_reward

LOG_EVERY = 50  # steps


async def _play(
    config: ConfigDict, name: str, scene: scenes.Scene, jobs: Sequence[tuple[Question, int]],
    flaws: Flaws, notes: Mapping[str, str],
) -> list[Episode]:  # fmt: skip
    sampler = ScriptedSampler(scene.world, scene.chat, scene.prompts, flaws)
    world = World(sampler.sample, scene.retriever.search, exact_match_reward)
    run = Run(seed=config.seed, purpose="train", step=0)
    limits = rollout.Limits(**config.rollout)
    team = dataclasses.replace(teams.make_team(config, name, scene), notes=notes)
    return [e async for e in rollout.play(jobs, team, world=world, run=run, limits=limits)]


def scripted_episodes(
    config: ConfigDict, name: str, scene: scenes.Scene, *, split: str, count: int, runs: int,
    flaws: Flaws, protocols: Mapping | None = None,
) -> list[Episode]:  # fmt: skip
    """Episodes of a team played by the oracle with flaws, in order of question and run.

    Ordered, since they finish in an order that depends on the machine. protocols: as the section
    `pretrain.protocols`; None for none.
    """
    questions = spread(scene.world.questions[split], count)
    jobs = [(question, run) for question in questions for run in range(runs)]
    shown = asyncio.run(_notes(scene, questions, **protocols)) if protocols else {}
    episodes = asyncio.run(_play(config, name, scene, jobs, flaws, shown))
    failed = [episode.failure for episode in episodes if episode.failure is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} scripted episodes failed; the first: {failed[0]}")
    place = {(question.uid, run): index for index, (question, run) in enumerate(jobs)}
    return sorted(episodes, key=lambda e: place[e.question, e.rollout])


async def _notes(
    scene: scenes.Scene, questions: Sequence[Question], *, share: float, skill: float, seed: int
) -> dict[str, str]:
    """A protocol behind this share of the questions: of two one's own, of one another question's,
    of one nothing, in turn.

    Each is the script's in one of its styles, normalised or not, and lacks each field with
    probability 0.2, so that a reader learns to use what is there.
    """
    rng = random.Random(seed)
    chosen = rng.sample(questions, round(share * len(questions)))
    found = {}
    for question in chosen:
        oracle = Oracle(scene.world, skill, rng.choice(sorted(STYLES)))
        limits = Limits()
        desk = Desk(
            local(oracle, limits), scene.retriever.search, oracle.style, limits=limits,
            normalise_style=rng.random() < 0.5,
        )  # fmt: skip
        protocol = (await work_on(question, desk)).protocol or {}
        kept = [name for name in FIELDS if rng.random() >= 0.2]
        found[question.uid] = render(select(protocol, kept), "toy")
    shown = {}
    for place, question in enumerate(chosen):
        other = chosen[(place + 1) % len(chosen)]
        kind = ("own", "own", "other", "nothing")[place % 4]
        shown[question.uid] = {
            "own": found[question.uid], "other": found[other.uid], "nothing": "",
        }[kind]  # fmt: skip
    return shown


def flawed_traces(
    config: ConfigDict, scene: scenes.Scene, *, split: str, count: int, runs: int
) -> list[Trace]:
    """Traces of every role in the config's teams on `count` questions, with the config's flaws."""
    flaws = Flaws(**config.pretrain.flaws)
    protocols = config.pretrain.protocols.to_dict()
    return [
        trace
        for name in config.pretrain.teams
        for episode in scripted_episodes(
            config, name, scene, split=split, count=count, runs=runs, flaws=flaws,
            protocols=protocols if name == "single" and protocols["share"] else None,
        )
        for trace in episode.traces
    ]  # fmt: skip


def _with_seed(config: ConfigDict, seed: int) -> ConfigDict:
    """The config of another world."""
    other = config.copy_and_resolve_references()
    other.world.seed = seed
    return other


def _start(config: ConfigDict) -> tuple[qwen3.ModelConfig, qwen3.Params]:
    """The parameters that training departs from, and their model."""
    p = config.pretrain
    if p.from_policy:
        return hf.load(policy_files.checkpoint_directory(config), dtype=jnp.float32)
    model = dataclasses.replace(qwen3.PRESETS[p.preset], max_positions=config.engine.context)
    return model, qwen3.init(model, jax.random.key(p.settings.seed), dtype=jnp.float32)


def make(config: ConfigDict, out: Path, console: Console) -> dict:
    """Trains the policy and writes it, with its tokenizer, to a new directory; returns a record.

    Raises: FileExistsError if the directory exists, before anything is done.
    """
    if out.exists():
        raise FileExistsError(f"{out} exists; remove it or name another directory")
    tokenizer, p = make_toy_tokenizer(), config.pretrain
    model, params = _start(config)
    scene = scenes.make_scene(config, tokenizer)
    traces = [
        trace
        for seed in p.worlds
        for trace in flawed_traces(
            config, scenes.make_scene(_with_seed(config, seed), tokenizer),
            split="train", count=p.num_questions, runs=p.num_episodes,
        )
    ]  # fmt: skip
    held_out = flawed_traces(config, scene, split="validation", count=p.num_held_out, runs=1)
    start_from = dict(model=model, params=params, tokenizer=tokenizer)
    record = {"world": scene.world.fingerprint, "pretrain": json.loads(p.to_json_best_effort())}
    settings = PretrainSettings(**p.settings)
    return fit(traces, held_out, settings, out, console, record=record, **start_from)


def fit(
    traces: Sequence[Trace], held_out: Sequence[Trace], settings: PretrainSettings, out: Path,
    console: Console, *, model: qwen3.ModelConfig, params: qwen3.Params, tokenizer: WordTokenizer,
    record: dict,
) -> dict:  # fmt: skip
    """Trains on traces and writes the policy with its tokenizer to a directory; returns the record
    with what became of it, which is pretrain.json there."""
    start = time.perf_counter()
    tokens = sum(len(trace.tokens) for trace in traces)
    console.log(f"{len(traces)} traces, {tokens:,} tokens")
    losses = []

    def _on_step(step: int, loss: float) -> None:
        losses.append(loss)
        if (step + 1) % LOG_EVERY == 0:
            mean = sum(losses[-LOG_EVERY:]) / LOG_EVERY
            elapsed = time.perf_counter() - start
            console.log(f"step {step + 1} of {settings.steps}: loss {mean:.3f}, {elapsed:.0f} s")

    params = pretrain(
        params,
        model,
        traces,
        settings,
        mesh=sharding.make_mesh(devices=jax.devices()[:1]),
        on_step=_on_step,
    )
    record = record | {
        "tokenizer": tokenizer.fingerprint,
        "final_loss": sum(losses[-LOG_EVERY:]) / len(losses[-LOG_EVERY:]),
        "held_out_loss": held_out_loss(params, model, held_out, chunk=settings.chunk),
        "wall_s": time.perf_counter() - start,
    }
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save(Path(directory))
        hf.save(out, model, params, tokenizer_dir=directory)
    (out / "pretrain.json").write_text(json.dumps(record, indent=1) + "\n")
    console.log(f"written to {out}: held-out loss {record['held_out_loss']:.3f}")
    return record
