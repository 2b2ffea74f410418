"""All benchmarks one after another: one JSON, one table, taken up where it was left.

Each runs in a process of its own, so that none inherits another's devices or memory; one that fails
is reported and the others go on. Must not know: what a benchmark measures, but for its headline.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mas_jax.benchmarks.processes import apart
from mas_jax.files import write_json

Benchmark = Callable[[Path, list[str] | None], None]
Line = tuple[str, str, float | None]  # case, what was measured, ratio to the peer (above 1: ahead)


def _over_cases(line: Callable[[dict], list[Line]]) -> Callable[[dict], list[Line]]:
    return lambda record: [found for case in record["cases"] for found in line(case)]


def _encoder(record: dict) -> list[Line]:
    rate = record["count"] / statistics.median(record["seconds"]["ours"])
    return [("MiniLM", f"{rate:,.0f} passages/s", record["ratio"])]


def _index_build(record: dict) -> list[Line]:
    ours, exact = record["scann_queries_per_s"], record["exact_queries_per_s"]
    return [(f"{record['passages']:,} passages", f"{ours:,.0f} queries/s", ours / exact)]


def _loop(case: dict) -> list[Line]:
    rate = 3600 * case["episodes"] / statistics.median(case["seconds"]["ours"])
    return [
        (
            case["size"],
            f"{rate:,.0f} episodes/h, torch pads to {name}",
            case["ratios"][key]["median"],
        )
        for key, name in (("cut", "the batch"), ("trimmed", "micro-batches"))
    ]


def _model(case: dict) -> list[Line]:
    rates = {
        kind: case["tokens"] / statistics.median(case["ours"][kind]) for kind in ("score", "train")
    }
    return [
        (f"{case['size']}, {case['rows']}", f"{kind} {rate:,.0f} tok/s", case[f"{kind}_ratio"])
        for kind, rate in rates.items()
    ]


def _quality(record: dict) -> list[Line]:
    return [
        (name, f"{entry['passages']:,} passages, {entry['questions']:,} questions", None)
        for name, entry in record["sets"].items()
    ]


def _rollout(case: dict) -> list[Line]:
    rate = case["tokens"] / statistics.median(case["seconds"]["ours"])
    return [(f"{case['size']}, {case['kind']}", f"{rate:,.0f} tok/s", case["ratio"])]


def _update(case: dict) -> list[Line]:
    rate = case["tokens"] / statistics.median(case["seconds"]["ours"])
    return [
        (case["size"], f"{rate:,.0f} tok/s, against {peer}", ratio)
        for peer, ratio in case["ratios"].items()
    ]


HEADLINES: Mapping[str, Callable[[dict], list[Line]]] = {
    "encoder": _encoder,
    "index_build": _index_build,
    "loop": _over_cases(_loop),
    "model": _over_cases(_model),
    "retrieval": _over_cases(
        lambda c: [(f"{c['vectors']:,} vectors", f"{c['scann_qps']:,.0f} queries/s", c["ratio"])]
    ),
    "retrieval_quality": _quality,
    "rollout": _over_cases(_rollout),
    "serving": _over_cases(
        lambda c: [(f"{c['clients']} clients", f"{c['served_qps']:,.0f} queries/s", None)]
    ),
    "update": _over_cases(_update),
}


def run_one(benchmark: Benchmark) -> dict:
    """One benchmark's record, or what became of it: {"failed": a line}."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        out, found = Path(directory) / "record.json", {}
        try:
            apart(benchmark, out, None)
            found["record"] = json.loads(out.read_text())
        except RuntimeError as error:
            found["failed"] = str(error)
    return found | {"seconds": time.perf_counter() - start}


def run(
    benchmarks: Mapping[str, Benchmark], out: Path, *, again: bool, console: Console
) -> dict[str, dict]:
    """Entries by name, written to `out` after each; one that has a record there is not run again
    but with `again`, one that failed is."""
    entries = json.loads(out.read_text()) if out.exists() else {}
    done = set() if again else {name for name, entry in entries.items() if "record" in entry}
    for name, benchmark in benchmarks.items():
        if name in done:
            console.log(f"{name}: in {out} already; --again measures it anew")
            continue
        console.log(f"{name} ...")
        entries[name] = run_one(benchmark)
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(out, entries)
        console.log(
            f"{name}: {entries[name].get('failed', 'done')}, {entries[name]['seconds']:,.0f} s"
        )
    return entries


def table(entries: Mapping[str, dict]) -> Table:
    """The headline of every benchmark: ours, and how far ahead of its peer where it has one."""
    result = Table(title="All benchmarks; ratio above 1: ahead of the peer")
    for heading in ("benchmark", "case", "ours", "ratio", "minutes"):
        result.add_column(heading, justify="right" if heading in ("ratio", "minutes") else "left")
    for name, entry in entries.items():
        minutes = f"{entry['seconds'] / 60:.1f}"
        if "failed" in entry:
            result.add_row(name, "FAILED", entry["failed"], "", minutes)
            continue
        for number, (case, ours, ratio) in enumerate(HEADLINES[name](entry["record"])):
            first = (name, minutes) if number == 0 else ("", "")
            result.add_row(first[0], case, ours, "" if ratio is None else f"{ratio:.2f}", first[1])
    return result


def main(
    benchmarks: Mapping[str, Benchmark], out: Path, names: list[str] | None, *, again: bool
) -> None:
    """Runs those of the benchmarks that are named, or all, and prints the table of all in `out`.

    Raises: ValueError for an unknown name; SystemExit at the end if one failed.
    """
    unknown = set(names or ()) - set(benchmarks)
    if unknown:
        raise ValueError(f"unknown sizes {sorted(unknown)}; choose from {sorted(benchmarks)}")
    console = Console(width=130)
    chosen = {name: run for name, run in benchmarks.items() if names is None or name in names}
    entries = run(chosen, out, again=again, console=console)
    console.print(table(entries))
    console.print(f"written to {out}")
    failed = sorted(name for name in chosen if "failed" in entries[name])
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; the same command tries these again")
