"""ScaNN over one shard of vectors: exact scoring, or a tree of quantised vectors with reordering.

ScaNN only proposes rows; `exact_index.rank` scores and orders them. It is imported when first used:
where TensorFlow is installed the import loads it too.
Letters: Q queries, M vectors of a shard, E dimensions, R results. Must not know: texts, jax.
"""

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mas_jax.retrieval import exact_index

DIMS_PER_BLOCK = 2  # of asymmetric hashing, 4 bits a block
QUANTIZATION_THRESHOLD = 0.2  # anisotropic loss: errors along a vector cost more than across it
SOAR_LAMBDA = 1.5  # every vector in a second leaf too: recall .96 to .99 at equal speed
TRAINING_SAMPLE = 100_000
EXTRA = 8  # rows asked for beyond k, to see whether a tie goes on behind the k-th


def is_available() -> bool:
    """Whether the scann package is installed, without importing it."""
    return importlib.util.find_spec("scann") is not None


@dataclass(frozen=True)
class TreeSizes:
    """Leaves of the tree, leaves searched a query, and rows of these scored exactly."""

    leaves: int
    leaves_to_search: int
    reorder: int


def choose_sizes(num_vectors: int) -> TreeSizes:
    """The rule: sqrt(M) leaves, a tenth of them searched but at least 20, 100 rows reordered.

    Measured on the benchmark's vectors: recall@3 is set by the leaves searched; 200 or 400 rows
    reordered add nothing, and twice as many leaves lose more recall than they save time.
    """
    leaves = max(1, round(math.sqrt(num_vectors)))
    return TreeSizes(leaves, min(leaves, max(20, math.ceil(leaves / 10))), 100)


def extra_ram_bytes(num_vectors: int, dim: int, sizes: TreeSizes | None) -> int:
    """Bytes that ScaNN holds beside our own vectors: its copy of them and, with a tree, codes,
    centres and the training sample."""
    copy = num_vectors * dim * 4
    if sizes is None:
        return copy
    codes = 2 * num_vectors * (math.ceil(dim / DIMS_PER_BLOCK) / 2 + 4)  # each in two leaves
    sample = min(num_vectors, TRAINING_SAMPLE) * dim * 4 * 2
    return int(copy + codes + sizes.leaves * dim * 4 + sample)


def _build_searcher(vectors_ME: np.ndarray, sizes: TreeSizes | None) -> Any:
    from scann.scann_ops.py import scann_ops_pybind

    builder = scann_ops_pybind.builder(vectors_ME, 10, "dot_product")
    if sizes is None:
        return builder.score_brute_force().build()
    sample = min(len(vectors_ME), TRAINING_SAMPLE)
    return (
        builder.tree(
            num_leaves=sizes.leaves,
            num_leaves_to_search=sizes.leaves_to_search,
            training_sample_size=sample,
            soar_lambda=SOAR_LAMBDA,
        )
        .score_ah(
            DIMS_PER_BLOCK,
            anisotropic_quantization_threshold=QUANTIZATION_THRESHOLD,
            training_sample_size=sample,
        )
        .reorder(sizes.reorder)
        .build()
    )


class ScannShard:
    """One ScaNN searcher and the vectors that it was built from.

    sizes: None for exact scoring. searcher: a loaded one; None builds it.
    """

    def __init__(
        self, vectors_ME: np.ndarray, sizes: TreeSizes | None, searcher: Any | None = None
    ) -> None:
        self._exact = exact_index.ExactShard(vectors_ME)
        self._sizes = sizes
        self._searcher = _build_searcher(vectors_ME, sizes) if searcher is None else searcher

    def search(self, queries_QE: np.ndarray, k: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each query the scores and rows of its best min(k, M) vectors, ranked.

        With exact scoring these are the exact index's; with a tree, the best of its candidates
        (of all vectors where the leaves searched hold fewer than k).
        """
        num_vectors = len(self._exact.vectors_ME)
        k = min(k, num_vectors)
        results: list = [None] * len(queries_QE)
        open_Q, num_asked = np.arange(len(queries_QE)), min(num_vectors, k + EXTRA)
        while len(open_Q):
            rows_QR, approx_QR = self._propose(queries_QE[open_Q], num_asked)
            still_open = []
            for query, rows_R, approx_R in zip(open_Q, rows_QR, approx_QR, strict=True):
                found = ~np.isnan(approx_R)  # ScaNN fills up with NaN
                if (
                    found[-1]
                    and num_asked < num_vectors
                    and self._tied(queries_QE[query], approx_R[k - 1] - approx_R[-1])
                ):
                    still_open.append(query)
                elif found.sum() < k:
                    results[query] = self._exact.search(queries_QE[query : query + 1], k)[0]
                else:
                    rows_R = rows_R[found].astype(np.int64)
                    vectors_ME, query_E = self._exact.vectors_ME, queries_QE[query]
                    results[query] = exact_index.rank(vectors_ME, query_E, rows_R, k)
            open_Q, num_asked = np.array(still_open, np.int64), min(num_vectors, 4 * num_asked)
        return results

    def _tied(self, query_E: np.ndarray, gap: float) -> bool:
        """Whether rounding could hide rows as good as the k-th behind the last one proposed."""
        return gap <= exact_index.rounding_bound(query_E, self._exact.max_norm)

    def _propose(self, queries_QE: np.ndarray, num_asked: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows and ScaNN's scores, [Q, num_asked] each, NaN scores where it found no more.

        A tree answers one query a call, in parallel: with larger batches ScaNN changes its kernels
        at 2 and at about 16 queries, and with them a query's candidates.
        """
        if self._sizes is None:
            return self._searcher.search_batched_parallel(queries_QE, num_asked)
        return self._searcher.search_batched_parallel(
            queries_QE, num_asked, max(self._sizes.reorder, num_asked), batch_size=1
        )

    def save(self, directory: Path) -> None:
        """Writes the searcher's files, the vectors among them, into an existing directory.

        Paths in ScaNN's list of files are kept relative, so that the directory can be moved.
        """
        self._searcher.serialize(str(directory), relative_path=True)


def load_shard(directory: Path, sizes: TreeSizes | None) -> ScannShard:
    """Reads a shard that `ScannShard.save` wrote, wherever its directory lies now."""
    from scann.scann_ops.py import scann_ops_pybind

    searcher = scann_ops_pybind.load_searcher(str(directory), assets_backcompat_shim=False)
    return ScannShard(exact_index.load_vectors(directory), sizes, searcher)
