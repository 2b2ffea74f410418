"""A plan counts what a frozen Actor's engines hold beside the policy's."""

import dataclasses

import jax
import pytest
from config_files import load
from tiny_agentpo import save_policy

from mas_jax.model import qwen3, sharding
from mas_jax.planning.run_programs import actor_model, held_by_actor

TOY = qwen3.PRESETS["toy-1m"]


def config_of(**changes):
    config = load("agentpo_toy").get_config()
    config.actor.update(changes)
    return config


def test_an_actor_is_the_checkpoint_the_preset_it_is_named_for_or_the_policy(tmp_path):
    assert actor_model(config_of(checkpoint=""), TOY) == TOY
    named = config_of(checkpoint="models/Qwen2.5-3B-Instruct")
    assert actor_model(named, TOY) == qwen3.PRESETS["qwen2.5-3b"]
    there = save_policy(tmp_path / "actor", 0)
    assert actor_model(config_of(checkpoint=str(there)), TOY).model_dim == 32
    with pytest.raises(ValueError, match=r"'models/other' is neither a checkpoint nor named for"):
        actor_model(config_of(checkpoint="models/other"), TOY)


def test_its_weights_and_pages_are_held_where_it_is_played_here_and_nowhere_else():
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    model = dataclasses.replace(TOY, num_layers=2)
    config = config_of(checkpoint="")
    config.actor.engine.update(dict(num_pages=100, page_size=8))
    held = held_by_actor(config, model, mesh)
    weights = sum(x.size for x in jax.tree.leaves(qwen3.init(model, jax.random.key(0), dtype="f4")))
    rotary = 192 * 32  # cosines and sines of each position of the context, half of 32 each
    assert held["the Actor's weights"] == 4 * (weights + rotary)
    # layers x (keys and values) x pages x positions x kv heads x head dim, padded x 4 bytes
    assert held["the Actor's page pool"] == 2 * 2 * 100 * 8 * 2 * 128 * 4
    assert held_by_actor(config_of(kind="api"), model, mesh) == {}
