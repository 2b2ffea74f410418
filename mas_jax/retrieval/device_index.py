"""Exact search on accelerators: all vectors sharded over the devices, one matmul and top-k.

21 million vectors of 768 dimensions are 32 GB in bfloat16: four v5e chips, or one H200.
Letters: Q queries, N vectors, M vectors of a block, E dimensions, R results, C candidates.
Must not know: texts, corpora.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mas_jax.model import sharding
from mas_jax.retrieval import exact_index

BLOCK = 65_536  # vectors of a device whose scores are held at once, for each query
QUERIES = (1, 8, 64, 512)  # a call is filled up to one of these
SPARE = 64  # candidates beside the k best, of which float32 on the host chooses


class DeviceShard:
    """A searchable array of vectors, rows split over all devices of a mesh.

    vectors_NE: float32 on the host (a memory map will do). dtype: in which they lie on the devices;
    scores are accumulated in float32. With `exact` the candidates' scores are computed again on the
    host in float32, so that ranks are the exact index's wherever bfloat16 kept a result within the
    `spare` candidates beside the k best.
    """

    def __init__(
        self, vectors_NE: np.ndarray, *, mesh: Mesh, dtype: jnp.dtype, spare: int, exact: bool
    ) -> None:
        self._vectors, self._spare, self._exact = vectors_NE, spare, exact
        self._mesh, self._num = mesh, len(vectors_NE)
        self._rows_a_device = -(-self._num // mesh.size)
        self._block = min(BLOCK, self._rows_a_device)
        rows = NamedSharding(mesh, PartitionSpec(sharding.MESH_AXES))
        shape = (self._rows_a_device * mesh.size, vectors_NE.shape[1])

        def _part(index: tuple[slice, ...]) -> np.ndarray:
            start, end, _ = index[0].indices(shape[0])
            part = np.zeros((end - start, shape[1]), jnp.dtype(dtype))
            held = vectors_NE[start : min(end, self._num)]
            part[: len(held)] = held
            return part

        self._on_device = jax.make_array_from_callback(shape, rows, _part)

    def search(self, queries_QE: np.ndarray, k: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each query the scores (f32) and rows of its best min(k, N) vectors, ranked."""
        k = min(k, self._num)
        count = min(self._num, k + self._spare)
        found = []
        for start in range(0, len(queries_QE), QUERIES[-1]):
            queries_BE = queries_QE[start : start + QUERIES[-1]]
            size = next(size for size in QUERIES if size >= len(queries_BE))
            filled = np.zeros((size, queries_QE.shape[1]), np.float32)
            filled[: len(queries_BE)] = queries_BE
            best = _best(
                self._on_device, np.int32(self._num), filled,
                mesh=self._mesh, block=self._block, count=count,
            )  # fmt: skip
            scores, rows = (np.asarray(x) for x in best)
            for query_E, scores_C, rows_C in zip(queries_BE, scores, rows, strict=False):
                found.append(self._rank(query_E, scores_C, rows_C.astype(np.int64), k))
        return found

    def save(self, directory: Path) -> None:
        """Writes the vectors into an existing directory, as the exact index does."""
        np.save(directory / exact_index.VECTORS, self._vectors)

    def _rank(self, query_E, scores_C, rows_C, k: int) -> tuple[np.ndarray, np.ndarray]:
        if self._exact:
            return exact_index.rank(self._vectors, query_E, rows_C, k)
        order_C = np.lexsort((rows_C, -scores_C))[:k]
        return scores_C[order_C], rows_C[order_C]


def on_this_host(vectors_NE: np.ndarray) -> DeviceShard:
    """A shard over all devices of this process, in bfloat16 but on CPUs, with float32 ranks."""
    devices = jax.local_devices()
    return DeviceShard(
        vectors_NE, mesh=sharding.make_mesh(data=len(devices), devices=devices),
        dtype=jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16, spare=SPARE,
        exact=True,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("mesh", "block", "count"))
def _best(
    vectors_NE: jax.Array, num: jax.Array, queries_QE: jax.Array, *, mesh: Mesh, block: int,
    count: int,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Scores and rows [Q, C] of each query's best `count` among the first `num` vectors.

    Compiled for each number of queries and of candidates, and each size of a shard.
    """
    axes, rows_a_device = sharding.MESH_AXES, len(vectors_NE) // mesh.size

    def _on_one(held_NE, num, queries_QE):
        first = jax.lax.axis_index(axes) * rows_a_device

        def _add(carry, index):
            start = jnp.minimum(index * block, rows_a_device - block)
            vectors_ME = jax.lax.dynamic_slice_in_dim(held_NE, start, block)
            scores_QM = jnp.einsum(
                "QE,ME->QM", queries_QE.astype(vectors_ME.dtype), vectors_ME,
                preferred_element_type=jnp.float32,
            )  # fmt: skip
            row_M = first + start + jnp.arange(block)
            # rows of the last block that the one before it has shown, and filling
            is_new_M = (start + jnp.arange(block) >= index * block) & (row_M < num)
            scores_QM = jnp.where(is_new_M, scores_QM, -jnp.inf)
            scores_QC, place_QC = jax.lax.top_k(scores_QM, min(count, block))
            scores_QC = jnp.concatenate([carry[0], scores_QC], axis=1)
            rows_QC = jnp.concatenate([carry[1], row_M[place_QC]], axis=1)
            scores_QC, place_QC = jax.lax.top_k(scores_QC, count)
            return (scores_QC, jnp.take_along_axis(rows_QC, place_QC, axis=1)), None

        Q = queries_QE.shape[0]
        empty = jnp.full((Q, count), -jnp.inf), jnp.zeros((Q, count), jnp.int32)
        turns = jnp.arange(-(-rows_a_device // block))
        (scores_QC, rows_QC), _ = jax.lax.scan(_add, empty, turns)
        gather = functools.partial(jax.lax.all_gather, axis_name=axes, axis=1, tiled=True)
        scores_QC, place_QC = jax.lax.top_k(gather(scores_QC), count)
        return scores_QC, jnp.take_along_axis(gather(rows_QC), place_QC, axis=1)

    whole = PartitionSpec()
    return jax.shard_map(
        _on_one, mesh=mesh, in_specs=(PartitionSpec(axes), whole, whole), out_specs=whole,
        check_vma=False,
    )(vectors_NE, num, queries_QE)  # fmt: skip
