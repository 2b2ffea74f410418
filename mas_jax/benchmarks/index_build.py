"""Building an index of a million passages on disk: time, memory, recall and queries a second.

The vectors are MiniLM's of real passages, those of the index in MAS_JAX_BASE_INDEX (one that
launch/build_index.py made), and jittered copies of them up to a million: a copy is the passage's
vector plus independent Gaussian noise of norm JITTER on average, scaled to norm 1, so that a
passage stands in a cloud of about 70 at cosine 1 / sqrt(1 + JITTER^2) = 0.89. Queries are real
questions under the same encoder. `retrieval.build` builds it, from a corpus file, in pieces.
"""

import functools
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from mas_jax import metrics
from mas_jax.benchmarks.processes import peak_bytes
from mas_jax.data.questions import read_jsonl
from mas_jax.model import packaged
from mas_jax.retrieval import build, exact_index, scann_index
from mas_jax.retrieval.corpus import open_corpus
from mas_jax.retrieval.encoder import EncoderConfig, TextEncoder
from mas_jax.retrieval.index import IndexConfig

COUNT, JITTER, NUM_QUERIES, K, PIECE = 1_000_000, 0.5, 1000, 3, 16_384
BASE_VARIABLE, DATA_VARIABLE = "MAS_JAX_BASE_INDEX", "MAS_JAX_QA"
QUESTIONS = ("2wikimultihopqa", "hotpotqa")


class Jittered:
    """The vectors of `contents` "N\\n": row N of the base, over and over, with noise of its own."""

    def __init__(self, base_NE: np.ndarray) -> None:
        self._base = base_NE
        self.fingerprint = (
            f"jittered-{JITTER}-{hashlib.blake2b(base_NE.tobytes()).hexdigest()[:16]}"
        )

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors [N, E] f32 of norm 1; the first copy of each passage is the passage itself."""
        rows_N = np.array([int(text.partition("\n")[0]) for text in texts])
        num, dim = self._base.shape
        noise_NE = np.random.default_rng(int(rows_N[0])).normal(size=(len(rows_N), dim))
        scale_N = np.where(rows_N < num, 0.0, JITTER / np.sqrt(dim))
        vectors_NE = self._base[rows_N % num] + noise_NE * scale_N[:, None]
        return (vectors_NE / np.linalg.norm(vectors_NE, axis=1, keepdims=True)).astype(np.float32)


def _queries(data: Path) -> np.ndarray:
    """Vectors [Q, E] of real questions."""
    encoder = TextEncoder(EncoderConfig(str(packaged.minilm()), max_tokens=128))
    share = NUM_QUERIES // len(QUESTIONS)
    texts = [
        question.text
        for name in QUESTIONS
        for question in read_jsonl(data / f"{name}.jsonl", dataset=name, split="test")[:share]
    ]
    return encoder.encode_queries(texts)


def _rows(shard, queries_QE: np.ndarray) -> tuple[np.ndarray, float]:
    """Rows [Q, K] and seconds of a search of all queries."""
    start = time.perf_counter()
    found = shard.search(queries_QE, K)
    return np.stack([rows for _, rows in found]), time.perf_counter() - start


def run(base_NE: np.ndarray, queries_QE: np.ndarray, console: Console) -> dict:
    """What building and searching took."""

    watch = functools.partial(metrics.watch, label="passages", console=console, interval_s=10.0)

    config = IndexConfig(backend="scann")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "corpus.jsonl"
        with path.open("w") as file:
            for row in range(COUNT):
                file.write(f'{{"id": "{row}", "contents": "{row}\\n"}}\n')
        start = time.perf_counter()
        corpus = open_corpus(path, cache=Path(folder))
        build.build(
            corpus, Jittered(base_NE), config, Path(folder) / "index", dim=base_NE.shape[1],
            piece=PIECE, share=build.Share(), watch=watch,
        )  # fmt: skip
        build_s, build_peak = time.perf_counter() - start, peak_bytes()
        shard_directory = Path(folder) / "index" / "shard-0"
        shard = scann_index.load_shard(shard_directory, config.tree_sizes(COUNT))
        rows_QK, scann_s = _rows(shard, queries_QE)
        exact = exact_index.ExactShard(exact_index.load_vectors(shard_directory))
        exact_QK, exact_s = _rows(exact, queries_QE)
    hits = [
        len(set(a) & set(b)) / K for a, b in zip(rows_QK.tolist(), exact_QK.tolist(), strict=True)
    ]
    return {
        "passages": COUNT, "base": len(base_NE), "dim": base_NE.shape[1], "jitter": JITTER,
        "queries": len(queries_QE), "build_s": build_s, "build_peak_bytes": build_peak,
        "estimate_bytes": build.estimate_bytes(COUNT, base_NE.shape[1], config),
        "recall_at_3": float(np.mean(hits)),
        "scann_queries_per_s": len(queries_QE) / scann_s,
        "exact_queries_per_s": len(queries_QE) / exact_s,
    }  # fmt: skip


def markdown(record: dict) -> str:
    """The result as the README shows it."""
    gb = {name: size / 1e9 for name, size in record["estimate_bytes"].items()}
    return (
        "| passages | build s | peak GB of building / estimated | GB searched | recall@3 | "
        "exact q/s | ScaNN q/s |\n| --- | --- | --- | --- | --- | --- | --- |\n"
        f"| {record['passages']:,} | {record['build_s']:.0f} | "
        f"{record['build_peak_bytes'] / 1e9:.1f} / {gb['ram_building']:.1f} | {gb['ram']:.1f} | "
        f"{record['recall_at_3']:.3f} | {record['exact_queries_per_s']:.0f} | "
        f"{record['scann_queries_per_s']:.0f} |"
    )


def main(out: Path, sizes: list[str] | None) -> None:
    """Runs the benchmark, writes `out` (JSON) and prints the table.

    Raises: ValueError without MAS_JAX_BASE_INDEX and MAS_JAX_QA.
    """
    places = {name: os.environ.get(name) for name in (BASE_VARIABLE, DATA_VARIABLE)}
    if not all(places.values()):
        raise ValueError(
            f"{places}: wanted an index of MiniLM vectors and a directory of questions; build one "
            "with launch/build_index.py"
        )
    logging.getLogger().setLevel(logging.INFO)
    base_NE = np.array(exact_index.load_vectors(Path(places[BASE_VARIABLE]) / "shard-0"))
    console = Console(width=130)
    record = run(base_NE, _queries(Path(places[DATA_VARIABLE])), console)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")
    console.print(markdown(record))
    console.print(f"written to {out}")
