"""What int8 sampling costs and saves: the same prompts through an engine of either kind.

For each model: the gap between what the sampler drew with and what the trainer's full weights give
its tokens (mean |log-prob difference|, KL(sampler || trainer), and of the importance weights the
effective sample size and the share above the cap), the bytes of the sampler's weights, the
temporaries of its largest decode program, and decoded tokens a second, runs of both kinds in turn.
The toy policy answers the prompts of the hierarchy that it plays, SmolLM2 passages of text.
"""

import asyncio
import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from mas_jax.benchmarks.rollout import hierarchy_workload
from mas_jax.config import default_config
from mas_jax.learning import policy_files
from mas_jax.learning.losses import importance_weights
from mas_jax.model import hf, packaged, qwen3, scoring, sharding
from mas_jax.records import Sample, SampleKey, Stop
from mas_jax.sampling.engine import Engine
from mas_jax.sampling.engine_settings import WEIGHTS, EngineSettings

MODELS = ("toy", "smollm2")
CAP = 2.0  # of importance weights, config.py's
TEXT = (
    "In the year the bridge was built the town had two schools, a mill and a market that drew "
    "farmers from the whole valley; its first mayor, a printer by trade, kept a diary of it all. "
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, prompts, tokens drawn of each, timed runs of either kind."""

    name: str
    directory: Path
    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int
    runs: int
    settings: EngineSettings


def make_case(name: str) -> Case:
    """The case of a model, "toy" or "smollm2". Raises: FileNotFoundError without its weights."""
    if name == "toy":
        directory = policy_files.checkpoint_directory(default_config())
        work = hierarchy_workload(64)
        prompts = [request.prompt for episode in work for request in episode]
        settings = EngineSettings(
            context=384, buckets=(384,), num_pages=4096, page_size=8, decode_rows=64
        )
        return Case(name, directory, tuple(prompts[:256]), 48, 5, settings)
    directory = packaged.smollm2()
    tokens = policy_files.load_tokenizer(directory).encode(TEXT)
    prompts = tuple(tuple(tokens[i:] + tokens[:i]) for i in range(0, 32))
    settings = EngineSettings(context=128, buckets=(128,), num_pages=600, decode_rows=32)
    return Case(name, directory, prompts, 64, 2, settings)


def sample(engine: Engine, case: Case) -> list[Sample]:
    """One continuation of each prompt, at temperature 1, all as long as the case says."""

    async def _one(index: int, prompt: tuple[int, ...]) -> Sample:
        key = SampleKey(0, "eval", 0, str(index), 0, "int8", 0)
        [found] = await engine.sample(
            prompt, key=key, policy="p", n=1, max_tokens=case.new_tokens, temperature=1.0,
            top_p=1.0, top_k=0, stop=Stop(),
        )  # fmt: skip
        return found

    async def _all() -> list[Sample]:
        return await asyncio.gather(*(_one(i, p) for i, p in enumerate(case.prompts)))

    return asyncio.run(_all())


def gap(
    params: qwen3.Params, config: qwen3.ModelConfig, case: Case, samples: Sequence[Sample]
) -> dict[str, float]:
    """How far the samples' log-probs are from the trainer's, in nats, and what weights they get."""
    score = scoring.make_score(
        config, sharding.make_mesh(devices=jax.devices()[:1]), temperature=1.0, chunk=1024,
        dtype=jnp.dtype("float32"), backend="auto",
    )  # fmt: skip
    rows, length = 16, case.settings.context
    parts = []
    for first in range(0, len(samples), rows):
        tokens_BT = np.zeros((rows, length), np.int32)
        sampler_BT = np.zeros((rows, length), np.float32)
        mask_BT, segments_BT = np.zeros((rows, length), bool), np.zeros((rows, length), np.int32)
        pairs = zip(case.prompts[first:], samples[first : first + rows], strict=False)
        for row, (prompt, one) in enumerate(pairs):
            drawn = slice(len(prompt), len(prompt) + len(one.tokens))
            tokens_BT[row, : drawn.stop] = prompt + one.tokens
            segments_BT[row, : drawn.stop] = 1
            mask_BT[row, drawn], sampler_BT[row, drawn] = True, one.logprobs
        found_BT = score(params, tokens_BT, segments_BT, mask_BT).logprobs_BT
        parts.append((np.asarray(found_BT)[mask_BT], sampler_BT[mask_BT]))
    trainer_1X, sampler_1X = (np.concatenate(x)[None] for x in zip(*parts, strict=True))
    weights_1X, metrics = importance_weights(
        trainer_1X, sampler_1X, jnp.ones_like(trainer_1X), jnp.ones(trainer_1X.shape, jnp.int32),
        form="token", cap=CAP,
    )  # fmt: skip
    found = {name: float(total / count) for name, (total, count) in metrics.items()}
    raw_1X = np.exp(np.float64(trainer_1X - sampler_1X))
    return {
        "tokens": trainer_1X.size,
        "mean_abs_nats": float(np.abs(trainer_1X - sampler_1X).mean()),
        "kl_nats": found["sampler_trainer_kl"],
        "max_abs_nats": float(np.abs(trainer_1X - sampler_1X).max()),
        "ess_frac": float(raw_1X.mean() ** 2 / np.square(raw_1X).mean()),
        "truncated_frac": found["importance_cap_frac"],
        "mean_weight": float(np.asarray(weights_1X).mean()),
    }


def run_case(case: Case) -> dict:
    """Figures of both kinds of weights."""
    config, params = hf.load(case.directory, dtype=jnp.float32)
    engines, results, rates = {}, {}, {kind: [] for kind in WEIGHTS}
    for kind in WEIGHTS:
        settings = dataclasses.replace(case.settings, weights=kind)
        engine = Engine(config, params, settings, policy="p", decode=lambda tokens: "")
        drawn = sample(engine, case)  # compiles, too
        results[kind] = gap(params, config, case, drawn) | {
            "weight_bytes": engine.device.weight_bytes,
            "decode_temp_bytes": engine.device.temporary_bytes("decode", settings.context),
        }
        engines[kind] = engine
    for _ in range(case.runs):
        for kind, engine in engines.items():
            engine.set_params(params)  # nothing is shared between runs
            before = dataclasses.replace(engine.metrics)
            sample(engine, case)
            m = engine.metrics
            seconds = m.decode_s - before.decode_s
            rates[kind].append((m.decode_tokens - before.decode_tokens) / seconds)
    for kind, numbers in rates.items():
        results[kind]["decode_tokens_per_s"] = statistics.median(numbers)
    return {"model": case.name, "runs": case.runs} | results


def show(results: Sequence[dict], console: Console) -> None:
    """A line for each model and kind of weights."""
    table = Table("model", "weights", "MB", "decode temp MB", "tokens/s", "|d| nats", "KL nats",
                  "ESS", f"above {CAP:g}")  # fmt: skip
    for result in results:
        for kind in WEIGHTS:
            r = result[kind]
            table.add_row(
                result["model"], kind, f"{r['weight_bytes'] / 1e6:.2f}",
                f"{r['decode_temp_bytes'] / 1e6:.2f}", f"{r['decode_tokens_per_s']:.0f}",
                f"{r['mean_abs_nats']:.2e}", f"{r['kl_nats']:.2e}", f"{r['ess_frac']:.5f}",
                f"{r['truncated_frac']:.2e}",
            )  # fmt: skip
    console.print(table)


def main(out: Path, sizes: Sequence[str] | None) -> None:
    """Measures the models named by `sizes`, default both, and writes the figures as JSON.

    Raises: ValueError for an unknown one.
    """
    if unknown := set(sizes or ()) - set(MODELS):
        raise ValueError(f"unknown sizes {sorted(unknown)}; choose from {sorted(MODELS)}")
    results = [run_case(make_case(name)) for name in sizes or MODELS]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1))
    show(results, Console(width=110))
