"""One GRPO update against TRL's trainer in torch and google-tunix's in JAX, on the same CPU.

All three load one checkpoint and work on the same ragged sequences, each in a process of its own
and in the micro-batches that it is fastest with; their updates alternate, so that a machine whose
speed drifts slows all of them, and what is reported is the median of the ratios of neighbouring
runs. The peers pad prompts and completions to the longest of the batch, as their own code does.
The losses of all updates and the first gradients' norms must agree, or there is no result.
"""

import contextlib
import dataclasses
import json
import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from mas_jax.benchmarks import update_peers, update_workload
from mas_jax.benchmarks.processes import Worker
from mas_jax.benchmarks.update_workload import Batch
from mas_jax.model import hf, logprobs, qwen3

WORKERS = "mas_jax.benchmarks.update_workers"
PEERS = ("trl", "tunix")
WARM_UP = 2  # updates; the second compiles once more in tunix
TOLERANCE = 1e-4  # of the losses, absolute, and of the gradients' norms, relative
ROPE_THETA = 1e6  # tunix's Qwen3 rotates by this one whatever its config says


@dataclass(frozen=True)
class Case:
    """One model size with so many sequences and timed updates a side.

    rows: sizes of a micro-batch that a side tries: packed rows for ours, sequences for the peers,
    divisors of num_sequences.
    """

    size: str
    num_sequences: int
    runs: int
    rows: dict[str, tuple[int, ...]]


CASES = [
    Case("toy-1m", 128, 7, {"ours": (4, 8, 16), "trl": (8, 16, 32), "tunix": (8, 16, 32)}),
    Case("toy-30m", 32, 3, {"ours": (2, 4, 8), "trl": (4, 8, 16), "tunix": (4, 8, 16)}),
]


def config_of(size: str) -> qwen3.ModelConfig:
    """The preset, with the rotary base that all three can run."""
    return dataclasses.replace(qwen3.PRESETS[size], rope_theta=ROPE_THETA)


def around_policy(batch: Batch, config: qwen3.ModelConfig, params: qwen3.Params) -> Batch:
    """The batch with the policy's own log-probs added to the noise in its old ones."""
    tokens_NT = np.concatenate([batch.prompt_ids_NP, batch.completion_ids_NC], axis=1)
    ids_NT = np.concatenate([batch.prompt_mask_NP, batch.completion_mask_NC], axis=1)
    found = []
    for start in range(0, len(tokens_NT), update_workload.GROUP):
        rows = slice(start, start + update_workload.GROUP)
        hidden_BTD = qwen3.hidden(params, config, tokens_NT[rows], segment_ids_BT=ids_NT[rows])
        head = logprobs.Head(hidden_BTD, qwen3.unembedding(params, config), config.vocab_size)
        mask_BT = logprobs.predictable(ids_NT[rows])
        found.append(
            logprobs.token_logprobs(head, tokens_NT[rows], mask_BT, temperature=1.0, chunk=1024)
        )
    policy_NC = np.concatenate(found)[:, batch.prompt_ids_NP.shape[1] :]
    old_NC = np.where(batch.completion_mask_NC, policy_NC + batch.old_logprobs_NC, 0.0)
    return dataclasses.replace(batch, old_logprobs_NC=old_NC.astype(np.float32))


def write_inputs(case: Case, directory: Path) -> Batch:
    """Stores the checkpoint and the batch that all workers read."""
    config = config_of(case.size)
    params = qwen3.init(config, jax.random.key(0), dtype=jnp.float32)
    hf.save(directory / "model", config, params)
    batch = update_workload.make(config.vocab_size, case.num_sequences, seed=0)
    batch = around_policy(batch, config, params)
    update_workload.write(batch, directory / "batch.npz")
    return batch


def _start(side: str, directory: Path, rows: int) -> Worker:
    where = {"python": update_peers.interpreter(side)} if side in PEERS else {}
    return Worker(WORKERS, side, directory=str(directory), rows=rows, **where)


def _fastest_rows(side: str, candidates: tuple[int, ...], directory: Path) -> int:
    """The micro-batch that a side is fastest with, each tried in a process of its own."""
    if len(candidates) == 1:
        return candidates[0]
    seconds = {}
    for rows in candidates:
        with _start(side, directory, rows) as worker:
            answers = [worker.ask("run") for _ in range(WARM_UP + 2)]
        seconds[rows] = min(answer["seconds"] for answer in answers[WARM_UP:])
    return min(candidates, key=seconds.__getitem__)


def _largest(differences: list[float]) -> float:
    return float(np.max(np.abs(differences)))  # NaN if any is


def check_same_work(results: dict[str, list[dict]]) -> dict[str, float]:
    """How far each peer's losses, over all updates, and its first gradient's norm are from ours.

    Later gradients are taken at weights that Adam's division by small moments moved apart by more
    than rounding. Raises: RuntimeError if a difference is above `TOLERANCE`.
    """
    differences = {}
    for side in results.keys() - {"ours"}:
        pairs = list(zip(results["ours"], results[side], strict=True))
        differences[f"{side}_loss"] = _largest([a["loss"] - b["loss"] for a, b in pairs])
        first, other = pairs[0]
        if "grad_norm" in other:
            differences[f"{side}_grad_norm"] = _largest(
                [other["grad_norm"] / first["grad_norm"] - 1]
            )
    wrong = {name: value for name, value in differences.items() if not value <= TOLERANCE}
    if wrong:
        raise RuntimeError(f"the sides do not do the same work; they differ by {wrong}")
    return differences


def run_case(case: Case, console: Console) -> dict:
    """Measures one case: seconds and peak bytes of each side, ratios above 1 for ahead.

    Raises: RuntimeError if the sides' losses or gradients do not agree.
    """
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        batch = write_inputs(case, directory)
        rows = {}
        for side, candidates in case.rows.items():
            rows[side] = _fastest_rows(side, candidates, directory)
            console.log(f"{case.size}: {side} takes {rows[side]} rows a micro-batch")
        workers = {s: stack.enter_context(_start(s, directory, rows[s])) for s in rows}
        results = {side: [] for side in workers}
        for _ in range(WARM_UP + case.runs):
            for side, worker in workers.items():
                results[side].append(worker.ask("run"))
            differences = check_same_work(results)
        peaks = {side: worker.close()["peak_bytes"] for side, worker in workers.items()}
    seconds = {s: [x["seconds"] for x in found[WARM_UP:]] for s, found in results.items()}
    return {
        "size": case.size,
        "num_sequences": case.num_sequences,
        "runs": case.runs,
        "tokens": batch.num_tokens,
        "completion_tokens": batch.num_completion_tokens,
        "padded_positions": batch.prompt_ids_NP.size + batch.completion_ids_NC.size,
        "rows": rows,
        "seconds": seconds,
        "peak_bytes": peaks,
        "differences": differences,
        "ratios": {
            side: statistics.median(
                p / o for o, p in zip(seconds["ours"], seconds[side], strict=True)
            )
            for side in seconds.keys() - {"ours"}
        },
    }


HEADINGS = (
    "model", "sequences", "tokens", "tok/s: ours / TRL / tunix", "ahead of TRL", "ahead of tunix",
    "peak GB: ours / TRL / tunix", "loss and gradient differ by",
)  # fmt: skip


def _cells(case: dict) -> list[str]:
    """One case under `HEADINGS`; rates count the tokens of prompts and completions."""
    sides = ("ours", *PEERS)
    rates = [case["tokens"] / statistics.median(case["seconds"][side]) for side in sides]
    return [
        case["size"], str(case["num_sequences"]), f"{case['tokens']:,}",
        " / ".join(f"{rate:,.0f}" for rate in rates),
        *(f"{case['ratios'][peer]:.2f}" for peer in PEERS),
        " / ".join(f"{case['peak_bytes'][side] / 1e9:.2f}" for side in sides),
        f"{max(case['differences'].values()):.0e}",
    ]  # fmt: skip


def table(cases: list[dict]) -> Table:
    """The results for the console."""
    result = Table(title="One GRPO update, float32, this CPU")
    for heading in HEADINGS:
        result.add_column(heading, justify="left" if heading == "model" else "right")
    for case in cases:
        result.add_row(*_cells(case))
    return result


def markdown(cases: list[dict]) -> str:
    """The results as the README shows them."""
    lines = [HEADINGS, ["---"] * len(HEADINGS), *(_cells(case) for case in cases)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(out: Path, sizes: list[str] | None) -> None:
    """Runs the benchmark, writing `out` (JSON) after every case and the table at the end.

    The first run makes the peers' environments, which takes minutes and 3 GB.
    Raises: ValueError for an unknown size.
    """
    known = {case.size for case in CASES}
    if set(sizes or ()) - known:
        raise ValueError(f"unknown sizes {sorted(set(sizes) - known)}; choose from {sorted(known)}")
    jax.config.update("jax_platforms", "cpu")
    console = Console(width=150)
    record = {"packages": update_peers.PACKAGES, "cpus": os.cpu_count(), "cases": []}
    for case in CASES:
        if sizes is None or case.size in sizes:
            record["cases"].append(run_case(case, console))
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(record, indent=1))
    console.print(table(record["cases"]))
    console.print(f"written to {out}")
