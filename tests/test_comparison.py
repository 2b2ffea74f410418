"""What MAPD is compared with: each config starts and makes an update, at the smallest sizes."""

import asyncio

import jax.numpy as jnp
import numpy as np
import pytest
from config_files import load
from rich.console import Console
from small_runs import SMALL, save_start, scene_of, small_pipeline, weights
from tiny_learning import largest_gap

from mas_jax.agents.protocol_files import build
from mas_jax.agents.protocol_oracle import Oracle, local
from mas_jax.agents.protocol_roles import Limits
from mas_jax.agents.protocol_team import Desk
from mas_jax.config_rules import validate
from mas_jax.data.questions import of_step, spread
from mas_jax.learning import pipeline
from mas_jax.metrics import read
from mas_jax.model import hf

NAMES = ("toy_raw_trajectory_one", "toy_raw_trajectory_team", "toy_protocol_one",
         "toy_logit_matching")  # fmt: skip


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return save_start(tmp_path_factory.mktemp("start") / "policy")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return save_start(tmp_path_factory.mktemp("teacher") / "policy", seed=1)


@pytest.fixture(scope="module")
def records(start, tmp_path_factory):
    """One model's work on a few questions of every family, and those of the first step."""
    scene, path = scene_of(start), tmp_path_factory.mktemp("records") / "records.jsonl"
    desk = Desk(
        local(Oracle(scene.world), Limits()), scene.retriever.search, "plain", is_alone=True
    )
    chosen = spread(scene.questions["train"], 14)
    chosen += tuple(of_step(scene.training, seed=0, step=0, count=2, host=0, num_hosts=1))
    asyncio.run(build(chosen, [desk], path, concurrency=8, failure_frac=0.0))
    return path


def small(name, start, teacher, records):
    """A config with the tiny policy, two questions a step and one step a stage."""
    config = load(name).get_config()
    config.update_from_flattened_dict(
        {key: value for key, value in SMALL.items() if not key.startswith("stages.")}
        | {f"stages.{stage}.steps": 1 for stage in config.train.stages}
        | {"train.group_size": min(2, config.train.group_size), "model.checkpoint": str(start)}
    )
    if config.trajectories:
        config.trajectories = str(records)
    if config.privileged.protocols:
        config.privileged.protocols = str(records)
    if config.teacher.checkpoint:
        config.teacher.checkpoint = str(teacher)
    validate(config)
    return config


def largest_change(directory, other):
    return largest_gap(*(hf.load(place, dtype=jnp.float32)[1] for place in (directory, other)))


@pytest.mark.parametrize("name", NAMES)
def test_it_starts_and_makes_an_update(name, start, teacher, records, tmp_path):
    made = small_pipeline(small(name, start, teacher, records), tmp_path)
    done = pipeline.run(made, Console(quiet=True))
    (line,) = read(tmp_path / "agent" / "metrics.jsonl")
    assert np.isfinite(line["update/loss"])
    assert (line["update/skipped"], line["rollout/failure_frac"], line["batch/too_long"]) == (
        0,
    ) * 3
    assert largest_change(done["agent"], start) > 1e-5
    if "raw" in name:  # what is imitated was right, and no drift of what nobody drew is measured
        assert line["rollout/em"] == 1.0
        assert line["update/loss"] > 1.0  # nats a token, of a policy that knows nothing
        assert not [key for key in line if "kl_to_start" in key]
    # every arm whose policy plays is watched alike, also those that no protocol reaches
    assert ("leak/marker_frac" in line, "leak/answer_frac" in line) == ("raw" not in name,) * 2
    if name == "toy_protocol_one":
        assert line["privileged/protocols"] > 0
    if name == "toy_logit_matching":  # of two random policies, far apart
        (kl,) = [v for k, v in line.items() if k.endswith("divergence")]
        assert kl > 0.1


def test_ppo_goes_on_from_what_imitation_made(start, teacher, records, tmp_path):
    config = small("toy_sft_ppo", start, teacher, records)
    config.train.update(dict(learning_rates=(1e-2, 1e-3), updates_per_batch=2))
    made = small_pipeline(config, tmp_path)
    rates = [pipeline.make_stage(made, s).optimizer.learning_rate for s in config.train.stages]
    assert rates == [1e-2, 1e-3]
    done = pipeline.run(made, Console(quiet=True))
    assert list(done) == ["imitation", "agent"]
    assert largest_change(done["imitation"], start) > 1e-3
    assert largest_change(done["agent"], done["imitation"]) > 0
    (line,) = read(tmp_path / "agent" / "metrics.jsonl")
    # what it first plays with is its own start, which is far from the pipeline's
    assert abs(line["update/searcher/kl_to_start"]) < 1e-4
    begin = pipeline._going_on(made, [done["imitation"]])
    assert begin.start_directory == done["imitation"]
    assert largest_gap(begin.reference, made.reference) > 1e-3
    first = weights(done["imitation"])
    assert pipeline.run(made, Console(quiet=True)) == done  # nothing is left to do
    assert weights(done["imitation"]) == first


def test_every_system_is_a_config_for_a_real_model(tmp_path):
    module = load("mapd_compared")
    for name in module.SYSTEMS:
        config = module.get_config(name)
        validate(config, has_weights=False)
        assert config.model.prompts == "full"
        assert len(config.train.learning_rates) == len(config.train.stages)
        played = config.train.questions * config.train.group_size
        assert played == 1024  # episodes a step, of all systems alike
