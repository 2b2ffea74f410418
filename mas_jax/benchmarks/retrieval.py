"""Recall and speed of the ScaNN index against exact search in NumPy, on one core in one run.

Each size has a process of its own, bound to one core: with several, NumPy's matrix products suffer
more than ScaNN from whatever else runs on the machine, and the ratio would measure that.
How good an approximate index looks depends on the vectors. Independent Gaussians have no structure
to use and make it look useless; tight clusters make it look perfect. These vectors have neighbours
at several scales: each mixes two of a few hundred overlapping topics whose sizes follow a power
law, then a subject within the topics, a page within the subject, and its own part, all under a
covariance whose eigenvalues fall as 1/i. Queries are further members of pages, with more noise.
`structure` measures the result beside the two extremes. What real text vectors have: a relative
contrast of 1.75 to 2.05 was published for sentence embeddings (MiniLM and BERT, arXiv:2410.05752);
10,000 Wikipedia passages under TF-IDF and a projection to 128 dimensions measured 2.5 with a local
intrinsic dimension of 25 and cosines of 0.66, 0.41 and 0.28 to the 1st, 10th and 100th neighbour.
128 dimensions: with the 768 of a BERT-size encoder a million vectors and ScaNN's copy of them take
6 GB, and both sides slow down about alike.
Letters: N vectors, Q queries, E dimensions.
"""

import importlib.metadata
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from mas_jax.retrieval import scann_index
from mas_jax.retrieval.exact_index import ExactShard
from mas_jax.retrieval.index import IndexConfig, ram_bytes
from mas_jax.retrieval.scann_index import ScannShard

SIZES = {"10k": 10_000, "100k": 100_000, "1m": 1_000_000}
DIM = 128
K = 3
QUERIES, BATCH, RUNS = 1024, 256, 5
STRUCTURE_QUERIES = 256
# shares of a vector's variance, and how many members a level's groups have on average
TOPIC, SUBJECT, PAGE, OWN = 0.2, 0.2, 0.15, 0.45
NUM_TOPICS, SUBJECT_SIZE, PAGE_SIZE = 300, 300, 12
QUERY_NOISE = 0.2  # variance beside the 0.45 of a page's own members
SPECTRUM = 0.5  # standard deviations along the axes fall as i to the minus this
CHUNK = 100_000
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def _unit(vectors_NE: np.ndarray) -> np.ndarray:
    return vectors_NE / np.linalg.norm(vectors_NE, axis=1, keepdims=True)


def make_vectors(num_vectors: int, num_queries: int, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors [N, E] and queries [Q, E], f32, with neighbours at several scales."""
    rng = np.random.default_rng(seed)
    rotation_EE = np.linalg.qr(rng.normal(size=(DIM, DIM)))[0]
    basis_EE = (rotation_EE * np.arange(1, DIM + 1) ** -SPECTRUM).astype(np.float32)
    basis_EE /= np.sqrt(np.sum(basis_EE**2))  # a draw has norm 1 on average
    num_subjects, num_pages = num_vectors // SUBJECT_SIZE + 1, num_vectors // PAGE_SIZE + 1

    def _draw(count: int) -> np.ndarray:
        return rng.standard_normal((count, DIM), np.float32) @ basis_EE.T

    topics, subjects, pages = _draw(NUM_TOPICS), _draw(num_subjects), _draw(num_pages)
    popularity = 1 / np.arange(1, NUM_TOPICS + 1)
    topic_of = rng.choice(NUM_TOPICS, (2, num_subjects), p=popularity / popularity.sum())
    share = rng.uniform(0.5, 1, (num_subjects, 1)).astype(np.float32)  # of the first topic
    mixed = share * topics[topic_of[0]] + np.sqrt(1 - share**2) * topics[topic_of[1]]
    subjects = math.sqrt(TOPIC) * mixed + math.sqrt(SUBJECT) * subjects
    subject_of_page = rng.integers(0, num_subjects, num_pages)
    pages = subjects[subject_of_page] + math.sqrt(PAGE) * pages

    def _members(count: int, noise: float) -> np.ndarray:
        of_page = rng.integers(0, num_pages, count)
        return _unit(pages[of_page] + math.sqrt(OWN + noise) * _draw(count))

    vectors_NE = np.empty((num_vectors, DIM), np.float32)
    for start in range(0, num_vectors, CHUNK):
        stop = min(start + CHUNK, num_vectors)
        vectors_NE[start:stop] = _members(stop - start, 0.0)
    return vectors_NE, _members(num_queries, QUERY_NOISE)


def gaussians(num_vectors: int, *, seed: int) -> np.ndarray:
    """Independent unit Gaussians: one of the two extremes to compare with."""
    rng = np.random.default_rng(seed)
    return _unit(rng.standard_normal((num_vectors, DIM), np.float32))


def tight_clusters(num_vectors: int, *, seed: int) -> np.ndarray:
    """A hundred far clusters: the other extreme."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((100, DIM), np.float32)
    own = rng.standard_normal((num_vectors, DIM), np.float32)
    return _unit(centres[rng.integers(0, 100, num_vectors)] + np.float32(0.15) * own)


def structure(vectors_NE: np.ndarray) -> dict[str, float]:
    """Neighbour statistics of the first vectors among all.

    cosine_r: mean cosine to the r-th neighbour, and to a random vector. contrast: mean distance
    over nearest distance. lid: local intrinsic dimension, median of the maximum-likelihood estimate
    from the distances to the nearest 100 (Levina and Bickel 2004).
    """
    sample = vectors_NE[:STRUCTURE_QUERIES]
    scores = np.array([scores[1:] for scores, _ in ExactShard(vectors_NE).search(sample, 101)])
    distances = np.sqrt(np.maximum(2 - 2 * scores.astype(np.float64), 1e-12))
    to_random = sample @ vectors_NE[-STRUCTURE_QUERIES:].T
    lids = -1 / np.mean(np.log(distances[:, :-1] / distances[:, -1:]), axis=1)
    return {
        "cosine_1": float(scores[:, 0].mean()),
        "cosine_10": float(scores[:, 9].mean()),
        "cosine_100": float(scores[:, 99].mean()),
        "cosine_random": float(to_random.mean()),
        "contrast": float((np.sqrt(2 - 2 * to_random).mean() / distances[:, 0]).mean()),
        "lid": float(np.median(lids)),
    }


def _seconds(shard: ExactShard | ScannShard, queries_QE: np.ndarray) -> float:
    started = time.perf_counter()
    for start in range(0, len(queries_QE), BATCH):
        shard.search(queries_QE[start : start + BATCH], K)
    return time.perf_counter() - started


def recall(found: list, wanted: list) -> float:
    """Share of the wanted rows that were found, over all queries."""
    pairs = zip(found, wanted, strict=True)
    hits = sum(np.isin(wanted_R, found_R).sum() for (_, found_R), (_, wanted_R) in pairs)
    return float(hits / sum(len(wanted_R) for _, wanted_R in wanted))


def run_case(num_vectors: int) -> dict:
    """Measures one corpus size: structure, recall@3, queries/s of both, their ratio, build time."""
    vectors_NE, queries_QE = make_vectors(num_vectors, QUERIES, seed=0)
    config = IndexConfig(backend="scann")
    sizes = config.tree_sizes(num_vectors)
    exact = ExactShard(vectors_NE)
    started = time.perf_counter()
    scann = ScannShard(vectors_NE, sizes)
    build_s = time.perf_counter() - started
    found, wanted = scann.search(queries_QE, K), exact.search(queries_QE, K)  # and a warm-up
    seconds = {"exact": [], "scann": []}
    num_timed = min(QUERIES, max(BATCH, 2 * 10**8 // num_vectors))
    for _ in range(RUNS):
        for name, shard in (("exact", exact), ("scann", scann)):
            seconds[name].append(_seconds(shard, queries_QE[:num_timed]))
    ratios = [e / s for e, s in zip(seconds["exact"], seconds["scann"], strict=True)]
    return {
        "vectors": num_vectors,
        "dim": DIM,
        "tree": None if sizes is None else vars(sizes),
        "structure": structure(vectors_NE),
        f"recall_{K}": recall(found, wanted),
        "queries": num_timed,
        **{f"{name}_qps": num_timed / statistics.median(s) for name, s in seconds.items()},
        "seconds": seconds,
        "ratio": statistics.median(ratios),
        "build_s": build_s,
        "ram_bytes": ram_bytes(num_vectors, DIM, config),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


HEADINGS = (
    "vectors", "index", "cosine of neighbour 1 / 10 / 100", "contrast", "LID", "recall@3",
    "exact q/s", "ScaNN q/s", "ratio", "build s",
    "GB, index / process",
)  # fmt: skip


def _structure_cells(values: dict[str, float]) -> list[str]:
    cosines = " / ".join(f"{values[f'cosine_{r}']:.2f}" for r in (1, 10, 100))
    return [cosines, f"{values['contrast']:.2f}", f"{values['lid']:.0f}"]


def _cells(case: dict) -> list[str]:
    """One case under `HEADINGS`."""
    tree = case["tree"]
    kind = "exact scoring" if tree is None else (
        f"tree, {tree['leaves_to_search']} of {tree['leaves']} leaves, {tree['reorder']} reordered"
    )  # fmt: skip
    return [
        f"{case['vectors']:,}", kind, *_structure_cells(case["structure"]),
        f"{case[f'recall_{K}']:.3f}", f"{case['exact_qps']:,.0f}", f"{case['scann_qps']:,.0f}",
        f"{case['ratio']:.1f}", f"{case['build_s']:.1f}",
        f"{case['ram_bytes'] / 1e9:.2f} / {case['peak_bytes'] / 1e9:.2f}",
    ]  # fmt: skip


def _extreme_cells(name: str, values: dict[str, float]) -> list[str]:
    """The structure of vectors that were not searched, for comparison."""
    return [f"{SIZES['10k']:,}", name, *_structure_cells(values), *["-"] * 6]


def _rows(record: dict) -> list[list[str]]:
    cases = [_cells(case) for case in record["cases"]]
    return cases + [_extreme_cells(*extreme) for extreme in record["extremes"].items()]


def table(record: dict) -> Table:
    """The results for the console."""
    result = Table(title=f"ScaNN / exact search in NumPy, {DIM} dimensions, one core")
    for heading in HEADINGS:
        result.add_column(heading, justify="left" if heading == "index" else "right")
    for row in _rows(record):
        result.add_row(*row)
    return result


def markdown(record: dict) -> str:
    """The results as the README shows them."""
    lines = [HEADINGS, ["---"] * len(HEADINGS), *_rows(record)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def measure(sizes: list[str] | None) -> Iterator[dict]:
    """Results size by size; sizes: names of `SIZES` to keep, None for all."""
    for name in SIZES:
        if sizes is None or name in sizes:
            with tempfile.TemporaryDirectory() as directory:
                result = Path(directory) / "result.json"
                subprocess.run(
                    [sys.executable, "-m", "mas_jax.benchmarks.retrieval", name, str(result)],
                    env={**os.environ, **ENVIRONMENT},
                    check=True,
                )
                yield json.loads(result.read_text())


def work(size: str, result: Path) -> None:
    """What the process of one size does: binds itself to a core, measures, writes the result."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    result.write_text(json.dumps(run_case(SIZES[size])))


def main(out: Path, sizes: list[str] | None) -> None:
    """Runs the benchmark, writing `out` (JSON) after every size and the table at the end.

    Raises: ValueError for an unknown size, RuntimeError without ScaNN.
    """
    unknown = set(sizes or ()) - set(SIZES)
    if unknown:
        raise ValueError(f"unknown sizes {sorted(unknown)}; choose from {sorted(SIZES)}")
    if not scann_index.is_available():
        raise RuntimeError("this benchmark compares with ScaNN, which is not installed here")
    console = Console(width=160)
    record = {
        "versions": {name: importlib.metadata.version(name) for name in ("numpy", "scann")},
        "cpus": os.cpu_count(),
        "extremes": {
            "independent Gaussians": structure(gaussians(SIZES["10k"], seed=0)),
            "100 tight clusters": structure(tight_clusters(SIZES["10k"], seed=0)),
        },
        "cases": [],
    }
    for result in measure(sizes):
        record["cases"].append(result)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1))
        console.log(f"{result['vectors']:,} vectors: done")
    console.print(table(record))
    console.print(f"written to {out}")


if __name__ == "__main__":
    work(sys.argv[1], Path(sys.argv[2]))
