"""Benchmarks against pinned peers: `python launch/bench.py model [--out=FILE] [--sizes=toy-1m]`."""

from pathlib import Path

from absl import app, flags

from mas_jax.benchmarks import (
    encoder,
    index_build,
    int8,
    model,
    retrieval,
    retrieval_quality,
    rollout,
    serving,
    update,
)

OUT = flags.DEFINE_string("out", None, "JSON file to write; default runs/bench/NAME.json")
SIZES = flags.DEFINE_list("sizes", None, "sizes or sets to measure; default all")

BENCHMARKS = {
    "encoder": encoder.main,
    "index_build": index_build.main,
    "int8": int8.main,
    "model": model.main,
    "retrieval": retrieval.main,
    "retrieval_quality": retrieval_quality.main,
    "rollout": rollout.main,
    "serving": serving.main,
    "update": update.main,
}


def main(argv: list[str]) -> None:
    """Runs the benchmark that the first argument names."""
    if len(argv) != 2 or argv[1] not in BENCHMARKS:
        raise app.UsageError(f"name one benchmark of {sorted(BENCHMARKS)}, got {argv[1:]}")
    out = Path(OUT.value or f"runs/bench/{argv[1]}.json")
    BENCHMARKS[argv[1]](out, SIZES.value)


if __name__ == "__main__":
    app.run(main)
