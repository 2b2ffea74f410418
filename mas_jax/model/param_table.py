"""Tables of parameters: what each array is, from which init, shardings, files and counts derive.

A model describes its parameters once, as a nested dict of `ParamSpec`. Arrays of all layers are
stacked on a leading axis. Must not know: what any model computes.
"""

import dataclasses
import math
import zlib
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import traverse_util

from mas_jax.model import sharding

Params = dict  # one nested dict of arrays, as its table describes


@dataclass(frozen=True)
class ParamSpec:
    """One parameter: shape, logical axes, initial value, place in a Hugging Face checkpoint.

    init: "zeros", "ones", or the standard deviation of a normal distribution.
    hf_name: tensor name, `{layer}` where the leading axis is cut into layers; None if HF has none.
    hf_shape: shape of (one layer of) that tensor. `transposed`: HF stores [out, in], we [in, out].
    inputs: the axes that the matmul of a projection sums over; none of anything else.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: str | float
    hf_name: str | None
    hf_shape: tuple[int, ...]
    transposed: bool
    decay: bool
    inputs: tuple[str, ...] = ()


def vector(name: str | None, dims: dict[str, int], *, init: str) -> ParamSpec:
    """A norm scale or bias: HF holds it flat, no weight decay."""
    shape = tuple(dims.values())
    return ParamSpec(shape, tuple(dims), init, name, (math.prod(shape),), False, decay=False)


def matrix(name: str, inputs: dict[str, int], outputs: dict[str, int]) -> ParamSpec:
    """A projection from `inputs` to `outputs`: variance 1/fan_in, HF holds it [out, in]."""
    fan_in, fan_out = math.prod(inputs.values()), math.prod(outputs.values())
    dims = {**inputs, **outputs}
    shape, hf_shape = tuple(dims.values()), (fan_out, fan_in)
    return ParamSpec(
        shape, tuple(dims), fan_in**-0.5, name, hf_shape, True, decay=True, inputs=tuple(inputs)
    )


def embedding(name: str, rows: dict[str, int], dim: int) -> ParamSpec:
    """A vector of size `dim` for each of the rows, as Hugging Face holds it."""
    [(axis, size)] = rows.items()
    return ParamSpec((size, dim), (axis, "embed"), 0.02, name, (size, dim), False, decay=True)


def stack(specs: dict[str, ParamSpec], num_layers: int) -> dict[str, ParamSpec]:
    """Specs of one layer as those of all layers, stacked on a leading axis."""
    return {
        name: dataclasses.replace(s, shape=(num_layers, *s.shape), axes=("layers", *s.axes))
        for name, s in specs.items()
    }


def flatten(specs: dict) -> dict[str, ParamSpec]:
    """A table by path, as in `layers/wq`."""
    return traverse_util.flatten_dict(specs, sep="/")


def count(specs: dict) -> int:
    """Number of parameters."""
    return sum(math.prod(s.shape) for s in flatten(specs).values())


def shardings(specs: dict, mesh: jax.sharding.Mesh) -> dict:
    """Pytree of `NamedSharding`. Raises: ValueError where a size does not divide."""
    flat = {
        path: sharding.named(mesh, s.shape, s.axes, name=path) for path, s in flatten(specs).items()
    }
    return traverse_util.unflatten_dict(flat, sep="/")


def init(specs: dict, key: jax.Array, *, dtype: jnp.dtype) -> Params:
    """Random parameters of the table's shapes; values depend on `key` and a path alone."""

    def _leaf(path: str, s: ParamSpec) -> jax.Array:
        if isinstance(s.init, str):
            return {"zeros": jnp.zeros, "ones": jnp.ones}[s.init](s.shape, dtype)
        leaf_key = jax.random.fold_in(key, zlib.crc32(path.encode()))
        return (s.init * jax.random.normal(leaf_key, s.shape, jnp.float32)).astype(dtype)

    flat = {path: _leaf(path, s) for path, s in flatten(specs).items()}
    return traverse_util.unflatten_dict(flat, sep="/")
