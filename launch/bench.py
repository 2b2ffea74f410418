"""Benchmarks against pinned peers: `python launch/bench.py model [--out=FILE] [--sizes=toy-1m]`.

`all` runs every comparison, one after another, and goes on where it was stopped; `growth` fits how
cost grows, `device` measures one GPU or TPU.
"""

import functools
from pathlib import Path

from absl import app, flags

from mas_jax.benchmarks import (
    device,
    encoder,
    every,
    growth,
    index_build,
    int8,
    loop,
    model,
    retrieval,
    retrieval_quality,
    rollout,
    serving,
    update,
)

OUT = flags.DEFINE_string("out", None, "JSON file to write; default runs/bench/NAME.json")
SIZES = flags.DEFINE_list("sizes", None, "sizes, sets, axes or (of `all`) benchmarks; default all")
AGAIN = flags.DEFINE_bool("again", False, "all, growth: measure also what the JSON file has")

COMPARISONS = {
    "encoder": encoder.main,
    "index_build": index_build.main,
    "int8": int8.main,
    "loop": loop.main,
    "model": model.main,
    "retrieval": retrieval.main,
    "retrieval_quality": retrieval_quality.main,
    "rollout": rollout.main,
    "serving": serving.main,
    "update": update.main,
}
ALONE = {"device": device.main, "growth": growth.main}


def main(argv: list[str]) -> None:
    """Runs the benchmark that the first argument names."""
    names = sorted([*COMPARISONS, *ALONE, "all"])
    if len(argv) != 2 or argv[1] not in names:
        raise app.UsageError(f"name one benchmark of {names}, got {argv[1:]}")
    name = argv[1]
    if AGAIN.value and name not in ("all", "growth"):
        raise app.UsageError("--again is for `all` and `growth`; the others always measure")
    out = Path(OUT.value or f"runs/bench/{name}.json")
    benchmarks = COMPARISONS | ALONE | {"all": functools.partial(every.main, COMPARISONS)}
    again = {"again": AGAIN.value} if name in ("all", "growth") else {}
    benchmarks[name](out, SIZES.value, **again)


if __name__ == "__main__":
    app.run(main)
