"""Makes the two toy policies of mathematics from scripted episodes: a frozen Actor, a Collaborator.

Both learn to speak in every topology as a flawed player does. The Actor computes well and follows
what it is told in operations, but takes obscure verbs for others; the Collaborator's hints are good
and bad. The flaws were set by looking at the players, never at a training method.
"""

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
from rich.console import Console

from mas_jax.agents import rollout
from mas_jax.agents.chat import TEMPLATES, Chat, make_chat
from mas_jax.agents.collaboration import toy_collaboration_words
from mas_jax.agents.math_oracle import MathFlaws, MathScript
from mas_jax.agents.prompts import load_prompts
from mas_jax.agents.setting import Run, Sampling, World
from mas_jax.agents.topology import ACTOR, COLLABORATOR
from mas_jax.choices import check_choice
from mas_jax.data.arithmetic import draw_problems, make_arithmetic, make_arithmetic_tokenizer
from mas_jax.learning import (
    collaboration,
    experience,
    policy_files,
    samplers,
    scenes,
    teams,
    toy_policy,
)
from mas_jax.learning.pretrain import PretrainSettings
from mas_jax.model import hf, qwen3
from mas_jax.records import Episode, Question, Sample, Trace
from mas_jax.sampling.policies import Policies

POLICIES = (ACTOR, COLLABORATOR)


def directory_of(out: Path, name: str) -> Path:
    """Where `make` writes a policy."""
    return out / f"{name}_policy"


def scripted_episodes(
    config: ConfigDict, chat: Chat, name: str, questions: Sequence[Question]
) -> list[Episode]:
    """One episode of each question by a topology whose roles the config's flawed players play, in
    order. Raises: RuntimeError if the world failed one."""
    p, sampling = config.math_pretrain, Sampling(**config.sampling)
    team = collaboration.make_team(
        config, name, sampling, chats=dict.fromkeys(POLICIES, chat), prompts=load_prompts("toy"),
        grading=collaboration.INTEGERS, others={}, training=True,
    )  # fmt: skip
    flaws = {team.policies[role]: MathFlaws(**p[role]) for role in POLICIES}
    script = MathScript(chat, flaws)
    world = World(script.sample, scenes.NoRetriever().search, collaboration.INTEGERS.reward)
    run = Run(seed=p.seed, purpose="train", step=0)
    limits = rollout.Limits(**config.rollout)

    async def _play() -> list[Episode]:
        jobs = [(question, 0) for question in questions]
        return [e async for e in rollout.play(jobs, team, world=world, run=run, limits=limits)]

    episodes = asyncio.run(_play())
    failed = [episode.failure for episode in episodes if episode.failure is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} scripted episodes failed; the first: {failed[0]}")
    place = {question.uid: number for number, question in enumerate(questions)}
    return sorted(episodes, key=lambda episode: place[episode.question])


def make(config: ConfigDict, out: Path, console: Console) -> dict[str, dict]:
    """Trains both policies and writes OUT/actor_policy and OUT/collaborator_policy; their records
    by name.

    No problem of the config's toy mathematics is among those that they learn from; what those are
    does not depend on the preset, which is the shape of both.
    Raises: FileExistsError if one of the directories exists, ValueError for an unknown preset,
    before anything is done.
    """
    for name in POLICIES:
        if (place := directory_of(out, name)).exists():
            raise FileExistsError(f"{place} exists; remove it or name another directory")
    p = config.math_pretrain
    check_choice("math_pretrain.preset", p.preset, qwen3.PRESETS)
    tokenizer = make_arithmetic_tokenizer(toy_collaboration_words())
    chat = make_chat(tokenizer, TEMPLATES["toy"])
    played = make_arithmetic(**config.arithmetic)
    held_out = played.questions["validation"][: p.held_out]
    questions = _questions(p, {q.text for found in played.questions.values() for q in found})
    traces = _traces(config, chat, questions)
    unseen = _traces(config, chat, held_out)
    model = dataclasses.replace(
        qwen3.PRESETS[p.preset], vocab_size=tokenizer.vocab_size, max_positions=p.settings.length
    )
    params = qwen3.init(model, jax.random.key(p.settings.seed), dtype=jnp.float32)
    records = {}
    for name in POLICIES:  # the Collaborator goes on from the Actor, whose arithmetic it shares
        console.log(f"{name}:")
        records[name] = toy_policy.fit(
            traces[name], unseen[name], PretrainSettings(steps=p.steps[name], **p.settings),
            directory_of(out, name), console, model=model, params=params, tokenizer=tokenizer,
            record={"math_pretrain": json.loads(p.to_json_best_effort())},
        )  # fmt: skip
        params = hf.load(directory_of(out, name), dtype=jnp.float32)[1]
    return records


def _questions(p: ConfigDict, without: set[str]) -> tuple[Question, ...]:
    """The problems to learn from."""
    return tuple(
        Question(f"pretrain/{number}", "pretrain", problem.text, (str(problem.answer),))
        for number, problem in enumerate(draw_problems(p.seed, p.problems, without=without))
    )


def _traces(
    config: ConfigDict, chat: Chat, questions: Sequence[Question]
) -> dict[str, list[Trace]]:
    """Traces by role, of every team that the config names."""
    found: dict[str, list[Trace]] = {name: [] for name in POLICIES}
    for name in config.math_pretrain.teams:
        for episode in scripted_episodes(config, chat, name, questions):
            for trace in episode.traces:
                found[trace.role].append(trace)
    return found


def measure(config: ConfigDict, out: Path) -> dict[str, float]:
    """Accuracy on validation problems of the Actor that `make` wrote: alone, told the right steps,
    told wrong ones. It must follow what it is told, or no Collaborator can help or hurt it."""
    config = config.copy_and_resolve_references()
    start = directory_of(out, COLLABORATOR)
    config.model.checkpoint = str(start)
    config.actor.checkpoint = str(directory_of(out, ACTOR))
    tokenizer = policy_files.load_tokenizer(start)
    scene = scenes.make_scene(config, tokenizer)
    policies = samplers.make_policies(config, start, tokenizer)
    return {
        "alone": _accuracy(config, scene, policies, "actor", MathFlaws()),
        "right steps": _accuracy(config, scene, policies, "hint", MathFlaws()),
        "wrong steps": _accuracy(config, scene, policies, "hint", MathFlaws(misread_any=1.0)),
    }


def _accuracy(
    config: ConfigDict, scene: scenes.Scene, policies: Policies, team: str, flaws: MathFlaws
) -> float:
    """Of a team whose Collaborator is a player with these flaws."""
    script = MathScript(scene.chat, {config.model.policy: flaws})

    async def _sample(prompt: tuple[int, ...], *, policy: str, **knobs: Any) -> list[Sample]:
        by = script.sample if policy == config.model.policy else policies.sample
        return await by(prompt, policy=policy, **knobs)

    episodes = experience.collect(
        scene.questions["validation"], 1, teams.make_team(config, team, scene),
        world=dataclasses.replace(teams.make_play_world(scene, policies), sample=_sample),
        run=Run(seed=0, purpose="eval", step=0), limits=rollout.Limits(**config.rollout),
    )  # fmt: skip
    return experience.describe(episodes)["rollout/em"]
