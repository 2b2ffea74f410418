"""Speed of the text encoder against transformers on the same passages, on this CPU.

MiniLM's real weights; the first 256 passages of four corpora in the directory that MAS_JAX_QA
names, or made-up texts of like lengths without one. The peer's batch size is the better of two.
"""

import json
import os
import statistics
import tempfile
from pathlib import Path

import numpy as np
from rich.console import Console

from mas_jax.benchmarks.processes import Worker
from mas_jax.model import packaged

WORKERS = "mas_jax.benchmarks.encoder_workers"
COUNT, RUNS, BATCH_SIZES = 256, 3, (16, 32)
CORPORA = ("nq", "hotpotqa", "2wikimultihopqa", "musique")


def passages() -> tuple[str, list[str]]:
    """Where the texts are from, and the texts."""
    directory = os.environ.get("MAS_JAX_QA")
    if directory:
        texts = []
        for name in CORPORA:
            with (Path(directory) / f"{name}_corpus.jsonl").open(encoding="utf-8") as file:
                texts += [json.loads(next(file))["contents"] for _ in range(COUNT // len(CORPORA))]
        return "real passages", texts
    rng = np.random.default_rng(0)
    words = ["river", "was", "born", "in", "the", "city", "of", "painter", "1911", "album", "and"]
    return "made-up passages", [
        " ".join(rng.choice(words, int(n))) for n in rng.lognormal(4.4, 0.5, COUNT)
    ]


def main(out: Path, sizes: list[str] | None) -> None:
    """Runs the benchmark, writes `out` (JSON) and prints the ratio.

    Raises: ValueError if the two sides made other vectors.
    """
    source, texts = passages()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "texts.json"
        path.write_text(json.dumps(texts))
        shared = dict(directory=str(packaged.minilm()), texts=str(path))
        tried = {}
        for size in BATCH_SIZES:
            with Worker(WORKERS, "peer", batch_size=size, **shared) as peer:
                tried[size] = peer.ask("run")["seconds"]
        best = min(tried, key=tried.get)
        seconds: dict[str, list[float]] = {"ours": [], "peer": []}
        with (
            Worker(WORKERS, "ours", **shared) as ours,
            Worker(WORKERS, "peer", batch_size=best, **shared) as peer,
        ):
            for _ in range(RUNS):
                answers = {"ours": ours.ask("run"), "peer": peer.ask("run")}
                for side, found in answers.items():
                    seconds[side].append(found["seconds"])
    digests = [found["digest"] for found in answers.values()]
    if abs(digests[0] - digests[1]) > 1e-2:
        raise ValueError(f"the two sides made other vectors: digests {digests}")
    record = {
        "texts": source, "count": len(texts), "peer_batch_size": best, "tried": tried,
        "seconds": seconds, "digests": digests,
        "ratio": statistics.median(
            p / o for o, p in zip(seconds["ours"], seconds["peer"], strict=True)
        ),
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")
    console = Console(width=130)
    console.print(markdown(record))
    console.print(f"written to {out}")


def markdown(record: dict) -> str:
    """The result as the README shows it."""
    rates = [
        f"{record['count'] / statistics.median(record['seconds'][side]):.0f}"
        for side in ("ours", "peer")
    ]
    return (
        f"{record['count']:,} {record['texts']}: {' / '.join(rates)} passages/s, ratio "
        f"{record['ratio']:.2f} (transformers in batches of {record['peer_batch_size']})"
    )
