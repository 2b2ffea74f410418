"""The two sides of the encoder benchmark: one process each, the same weights and passages.

A worker answers every "run" with the seconds that embedding all passages took and the sum of the
vectors' entries weighted by place, by which the parent sees that both made the same vectors.
Both get the passages in any order and may sort them by length; tokenizing counts.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from mas_jax.benchmarks.processes import answer, peak_bytes

MAX_TOKENS = 256


def _serve(encode: Callable[[], np.ndarray]) -> None:
    encode()  # compiles, or warms up
    answer(ready=True)
    for line in sys.stdin:
        if line.strip() == "exit":
            answer(peak_bytes=peak_bytes())
            return
        start = time.perf_counter()
        vectors_NE = encode()
        seconds = time.perf_counter() - start
        answer(seconds=seconds, digest=float(np.sum(vectors_NE * _weights(vectors_NE.shape))))


def _weights(shape: tuple[int, int]) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape)


def ours(directory: Path, texts: Sequence[str]) -> None:
    """mas_jax: rows of like length, one device a core."""
    import jax

    from mas_jax.retrieval.encoder import EncoderConfig, TextEncoder

    jax.config.update("jax_num_cpu_devices", 2)
    encoder = TextEncoder(EncoderConfig(str(directory), max_tokens=MAX_TOKENS))
    _serve(lambda: encoder.encode_passages(texts))


def peer(directory: Path, texts: Sequence[str], *, batch_size: int) -> None:
    """transformers in torch: batches of texts sorted by length, padded to the longest of each."""
    import torch
    import transformers

    model = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    order_N = np.argsort([len(text) for text in texts], kind="stable")

    def _encode() -> np.ndarray:
        vectors_NE = np.empty((len(texts), model.config.hidden_size), np.float32)
        with torch.inference_mode():
            for start in range(0, len(texts), batch_size):
                chosen_B = order_N[start : start + batch_size]
                inputs = tokenizer(
                    [texts[i] for i in chosen_B], padding=True, truncation=True,
                    max_length=MAX_TOKENS, return_tensors="pt",
                )  # fmt: skip
                hidden_BTD = model(**inputs).last_hidden_state
                mask_BT1 = inputs["attention_mask"][..., None]
                mean_BD = (hidden_BTD * mask_BT1).sum(1) / mask_BT1.sum(1)
                vectors_NE[chosen_B] = torch.nn.functional.normalize(mean_BD).numpy()
        return vectors_NE

    _serve(_encode)


def main() -> None:
    """Entry point of a worker process: the side, and a JSON object of its arguments."""
    side, arguments = sys.argv[1], json.loads(sys.argv[2])
    texts = json.loads(Path(arguments.pop("texts")).read_text())
    {"ours": ours, "peer": peer}[side](Path(arguments.pop("directory")), texts, **arguments)


if __name__ == "__main__":
    main()
