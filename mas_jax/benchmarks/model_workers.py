"""The two sides of the model benchmark: one process each, the same weights and tokens.

A worker prints one JSON line when it is ready, then answers each line on its standard input
("score", "train") with the seconds that one run of it took, and "exit" with its peak memory.
Both compute the log-prob of every predictable token (score) and one AdamW step on the loss
-sum(weight x log-prob) / tokens (train), in float32.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

LEARNING_RATE = 1e-5


def _answer(**fields) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def serve(runs: dict[str, Callable[[], None]], *, warm_up: bool, **ready) -> None:
    """Runs what the parent asks for, one timed run a line, until it says "exit"."""
    if warm_up:
        for run in runs.values():
            run()
    _answer(**ready)
    for line in sys.stdin:
        command = line.strip()
        if command == "exit":
            peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            _answer(peak_bytes=1024 * peak_kb)
            return
        start = time.perf_counter()
        runs[command]()
        _answer(seconds=time.perf_counter() - start)


def ours(directory: Path, work: dict[str, np.ndarray], *, chunk: int, warm_up: bool) -> None:
    """mas_jax: packed rows as they are, the chunked log-prob kernel, one jitted step."""
    import jax
    import jax.numpy as jnp
    import optax

    from mas_jax.model import hf, logprobs, qwen3

    config, params = hf.load(directory, dtype=jnp.float32)
    optimizer = optax.adamw(LEARNING_RATE)
    tokens_BT, segment_ids_BT = jnp.asarray(work["tokens"]), jnp.asarray(work["segment_ids"])
    weights_BT = jnp.asarray(work["weights"])
    mask_BT = logprobs.predictable(segment_ids_BT)

    def score(params):
        hidden_BTD = qwen3.hidden(params, config, tokens_BT, segment_ids_BT=segment_ids_BT)
        head = logprobs.Head(hidden_BTD, qwen3.unembedding(params, config), config.vocab_size)
        return logprobs.token_logprobs(head, tokens_BT, mask_BT, temperature=1.0, chunk=chunk)

    def train(params, state):
        def loss(params):
            return -jnp.sum(score(params) * weights_BT) / jnp.sum(mask_BT)

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    holder = {"state": (params, optimizer.init(params))}
    score_fn = jax.jit(score).lower(params).compile()
    train_fn = jax.jit(train, donate_argnums=(0, 1)).lower(*holder["state"]).compile()
    logprobs_BT = np.asarray(score_fn(params))
    del params

    def run_score() -> None:
        jax.block_until_ready(score_fn(holder["state"][0]))

    def run_train() -> None:
        holder["state"] = jax.block_until_ready(train_fn(*holder["state"]))

    digest = float(np.sum(logprobs_BT.astype(np.float64) * work["weights"]))
    serve({"score": run_score, "train": run_train}, warm_up=warm_up, digest=digest, layout="packed")


def _padded(work: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Each segment in a row of its own, padded to the longest: the peer's other layout."""
    ids_BT = work["segment_ids"]
    spans = [(b, ids_BT[b] == i) for b in range(len(ids_BT)) for i in np.unique(ids_BT[b]) if i]
    longest = max(int(inside_T.sum()) for _, inside_T in spans)
    padded = {name: np.zeros((len(spans), longest), x.dtype) for name, x in work.items()}
    for row, (b, inside_T) in enumerate(spans):
        for name, x in work.items():
            padded[name][row, : int(inside_T.sum())] = x[b][inside_T]
    padded["segment_ids"] = (padded["segment_ids"] > 0).astype(np.int32)
    return padded


def _positions(segment_ids_BT: np.ndarray) -> np.ndarray:
    positions_BT = np.zeros_like(segment_ids_BT)
    for t in range(1, segment_ids_BT.shape[1]):
        same_B = segment_ids_BT[:, t] == segment_ids_BT[:, t - 1]
        positions_BT[:, t] = np.where(same_B, positions_BT[:, t - 1] + 1, 0)
    return positions_BT


def peer(
    directory: Path, work: dict[str, np.ndarray], *, layouts: list[str], warm_up: bool
) -> None:
    """transformers in torch: scaled-dot-product attention, fused cross-entropy, fused AdamW.

    layouts: what to try ("packed": the same rows, told apart by their positions; "padded": a
    sequence a row; "full": whole rows, no mask); the one that trains faster is measured.
    """
    import torch
    from torch.nn import functional
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="sdpa"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def runs_of(layout: str):
        laid_out = _padded(work) if layout == "padded" else work
        tokens_BT = torch.from_numpy(laid_out["tokens"].astype(np.int64))
        ids_BT = torch.from_numpy(laid_out["segment_ids"])
        # targets moved instead of logits: a shifted view of [B, T, V] would be copied
        targets_BT = tokens_BT.roll(-1, dims=1)
        mask_BT = (ids_BT == ids_BT.roll(-1, dims=1)) & (ids_BT > 0)
        mask_BT[:, -1] = False
        weights_BT = torch.from_numpy(laid_out["weights"]).roll(-1, dims=1)
        inputs = {
            "full": lambda: {},
            "padded": lambda: {"attention_mask": ids_BT.long()},
            "packed": lambda: {
                "position_ids": torch.from_numpy(_positions(laid_out["segment_ids"]))
            },
        }[layout]()

        def score() -> torch.Tensor:
            logits_BTV = model(input_ids=tokens_BT, use_cache=False, **inputs).logits
            nll = functional.cross_entropy(
                logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none"
            )
            return torch.where(mask_BT, -nll.view_as(mask_BT), 0.0)

        def run_score() -> torch.Tensor:
            with torch.inference_mode():
                return score()

        def run_train() -> None:
            (-(score() * weights_BT).sum() / mask_BT.sum()).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return run_score, run_train, weights_BT

    tried = {layout: runs_of(layout) for layout in layouts}
    run_score, _, weights_BT = tried[layouts[0]]
    digest = float((run_score().double() * weights_BT).sum())
    best = layouts[0]
    if len(layouts) > 1:
        seconds = {}
        for layout, (_, run_train, _) in tried.items():
            run_train()
            start = time.perf_counter()
            run_train()
            seconds[layout] = time.perf_counter() - start
        best = min(seconds, key=seconds.get)
    run_score, run_train, _ = tried[best]
    serve({"score": run_score, "train": run_train}, warm_up=warm_up, digest=digest, layout=best)


def main() -> None:
    """Entry point of a worker process: the side, and a JSON object of its arguments."""
    side, arguments = sys.argv[1], json.loads(sys.argv[2])
    directory = Path(arguments.pop("directory"))
    work = dict(np.load(directory / "work.npz"))
    {"ours": ours, "peer": peer}[side](directory / "model", work, **arguments)


if __name__ == "__main__":
    main()
