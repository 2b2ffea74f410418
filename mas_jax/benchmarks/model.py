"""Scoring and training speed and memory of the model against transformers on the same CPU.

Each case is one model size and one kind of rows. Both sides load the same checkpoint and work on
the same tokens, each in a process of its own; their runs alternate, so that a machine whose speed
drifts slows both, and what is reported is the median of the ratios of neighbouring runs. (At the
full vocabulary the two do not fit into memory together and run one after the other.) On packed
rows the peer may also pad a sequence a row; for scoring and training it gets what is faster.
"""

import contextlib
import dataclasses
import json
import os
import statistics
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

from mas_jax.benchmarks.processes import Worker
from mas_jax.model import hf, qwen3

LENGTH = 512
MIN_TOKENS, MAX_TOKENS = 40, 240  # of a toy trace
WORKERS = "mas_jax.benchmarks.model_workers"


@dataclass(frozen=True)
class Case:
    """One comparison of `runs` timed runs a side.

    rows: "full" or "packed", and how many. chunk: logit rows that our kernel holds at once; remat:
    what our layers keep for the backward pass (`qwen3.REMAT_POLICIES`).
    alone: one side's process after the other's; without a warm-up, since a step takes minutes.
    """

    size: str
    rows: str
    num_rows: int
    runs: int
    chunk: int
    remat: str = "none"
    alone: bool = False


SLICE = dataclasses.replace(qwen3.PRESETS["qwen3-0.6b"], num_layers=2)
CONFIGS = {
    "toy-1m": qwen3.PRESETS["toy-1m"],
    "toy-30m": qwen3.PRESETS["toy-30m"],
    "qwen3-0.6b, 2 layers": SLICE,
}
CASES = [
    Case("toy-1m", "packed", 16, 9, 4096),
    Case("toy-1m", "full", 16, 9, 4096),
    Case("toy-30m", "packed", 16, 3, 4096),
    Case("toy-30m", "full", 16, 3, 4096),
    Case("qwen3-0.6b, 2 layers", "packed", 4, 1, 256, "dots", alone=True),
    Case("qwen3-0.6b, 2 layers", "full", 16, 1, 256, "dots", alone=True),
]


def make_work(vocab_size: int, rows: str, num_rows: int, *, seed: int) -> dict[str, np.ndarray]:
    """Random tokens [B, T], segment ids (0: padding) and loss weights of one batch.

    rows: "full" is one sequence a row; "packed" fits ragged sequences of the toy workload's lengths
    into the rows, first fit.
    """
    rng = np.random.default_rng(seed)
    segment_ids_BT = np.zeros((num_rows, LENGTH), np.int32)
    if rows == "full":
        segment_ids_BT[:] = 1
    used, segments, misses = [0] * num_rows, [0] * num_rows, 0
    while rows == "packed" and misses < 20:
        length = int(rng.integers(MIN_TOKENS, MAX_TOKENS + 1))
        row = next((r for r in range(num_rows) if used[r] + length <= LENGTH), None)
        misses += row is None
        if row is not None:
            segments[row] += 1
            segment_ids_BT[row, used[row] : used[row] + length] = segments[row]
            used[row] += length
    return {
        "tokens": rng.integers(0, vocab_size, (num_rows, LENGTH), dtype=np.int32),
        "segment_ids": segment_ids_BT,
        "weights": rng.normal(size=(num_rows, LENGTH)).astype(np.float32),
    }


def _fastest_layouts(case: Case, directory: str) -> dict[str, str]:
    """The peer's best layout for each command, each tried in a process of its own; at the full
    vocabulary a trial would take minutes, and the rows stay as they are."""
    if case.rows == "full" or case.alone:
        return {"score": case.rows, "train": case.rows}
    seconds = {}
    for layout in ("packed", "padded"):
        layouts = {"score": layout, "train": layout}
        with Worker(WORKERS, "peer", directory=directory, layouts=layouts, warm_up=True) as worker:
            for command in layouts:
                seconds[command, layout] = worker.ask(command)["seconds"]
    return {
        command: min(("packed", "padded"), key=lambda layout: seconds[command, layout])
        for command in ("score", "train")
    }


def _measure(case: Case, arguments: dict[str, dict]) -> dict[str, dict]:
    """Seconds of each run, digests and peak bytes of both sides."""
    results = {side: {"score": [], "train": []} for side in arguments}
    turns = [(side,) for side in arguments] if case.alone else [tuple(arguments)]
    for sides in turns:
        with contextlib.ExitStack() as stack:
            workers = {s: stack.enter_context(Worker(WORKERS, s, **arguments[s])) for s in sides}
            for command in ("score", "train"):
                for _ in range(case.runs):
                    for side, worker in workers.items():
                        results[side][command].append(worker.ask(command)["seconds"])
            for side, worker in workers.items():
                results[side] |= worker.close()
    return results


def _check_same_work(case: Case, results: dict[str, dict]) -> None:
    """Raises RuntimeError unless both sides' log-probs agree, before and after training."""
    for digest in {"digest", "trained_digest"} & results["ours"].keys():
        ours, peer = (results[side][digest] for side in ("ours", "peer"))
        if abs(ours - peer) > 1e-3 * max(1.0, abs(peer)):
            raise RuntimeError(
                f"{case.size}, {case.rows} rows: the weighted sum of log-probs ({digest}) is "
                f"{ours} here and {peer} in transformers; the two do not do the same work"
            )


def run_case(case: Case) -> dict:
    """Measures one case: tokens, both sides' seconds and peak bytes, and ratios above 1 for ahead.

    Raises: RuntimeError if the two sides' log-probs of the same tokens do not agree.
    """
    config = CONFIGS[case.size]
    with tempfile.TemporaryDirectory() as directory:
        params = qwen3.init(config, jax.random.key(0), dtype=jnp.float32)
        hf.save(Path(directory) / "model", config, params)
        del params
        work = make_work(config.vocab_size, case.rows, case.num_rows, seed=0)
        np.savez(Path(directory) / "work.npz", **work)
        layouts = _fastest_layouts(case, directory)
        shared = dict(directory=directory, warm_up=not case.alone)
        ours = shared | {"chunk": case.chunk, "remat": case.remat}
        arguments = {"ours": ours, "peer": shared | {"layouts": layouts}}
        results = _measure(case, arguments)
    _check_same_work(case, results)
    ours, peer = results["ours"], results["peer"]
    ratios = {
        f"{kind}_ratio": statistics.median(
            p / o for o, p in zip(ours[kind], peer[kind], strict=True)
        )
        for kind in ("score", "train")
    }
    return {
        **dataclasses.asdict(case),
        "tokens": int((work["segment_ids"] > 0).sum()),
        "peer_layouts": layouts,
        **results,
        **ratios,
        "memory_ratio": ours["peak_bytes"] / peer["peak_bytes"],
    }


HEADINGS = (
    "model", "rows", "tokens", "score tok/s", "ratio", "train tok/s", "ratio", "peak GB", "ratio",
)  # fmt: skip


def _cells(case: dict) -> list[str]:
    """One case under `HEADINGS`: ours / peer in tokens/s and GB, then ours over peer."""
    rates = {
        kind: " / ".join(
            f"{case['tokens'] / statistics.median(case[side][kind]):,.0f}"
            for side in ("ours", "peer")
        )
        for kind in ("score", "train")
    }
    peaks = " / ".join(f"{case[side]['peak_bytes'] / 1e9:.2f}" for side in ("ours", "peer"))
    return [
        case["size"], case["rows"], f"{case['tokens']:,}",
        rates["score"], f"{case['score_ratio']:.2f}",
        rates["train"], f"{case['train_ratio']:.2f}",
        peaks, f"{case['memory_ratio']:.2f}",
    ]  # fmt: skip


def table(cases: list[dict]) -> Table:
    """The results for the console."""
    result = Table(title="mas_jax / transformers (torch), float32, this CPU")
    for heading in HEADINGS:
        result.add_column(heading, justify="left" if heading in ("model", "rows") else "right")
    for case in cases:
        result.add_row(*_cells(case))
    return result


def markdown(cases: list[dict]) -> str:
    """The results as the README shows them."""
    lines = [HEADINGS, ["---"] * len(HEADINGS), *(_cells(case) for case in cases)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


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
    jax.config.update("jax_platforms", "cpu")
    console = Console(width=130)
    record = {"versions": _versions(), "cpus": os.cpu_count(), "cases": []}
    for result in measure(sizes):
        record["cases"].append(result)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1))
        console.log(f"{result['size']}, {result['rows']} rows: done")
    console.print(table(record["cases"]))
    console.print(f"written to {out}")
