"""Sampling speed of the engine against transformers.generate on the same CPU.

(a) "equal": 64 equal prompts, 128 new tokens each. (b) "hierarchy": the requests of the hierarchy
team in the toy world, recorded while the starting policy plays it: ragged, several turns, each
request made when those before it have ended. The peer is given all of (b) at once, more than a
rollout could give it, sorted by prompt length, in its best batch size (tried in the warm-up); a
batch goes on until its longest continuation has the recorded number of tokens, as generate does.
We sample with an engine for each of two cores, the peer with torch's two threads. Runs alternate;
ratios are medians over neighbouring runs.
"""

import asyncio
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from mas_jax.agents import rollout
from mas_jax.agents.setting import Run, World
from mas_jax.benchmarks import workload
from mas_jax.benchmarks.processes import Worker
from mas_jax.config import default_config
from mas_jax.data.questions import spread
from mas_jax.learning import policy_files, samplers, scenes, teams
from mas_jax.model import hf, qwen3
from mas_jax.rewards.exact_match import exact_match_reward

WORKERS = "mas_jax.benchmarks.rollout_workers"
SETTINGS = dict(context=384, buckets=(128, 256, 384), num_pages=16384, page_size=8)
EQUAL_PROMPT, EQUAL_ROWS, EQUAL_TOKENS = 64, 64, 128


@dataclass(frozen=True)
class Case:
    """A model size, a workload, timed runs a side.

    decode_rows, prefill_blocks: of each engine's calls. episodes: of the hierarchy. batch_sizes:
    that the peer tries.
    """

    size: str
    kind: str
    runs: int
    decode_rows: int
    prefill_blocks: int
    episodes: int = 0
    batch_sizes: tuple[int, ...] = (64,)


CASES = [
    Case("toy-1m", "equal", 5, 32, 64),
    Case("toy-1m", "hierarchy", 3, 32, 32, 560, (64, 128, 256, 512)),
    Case("toy-30m", "equal", 3, 32, 64),
    Case("toy-30m", "hierarchy", 3, 16, 32, 280, (64, 128, 256)),
]


def equal_workload(vocab_size: int) -> workload.Workload:
    """64 episodes of one request each, all with one prompt."""
    rng = np.random.default_rng(0)
    prompt = tuple(rng.integers(0, vocab_size, EQUAL_PROMPT).tolist())
    return [[workload.Recorded(prompt, (EQUAL_TOKENS,), ())] for _ in range(EQUAL_ROWS)]


def hierarchy_workload(num_episodes: int) -> workload.Workload:
    """What the hierarchy asks of its engine while the starting policy plays training questions."""
    config = default_config()
    directory = policy_files.checkpoint_directory(config)
    scene = scenes.make_scene(config, policy_files.load_tokenizer(directory))
    engines = samplers.make_engines(config, directory, scene.tokenizer)
    recorder = workload.Recorder(engines.sample)
    world = World(recorder.sample, scene.retriever.search, exact_match_reward)
    questions = spread(scene.world.questions["train"], num_episodes // 4)
    jobs = [(question, index) for question in questions for index in range(4)]
    team = teams.make_team(config, "hierarchy", scene)

    async def _play() -> None:
        episodes = rollout.play(
            jobs, team, world=world, run=Run(0, "train", 0),
            limits=rollout.Limits(**config.rollout),
        )  # fmt: skip
        async for _ in episodes:
            pass

    asyncio.run(_play())
    return recorder.workload()


def _best_s(function: Callable, argument: jax.Array) -> float:
    """Least seconds of ten calls of a compiled function; argument: of any shape."""
    seconds = []
    for _ in range(11):
        start = time.perf_counter()
        jax.block_until_ready(function(argument))
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def measure_machine(weight_bytes: int) -> dict[str, float]:
    """What this machine can do: FLOP/s of a large float32 matmul, and bytes/s of reading as many
    bytes as the weights have, so that a model which fits the cache is priced by the cache."""
    square = jnp.ones((2048, 2048), jnp.float32)
    weights = jnp.ones((weight_bytes // 4,), jnp.float32)
    return {
        "flops_per_s": 2 * 2048**3 / _best_s(jax.jit(lambda x: x @ x), square),
        "bytes_per_s": weight_bytes / _best_s(jax.jit(jnp.sum), weights),
    }


def floor_s(
    config: qwen3.ModelConfig, work: workload.Workload, counts: dict, machine: dict[str, float]
) -> dict[str, float]:
    """Least seconds that the machine allows for the work: by its FLOPs, and by its bytes.

    FLOPs: the layers' matrices for every token that was computed, the head's for every token drawn,
    attention at half of each context. Bytes: the weights once a device step, and a decoded token's
    keys and values once.
    """
    head = config.vocab_size * config.model_dim
    layers = qwen3.param_count(config) - head
    drawn = workload.num_tokens(work)
    computed = counts["prefill_tokens"] + counts["decode_tokens"]
    lengths = [len(r.prompt) + n / 2 for e in work for r in e for n in r.lengths]
    mean_context = sum(lengths) / len(lengths)
    kv = config.num_layers * config.num_kv_heads * config.head_dim * 2
    queries = config.num_layers * config.num_heads * config.head_dim
    flops = 2 * layers * computed + 2 * head * drawn + 4 * queries * computed * mean_context / 2
    steps = counts["decode_places"] / counts["decode_rows"] + counts["prefill_calls"]
    read_bytes = 4 * ((layers + head) * steps + kv * counts["decode_tokens"] * mean_context)
    return {
        "flops_s": flops / machine["flops_per_s"], "bytes_s": read_bytes / machine["bytes_per_s"]
    }  # fmt: skip


def run_case(case: Case) -> dict:
    """Measures one case: seconds of each run of both sides, tokens, ratio above 1 for ahead.

    Raises: RuntimeError if the engine had to pre-empt, since it then counts work twice.
    """
    config = qwen3.PRESETS[case.size]
    machine = measure_machine(4 * qwen3.param_count(config))
    with tempfile.TemporaryDirectory() as directory:
        params = qwen3.init(config, jax.random.key(0), dtype=jnp.float32)
        model = Path(directory) / "model"
        hf.save(model, config, params)
        work = (
            equal_workload(config.vocab_size)
            if case.kind == "equal"
            else hierarchy_workload(case.episodes)
        )
        path = Path(directory) / "workload.json"
        workload.write(work, path)
        shared = dict(directory=str(model), workload=str(path))
        settings = SETTINGS | dict(decode_rows=case.decode_rows, prefill_blocks=case.prefill_blocks)
        seconds: dict[str, list[float]] = {"ours": [], "peer": []}
        with (
            Worker(WORKERS, "ours", settings=settings, **shared) as ours,
            Worker(WORKERS, "peer", batch_sizes=case.batch_sizes, **shared) as peer,
        ):
            for _ in range(case.runs):
                counts, other = ours.ask("run"), peer.ask("run")
                seconds["ours"].append(counts.pop("seconds"))
                seconds["peer"].append(other["seconds"])
    if counts["preemptions"]:
        raise RuntimeError(f"{counts['preemptions']} pre-emptions; raise num_pages in SETTINGS")
    tokens = workload.num_tokens(work)
    places = counts["prefill_places"] + counts["decode_places"]
    return {
        **dataclasses.asdict(case),
        "tokens": tokens,
        "prompt_tokens": sum(len(r.prompt) * len(r.lengths) for e in work for r in e),
        "seconds": seconds,
        "ratio": statistics.median(
            p / o for o, p in zip(seconds["ours"], seconds["peer"], strict=True)
        ),
        "peer_batch_size": other["batch_size"],
        "counts": counts,
        "work_share": (counts["prefill_tokens"] + counts["decode_tokens"]) / places,
        "machine": machine,
        "floor": floor_s(config, work, counts, machine),
    }


HEADINGS = (
    "model", "work", "prompt / new tokens", "tok/s", "ratio", "rows of work", "floor s", "our s",
)  # fmt: skip


def _cells(case: dict) -> list[str]:
    """One case under `HEADINGS`: new tokens/s ours / peer; floors by FLOPs / by bytes."""
    seconds = {side: statistics.median(case["seconds"][side]) for side in ("ours", "peer")}
    rates = " / ".join(f"{case['tokens'] / seconds[side]:,.0f}" for side in ("ours", "peer"))
    return [
        case["size"], case["kind"], f"{case['prompt_tokens']:,} / {case['tokens']:,}", rates,
        f"{case['ratio']:.2f}", f"{case['work_share']:.2f}",
        " / ".join(f"{case['floor'][name]:.2f}" for name in ("flops_s", "bytes_s")),
        f"{seconds['ours']:.2f}",
    ]  # fmt: skip


def markdown(cases: list[dict]) -> str:
    """The results as the README shows them."""
    lines = [HEADINGS, ["---"] * len(HEADINGS), *(_cells(case) for case in cases)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(out: Path, sizes: list[str] | None) -> None:
    """Runs the benchmark, writing `out` (JSON) after every case and the table at the end.

    Raises: ValueError for an unknown size.
    """
    unknown = set(sizes or ()) - {case.size for case in CASES}
    if unknown:
        raise ValueError(f"unknown sizes {sorted(unknown)}")
    jax.config.update("jax_platforms", "cpu")
    console = Console(width=130)
    record = {"cases": []}
    for case in CASES:
        if sizes is None or case.size in sizes:
            record["cases"].append(run_case(case))
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(record, indent=1))
            console.log(f"{case.size}, {case.kind}: done")
    table = Table(title="mas_jax / transformers.generate, float32, this CPU")
    for heading in HEADINGS:
        table.add_column(heading)
    for case in record["cases"]:
        table.add_row(*_cells(case))
    console.print(table)
    console.print(f"written to {out}")
