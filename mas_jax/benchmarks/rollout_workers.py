"""The two sides of the rollout benchmark: one process each, the same weights, prompts and lengths.

A worker reads a checkpoint and a workload (`workload.py`) and answers every "run" with the seconds
that generating all of its tokens took. Tokens are drawn at temperature 1 and nothing ends early:
each candidate has the number of tokens that was recorded.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from mas_jax.benchmarks import workload
from mas_jax.benchmarks.processes import answer, peak_bytes


def _serve(run: Callable[[], dict], prepare: Callable[[], None]) -> None:
    """Runs once to warm up, then once a line, until it is told to exit; prepare() is not timed."""
    run()
    prepare()
    answer(ready=True)
    for line in sys.stdin:
        if line.strip() == "exit":
            answer(peak_bytes=peak_bytes())
            return
        start = time.perf_counter()
        fields = run()
        answer(seconds=time.perf_counter() - start, **fields)
        prepare()


def engines_on_each_device(config, params, settings):
    """An engine on each device behind one `sample`, settings: `EngineSettings`."""
    import jax

    from mas_jax.model import sharding
    from mas_jax.sampling.engine import Engine
    from mas_jax.sampling.replicas import Replicas

    meshes = [sharding.make_mesh(devices=[device]) for device in jax.devices()]
    return Replicas(
        [
            Engine(config, params, settings, policy="p", decode=lambda tokens: "", mesh=mesh)
            for mesh in meshes
        ]
    )


def ours(directory: Path, work: workload.Workload, *, settings: dict) -> None:
    """mas_jax: an engine a core, every request when those before it in its episode have ended."""
    import jax
    import jax.numpy as jnp

    from mas_jax.model import hf
    from mas_jax.records import SampleKey, Stop
    from mas_jax.sampling.engine_settings import EngineSettings

    jax.config.update("jax_num_cpu_devices", 2)
    config, params = hf.load(directory, dtype=jnp.float32)
    settings = EngineSettings(**(settings | {"buckets": tuple(settings["buckets"])}))
    engines = engines_on_each_device(config, params, settings)

    async def _request(name: tuple[int, int], recorded: workload.Recorded) -> None:
        episode, index = name

        async def _candidate(candidate: int, length: int) -> None:
            path = f"{index}.{candidate}"
            key = SampleKey(0, "eval", 0, str(episode), 0, path, 0)
            [sample] = await engines.sample(
                recorded.prompt, key=key, policy="p", n=1, max_tokens=length, temperature=1.0,
                top_p=1.0, top_k=0, stop=Stop(),
            )  # fmt: skip
            assert len(sample.tokens) == length

        await asyncio.gather(*(_candidate(c, n) for c, n in enumerate(recorded.lengths)))

    def _run() -> dict:
        before = engines.metrics
        asyncio.run(workload.replay(work, _request))
        counts = {name: value - before[name] for name, value in engines.metrics.items()}
        return counts | {"decode_rows": settings.decode_rows}

    _serve(_run, lambda: engines.set_params(params))  # nothing is shared between runs


def generate_batch(model, batch: list[tuple[tuple[int, ...], int]]) -> None:
    """Generates for a batch of (prompt, length), padded on the left, until its longest is done."""
    import torch

    longest, length = max(len(p) for p, _ in batch), max(n for _, n in batch)
    ids = torch.zeros((len(batch), longest), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, _) in enumerate(batch):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    out = model.generate(
        ids, attention_mask=mask, do_sample=True, temperature=1.0, top_p=1.0, top_k=0,
        max_new_tokens=length, min_new_tokens=length, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert out.shape[1] == longest + length


def peer(directory: Path, work: workload.Workload, *, batch_sizes: list[int]) -> None:
    """transformers.generate: all requests at once, in batches of about equal lengths.

    It need not wait for anything. Requests are sorted by the length of their prompts; a batch goes
    on until its longest continuation is done. The best of the batch sizes is chosen by a run of
    each.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="sdpa"
    )
    requests = [(r.prompt, n) for episode in work for r in episode for n in r.lengths]
    requests.sort(key=lambda r: len(r[0]))

    def _run(size: int) -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            for first in range(0, len(requests), size):
                generate_batch(model, requests[first : first + size])
        return time.perf_counter() - start

    generate_batch(model, requests[: batch_sizes[0]])  # the first call pays for what is set up once
    best = min(batch_sizes, key=_run) if len(batch_sizes) > 1 else batch_sizes[0]

    def _run_best() -> dict:
        _run(best)
        return {"batch_size": best}

    _serve(_run_best, lambda: None)


def main() -> None:
    """Entry point of a worker process: the side, and a JSON object of its arguments."""
    side, arguments = sys.argv[1], json.loads(sys.argv[2])
    directory, work = Path(arguments.pop("directory")), Path(arguments.pop("workload"))
    {"ours": ours, "peer": peer}[side](directory, workload.read(work), **arguments)


if __name__ == "__main__":
    main()
