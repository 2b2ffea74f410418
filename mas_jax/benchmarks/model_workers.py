"""The two sides of the model benchmark: one process each, the same weights and tokens.

A worker prints one JSON line when it is ready, then answers each line on its standard input
("score", "train") with the seconds that one run of it took, and "exit" with its peak memory and the
sum of weight x log-prob after the training runs it made, by which the parent sees that both sides
did the same work. Score is the log-prob of every predictable token; train is one AdamW step on
-sum(weight x log-prob) / tokens. All in float32.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mas_jax.benchmarks.processes import answer, peak_bytes

LEARNING_RATE, WEIGHT_DECAY = 1e-5, 0.01


def _serve(
    score: Callable[[], np.ndarray],
    train: Callable[[], None],
    weights_BT: np.ndarray,
    warm_up: bool,
) -> None:
    """Runs what the parent asks for, one timed run a line, until it says "exit".

    score returns log-probs [B, T]; a digest is their sum weighted by weights_BT. With a warm-up
    there is one from before all training and one from after; without, one of the last scoring.
    """
    last = [np.zeros_like(weights_BT)]

    def _score() -> None:
        last[0] = score()

    def _digest() -> float:
        return float(np.sum(np.float64(last[0]) * weights_BT))

    runs = {"score": _score, "train": train}
    digests = {}
    if warm_up:
        _score()
        digests["digest"] = _digest()
        train()
    answer(ready=True)
    for line in sys.stdin:
        command = line.strip()
        if command == "exit":
            peak = peak_bytes()
            if warm_up:
                _score()
            digests["trained_digest" if warm_up else "digest"] = _digest()
            answer(peak_bytes=peak, **digests)
            return
        start = time.perf_counter()
        runs[command]()
        answer(seconds=time.perf_counter() - start)


def _weighted_nll(logprobs_C, weights_C):
    return -logprobs_C * weights_C


def ours(
    directory: Path, work: dict[str, np.ndarray], *, chunk: int, remat: str, warm_up: bool
) -> None:
    """mas_jax: packed rows as they are, the chunked log-prob and loss kernels, one jitted step."""
    import jax
    import jax.numpy as jnp
    import optax

    from mas_jax.model import hf, logprobs, qwen3

    config, params = hf.load(directory, dtype=jnp.float32)
    optimizer = optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    batch = {name: jnp.asarray(x) for name, x in work.items()}

    def _head_and_mask(params, batch):
        segment_ids_BT = batch["segment_ids"]
        hidden_BTD = qwen3.hidden(
            params, config, batch["tokens"], segment_ids_BT=segment_ids_BT, remat=remat
        )
        head = logprobs.Head(hidden_BTD, qwen3.unembedding(params, config), config.vocab_size)
        return head, logprobs.predictable(segment_ids_BT)

    def _score(params, batch):
        head, mask_BT = _head_and_mask(params, batch)
        return logprobs.token_logprobs(head, batch["tokens"], mask_BT, temperature=1.0, chunk=chunk)

    def _train(params, state, batch):
        def _loss(params):
            head, mask_BT = _head_and_mask(params, batch)
            loss, _ = logprobs.loss_sum(
                _weighted_nll, head, batch["tokens"], mask_BT, batch["weights"],
                with_entropy=False, temperature=1.0, chunk=chunk,
            )  # fmt: skip
            return loss / jnp.sum(mask_BT)

        updates, state = optimizer.update(jax.grad(_loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    held = [params, optimizer.init(params)]
    del params
    score_fn = jax.jit(_score).lower(held[0], batch).compile()
    train_fn = jax.jit(_train, donate_argnums=(0, 1)).lower(*held, batch).compile()

    def _run_train() -> None:
        held[:] = jax.block_until_ready(train_fn(*held, batch))

    _serve(lambda: np.asarray(score_fn(held[0], batch)), _run_train, work["weights"], warm_up)


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


def _laid_out(work: dict[str, np.ndarray], layout: str):
    """The work as torch tensors: tokens, targets, mask and weights [B, T], and the model's inputs.

    layout: "full" (whole rows, no mask), "packed" (the same rows, whose sequences transformers
    tells apart by their positions) or "padded" (a sequence a row, with an attention mask).
    """
    import torch

    work = _padded(work) if layout == "padded" else work
    tokens_BT = torch.from_numpy(work["tokens"].astype(np.int64))
    ids_BT = torch.from_numpy(work["segment_ids"])
    # targets moved instead of logits: a shifted view of [B, T, V] would be copied
    mask_BT = (ids_BT == ids_BT.roll(-1, dims=1)) & (ids_BT > 0)
    mask_BT[:, -1] = False
    weights_BT = torch.from_numpy(work["weights"]).roll(-1, dims=1)
    inputs = {}
    if layout == "padded":
        inputs = {"attention_mask": ids_BT.long()}
    if layout == "packed":
        inputs = {"position_ids": torch.from_numpy(_positions(work["segment_ids"]))}
    return tokens_BT, tokens_BT.roll(-1, dims=1), mask_BT, weights_BT, inputs


def peer(directory: Path, work: dict[str, np.ndarray], *, layouts: dict, warm_up: bool) -> None:
    """transformers in torch: scaled-dot-product attention, fused cross-entropy, fused AdamW.

    layouts: the layout for each of "score" and "train", see `_laid_out`.
    """
    import torch
    from torch.nn import functional
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="sdpa"
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
    )
    laid_out = {layout: _laid_out(work, layout) for layout in set(layouts.values())}

    def _score(command: str) -> torch.Tensor:
        tokens_BT, targets_BT, mask_BT, _, inputs = laid_out[layouts[command]]
        logits_BTV = model(input_ids=tokens_BT, use_cache=False, **inputs).logits
        nll = functional.cross_entropy(
            logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none"
        )
        return torch.where(mask_BT, -nll.view_as(mask_BT), 0.0)

    def _run_score() -> np.ndarray:
        with torch.inference_mode():
            return _score("score").numpy()

    def _run_train() -> None:
        _, _, mask_BT, weights_BT, _ = laid_out[layouts["train"]]
        (-(_score("train") * weights_BT).sum() / mask_BT.sum()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    _serve(_run_score, _run_train, laid_out[layouts["score"]][3].numpy(), warm_up)


def main() -> None:
    """Entry point of a worker process: the side, and a JSON object of its arguments."""
    side, arguments = sys.argv[1], json.loads(sys.argv[2])
    directory = Path(arguments.pop("directory"))
    work = dict(np.load(directory / "work.npz"))
    {"ours": ours, "peer": peer}[side](directory / "model", work, **arguments)


if __name__ == "__main__":
    main()
