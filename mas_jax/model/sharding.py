"""Logical axis -> mesh axis: the one place that names mesh axes.

Arrays name their dimensions with *logical* axes (`"embed"`, `"heads"`, `"batch"`); `RULES` says
which axes of the device mesh each of them is split over. An empty tuple writes replication out; a
name that is not in the table is an error, never a silent replication.
Must not know: models, roles, losses.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp", "tensor")

# What the TPU compiler is told before it is loaded. It would multiply by a split weight in as many
# pieces as there are devices, each of which reads and writes the whole result: that doubled the HBM
# traffic of an update of Qwen3-4B on v6e:4x4. So weights are gathered first, and only their
# gradients are formed in pieces, each on its way while the next one is computed.
TPU_FLAGS = (
    "--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000",
    "--xla_tpu_decompose_einsum_reduce_scatter=true",
)

Rules = Mapping[str, tuple[str, ...]]

RULES: Rules = {
    # activations
    "batch": ("data", "fsdp"),
    "length": (),
    "hidden": (),
    # parameters
    "layers": (),
    "embed": ("fsdp",),
    "head_dim": (),
    "positions": (),
    "replicated": (),
    # either
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "ffw": ("tensor",),
    "vocab": ("tensor",),
}


def tpu_flags(given: str = "") -> str:
    """TPU_FLAGS for LIBTPU_INIT_ARGS behind those that were given; of one that is there twice the
    given one counts."""
    names = {flag.partition("=")[0] for flag in given.split()}
    return " ".join([*given.split(), *(f for f in TPU_FLAGS if f.partition("=")[0] not in names)])


def mesh_axes(logical_axis: str, *, rules: Rules = RULES) -> tuple[str, ...]:
    """Mesh axes that one logical axis is split over; `()` means replicated.

    Raises: ValueError for a name that is not in `rules`, with the nearest known one.
    """
    if logical_axis not in rules:
        near = get_close_matches(logical_axis, rules, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"logical axis {logical_axis!r} has no sharding rule{hint} known: {sorted(rules)}; "
            "add it to sharding.RULES (an empty tuple replicates)"
        )
    return rules[logical_axis]


def spec(axes: Sequence[str], *, rules: Rules = RULES) -> PartitionSpec:
    """PartitionSpec of an array whose dimensions carry the logical names `axes`.

    Raises: ValueError if a name is unknown, or if two dimensions would share a mesh axis, with both
    names.
    """
    owner: dict[str, str] = {}
    entries = []
    for name in axes:
        mesh_names = mesh_axes(name, rules=rules)
        for mesh_name in mesh_names:
            if mesh_name in owner:
                raise ValueError(
                    f"logical axes {owner[mesh_name]!r} and {name!r} of one array {tuple(axes)} "
                    f"both map to mesh axis {mesh_name!r}; change one of the two rules"
                )
            owner[mesh_name] = name
        entries.append(mesh_names or None)
    return PartitionSpec(*entries)


def ring(devices: Sequence[jax.Device], *, max_steps: int = 5_000) -> list[jax.Device] | None:
    """The devices of a TPU slice so that each is a neighbour of the next, and the last of the
    first; None where none is found in so many steps from each of the first process's devices.

    Weights that are split over one axis pass from each device to the next: in jax's order on 2x2x2
    chips some take three links, and a training step of Qwen3-4B waits a sixth of its time.
    The devices of a process stay together, so that its rows of a batch do.
    """
    if len(devices) < 4 or not hasattr(devices[0], "coords"):
        return None
    near = [
        [b for b, there in enumerate(devices) if math.dist(here.coords, there.coords) <= 1]
        for here in devices
    ]
    process = [device.process_index for device in devices]
    for start in (place for place, index in enumerate(process) if index == process[0]):
        if found := _ring_from(start, near, process, max_steps):
            return [devices[place] for place in found]
    return None


def _ring_from(
    start: int, near: list[list[int]], process: list[int], max_steps: int
) -> list[int] | None:
    """Places in the order of a ring, by trying neighbour after neighbour and going back."""
    left, path, choices = Counter(process), [start], [list(near[start])]
    left[process[start]] -= 1
    for _ in range(max_steps):
        if len(path) == len(near) and start in near[path[-1]]:
            return path
        here = process[path[-1]]
        free = [n for n in choices[-1] if n not in path and (process[n] == here or not left[here])]
        choices[-1] = free[:-1]
        if free:
            path.append(free[-1])
            choices.append(list(near[free[-1]]))
            left[process[free[-1]]] -= 1
            continue
        choices.pop()
        left[process[path.pop()]] += 1
        if not path:
            return None
    return None


def make_mesh(
    *, data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Device mesh with the axes `data`, `fsdp`, `tensor`, over `devices` (default: all of them).

    Raises: ValueError if the product of the sizes is not the number of devices, or if a torus of
    chips has no such axes.
    """
    devices = jax.devices() if devices is None else devices
    shape = (data, fsdp, tensor)
    if math.prod(shape) != len(devices):
        raise ValueError(
            f"mesh data={data} x fsdp={fsdp} x tensor={tensor} needs {math.prod(shape)} devices, "
            f"got {len(devices)}; change the mesh sizes or pass `devices`"
        )
    if max(shape) == len(devices) and (around := ring(devices)):
        return Mesh(np.asarray(around).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * 3)
    try:
        return jax.make_mesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)
    except NotImplementedError as error:
        raise ValueError(
            f"mesh data={data} x fsdp={fsdp} x tensor={tensor} cannot be laid over this slice; "
            "take sizes that are products of those of its axes"
        ) from error


def named(
    mesh: Mesh, shape: Sequence[int], axes: Sequence[str], *, name: str, rules: Rules = RULES
) -> NamedSharding:
    """Sharding of the array called `name`, checked against its shape.

    Raises: ValueError if a dimension is not divisible by the mesh axes that split it.
    """
    partition = spec(axes, rules=rules)
    for size, logical_axis in zip(shape, axes, strict=True):
        mesh_names = mesh_axes(logical_axis, rules=rules)
        parts = math.prod(mesh.shape[m] for m in mesh_names)
        if size % parts:
            raise ValueError(
                f"{name}: dimension {logical_axis!r} of size {size} is not divisible by {parts}, "
                f"the size of mesh axes {mesh_names}; use a smaller mesh axis or another rule"
            )
    return NamedSharding(mesh, partition)


class OnMesh:
    """A jitted entry point that is called, or lowered to be compiled, on its own mesh."""

    def __init__(self, jitted: jax.stages.Wrapped, mesh: Mesh) -> None:
        self._jitted, self._mesh = jitted, mesh

    def __call__(self, *args: Any) -> Any:
        """The entry point's results."""
        with jax.set_mesh(self._mesh):
            return self._jitted(*args)

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """The program for arguments like these; shapes with shardings will do."""
        with jax.set_mesh(self._mesh):
            return self._jitted.lower(*args)


def on_each(tree: Any, meshes: Sequence[Mesh], shardings_of: Callable[[Mesh], Any]) -> list[Any]:
    """`tree` on each of this host's meshes, from wherever it lies: a collective of all hosts if it
    lies on several.

    meshes: of one shape, and on every host as many, of the same places among its devices.
    shardings_of: where the leaves lie on one of them.
    """
    leaves = jax.tree.leaves(tree)
    if all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves):
        return [jax.device_put(tree, shardings_of(mesh)) for mesh in meshes]
    # one mesh of all hosts' meshes, then each host's own shards of it: a direct move to a mesh of
    # one host is no collective, which a layout over several needs
    own = jax.local_devices()
    places = [[own.index(device) for device in mesh.devices.flat] for mesh in meshes]
    devices = [
        [jax.local_devices(process_index=process)[place] for place in mesh]
        for process in range(jax.process_count())
        for mesh in places
    ]
    shape = (len(devices), *meshes[0].devices.shape)
    everywhere = Mesh(np.asarray(devices).reshape(shape), ("replica", *MESH_AXES))
    moved = jax.tree.map(
        lambda x, at: jax.device_put(x, NamedSharding(everywhere, at.spec)),
        tree, shardings_of(meshes[0]),
    )  # fmt: skip

    def _local(x: jax.Array, at: NamedSharding) -> jax.Array:
        """This host's copy of a moved array, of any shape."""
        parts = {shard.device: shard for shard in x.addressable_shards}
        for device, index in at.addressable_devices_indices_map(x.shape).items():
            if parts[device].index != index:
                raise AssertionError(
                    f"device {device} got the part {parts[device].index} of an array, not {index}; "
                    "the hosts' meshes are not made alike"
                )
        return jax.make_array_from_single_device_arrays(
            x.shape, at, [parts[device].data for device in at.mesh.devices.flat]
        )

    return [jax.tree.map(_local, moved, shardings_of(mesh)) for mesh in meshes]


def constrain(x: jax.Array, axes: Sequence[str], *, rules: Rules = RULES) -> jax.Array:
    """`x` (any shape) pinned to its logical sharding on the mesh of `jax.set_mesh`, if any."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec(axes, rules=rules))
