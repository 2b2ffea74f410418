"""Shapes of the engine's device calls. Must not know: models, requests."""

from dataclasses import dataclass

WEIGHTS = ("full", "int8")


@dataclass(frozen=True)
class EngineSettings:
    """Shapes of the engine's device calls.

    calls: "dense" for prefill and decode apart on gathered arrays, two programs a bucket; "ragged"
    for both in one call through the paged kernel, one program in all; "auto" is ragged on TPU.
    context: positions a sequence may have. buckets: context sizes that programs are made for, the
    last one `context`; all multiples of page_size. prefill_blocks, decode_rows: rows of one call
    (a block is a page of tokens); decode_steps: most tokens a row takes in one call. num_pages:
    pages of the pool, whose bytes are 2 x layers x kv heads x head dim x page_size x itemsize each.
    weights: "full" for matrices in `dtype`, or "int8" for those of the layers as int8 with a scale
    for each output channel (`model/int8.py`): the sampler is then another policy than the trainer's
    by so much, which a learning row's `correction` weighs back.
    """

    context: int
    buckets: tuple[int, ...]
    num_pages: int
    page_size: int = 16
    prefill_blocks: int = 32
    decode_rows: int = 64
    decode_steps: int = 16
    max_stop_ids: int = 4
    min_active_share: float = 0.6
    dtype: str = "float32"
    calls: str = "auto"
    weights: str = "full"


def check_settings(settings: EngineSettings) -> None:
    """Raises: ValueError for sizes that do not fit together."""
    s = settings
    if s.calls not in ("auto", "dense", "ragged"):
        raise ValueError(f"calls={s.calls!r} is unknown; choose 'auto', 'dense' or 'ragged'")
    if s.weights not in WEIGHTS:
        raise ValueError(f"weights={s.weights!r} is unknown; choose 'full' or 'int8'")
    if list(s.buckets) != sorted(set(s.buckets)) or not s.buckets or s.buckets[-1] != s.context:
        raise ValueError(f"buckets={s.buckets} must rise and end at context={s.context}")
    if any(b % s.page_size for b in s.buckets):
        raise ValueError(f"buckets={s.buckets} must be multiples of page_size={s.page_size}")
    needed = s.context // s.page_size + 1
    if s.num_pages < needed:
        raise ValueError(
            f"num_pages={s.num_pages} cannot hold one sequence of context={s.context}; "
            f"wanted at least {needed}"
        )
