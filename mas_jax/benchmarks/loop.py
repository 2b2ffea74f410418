"""The whole loop of Stage II against a straightforward torch loop on the same CPU.

One step: the hierarchy plays the questions of Stage II's first step, and one update follows, with
the teacher's log-probs of every trace. Ours: continuous batching on an engine a core, credit,
packing, scores, update. Torch: `transformers.generate` in its best static batch size under the same
agents, then TRL's trainer. Both are given the tokens that the starting policy once drew
(`loop_workload.py`), so that episodes, budgets and the update's sequences are equal at any size;
weights are random. TRL's step is timed twice: with every sequence padded to the longest of the
batch, as TRL does, and sorted with each micro-batch as wide as it needs. Torch is not charged for
the new weights' way from TRL's process to the other (ours is, for handing them to its engines), nor
for making its sequences of the episodes (ours is, for credit and packing).
Runs alternate; ratios are medians over neighbouring runs, with the least and the largest. By cause:
ours again with one thing switched off, and from counts of what was computed. The sides' sums of the
teacher's log-probs must agree, or there is no result.
"""

import contextlib
import dataclasses
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from mas_jax.benchmarks import loop_stage, loop_workload, update_peers
from mas_jax.benchmarks.processes import Worker
from mas_jax.config import default_config
from mas_jax.learning.credit import credit
from mas_jax.learning.programme import make_programme
from mas_jax.model import hf, qwen3

WORKERS = "mas_jax.benchmarks.loop_workers"
SWITCHES = {  # variants of ours, and what each is without
    "unshared": "prefix sharing",
    "waves": "continuous batching",
    "unmerged": "merging of equal traces",
    "unpacked": "packing and merging",
}
PADDINGS = ("cut", "trimmed")
TOLERANCE = 1e-4  # of the sums of the teacher's log-probs, relative


@dataclass(frozen=True)
class Case:
    """A model size with so many questions and episodes of each, timed runs, and runs of each
    switch. batch_sizes, rows: what the torch loop tries for generate and for TRL's micro-batches.
    """

    size: str
    questions: int
    group: int
    runs: int
    switch_runs: int
    batch_sizes: tuple[int, ...]
    rows: tuple[int, ...]


CASES = [
    Case("toy-1m", 12, 8, 5, 3, (64, 128, 256, 512), (8, 16, 32)),
    Case("toy-30m", 3, 8, 3, 1, (32, 64, 128), (8, 16)),
]


def write_inputs(case: Case, directory: Path) -> dict[str, int]:
    """Stores weights, script and sequences of a case; returns counts of what will be played."""
    config = qwen3.PRESETS[case.size]
    for name, seed in (("model", 0), ("teacher", 1)):
        params = qwen3.init(config, jax.random.key(seed), dtype=jnp.float32)
        hf.save(directory / name, config, params)
    stage = loop_stage.make(case.questions, case.group)
    script = loop_stage.record(stage)
    loop_workload.write(script, directory / "script.json")
    episodes = stage.play(loop_workload.scripted(script, loop_workload.nothing))
    programme = make_programme(default_config().stages.student.programme.to_dict())
    credited, _ = credit(episodes, programme)
    found = loop_workload.pad(
        [c.trace for c in credited], [c.advantage for c in credited], distilled="searcher"
    )
    loop_workload.write_sequences(found, directory)
    return {
        "episodes": len(episodes),
        "requests": len(script),
        "sampled_tokens": sum(len(s.tokens) for samples in script.values() for s in samples),
        "traces": len(credited),
        "trace_tokens": sum(len(c.trace.tokens) for c in credited),
        "widest": found.batch.prompt_ids_NP.shape[1] + found.batch.completion_ids_NC.shape[1],
    }


def settings() -> dict:
    """Our side's shapes: the toy config's own."""
    config = default_config()
    return {
        "engine": config.engine.to_dict(),
        **{name: config.train[name] for name in ("micro_rows", "row_length", "chunk")},
    }


def _fastest(candidates: tuple[int, ...], start: Callable[[int], Worker], command: str) -> int:
    """The candidate whose process answers the command soonest."""
    if len(candidates) == 1:
        return candidates[0]
    seconds = {}
    for candidate in candidates:
        with start(candidate) as worker:
            seconds[candidate] = min(_total(worker.ask(command)) for _ in range(2))
    return min(candidates, key=seconds.__getitem__)


def _total(answer: dict) -> float:
    return sum(answer["seconds"].values())


def check_same_work(results: dict[str, dict]) -> None:
    """Raises: RuntimeError unless all sides trained on as many sampled tokens, and the teacher's
    log-probs of them have equal sums."""
    ours = results["ours"]
    for side in PADDINGS:
        theirs = results[side]
        apart = abs(theirs["teacher_sum"] / ours["teacher_sum"] - 1)
        if round(ours["tokens"]) != theirs["tokens"] or not apart <= TOLERANCE:
            raise RuntimeError(
                f"the sides do not do the same work: {ours['tokens']} and {theirs['tokens']} "
                f"tokens, whose teacher's log-probs add up to {ours['teacher_sum']} and "
                f"{theirs['teacher_sum']} ({side})"
            )


def run_case(case: Case, console: Console) -> dict:
    """Measures one case: every run's seconds by part, ratios above 1 for ahead, gains by cause.

    Raises: RuntimeError if the sides do not do the same work.
    """
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        counts = write_inputs(case, directory)
        console.log(f"{case.size}: {counts}")
        shared = dict(directory=name)
        played = shared | dict(questions=case.questions, group=case.group)
        trl = dict(python=update_peers.interpreter("trl"), **shared)
        batch_size = _fastest(
            case.batch_sizes, lambda n: Worker(WORKERS, "play", batch_size=n, **played), "play"
        )
        rows = _fastest(case.rows, lambda n: Worker(WORKERS, "trl", rows=n, **trl), "trimmed")
        console.log(f"{case.size}: torch takes batches of {batch_size}, {rows} rows")
        sides = {
            "ours": dict(settings=settings(), **played),
            "play": dict(batch_size=batch_size, **played),
            "trl": dict(rows=rows, **trl),
        }
        workers = {
            side: stack.enter_context(Worker(WORKERS, side, **arguments))
            for side, arguments in sides.items()
        }
        runs, switched = _measure(case, workers, console)
        peaks = {side: worker.close()["peak_bytes"] for side, worker in workers.items()}
    return {
        **dataclasses.asdict(case), **counts, "batch_size": batch_size, "trl_rows": rows,
        "runs_of": runs, "switched": switched, "peak_bytes": peaks,
        **compare(runs, switched),
    }  # fmt: skip


def _measure(case: Case, workers: dict[str, Worker], console: Console) -> tuple[dict, dict]:
    """Answers of all runs by side, and of ours with one thing off, each beside one with all on."""
    ours, play, trl = workers["ours"], workers["play"], workers["trl"]
    for worker, command in ((ours, "all"), (play, "play"), (trl, "trimmed")):
        worker.ask(command)  # compiles, or pays for what torch sets up once
    runs = {side: [] for side in ("ours", "play", *PADDINGS)}
    for _ in range(case.runs):
        for side, worker, command in (
            ("ours", ours, "all"), ("play", play, "play"),
            *((padding, trl, padding) for padding in PADDINGS),
        ):  # fmt: skip
            runs[side].append(worker.ask(command))
        check_same_work({side: found[-1] for side, found in runs.items()})
        console.log(
            f"{case.size}: " + ", ".join(f"{s} {_total(r[-1]):.1f} s" for s, r in runs.items())
        )
    switched = {"host": [ours.ask("host") for _ in range(case.runs)]}
    for variant in SWITCHES:
        ours.ask(variant)  # compiles
        pairs = [(ours.ask("all"), ours.ask(variant)) for _ in range(case.switch_runs)]
        switched[variant] = [{"on": on, "off": off} for on, off in pairs]
        console.log(f"{case.size}: without {SWITCHES[variant]} {_total(pairs[-1][1]):.1f} s")
    return runs, switched


def _ratio(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "largest": max(values)}


def _part(answers: list[dict], name: str) -> float:
    return statistics.median(answer["seconds"][name] for answer in answers)


def compare(runs: dict[str, list[dict]], switched: dict[str, list[dict]]) -> dict:
    """What the runs say: whole seconds, ratios with their spread, and gains by cause.

    gains: how much slower ours is with one thing off (whole step over whole step). work: counted
    places. host_s: of agents, search and tokenizer, with no model; in torch's loop, what is not
    generate; in ours, what no engine's device call covers.
    """
    ours = [_total(answer) for answer in runs["ours"]]
    found = {"seconds": {"ours": ours}, "ratios": {}}
    for padding in PADDINGS:
        pairs = zip(runs["play"], runs[padding], strict=True)
        theirs = found["seconds"][padding] = [_total(a) + _total(b) for a, b in pairs]
        found["ratios"][padding] = _ratio([t / o for o, t in zip(ours, theirs, strict=True)])
    found["gains"] = {
        variant: _ratio([_total(pair["off"]) / _total(pair["on"]) for pair in switched[variant]])
        for variant in SWITCHES
    }
    parts = runs["ours"][0]["seconds"]
    found["parts"] = {
        "ours": {name: _part(runs["ours"], name) for name in parts},
        "torch": {
            "play": _part(runs["play"], "play"),
            **{
                f"{p} {name}": _part(runs[p], name)
                for p in PADDINGS
                for name in ("score", "update")
            },
        },
    }
    last, play = runs["ours"][-1], runs["play"][-1]
    c = last["counts"]
    device_s = [
        (a["counts"]["prefill_s"] + a["counts"]["decode_s"]) / a["engines"] for a in runs["ours"]
    ]
    found["host_s"] = {
        "alone": _part(switched["host"], "play"),
        "torch": statistics.median(
            a["seconds"]["play"] - a["counts"]["generate_s"] for a in runs["play"]
        ),
        "ours": statistics.median(
            a["seconds"]["play"] - s for a, s in zip(runs["ours"], device_s, strict=True)
        ),
    }
    found["work"] = {
        "prefill": (c["prefill_places"], play["counts"]["prefill_places"]),
        "decode": (c["decode_places"], play["counts"]["decode_places"]),
        "train": (last["train_places"], *(runs[p][-1]["train_places"] for p in PADDINGS)),
        "prompt_tokens": c["prompt_tokens"], "shared_tokens": c["shared_tokens"],
    }  # fmt: skip
    return found


HEADINGS = (
    "model", "episodes", "episodes/hour: ours / torch / torch trimmed", "ahead of torch",
    "ahead, trimmed", "without sharing", "without continuous batching", "without merging",
    "without packing", "host s: ours / torch",
)  # fmt: skip


def _with_spread(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['largest']:.2f})"


def _cells(case: dict) -> list[str]:
    """One case under `HEADINGS`; "without": whole steps of ours, times what they take with all."""
    rates = [
        3600 * case["episodes"] / statistics.median(case["seconds"][side])
        for side in ("ours", *PADDINGS)
    ]
    return [
        case["size"], str(case["episodes"]), " / ".join(f"{rate:,.0f}" for rate in rates),
        *(_with_spread(case["ratios"][padding]) for padding in PADDINGS),
        *(_with_spread(case["gains"][variant]) for variant in SWITCHES),
        " / ".join(f"{case['host_s'][side]:.2f}" for side in ("ours", "torch")),
    ]  # fmt: skip


WORK_HEADINGS = (
    "model", "seconds of ours: play / score / update", "torch: play / score / update",
    "trimmed: score / update", "prompt tokens / found in a cache", "places prefilled: ours / torch",
    "decoded", "trained on: ours / torch / trimmed",
)  # fmt: skip


def _work_cells(case: dict) -> list[str]:
    """One case under `WORK_HEADINGS`; torch's seconds with TRL's own padding, then trimmed."""
    ours, torch, work = case["parts"]["ours"], case["parts"]["torch"], case["work"]
    return [
        case["size"],
        " / ".join(f"{ours[name]:.2f}" for name in ("play", "score", "update")),
        " / ".join(f"{torch[name]:.2f}" for name in ("play", "cut score", "cut update")),
        " / ".join(f"{torch[name]:.2f}" for name in ("trimmed score", "trimmed update")),
        f"{work['prompt_tokens']:,} / {work['shared_tokens']:,}",
        *(" / ".join(f"{n:,}" for n in work[name]) for name in ("prefill", "decode", "train")),
    ]  # fmt: skip


def markdown(cases: list[dict]) -> str:
    """The results as the README shows them: speed and its causes, then seconds and work."""
    tables = []
    for headings, cells in ((HEADINGS, _cells), (WORK_HEADINGS, _work_cells)):
        lines = [headings, ["---"] * len(headings), *map(cells, cases)]
        tables.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(tables)


def tables(cases: list[dict]) -> list[Table]:
    """The results for the console."""
    found = []
    titles = ("One step of Stage II, float32, this CPU", "Where its time goes")
    for title, headings, cells in zip(
        titles, (HEADINGS, WORK_HEADINGS), (_cells, _work_cells), strict=True
    ):
        table = Table(title=title)
        for heading in headings:
            table.add_column(heading, justify="left" if heading == "model" else "right")
        for case in cases:
            table.add_row(*cells(case))
        found.append(table)
    return found


def main(out: Path, sizes: list[str] | None) -> None:
    """Runs the benchmark, writing `out` (JSON) after every case and the tables at the end.

    The first run makes TRL's environment, which takes minutes and 1.5 GB.
    Raises: ValueError for an unknown size.
    """
    known = {case.size for case in CASES}
    if set(sizes or ()) - known:
        raise ValueError(f"unknown sizes {sorted(set(sizes) - known)}; choose from {sorted(known)}")
    jax.config.update("jax_platforms", "cpu")
    console = Console(width=180)
    record = {"packages": update_peers.PACKAGES["trl"], "cpus": os.cpu_count(), "cases": []}
    for case in CASES:
        if sizes is None or case.size in sizes:
            record["cases"].append(run_case(case, console))
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(record, indent=1))
    console.print(*tables(record["cases"]))
    console.print(f"written to {out}")
