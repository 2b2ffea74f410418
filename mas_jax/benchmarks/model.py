"""Scoring and training speed and memory of the model against transformers on the same CPU.

Each case is one model size and one kind of rows. Both sides load the same checkpoint and work on
the same tokens, each in a process of its own; their runs alternate, so that a machine whose speed
drifts slows both, and what is reported is the median of the ratios of neighbouring runs.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import transformers
from rich.console import Console
from rich.table import Table

from mas_jax.model import hf, qwen3

ROWS, LENGTH = 16, 512
MIN_TOKENS, MAX_TOKENS = 40, 240  # of a toy trace
# glibc gives large arrays fresh pages on every allocation; huge pages make that cheap, for both
ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "JAX_PLATFORMS": "cpu"}


@dataclass(frozen=True)
class Case:
    """One comparison. together: both processes alive at once, which needs their memory together."""

    size: str
    rows: str
    runs: int
    chunk: int
    together: bool = True


SLICE = dataclasses.replace(qwen3.PRESETS["qwen3-0.6b"], num_layers=2)
CONFIGS = {
    "toy-1m": qwen3.PRESETS["toy-1m"],
    "toy-30m": qwen3.PRESETS["toy-30m"],
    "qwen3-0.6b, 2 layers": SLICE,
}
CASES = [
    Case("toy-1m", "packed", 9, 4096),
    Case("toy-1m", "full", 9, 4096),
    Case("toy-30m", "packed", 3, 4096),
    Case("toy-30m", "full", 3, 4096),
    # at the full vocabulary one step takes minutes: one run each, without a warm-up
    Case("qwen3-0.6b, 2 layers", "packed", 1, 256, together=False),
    Case("qwen3-0.6b, 2 layers", "full", 1, 256, together=False),
]


def make_work(vocab_size: int, rows: str, *, seed: int) -> dict[str, np.ndarray]:
    """Random tokens [B, T], segment ids (0: padding) and loss weights of one batch.

    rows: "full" is one sequence a row; "packed" fits ragged sequences of the toy workload's lengths
    into the rows, first fit.
    """
    rng = np.random.default_rng(seed)
    segment_ids_BT = np.zeros((ROWS, LENGTH), np.int32)
    if rows == "full":
        segment_ids_BT[:] = 1
    used, segments, misses = [0] * ROWS, [0] * ROWS, 0
    while rows == "packed" and misses < 20:
        length = int(rng.integers(MIN_TOKENS, MAX_TOKENS + 1))
        row = next((r for r in range(ROWS) if used[r] + length <= LENGTH), None)
        misses += row is None
        if row is not None:
            segments[row] += 1
            segment_ids_BT[row, used[row] : used[row] + length] = segments[row]
            used[row] += length
    return {
        "tokens": rng.integers(0, vocab_size, (ROWS, LENGTH), dtype=np.int32),
        "segment_ids": segment_ids_BT,
        "weights": rng.normal(size=(ROWS, LENGTH)).astype(np.float32),
    }


class Worker:
    """One side's process (`model_workers.py`): started on entry, ended on exit."""

    def __init__(self, side: str, arguments: dict) -> None:
        command = [sys.executable, "-m", "mas_jax.benchmarks.model_workers", side]
        self._process = subprocess.Popen(
            [*command, json.dumps(arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            env={**os.environ, **ENVIRONMENT},
        )  # fmt: skip
        self.ready = self._read()

    def _read(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise RuntimeError(f"benchmark worker {self._process.args[3]} ended with code {code}")
        return json.loads(line)

    def ask(self, command: str) -> dict:
        """The worker's answer to one command."""
        self._process.stdin.write(command + "\n")
        return self._read()

    def close(self) -> int:
        """Ends the process; its peak resident memory in bytes."""
        peak_bytes = self.ask("exit")["peak_bytes"]
        self._process.wait()
        return peak_bytes


def _measure(case: Case, arguments: dict[str, dict]) -> dict[str, dict]:
    """Seconds of each run and peak bytes of both sides."""
    results = {side: {"score_s": [], "train_s": []} for side in arguments}
    turns = [tuple(arguments)] if case.together else [(side,) for side in arguments]
    for sides in turns:
        workers = {side: Worker(side, arguments[side]) for side in sides}
        for command in ("score", "train"):
            for _ in range(case.runs):
                for side, worker in workers.items():
                    seconds = worker.ask(command)["seconds"]
                    results[side][f"{command}_s"].append(seconds)
        for side, worker in workers.items():
            results[side] |= worker.ready
            results[side]["peak_bytes"] = worker.close()
    return results


def run_case(case: Case) -> dict:
    """Measures one case: tokens, both sides' seconds and peak bytes, and ratios above 1 for ahead.

    Raises: RuntimeError if the two sides' log-probs of the same tokens do not agree.
    """
    config = CONFIGS[case.size]
    with tempfile.TemporaryDirectory() as directory:
        params = qwen3.init(config, jax.random.key(0), dtype=jnp.float32)
        hf.save(Path(directory) / "model", config, params)
        del params
        work = make_work(config.vocab_size, case.rows, seed=0)
        np.savez(Path(directory) / "work.npz", **work)
        layouts = {"full": ["full"], "packed": ["packed", "padded"]}[case.rows]
        shared = dict(directory=directory, warm_up=case.runs > 1)
        results = _measure(
            case,
            {
                "ours": dict(shared, chunk=case.chunk),
                "peer": dict(shared, layouts=layouts if case.runs > 1 else layouts[:1]),
            },
        )
    ours, peer = results["ours"], results["peer"]
    gap = abs(ours["digest"] - peer["digest"])
    if gap > 1e-3 * max(1.0, abs(peer["digest"])):
        raise RuntimeError(
            f"{case.size}, {case.rows} rows: the weighted sum of log-probs is {ours['digest']} "
            f"here and {peer['digest']} in transformers; the two sides do not do the same work"
        )
    ratios = {
        kind: statistics.median(p / o for o, p in zip(ours[kind], peer[kind], strict=True))
        for kind in ("score_s", "train_s")
    }
    return {
        **dataclasses.asdict(case),
        "tokens": int((work["segment_ids"] > 0).sum()),
        "ours": ours,
        "peer": peer,
        "score_ratio": ratios["score_s"],
        "train_ratio": ratios["train_s"],
        "memory_ratio": ours["peak_bytes"] / peer["peak_bytes"],
    }


def table(cases: list[dict]) -> Table:
    """The results as a console table: tokens/s of both sides and their ratios."""
    result = Table(title="mas_jax against transformers (torch), float32, this CPU")
    for heading in (
        "model",
        "rows",
        "tokens",
        "score tok/s",
        "x",
        "train tok/s",
        "x",
        "peak GB",
        "x",
    ):
        result.add_column(heading, justify="left" if heading in ("model", "rows") else "right")
    for c in cases:
        rates = {
            kind: [
                f"{c['tokens'] / statistics.median(c[side][kind]):,.0f}"
                for side in ("ours", "peer")
            ]
            for kind in ("score_s", "train_s")
        }
        peaks = [f"{c[side]['peak_bytes'] / 1e9:.2f}" for side in ("ours", "peer")]
        result.add_row(
            c["size"], f"{c['rows']} (peer: {c['peer']['layout']})", str(c["tokens"]),
            " / ".join(rates["score_s"]), f"{c['score_ratio']:.2f}",
            " / ".join(rates["train_s"]), f"{c['train_ratio']:.2f}",
            " / ".join(peaks), f"{c['memory_ratio']:.2f}",
        )  # fmt: skip
    return result


def _versions() -> dict[str, str]:
    packages = {"jax": jax, "optax": optax, "torch": torch, "transformers": transformers}
    return {name: package.__version__ for name, package in packages.items()}


def measure(sizes: list[str] | None) -> Iterator[dict]:
    """Results case by case; sizes: names of `CONFIGS` to keep, None for all."""
    for case in CASES:
        if sizes is None or case.size in sizes:
            yield run_case(case)


def main(out: Path, sizes: list[str] | None) -> None:
    """Runs the benchmark, writing `out` (JSON) after every case and the table at the end.

    Raises: ValueError for an unknown size.
    """
    unknown = set(sizes or ()) - set(CONFIGS)
    if unknown:
        raise ValueError(f"unknown sizes {sorted(unknown)}; choose from {sorted(CONFIGS)}")
    console = Console(width=130)
    record = {"versions": _versions(), "cpus": os.cpu_count(), "cases": []}
    for result in measure(sizes):
        record["cases"].append(result)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1))
        console.log(f"{result['size']}, {result['rows']} rows: done")
    console.print(table(record["cases"]))
    console.print(f"written to {out}")
