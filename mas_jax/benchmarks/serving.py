"""Load on the retrieval server over loopback: many clients at once, beside the same in the process.

`launch/serve_retriever.py` runs in a process of its own. Each client asks for one query, waits for
its passages and asks for the next; no query is asked twice, and nothing is cached. The clients of a
run share one event loop with the measurement, so at 64 of them a latency is mostly the time that
the other 63 take. The peer is `Retriever.search` under as many tasks in this process. Both sides
find the same passages, or the benchmark fails.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import httpx2
import numpy as np
from rich.console import Console
from rich.table import Table

from mas_jax.benchmarks.processes import ROOT
from mas_jax.data.world import make_world
from mas_jax.records import Passage, SearchFailure
from mas_jax.retrieval.client import ClientConfig, RetrieverClient
from mas_jax.retrieval.hashed_ngrams import HashedNgrams
from mas_jax.retrieval.index import IndexConfig, Retriever

SIZES = {"1": 1, "8": 8, "64": 64}  # clients
REQUESTS, WARMUP, RUNS = 1024, 128, 3
K = 3
SERVER = "launch/serve_retriever.py"
START_S = 120.0  # that a server may take to load

Answer = list[Passage] | SearchFailure
Search = Callable[[Sequence[str], int], Awaitable[list[Answer]]]


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start_server(corpus: Path, port: int, *flags: str) -> subprocess.Popen:
    """A server process of hashed n-grams that answers at the port.

    Raises: RuntimeError if it ends, or does not answer within `START_S`.
    """
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    process = subprocess.Popen(
        [sys.executable, SERVER, f"--corpus={corpus}", f"--port={port}", *flags],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx2.TransportError):
            httpx2.get(f"http://127.0.0.1:{port}/health", trust_env=False)
            return process
        time.sleep(0.05)
    process.kill()
    raise RuntimeError(f"the server ended with code {process.wait()} before it answered")


@contextlib.contextmanager
def serving(corpus: Path, port: int) -> Iterator[str]:
    """The URL of a server that runs while the block does."""
    process = start_server(corpus, port)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def write_corpus(passages: Sequence[Passage], path: Path) -> None:
    """A JSONL corpus as `retrieval/corpus.py` reads it."""
    lines = ({"id": p.id, "title": p.title, "text": p.text} for p in passages)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


async def ask_all(
    searches: Sequence[Search], queries: Sequence[str], k: int
) -> tuple[list[Answer], list[float], float]:
    """Answers and latencies (seconds) by query, and the seconds that all took; each search takes
    the next query as soon as it has an answer."""
    answers: list[Answer] = [[]] * len(queries)
    seconds = [0.0] * len(queries)
    waiting = iter(enumerate(queries))

    async def _work(search: Search) -> None:
        for place, query in waiting:  # shared: each query is asked once
            started = time.perf_counter()
            (answers[place],) = await search([query], k)
            seconds[place] = time.perf_counter() - started

    started = time.perf_counter()
    await asyncio.gather(*(_work(search) for search in searches))
    return answers, seconds, time.perf_counter() - started


async def _measure(
    served: Sequence[Search], own: Sequence[Search], queries: Sequence[str]
) -> dict[str, list]:
    """Latencies and seconds of runs of both sides in turn. Raises: RuntimeError if they differ."""
    sides = {"served": served, "in_process": own}
    results = {f"{side}_{what}": [] for side in sides for what in ("latencies", "seconds")}
    parts = itertools.pairwise([0, *range(WARMUP, WARMUP + RUNS * REQUESTS + 1, REQUESTS)])
    for start, end in parts:
        answers = {}
        for side, searches in sides.items():
            answers[side], latencies, total = await ask_all(searches, queries[start:end], K)
            if start:  # after the warm-up
                results[f"{side}_latencies"] += latencies
                results[f"{side}_seconds"].append(total)
        if answers["served"] != answers["in_process"]:
            raise RuntimeError("the server's passages are not those that the process itself finds")
    return results


def run_case(num_clients: int) -> dict:
    """Measures one number of clients: queries/s, latency p50 and p99 (ms) of both sides."""
    world = make_world(0)
    queries = list(dict.fromkeys(q.text for q in world.questions["train"]))
    retriever = Retriever.build(world.passages, HashedNgrams(), IndexConfig())
    patient = ClientConfig(concurrent=1, max_cached=0)
    with tempfile.TemporaryDirectory() as directory:
        corpus = Path(directory) / "corpus.jsonl"
        write_corpus(world.passages, corpus)
        with serving(corpus, free_port()) as url:
            clients = [RetrieverClient(url, config=patient) for _ in range(num_clients)]

            async def _run() -> dict[str, list]:
                own = [retriever.search] * num_clients
                results = await _measure([client.search for client in clients], own, queries)
                await asyncio.gather(*(client.close() for client in clients))
                return results

            results = asyncio.run(_run())
    case = {"clients": num_clients, "passages": len(world.passages), "requests": RUNS * REQUESTS}
    for side in ("served", "in_process"):
        p50, p99 = np.percentile(results[f"{side}_latencies"], (50, 99)) * 1000
        seconds = results[f"{side}_seconds"]
        case |= {f"{side}_p50_ms": float(p50), f"{side}_p99_ms": float(p99)}
        case |= {f"{side}_qps": REQUESTS / statistics.median(seconds), f"{side}_seconds": seconds}
    case["retries"] = sum(client.counts["retries"] for client in clients)
    return case


HEADINGS = (
    "clients", "passages", "queries", "served q/s", "p50 ms", "p99 ms", "in process q/s", "p50 ms",
    "p99 ms", "retries",
)  # fmt: skip


def _cells(case: dict) -> list[str]:
    """One case under `HEADINGS`."""
    cells = [f"{case[name]:,}" for name in ("clients", "passages", "requests")]
    for side in ("served", "in_process"):
        cells.append(f"{case[f'{side}_qps']:,.0f}")
        cells += [f"{case[f'{side}_{name}_ms']:.1f}" for name in ("p50", "p99")]
    return [*cells, str(case["retries"])]


def markdown(record: dict) -> str:
    """The results as the README shows them."""
    lines = [HEADINGS, ["---"] * len(HEADINGS), *(_cells(case) for case in record["cases"])]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(out: Path, sizes: list[str] | None) -> None:
    """Runs the benchmark, writing `out` (JSON) after every case and the table at the end.

    Raises: ValueError for a number that is not measured.
    """
    unknown = set(sizes or ()) - set(SIZES)
    if unknown:
        raise ValueError(f"unknown sizes {sorted(unknown)}; choose from {sorted(SIZES)}")
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line for every request
    console = Console(width=130)
    record = {"cpus": os.cpu_count(), "cases": []}
    for name, num_clients in SIZES.items():
        if sizes is None or name in sizes:
            record["cases"].append(run_case(num_clients))
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(record, indent=1))
            console.log(f"{num_clients} clients: done")
    table = Table(title="The retrieval server over loopback / Retriever.search in the process")
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for case in record["cases"]:
        table.add_row(*_cells(case))
    console.print(table)
    console.print(f"written to {out}")
