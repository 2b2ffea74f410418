"""Every config trains: one step of its last stage, with the toy policy and a few rows."""

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from config_files import CONFIGS, load
from conftest import ROOT
from rich.console import Console

from mas_jax.agents import protocol_files, protocol_oracle, protocol_roles
from mas_jax.agents.oracle import Flaws
from mas_jax.agents.protocol_team import Desk
from mas_jax.agents.rollout import Limits
from mas_jax.agents.scripted import ScriptedSampler
from mas_jax.agents.setting import Run, World
from mas_jax.config import default_config
from mas_jax.config_rules import validate
from mas_jax.learning import experience, pipeline, policy_files, scenes, teams
from mas_jax.metrics import read
from mas_jax.model import hf, qwen3, sharding
from mas_jax.model.hf_config import load_config
from mas_jax.rewards.exact_match import exact_match_reward
from mas_jax.sampling.engine import Engine
from mas_jax.sampling.engine_settings import EngineSettings
from mas_jax.sampling.replicas import Replicas

QWEN = ROOT.parent / "shared" / "data" / "qwen3_tokenizer"
SHRUNK = {  # the toy policy and a batch of a few rows, whatever the config is for
    "seed": 3,
    "train.questions": 2,
    "train.micro_rows": 2,
    "train.row_length": 384,
    "train.validation_interval": 0,
    "train.role_gradient_interval": 0,
    "train.mesh.fsdp": 1,
    "rollout.min_episodes": 1,
    "rollout.failure_frac": 0.0,
    "certify.ignore": True,
    "certify.num_questions": 7,
    "certify.num_runs": 1,
}
TOY_SECTIONS = ("model", "engine", "mesh", "budgets", "sampling")
SLOW = set(CONFIGS) - {"toy"}  # a program of its own for each: minutes of compilation


@pytest.fixture(scope="module")
def protocols(shared, tmp_path_factory):
    """Protocols of the questions that a shrunk config plays, by the toy world's script."""
    path, limits = tmp_path_factory.mktemp("protocols") / "protocols.jsonl", protocol_roles.Limits()
    oracle = protocol_oracle.local(protocol_oracle.Oracle(shared.scene.world), limits)
    desk = Desk(oracle, shared.scene.retriever.search, "oracle", limits=limits)
    questions = shared.scene.questions["train"]
    asyncio.run(protocol_files.build(questions, [desk], path, concurrency=8, failure_frac=0.0))
    return path


def shrink(config, teacher):
    """One step of the config's last stage, small enough for a test; `teacher` is there already."""
    toy = default_config()
    config.update({name: toy[name].to_dict() for name in TOY_SECTIONS})
    config.update_from_flattened_dict(SHRUNK)
    config.train.group_size = min(config.train.group_size, 2)
    if config.train.tree.trees:
        config.train.tree.update(dict(trees=1, expansions=1, rounds=1))
    last = config.train.stages[-1]
    config.train.stages = (last,)
    config.stages[last].steps = 1
    config.teacher.checkpoint = str(teacher)
    return config


@pytest.fixture(scope="module")
def shared():
    """Scene, engine and weights of all configs: shrunk, they have the same."""
    config = default_config()
    directory = policy_files.checkpoint_directory(config)
    scene = scenes.make_scene(config, policy_files.load_tokenizer(directory))
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    shardings = qwen3.param_shardings(load_config(directory), mesh)
    model, params = hf.load(directory, dtype=jnp.float32, shardings=shardings)
    small = dict(buckets=(384,), num_pages=1024, prefill_blocks=16, decode_rows=8)
    settings = EngineSettings(**config.engine.to_dict() | small)
    engine = Engine(
        model, params, settings, policy="student", decode=scene.tokenizer.decode, mesh=mesh
    )
    return pipeline.Pipeline(
        config=config, workdir=ROOT, start_directory=directory, scene=scene,
        engines=Replicas([engine]), mesh=mesh, model=model, reference=params,
    )  # fmt: skip


def in_place(shared, config, workdir):
    """What `pipeline.prepare` makes of the config, from the parts that are there."""
    model, reference = shared.model, shared.reference
    reference = jax.tree.map(lambda x: x.astype(config.train.dtype), reference)
    if config.train.value_head:
        model = dataclasses.replace(model, value_head=True)
        reference["value_head"] = jnp.zeros(model.model_dim, config.train.dtype)
    return dataclasses.replace(
        shared, config=config, workdir=workdir, reference=reference, model=model
    )


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in CONFIGS],
)
def test_a_shrunk_config_takes_one_step(name, shared, tmp_path, request):
    config = shrink(load(name).get_config(), shared.start_directory)
    if config.train.view_length:
        path = request.getfixturevalue("protocols")
        config.privileged.update(dict(protocols=str(path), form="toy"))
        config.trajectories = str(path)
        config.train.view_length = 768
    validate(config)
    done = pipeline.run(in_place(shared, config, tmp_path), Console(quiet=True))
    (stage,) = config.train.stages
    assert done == {stage: tmp_path / stage / "policy"}
    (line,) = read(tmp_path / stage / "metrics.jsonl")
    assert line["step"] == 0
    assert line["rollout/failure_frac"] == 0.0
    assert line["batch/too_long"] == 0
    assert np.isfinite(line["update/loss"])
    _, trained = hf.load(done[stage], dtype=jnp.float32)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), trained, shared.reference)
    assert (max(jax.tree.leaves(moved)) > 0) == (line["update/skipped"] == 0.0)


@pytest.mark.skipif(not QWEN.is_dir(), reason="the Qwen3 tokenizer is not here")
def test_the_script_plays_to_the_end_in_the_real_tokenizer():
    config = load("sft").get_config()
    scene = scenes.make_scene(config, policy_files.load_tokenizer(QWEN))
    team = teams.make_team(config, "cascade", scene, training=True)
    script = ScriptedSampler(scene.world, scene.chat, scene.prompts, Flaws())
    episodes = experience.collect(
        scene.world.questions["train"][:10], 1, team,
        world=World(script.sample, scene.retriever.search, exact_match_reward),
        run=Run(seed=0, purpose="train", step=0), limits=Limits(10, 0.0, 1),
    )  # fmt: skip
    assert [episode.reward for episode in episodes] == [1.0] * 10
