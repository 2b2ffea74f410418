"""Exports a trained policy: `python launch/export_hf.py CHECKPOINT OUT`.

CHECKPOINT: a stage's directory of a training workdir, such as runs/opd/student, for its newest
checkpoint, with --best the best validated one; or one of them, runs/opd/student/checkpoints/40.
OUT: a new directory, which `transformers` loads.
"""

import logging
from pathlib import Path

from absl import app, flags

from mas_jax.learning import export, process

BEST = flags.DEFINE_bool("best", False, "the checkpoint that validation found best")


def main(argv: list[str]) -> None:
    """Writes OUT; what does not fit ends it with one line."""
    if len(argv) != 3:
        raise app.UsageError(f"wanted CHECKPOINT and OUT, got {argv[1:]}")
    process.start()
    source, out = Path(argv[1]), Path(argv[2])
    try:
        step = export.export(source, out, best=BEST.value)
    except (ValueError, OSError) as error:
        raise SystemExit(f"stopped: {error}") from error
    logging.info("written to %s: step %d of %s", out, step, source)


if __name__ == "__main__":
    app.run(main)
