"""The programs of a training run for a slice, lowered from shapes, and what its devices hold.

Dimensions: as in the modules that own the programs. Must not know: costs, tables.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from ml_collections import ConfigDict

from mas_jax.learning import update
from mas_jax.learning.objective import Forward
from mas_jax.learning.programme import make_programme
from mas_jax.learning.teachers import Teacher
from mas_jax.learning.trainer import Trainer
from mas_jax.model import qwen3, sharding
from mas_jax.model.hf_config import load_config
from mas_jax.planning.chips import Slice
from mas_jax.sampling import calls
from mas_jax.sampling.engine_settings import EngineSettings

START = "score of the start"  # how far the policy has gone from it, on a share of the micro-batches
NUM_MICRO = 2  # micro-batches of the shapes that are compiled; their loop takes any number


@dataclass(frozen=True)
class Run:
    """What a stage of a config compiles on a slice.

    lower: makes the training programs by name, one at a time; `lower_engine` the engine's. held:
    bytes that each device holds through the run, by what they are. num_roles: that learn.
    view_length: of rows of views, 0 without a privileged branch.
    """

    config: ConfigDict
    model: qwen3.ModelConfig
    place: Slice
    stage: str
    num_roles: int
    view_length: int
    mesh: Mesh
    sampler_mesh: Mesh
    settings: EngineSettings
    lower: Mapping[str, Callable[[], jax.stages.Lowered]]
    held: Mapping[str, float]

    @property
    def program_names(self) -> tuple[str, ...]:
        """All that a plan can compile."""
        return (*self.lower, "engine")

    @property
    def num_engines(self) -> int:
        """Engines of the slice, which all sample at once."""
        return self.mesh.size // self.sampler_mesh.size

    @property
    def coords(self) -> list[tuple[int, ...]]:
        """Where each device of the training mesh lies, in the order of the program's ids."""
        return [tuple(d.coords) for d in self.mesh.devices.flat]

    @property
    def sampler_coords(self) -> list[tuple[int, ...]]:
        """The same of an engine's mesh."""
        return [tuple(d.coords) for d in self.sampler_mesh.devices.flat]


def bytes_on_device(tree: Any) -> float:
    """Bytes that one device holds of shapes with shardings."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        total += math.prod(shape) * jnp.dtype(leaf.dtype).itemsize
    return float(total)


def abstract_params(config: qwen3.ModelConfig, mesh: Mesh, dtype: str) -> qwen3.Params:
    """Shapes of a policy's parameters and where they lie on a mesh."""
    shapes = jax.eval_shape(lambda: qwen3.init(config, jax.random.key(0), dtype=jnp.dtype(dtype)))
    return jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
        shapes, qwen3.param_shardings(config, mesh),
    )  # fmt: skip


def fit_mesh(config: ConfigDict, place: Slice) -> ConfigDict:
    """The config with its training mesh filled up over `fsdp` where it does not fit the slice, and
    as many rows a micro-batch as the mesh splits evenly."""
    config = ConfigDict(config.to_dict())
    t, devices = config.train, len(place.devices)
    if t.mesh.data * t.mesh.fsdp * t.mesh.tensor != devices:
        t.mesh.update(dict(data=1, fsdp=devices // t.mesh.tensor))
    rows = t.mesh.data * t.mesh.fsdp
    t.micro_rows = rows * max(1, t.micro_rows // rows)
    return config


def actor_model(config: ConfigDict, model: qwen3.ModelConfig) -> qwen3.ModelConfig:
    """The architecture of a frozen Actor: of its checkpoint if that is there, else of the preset
    that it is named for, else, without a name, the policy's.

    Raises: ValueError for a name of neither.
    """
    given = config.actor.checkpoint
    if not given:
        return model
    if (Path(given) / "config.json").is_file():
        return load_config(given)
    name = Path(given).name.lower().removesuffix("-instruct")
    if name not in qwen3.PRESETS:
        raise ValueError(
            f"actor.checkpoint={given!r} is neither a checkpoint nor named for one of "
            f"{sorted(qwen3.PRESETS)}, so that its memory is not known"
        )
    return qwen3.PRESETS[name]


def held_by_actor(config: ConfigDict, model: qwen3.ModelConfig, mesh: Mesh) -> dict[str, float]:
    """Bytes that a frozen Actor's engines hold on each device, beside the policy's on its mesh."""
    if config.actor.kind != "policy":
        return {}
    theirs = dataclasses.replace(actor_model(config, model), value_head=False)
    args = abstract_engine(theirs, EngineSettings(**config.actor.engine), mesh)
    return {
        "the Actor's weights": bytes_on_device(args[0]),
        "the Actor's page pool": bytes_on_device(args[1]),
    }


def make_run(config: ConfigDict, model: qwen3.ModelConfig, place: Slice, stage: str) -> Run:
    """The programs of a stage on a slice, whose devices its meshes fill.

    Raises: ValueError for meshes that do not fit the slice or the model.
    """
    t = config.train
    mesh = sharding.make_mesh(**t.mesh, devices=place.devices)
    own = [d for d in place.devices if d.process_index == 0]
    size = math.prod(config.mesh.values())
    if len(own) < size:
        raise ValueError(
            f"an engine's mesh {dict(config.mesh)} needs {size} devices, a host of "
            f"{place.name} has {len(own)}; make mesh.tensor smaller"
        )
    sampler_mesh = sharding.make_mesh(**config.mesh, devices=own[:size])
    model = dataclasses.replace(model, value_head=t.value_head)
    trainer = _trainer(config, model, mesh, stage)
    shape = (NUM_MICRO, t.micro_rows, t.row_length)
    is_viewed = any(row.learns and row.is_viewed for row in trainer.programme.values())
    view_length = t.view_length if is_viewed else 0
    settings = EngineSettings(**config.engine)
    sampled = dataclasses.replace(model, value_head=False)
    held = {
        "weights": bytes_on_device(trainer.abstract_state.params),
        "optimizer state": bytes_on_device(trainer.abstract_state.opt_state),
        "the start, as reference": bytes_on_device(abstract_params(model, mesh, t.dtype)),
    }
    for name in sorted({*trainer.scored_teachers, *trainer.exact_teachers} - {"initial"}):
        held[f"teacher {name}"] = bytes_on_device(abstract_params(model, mesh, t.dtype))
    if trainer.has_average:
        held["average of the weights"] = held["weights"]
    engine_args = abstract_engine(sampled, settings, sampler_mesh)
    held["the sampler's weights"] = bytes_on_device(engine_args[0])
    held["page pool"] = bytes_on_device(engine_args[1])
    lower = {
        name: (lambda name=name: trainer.lower(name, shape, view_length=view_length))
        for name in trainer.program_names
    }
    held |= held_by_actor(config, model, sampler_mesh)
    if t.drift_frac and not any(name.startswith("score") for name in lower):
        lower[START] = lambda: trainer.lower("score of the policy", shape)
    if trainer.has_critic:
        lower["gae"] = lambda: _lower_gae(trainer, shape, whiten=t.whiten)
    lower["resharding"] = lambda: _lower_resharding(sampled, config, mesh)
    num_roles = sum(row.learns for row in trainer.programme.values())
    return Run(
        config, model, place, stage, num_roles, view_length, mesh, sampler_mesh, settings, lower,
        held,
    )  # fmt: skip


def lower_engine(run: Run, layers: int) -> jax.stages.Lowered:
    """An engine's ragged call for a model of so many layers, which are unrolled in it."""
    model = dataclasses.replace(run.model, value_head=False, num_layers=layers)
    args = abstract_engine(model, run.settings, run.sampler_mesh)
    return calls.lower_call("mixed", model, run.sampler_mesh, args)


def _lower_gae(
    trainer: Trainer, shape: tuple[int, int, int], *, whiten: bool
) -> jax.stages.Lowered:
    """Advantages and returns of a batch of a shape [M, B, T] from a critic's values."""
    batch = update.abstract_batch(trainer.mesh, shape)
    with jax.set_mesh(trainer.mesh):
        gae = update.make_gae(trainer.programme, trainer.mesh, whiten=whiten)
        return gae.lower(batch, batch.weights_MBT)


def _trainer(config: ConfigDict, model: qwen3.ModelConfig, mesh: Mesh, stage: str) -> Trainer:
    t = config.train
    programme = make_programme(config.stages[stage].programme.to_dict())
    params = abstract_params(model, mesh, t.dtype)
    names = {"teacher", "initial"}
    return Trainer(
        programme,
        Forward(
            config=model, temperature=t.temperature, chunk=t.chunk, dtype=t.dtype, remat=t.remat,
            backend=t.backend,
        ),
        mesh,
        update.make_optimizer(update.OptimizerSettings(**t.optimizer), model, 1),
        {name: Teacher(name, params, model) for name in names},
        updates_per_batch=t.updates_per_batch, whiten=t.whiten,
        ema_decay=config.teacher.ema_decay, param_dtype=t.param_dtype,
    )  # fmt: skip


def abstract_engine(model: qwen3.ModelConfig, settings: EngineSettings, mesh: Mesh) -> tuple:
    """Shapes of the arguments of an engine's ragged call: parameters, pool, host arrays."""
    params = abstract_params(model, mesh, settings.dtype)
    params = calls.params_shapes(params, model, settings, mesh)
    pool = calls.pool_shapes(model, settings, mesh, is_ragged=True)
    host = (
        calls.flat(settings, [((0,), 0, (0,))]),
        calls.rows(settings, settings.context, [], []),
        calls.drawing([], settings.decode_rows + settings.prefill_blocks),
        np.zeros(model.vocab_size, bool),
    )
    host = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), host)
    return params, pool, *host


def _lower_resharding(
    model: qwen3.ModelConfig, config: ConfigDict, mesh: Mesh
) -> jax.stages.Lowered:
    """Parameters from the training layout to every engine's, as the sampler reads them: one program
    for what `sharding.on_each` does leaf by leaf."""
    m = config.mesh
    # in the training mesh's order, as one program wants them: `make_mesh` would sort them anew
    order = mesh.devices.reshape(-1, m.fsdp, m.tensor)
    engines = Mesh(order, sharding.MESH_AXES, axis_types=(AxisType.Auto,) * 3)
    settings = EngineSettings(**config.engine)

    def _move(params: qwen3.Params) -> qwen3.Params:
        return calls.in_use(params, model, settings)

    params = abstract_params(model, mesh, config.train.param_dtype)
    moved = jax.jit(
        _move,
        in_shardings=(qwen3.param_shardings(model, mesh),),
        out_shardings=calls.shardings(jax.eval_shape(_move, params), model, engines),
    )
    return moved.lower(params)
