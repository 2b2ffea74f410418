"""How cost grows with episodes, context, corpus and devices, each as a fitted exponent.

An exponent is the slope of log seconds over log size by least squares, with its standard error.
Where linear is the ideal it should be at most `LIMIT`: more would mean that something is done again
for each of the others. Where the ideal is not linear it is fitted beside, to FLOPs. Devices are
virtual ones that share this machine's cores, with as many rows each: twice the devices have twice
the work, so that linear is the ideal here too, and more is what dividing costs.
Every axis has a process of its own. Must not know: peers.
"""

import asyncio
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from mas_jax.agents import rollout
from mas_jax.agents.setting import Run, World
from mas_jax.benchmarks import retrieval, step
from mas_jax.benchmarks.processes import apart
from mas_jax.config import default_config
from mas_jax.data.questions import spread
from mas_jax.files import write_json
from mas_jax.learning import batch as packing
from mas_jax.learning import experience, policy_files, samplers, scenes, teams
from mas_jax.learning.credit import credit
from mas_jax.learning.programme import make_programme
from mas_jax.model import qwen3, scoring, sharding
from mas_jax.records import SampleKey, Stop
from mas_jax.retrieval.exact_index import ExactShard
from mas_jax.retrieval.index import IndexConfig
from mas_jax.retrieval.scann_index import ScannShard
from mas_jax.rewards.exact_match import exact_match_reward
from mas_jax.sampling.engine import Engine
from mas_jax.sampling.engine_settings import EngineSettings

LIMIT = 1.1
GROUP = 8  # episodes of a question
SEGMENT = 256  # tokens of a sequence in packed rows
ENGINE_ROWS, NEW_TOKENS = 8, 32
ROWS_A_DEVICE, ROW_LENGTH = 4, 384
PRESET = "toy-1m"


@dataclass(frozen=True)
class Line:
    """Seconds of one kind of work at each size; ideal: the exponent that the work itself has."""

    what: str
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    ideal: float = 1.0


@dataclass(frozen=True)
class Axis:
    """What grows, the sizes, runs of each, and what measures it."""

    sizes: tuple[int, ...]
    runs: int
    measure: Callable[[Sequence[int], int], list[Line]]


def fit(sizes: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """The exponent b of values = a sizes^b by least squares on logs, and its standard error, NaN
    with fewer than three sizes. Raises: ValueError with fewer than two, or values not above 0."""
    if len(sizes) < 2 or min(values) <= 0 or min(sizes) <= 0:
        raise ValueError(f"sizes {list(sizes)} and values {list(values)}: no exponent fits these")
    x, y = np.log(np.asarray(sizes, float)), np.log(np.asarray(values, float))
    dx, dy = x - x.mean(), y - y.mean()
    exponent = float(dx @ dy / (dx @ dx))
    left = float(np.sum((dy - exponent * dx) ** 2))
    spread = math.sqrt(left / (len(x) - 2) / float(dx @ dx)) if len(x) > 2 else math.nan
    return exponent, spread


# --- the axes -------------------------------------------------------------------------------------


def episodes(sizes: Sequence[int], runs: int) -> list[Line]:
    """Episodes at once: the starting policy plays the hierarchy, then credit and packing."""
    jax.config.update("jax_num_cpu_devices", 2)
    config = default_config()
    directory = policy_files.checkpoint_directory(config)
    scene = scenes.make_scene(config, policy_files.load_tokenizer(directory))
    engines = samplers.make_engines(config, directory, scene.tokenizer)
    team = teams.make_team(config, "hierarchy", scene, training=True)
    world = World(engines.sample, scene.retriever.search, exact_match_reward)
    programme = make_programme(config.stages.student.programme.to_dict())
    params, t = samplers.load_params(config, directory), config.train

    def _once(count: int, number: int) -> tuple[float, float]:
        questions = spread(scene.questions["train"], -(-count // GROUP))
        engines.set_params(params)
        start = time.perf_counter()
        found = experience.collect(
            questions[: -(-count // GROUP)], min(GROUP, count), team, world=world,
            run=Run(0, "train", number), limits=rollout.Limits(**config.rollout),
        )  # fmt: skip
        played = time.perf_counter()
        credited, _ = credit(found, programme)
        packing.pack(
            credited, programme, micro_rows=t.micro_rows, length=t.row_length, agree=lambda n: n
        )
        return played - start, time.perf_counter() - played

    _once(max(sizes[0], GROUP), 0)  # compiles
    number, play_s, pack_s = 1, [], []
    for size in sizes:
        pairs = []
        for _ in range(runs):
            pairs.append(_once(size, number))
            number += 1
        play_s.append(statistics.median(pair[0] for pair in pairs))
        pack_s.append(statistics.median(pair[1] for pair in pairs))
    return [
        Line("rollout", tuple(sizes), tuple(play_s)),
        Line("credit and packing", tuple(sizes), tuple(pack_s)),
    ]


def context(sizes: Sequence[int], runs: int) -> list[Line]:
    """Positions of a sequence: scores and updates, seconds a row (the rows together have as many
    tokens at every length), then the engine's prefill and decode of full contexts."""
    config = qwen3.PRESETS[PRESET]
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    params = qwen3.init(config, jax.random.key(0), dtype=jnp.float32)
    score = scoring.make_score(
        config, mesh, temperature=1.0, chunk=1024, dtype=jnp.float32, backend="auto"
    )
    trainer = step.make_trainer(config, mesh, dtype="float32", remat="none", chunk=1024)
    seconds: dict[str, list[float]] = {}
    for size in sizes:
        rows = max(sizes) // size
        for kind, segment in (("one sequence", size), ("packed sequences", min(SEGMENT, size))):
            batch = step.make_batch(config.vocab_size, (1, rows, size), segment)
            arrays = [jnp.asarray(x[0]) for x in (batch.tokens_MBT, batch.segment_ids_MBT)]
            mask_BT = jnp.ones((rows, size), bool)
            works = {
                "scores": lambda arrays=arrays, mask_BT=mask_BT: score(params, *arrays, mask_BT),
                "update": step.make_update(trainer, (1, rows, size), segment),
            }
            for name, work in works.items():
                taken = statistics.median(step.timed(work, runs)) / rows
                seconds.setdefault(f"{name}, {kind}", []).append(taken)
        for name, taken in _engine_seconds(config, params, size, runs).items():
            seconds.setdefault(name, []).append(taken)
    whole = fit(sizes, [step.forward_flops(config, [n], with_head=True) for n in sizes])[0]
    ideals = {"scores, one sequence": whole, "update, one sequence": whole, "prefill": whole}
    return [
        Line(what, tuple(sizes), tuple(found), ideals.get(what, 1.0))
        for what, found in seconds.items()
    ]


def _engine_seconds(
    config: qwen3.ModelConfig, params: qwen3.Params, size: int, runs: int
) -> dict[str, float]:
    """Device seconds of one prompt's prefill, and of one decode step of rows with full contexts."""
    new = min(NEW_TOKENS, size // 2)
    settings = EngineSettings(
        context=size, buckets=(size,), num_pages=(ENGINE_ROWS + 1) * size // 16 + 2, page_size=16,
        prefill_blocks=32, decode_rows=ENGINE_ROWS, decode_steps=16,
    )  # fmt: skip
    engine = Engine(config, params, settings, policy="p", decode=lambda tokens: "")
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, config.vocab_size, (ENGINE_ROWS, size - new)).tolist()

    async def _all() -> None:
        requests = (
            engine.sample(
                tuple(prompt), key=SampleKey(0, "eval", 0, str(row), 0, "", 0), policy="p", n=1,
                max_tokens=new, temperature=1.0, top_p=1.0, top_k=0, stop=Stop(),
            )
            for row, prompt in enumerate(prompts)
        )  # fmt: skip
        await asyncio.gather(*requests)

    prefill_s, decode_s = [], []
    for _ in range(runs + 1):
        before = asdict(engine.metrics)
        engine.set_params(params)
        asyncio.run(_all())
        found = {name: value - before[name] for name, value in asdict(engine.metrics).items()}
        prefill_s.append(found["prefill_s"] / ENGINE_ROWS)
        decode_s.append(found["decode_s"] * ENGINE_ROWS / found["decode_places"])
    return {
        "prefill": statistics.median(prefill_s[1:]),
        "decode step": statistics.median(decode_s[1:]),
    }


def corpus(sizes: Sequence[int], runs: int) -> list[Line]:
    """Passages: building the index where it has a tree, and a query's search, ScaNN and exact."""
    build_s, search_s, exact_s = [], [], []
    for size in sizes:
        vectors_NE, queries_QE = retrieval.make_vectors(size, retrieval.BATCH, seed=0)
        sizes_of_tree = IndexConfig(backend="scann").tree_sizes(size)
        start = time.perf_counter()
        index = ScannShard(vectors_NE, sizes_of_tree)
        if sizes_of_tree is not None:
            build_s.append((size, time.perf_counter() - start))
        few_QE = queries_QE[:64]  # exact search of a million takes a second for these
        for shard, asked, found in (
            (index, queries_QE, search_s), (ExactShard(vectors_NE), few_QE, exact_s)
        ):  # fmt: skip
            seconds = step.timed(lambda s=shard, q=asked: s.search(q, retrieval.K), runs)
            found.append(statistics.median(seconds) / len(asked))
    lines = [
        Line("search, ScaNN", tuple(sizes), tuple(search_s)),
        Line("search, exact", tuple(sizes), tuple(exact_s)),
    ]
    if len(build_s) > 1:
        lines.append(Line("build, ScaNN's tree", *(tuple(x) for x in zip(*build_s, strict=True))))
    return lines


def devices(sizes: Sequence[int], runs: int) -> list[Line]:
    """Virtual devices, with as many rows each: a training step, data parallel and sharded."""
    seconds: dict[str, list[float]] = {"data": [], "fsdp": []}
    for size in sizes:
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory) / "seconds.json"
            apart(update_on, size, runs, out)
            for name, taken in json.loads(out.read_text()).items():
                seconds[name].append(taken)
    return [Line(f"update, {name}", tuple(sizes), tuple(found)) for name, found in seconds.items()]


def update_on(num_devices: int, runs: int, out: Path) -> None:
    """Writes the seconds of an update on so many virtual devices, by mesh axis."""
    jax.config.update("jax_num_cpu_devices", num_devices)
    found = {}
    for name in ("data", "fsdp"):
        mesh = sharding.make_mesh(**{name: num_devices}, devices=jax.devices()[:num_devices])
        trainer = step.make_trainer(
            qwen3.PRESETS[PRESET], mesh, dtype="float32", remat="none", chunk=1024
        )
        run = step.make_update(trainer, (1, ROWS_A_DEVICE * num_devices, ROW_LENGTH), 128)
        found[name] = statistics.median(step.timed(run, runs))
    out.write_text(json.dumps(found))


AXES = {
    "episodes": Axis((64, 128, 256, 512, 1024), 2, episodes),
    "context": Axis((512, 1024, 2048, 4096, 8192), 3, context),
    "corpus": Axis((10_000, 30_000, 100_000, 300_000, 1_000_000), 3, corpus),
    "devices": Axis((1, 2, 4, 8), 5, devices),
}


# --- all of them ----------------------------------------------------------------------------------


def measure(name: str, axis: Axis, out: Path) -> None:
    """Writes an axis' lines with their exponents: what its process does."""
    start, lines = time.perf_counter(), []
    for line in axis.measure(axis.sizes, axis.runs):
        exponent, error = fit(line.sizes, line.seconds)
        lines.append(asdict(line) | {"exponent": exponent, "standard_error": error})
    write_json(out, {"axis": name, "lines": lines, "seconds": time.perf_counter() - start})


def run(axes: dict[str, Axis], out: Path, *, again: bool, console: Console) -> dict:
    """The record, written to `out` after each axis; an axis that is there is not measured again but
    with `again`."""
    record = json.loads(out.read_text()) if out.exists() else {"cpus": os.cpu_count(), "axes": {}}
    for name, axis in axes.items():
        if name in record["axes"] and not again:
            console.log(f"{name}: in {out} already; --again measures it anew")
            continue
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "axis.json"
            apart(measure, name, axis, path)
            record["axes"][name] = json.loads(path.read_text())
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(out, record)
        console.log(f"{name}: {record['axes'][name]['seconds']:,.0f} s")
    return record


HEADINGS = (
    "grows",
    "from - to",
    "work",
    "seconds, first / last",
    "exponent",
    "ideal",
    "at most 1.1",
)


def _rows(record: dict) -> list[list[str]]:
    """Lines under `HEADINGS`; the last column where linear is the ideal."""
    rows = []
    for name, axis in record["axes"].items():
        for line in axis["lines"]:
            is_linear = line["ideal"] == 1.0
            verdict = ("yes" if line["exponent"] <= LIMIT else "NO") if is_linear else "-"
            rows.append(
                [
                    name, f"{line['sizes'][0]:,} - {line['sizes'][-1]:,}", line["what"],
                    f"{line['seconds'][0]:.3g} / {line['seconds'][-1]:.3g}",
                    f"{line['exponent']:.2f} ± {line['standard_error']:.2f}",
                    f"{line['ideal']:.2f}", verdict,
                ]
            )  # fmt: skip
    return rows


def markdown(record: dict) -> str:
    """The results as the README shows them."""
    lines = [HEADINGS, ["---"] * len(HEADINGS), *_rows(record)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table(record: dict) -> Table:
    """The results for the console."""
    result = Table(title="How cost grows: seconds ~ size ^ exponent, this CPU")
    for heading in HEADINGS:
        result.add_column(heading, justify="left" if heading in ("grows", "work") else "right")
    for row in _rows(record):
        result.add_row(*row)
    return result


def main(out: Path, sizes: list[str] | None, *, again: bool = False) -> None:
    """Runs the axes that `sizes` names, all by default, and prints the table.

    Raises: ValueError for an unknown axis.
    """
    unknown = set(sizes or ()) - set(AXES)
    if unknown:
        raise ValueError(f"unknown sizes {sorted(unknown)}; choose from {sorted(AXES)}")
    console = Console(width=150)
    chosen = {name: axis for name, axis in AXES.items() if sizes is None or name in sizes}
    record = run(chosen, out, again=again, console=console)
    console.print(table(record))
    console.print(f"written to {out}")
