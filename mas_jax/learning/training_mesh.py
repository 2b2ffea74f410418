"""The mesh on which a config trains, and a policy's parameters on it.

Must not know: how a stage trains, what is sampled from.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from mas_jax.model import hf, qwen3, sharding
from mas_jax.model.hf_config import load_config


def make(config: ConfigDict) -> jax.sharding.Mesh:
    """The mesh `config.train.mesh` of the first devices of all hosts.

    Raises: ValueError for too few, or where several hosts would not all have their devices in it.
    """
    size, devices = 1, jax.devices()
    for parts in config.train.mesh.values():
        size *= parts
    if len(devices) < size:
        raise ValueError(
            f"train.mesh={dict(config.train.mesh)} needs {size} devices, there are {len(devices)}"
        )
    if jax.process_count() > 1 and len(devices) != size:
        raise ValueError(
            f"train.mesh={dict(config.train.mesh)} has {size} devices, the {jax.process_count()} "
            f"hosts have {len(devices)}; every device of every host trains, so set "
            f"train.mesh.fsdp or train.mesh.data"
        )
    if config.train.micro_rows % jax.process_count():
        raise ValueError(
            f"train.micro_rows={config.train.micro_rows} cannot be shared by "
            f"{jax.process_count()} hosts; set a multiple"
        )
    return sharding.make_mesh(**config.train.mesh, devices=devices[:size])


def load_params(
    directory: Path, mesh: jax.sharding.Mesh, *, dtype: str, value_head: bool
) -> qwen3.Params:
    """A policy's parameters on the training mesh; a value head starts at 0."""
    model = load_config(directory)
    _, params = hf.load(
        directory, dtype=jnp.dtype(dtype), shardings=qwen3.param_shardings(model, mesh)
    )
    if value_head:
        with_head = dataclasses.replace(model, value_head=True)
        at = qwen3.param_shardings(with_head, mesh)["value_head"]
        params = params | {"value_head": jnp.zeros(model.model_dim, dtype, device=at)}
    return params
