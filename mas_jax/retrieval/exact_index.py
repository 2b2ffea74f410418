"""Exact search over one shard of vectors, and the ranking that every index ends with.

An index may find its candidates with whatever rounding it likes; their scores are then computed
here, row by row in one order of addition. So equal vectors get equal scores, ties have one order,
and a query's answer does not depend on the queries beside it.
Letters: Q queries, M vectors of a shard, E dimensions, R results. Must not know: texts, jax.
"""

from pathlib import Path

import numpy as np

VECTORS = "dataset.npy"  # ScaNN's name for the same file, so that both kinds of index share it
# scores are made and looked through in blocks of 16 MiB, however large the shard
QUERY_BLOCK, ROW_BLOCK = 64, 65_536
GROUP = 64  # rows that share one maximum when the k-th score is bounded


def rank(
    vectors_ME: np.ndarray, query_E: np.ndarray, rows_R: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Scores (f32) and rows of the best k among some rows: score descending, then row ascending."""
    products_RE = vectors_ME[rows_R].astype(np.float64) * query_E.astype(np.float64)
    scores_R = products_RE.sum(axis=1).astype(np.float32)
    order_R = np.lexsort((rows_R, -scores_R))[:k]
    return scores_R[order_R], rows_R[order_R]


def rounding_bound(query_E: np.ndarray, max_norm: float) -> float:
    """Most by which any two f32 scores of a query can come out in the wrong order.

    Twice the standard bound of a dot product's rounding, for any order of its additions.
    """
    unit = 2.0**-24
    return 2 * (len(query_E) + 2) * unit * float(np.linalg.norm(query_E)) * max_norm


def merge(parts: list[tuple[np.ndarray, np.ndarray]], k: int) -> tuple[np.ndarray, np.ndarray]:
    """The best k of several shards' (scores, rows), rows already counted over the whole corpus."""
    scores_R = np.concatenate([scores for scores, _ in parts])
    rows_R = np.concatenate([rows for _, rows in parts])
    order_R = np.lexsort((rows_R, -scores_R))[:k]
    return scores_R[order_R], rows_R[order_R]


def _at_least_kth(scores_M: np.ndarray, k: int, slack: float) -> np.ndarray:
    """Rows of every score that is at most `slack` below the k-th largest, and perhaps some more.

    The k-th largest maximum of groups of rows bounds the k-th largest score from below, so only
    groups whose maximum reaches it are looked into.
    """
    if k >= len(scores_M):
        return np.arange(len(scores_M))
    whole = len(scores_M) // GROUP * GROUP
    maxima_G = scores_M[:whole].reshape(-1, GROUP).max(axis=1)
    if len(maxima_G) < 2 * k:
        least = np.partition(scores_M, len(scores_M) - k)[len(scores_M) - k] - slack
        return np.flatnonzero(scores_M >= least)
    least = np.partition(maxima_G, len(maxima_G) - k)[len(maxima_G) - k] - slack
    groups = np.flatnonzero(maxima_G >= least)
    rows_R = (groups[:, None] * GROUP + np.arange(GROUP)).ravel()
    rows_R = np.concatenate([rows_R, np.arange(whole, len(scores_M))])
    return rows_R[scores_M[rows_R] >= least]


class ExactShard:
    """Scores every vector: the reference, and the fallback where ScaNN has no wheel.

    vectors_ME: finite f32; may be a memory map.
    """

    def __init__(self, vectors_ME: np.ndarray) -> None:
        self.vectors_ME = vectors_ME
        self.max_norm = max(
            float(np.linalg.norm(vectors_ME[start : start + ROW_BLOCK], axis=1).max())
            for start in range(0, len(vectors_ME), ROW_BLOCK)
        )

    def search(self, queries_QE: np.ndarray, k: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each query the scores and rows of its best min(k, M) vectors, ranked."""
        results = []
        for start in range(0, len(queries_QE), QUERY_BLOCK):
            queries_BE = queries_QE[start : start + QUERY_BLOCK]
            rows_BR = self._propose(queries_BE, k)
            results += [
                rank(self.vectors_ME, query_E, rows_R, k)
                for query_E, rows_R in zip(queries_BE, rows_BR, strict=True)
            ]
        return results

    def _propose(self, queries_BE: np.ndarray, k: int) -> list[np.ndarray]:
        """Rows among which each query's best k are: the best k of every block of rows."""
        slacks_B = [rounding_bound(query_E, self.max_norm) for query_E in queries_BE]
        rows_B: list[list[np.ndarray]] = [[] for _ in queries_BE]
        for start in range(0, len(self.vectors_ME), ROW_BLOCK):
            scores_BM = queries_BE @ self.vectors_ME[start : start + ROW_BLOCK].T
            for rows, scores_M, slack in zip(rows_B, scores_BM, slacks_B, strict=True):
                rows.append(start + _at_least_kth(scores_M, k, slack))
        return [np.concatenate(rows) for rows in rows_B]

    def save(self, directory: Path) -> None:
        """Writes the vectors into an existing directory."""
        np.save(directory / VECTORS, self.vectors_ME)


def load_vectors(directory: Path) -> np.ndarray:
    """A saved shard's vectors, read from disk as they are used."""
    return np.asarray(np.load(directory / VECTORS, mmap_mode="r"))
