"""Tiny policies of toy mathematics, a Collaborator and an Actor, and a config of both."""

import dataclasses

import jax
import jax.numpy as jnp
from config_files import load

from mas_jax.agents.collaboration import toy_collaboration_words
from mas_jax.data.arithmetic import make_arithmetic_tokenizer
from mas_jax.model import hf, qwen3


def save_policy(directory, seed, vocab_extra=0):
    """A random policy of two thin layers with the tokenizer of toy mathematics."""
    tokenizer = make_arithmetic_tokenizer(toy_collaboration_words())
    model = dataclasses.replace(
        qwen3.PRESETS["toy-1m"], vocab_size=tokenizer.vocab_size + vocab_extra, num_layers=2,
        model_dim=32, ffw_dim=64, num_heads=2, num_kv_heads=1, head_dim=16, max_positions=192,
    )  # fmt: skip
    params = qwen3.init(model, jax.random.key(seed), dtype=jnp.float32)
    params["embed"] = 8 * params["embed"]
    files = directory.with_name(directory.name + "_tokenizer")
    files.mkdir()
    tokenizer.save(files)
    hf.save(directory, model, params, tokenizer_dir=files)
    return directory


def save_both(root):
    """Directories of a Collaborator and of an Actor of another size."""
    return save_policy(root / "collaborator", 0), save_policy(root / "actor", 1, vocab_extra=7)


def small_config(places, team="hint", **changes):
    config = load("agentpo_toy").get_config(team)
    for engine in (config.engine, config.actor.engine):
        engine.update(
            dict(buckets=(192,), num_pages=256, prefill_blocks=8, decode_rows=8, decode_steps=4)
        )
    config.update_from_flattened_dict(
        {
            "model.checkpoint": str(places[0]), "actor.checkpoint": str(places[1]),
            "collaboration.max_tokens": 6, "actor.max_tokens": 6, "collaboration.votes": 2,
            "arithmetic.train": 20, "arithmetic.held_out": 6, "stages.agentpo.steps": 2,
            "train.questions": 2, "train.group_size": 3, "train.micro_rows": 2,
            "train.validation_interval": 2, "train.validation_questions": 4,
            "train.checkpoint_interval": 1, "train.log_interval_s": 1e9,
            "evaluation.num_questions": 6, "evaluation.log_interval_s": 1e9,
            "rollout.min_episodes": 3,
        }
    )  # fmt: skip
    config.update_from_flattened_dict(changes)
    return config


def weights(directory):
    return (directory / "model.safetensors").read_bytes()
