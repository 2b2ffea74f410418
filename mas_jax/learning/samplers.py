"""What a config's teams sample from: engines of the policy and of its Actor on this host's devices.

Must not know: teams, scenes, what is sampled.
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from mas_jax.data.tokenizer import Tokenizer
from mas_jax.learning import collaboration, policy_files
from mas_jax.learning.collaboration import ACTOR_POLICY
from mas_jax.model import hf, qwen3, sharding
from mas_jax.model.hf_config import load_config
from mas_jax.sampling.engine import Engine
from mas_jax.sampling.engine_settings import EngineSettings
from mas_jax.sampling.policies import Policies
from mas_jax.sampling.replicas import Replicas


def make_policies(config: ConfigDict, directory: Path, tokenizer: Tokenizer) -> Replicas | Policies:
    """What is sampled from: the engines of the configured policy, and an Actor beside them if the
    config has one, in engines with pages of their own on the same devices.

    Raises: ValueError as `make_engines`, for a missing key, or for an Actor whose own chat template
    is another; FileNotFoundError without its checkpoint.
    """
    engines = make_engines(config, directory, tokenizer)
    if config.actor.kind == "none":
        return engines
    if config.actor.kind == "api":
        return collaboration.with_endpoint(config, engines)
    place = policy_files.actor_directory(config)
    theirs = policy_files.load_tokenizer(place)
    policy_files.check_chat(policy_files.actor_chat(config, theirs), place)
    settings, dtype = EngineSettings(**config.actor.engine), config.actor.dtype
    actor = make_actor_engines(config, place, theirs)
    identity = policy_files.policy_identity(place, dtype=dtype, settings=settings)
    return collaboration.with_frozen(config, engines, actor, identity=identity)


def make_engines(config: ConfigDict, directory: Path, tokenizer: Tokenizer) -> Replicas:
    """The sampling engines of a checkpoint as the configured policy, one on each mesh of this host.

    Raises: ValueError if the tokenizer has more tokens than the model.
    """
    settings, meshes = EngineSettings(**config.engine), sampling_meshes(config)
    name, dtype = config.model.policy, config.model.dtype
    return _engines(directory, tokenizer, settings, meshes, policy=name, dtype=dtype)


def make_actor_engines(config: ConfigDict, directory: Path, tokenizer: Tokenizer) -> Replicas:
    """The frozen Actor's engines, one on each mesh of this host. Raises: as `make_engines`."""
    settings, meshes = EngineSettings(**config.actor.engine), sampling_meshes(config)
    dtype = config.actor.dtype
    return _engines(directory, tokenizer, settings, meshes, policy=ACTOR_POLICY, dtype=dtype)


def _engines(
    directory: Path, tokenizer: Tokenizer, settings: EngineSettings,
    meshes: Sequence[jax.sharding.Mesh], *, policy: str, dtype: str,
) -> Replicas:  # fmt: skip
    """An engine of a checkpoint on each mesh. Raises: as `make_engines`."""
    model = load_config(directory)
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {model.vocab_size}; they "
            "are not of one checkpoint"
        )

    def _engine(mesh: jax.sharding.Mesh) -> Engine:
        shardings = qwen3.param_shardings(model, mesh)
        _, params = hf.load(directory, dtype=jnp.dtype(dtype), shardings=shardings)
        return Engine(model, params, settings, policy=policy, decode=tokenizer.decode, mesh=mesh)

    return Replicas([_engine(mesh) for mesh in meshes])


def sampling_meshes(config: ConfigDict) -> list[jax.sharding.Mesh]:
    """A mesh for each engine: as many of `config.mesh` as this host's devices make, on the CPUs of
    a single host no more than cores: an engine keeps one busy and compiles programs of its own.

    Raises: ValueError if they do not make one.
    """
    sizes, devices = config.mesh.to_dict(), jax.local_devices()
    size = math.prod(sizes.values())
    if len(devices) < size:
        raise ValueError(f"mesh {sizes} needs {size} devices, this host has {len(devices)}")
    # several hosts hand weights over on device, from all devices to all
    if devices[0].platform == "cpu" and jax.process_count() == 1:
        devices = devices[: max(size, os.cpu_count())]
    return [
        sharding.make_mesh(**sizes, devices=devices[first : first + size])
        for first in range(0, len(devices) - size + 1, size)
    ]


def load_params(config: ConfigDict, directory: Path) -> qwen3.Params:
    """A policy's weights in the sampler's dtype, on the first mesh of this host's engines."""
    model, mesh = load_config(directory), sampling_meshes(config)[0]
    shardings = qwen3.param_shardings(model, mesh)
    return hf.load(directory, dtype=jnp.dtype(config.model.dtype), shardings=shardings)[1]
