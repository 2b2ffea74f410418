"""Matrices as int8 with a scale for each output channel, for whoever only reads them.

A weight is values x scale, values within -127..127 and scale the channel's largest magnitude over
127, so that no entry is off by more than half a scale. The scale keeps the weight's axes, with
size 1 where the matmul sums: slices, joins and shardings of a weight are those of both parts.
Dimensions: as in `qwen3.py`. Must not know: layers, who samples.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from mas_jax.model import param_table

LARGEST = 127  # symmetric: -128 is not used
SMALLEST = 1e-30  # a channel below is zeros; its scale would be no normal float32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8:
    """A matrix: values int8, and scale float32 of the same axes, 1 long where a matmul sums."""

    values: jax.Array
    scale: jax.Array


def quantize(weight: jax.Array, inputs: tuple[int, ...]) -> Int8:
    """A weight rounded to int8 [same shape], symmetric, a scale for each channel that is left when
    the axes `inputs` are summed over. Zeros are exact; a NaN stays loud, in its channel's scale."""
    weight = weight.astype(jnp.float32)
    most = jnp.max(jnp.abs(weight), axis=inputs, keepdims=True)
    scale = jnp.where(most < SMALLEST, 1.0, most) / LARGEST
    return Int8(jnp.round(weight / scale).astype(jnp.int8), scale)


def dequantize(weight: Int8) -> jax.Array:
    """The float32 matrix that the parts stand for, in its own shape."""
    return weight.values.astype(jnp.float32) * weight.scale


def einsum(spec: str, x: jax.Array, weight: Int8) -> jax.Array:
    """`jnp.einsum(spec, x, dequantize(weight))` in x's dtype, any shapes, the weight's outputs last
    in the result. The matmul reads whole numbers, exact in bfloat16 too; the scale comes after its
    float32 sum, so a scaled copy of the weight is never made."""
    values = jax.lax.platform_dependent(
        x, weight.values, cpu=_after, default=lambda _, values: values
    )
    y = jnp.einsum(spec, x, values.astype(x.dtype), preferred_element_type=jnp.float32)
    return (y * weight.scale).astype(x.dtype)


def _after(x: jax.Array, values: jax.Array) -> jax.Array:
    """The values [any shape], which the compiler takes to depend on x.

    XLA on CPUs has no matmul that reads int8: it makes a float32 copy, and copies that depend on no
    loop's state and no layer before are all made at once, the whole model (a barrier does not last
    long enough to stop it). A word has at most 32 bits set, which XLA does not know.
    """
    word = jax.lax.bitcast_convert_type(x.reshape(-1)[0].astype(jnp.float32), jnp.uint32)
    return values + (jax.lax.population_count(word) > 32).astype(jnp.int8)


def quantize_params(params: param_table.Params, specs: dict) -> param_table.Params:
    """Parameters with every matrix of a matmul (not embeddings) as `Int8`; one that is so stays."""

    def _leaf(s: param_table.ParamSpec, x: jax.Array | Int8) -> jax.Array | Int8:
        """A parameter of the shape in its spec, as `Int8` if a matmul sums over an axis of it."""
        if not s.inputs or isinstance(x, Int8):
            return x
        return quantize(x, tuple(s.axes.index(name) for name in s.inputs))

    return jax.tree.map(_leaf, specs, params)


def shardings(at: param_table.Params, params: param_table.Params) -> param_table.Params:
    """Where the parts of `params`, or of their shapes, lie if the parameters they are of lie `at`:
    a scale as its matrix, but whole along axes of size 1."""

    def _leaf(sharding: NamedSharding, x: jax.Array | Int8) -> NamedSharding | Int8:
        """Where a parameter of any shape lies, and its scale, which has as many axes."""
        if not isinstance(x, Int8):
            return sharding
        names = [*sharding.spec, *[None] * (x.scale.ndim - len(sharding.spec))]
        kept = [n if size > 1 else None for n, size in zip(names, x.scale.shape, strict=True)]
        return Int8(sharding, NamedSharding(sharding.mesh, PartitionSpec(*kept)))

    return jax.tree.map(_leaf, at, params)


def num_bytes(params: param_table.Params) -> int:
    """Bytes of all arrays of a tree, or of their shapes."""
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(params))
