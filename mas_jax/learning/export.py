"""A trained policy as a directory in the Hugging Face layout, from memory or from a checkpoint.

Must not know: how it was trained.
"""

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from mas_jax.learning import policy_files
from mas_jax.learning.checkpoint import Checkpointer
from mas_jax.learning.checkpoint_contents import DamagedCheckpoint
from mas_jax.model import hf, qwen3
from mas_jax.model.hf_config import load_config

CHECKPOINTS = "checkpoints"  # in a stage's directory

logger = logging.getLogger(__name__)


def save_policy(params: qwen3.Params, start_directory: Path, out: Path) -> None:
    """Writes a policy that departed from `start_directory`, with the tokenizer files from there,
    whole or not at all, without a value head. Every process calls this. Raises: as `hf.save`."""
    policy = {name: value for name, value in params.items() if name != "value_head"}
    hf.save(out, load_config(start_directory), policy, tokenizer_dir=start_directory)


def export(source: Path, out: Path, *, best: bool) -> int:
    """Writes the policy of a checkpoint to the new directory `out`; returns the checkpoint's step.

    source: a stage's directory of a workdir, for its newest whole checkpoint or with `best` the one
    that validation found best; or one of its checkpoints/STEP. The optimizer's state is not read.
    Raises: FileNotFoundError without a checkpoint or the starting policy's directory;
    FileExistsError if `out` exists; ValueError for a step that is not there or is damaged.
    """
    if out.exists():
        raise FileExistsError(f"{out} exists; name a new directory")
    directory, given = _locate(source)
    if best and given is not None:
        raise ValueError(f"{source} is one checkpoint; for the best one give {directory.parent}")
    checkpoints = Checkpointer(directory, keep=1)
    damage = []
    for step in _steps(checkpoints, given, directory, best=best):
        try:
            params, start_directory = _read(checkpoints, step)
        except DamagedCheckpoint as error:
            damage.append(str(error))
            continue
        for text in damage:
            logger.warning("%s; taking step %d", text, step)
        save_policy(params, start_directory, out)
        return step
    raise ValueError("; ".join(damage))


def _locate(source: Path) -> tuple[Path, int | None]:
    """The directory of checkpoints that is meant, and the step if one is given."""
    if (source / CHECKPOINTS).is_dir():
        return source / CHECKPOINTS, None
    if source.is_dir() and source.parent.name == CHECKPOINTS and source.name.isdigit():
        return source.parent, int(source.name)
    stages = sorted(str(path.parent) for path in source.glob(f"*/{CHECKPOINTS}"))
    raise FileNotFoundError(
        f"{source}: no checkpoint there; give a stage's directory of a training workdir"
        + (f": {' or '.join(stages)}" if stages else ", or one of its checkpoints/STEP")
    )


def _steps(
    checkpoints: Checkpointer, given: int | None, directory: Path, *, best: bool
) -> tuple[int, ...]:
    """The steps to try, in order. Raises: FileNotFoundError if there is none."""
    if given is not None:
        return (given,)
    if not checkpoints.steps:
        raise FileNotFoundError(f"{directory} holds no complete checkpoint; train first")
    if not best:
        return checkpoints.steps[::-1]
    if checkpoints.best is None:
        raise FileNotFoundError(
            f"{directory}: no checkpoint was validated; train with train.validation_interval, or "
            "export the newest one"
        )
    return (checkpoints.best,)


def _read(checkpoints: Checkpointer, step: int) -> tuple[qwen3.Params, Path]:
    """Parameters of a checkpoint, in their own dtype on the host, and where they departed from."""
    index: dict[str, Any] = checkpoints.index(step)
    start_directory = policy_files.checkpoint_directory(ConfigDict(index["meta"]["config"]))
    dtype = jnp.dtype(index["leaves"]["params.embed"]["dtype"])
    at = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    shapes = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, dtype, sharding=at),
        qwen3.param_specs(load_config(start_directory)),
    )
    return checkpoints.restore_step(step, {"params": shapes}).state["params"], start_directory
