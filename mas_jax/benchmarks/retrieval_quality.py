"""Real retrieval quality: MiniLM beside BM25 on real questions and their passages.

Wants a directory of DATASET.jsonl and DATASET_corpus.jsonl in FlashRAG's form. Embeddings are kept
in runs/quality, so that an interrupted run goes on.
"""

import dataclasses
import functools
import json
import logging
import os
import time
from pathlib import Path

import jax
from rich.console import Console

from mas_jax import metrics
from mas_jax.data.questions import read_jsonl
from mas_jax.evaluation.retrieval_quality import DEPTHS, Quality, measure
from mas_jax.model import packaged
from mas_jax.retrieval import build
from mas_jax.retrieval.bm25_index import Bm25Config, Bm25Retriever
from mas_jax.retrieval.corpus import open_corpus
from mas_jax.retrieval.encoder import EncoderConfig, TextEncoder
from mas_jax.retrieval.index import IndexConfig, Retriever

DATASETS = (
    "nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle",
)  # fmt: skip
DATA_VARIABLE = "MAS_JAX_QA"  # environment variable: the directory of questions and corpora
INDEXES = Path("runs/quality")


def _retrievers(corpus, encoder: TextEncoder, name: str, console: Console) -> dict[str, Retriever]:
    watch = functools.partial(
        metrics.watch, label=f"{name}: passages", console=console, interval_s=30.0
    )

    config, directory = IndexConfig(), INDEXES / f"{name}-{encoder.fingerprint}"
    if not directory.exists():
        build.build(
            corpus, encoder, config, directory, dim=encoder.dim, piece=1024, share=build.Share(),
            watch=watch,
        )  # fmt: skip
    return {
        "MiniLM": Retriever.load(directory, corpus, encoder, config),
        "BM25": Bm25Retriever(corpus, Bm25Config()),
    }


def run(data: Path, datasets: list[str], console: Console) -> dict:
    """Quality of both retrievers on each set, and the seconds that their searches took."""
    encoder = TextEncoder(EncoderConfig(str(packaged.minilm()), max_tokens=256))
    record = {"encoder": encoder.fingerprint, "sets": {}}
    for name in datasets:
        questions = read_jsonl(data / f"{name}.jsonl", dataset=name, split="test")
        corpus = open_corpus(data / f"{name}_corpus.jsonl")
        entry = {"questions": len(questions), "passages": len(corpus)}
        for label, retriever in _retrievers(corpus, encoder, name, console).items():
            start = time.perf_counter()
            found = retriever.search_now([q.text for q in questions], max(DEPTHS))
            seconds = time.perf_counter() - start
            quality = measure(questions, found)
            entry[label] = dataclasses.asdict(quality) | {"search_s": seconds}
        record["sets"][name] = entry
        console.log(f"{name}: done")
    return record


def _row(name: str, entry: dict, label: str) -> str:
    quality = Quality(**{f.name: entry[label][f.name] for f in dataclasses.fields(Quality)})
    # keys of a record that was read back are strings
    cells = [
        " / ".join(f"{ {int(k): v for k, v in values.items()}[depth]:.2f}" for depth in DEPTHS)
        for values in (quality.has_answer, quality.gold_recall)
    ]
    cells[1] = f"{cells[1]} ({quality.num_with_gold:,})" if quality.num_with_gold else "-"
    counts = f"{entry['questions']:,} / {entry['passages']:,}"
    return f"| {name} | {counts} | {label} | {cells[0]} | {cells[1]} |"


def markdown(record: dict) -> str:
    """The results as the README shows them."""
    depths = "/".join(map(str, DEPTHS))
    lines = [
        f"| set | questions / passages | retriever | has-answer@{depths} "
        f"| gold recall@{depths} (questions) |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, entry in record["sets"].items():
        lines += [_row(name, entry, label) for label in ("MiniLM", "BM25")]
    return "\n".join(lines)


def main(out: Path, sizes: list[str] | None) -> None:
    """Measures the sets (`sizes` names some of them), writes `out` (JSON) and prints the table.

    Raises: ValueError for an unknown set, or without a directory in MAS_JAX_QA.
    """
    unknown = set(sizes or ()) - set(DATASETS)
    if unknown or not os.environ.get(DATA_VARIABLE):
        raise ValueError(
            f"set {DATA_VARIABLE} to a directory of DATASET.jsonl and DATASET_corpus.jsonl"
            if not unknown
            else f"unknown sets {sorted(unknown)}; choose from {DATASETS}"
        )
    jax.config.update("jax_platforms", "cpu")
    logging.getLogger().setLevel(logging.WARNING)
    console = Console(width=130)
    record = run(Path(os.environ[DATA_VARIABLE]), list(sizes or DATASETS), console)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")
    console.print(markdown(record))
    console.print(f"written to {out}")
