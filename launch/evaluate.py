"""Evaluates teams: `python launch/evaluate.py --config=configs/toy.py [--workdir=DIR]`.

Any value of the config can be changed: `--config.evaluation.num_questions=70`. Interrupted, the
same command goes on where it stopped.
"""

from pathlib import Path

from absl import app, flags
from ml_collections import config_flags
from rich.console import Console

from mas_jax.agents import rollout
from mas_jax.learning import evaluate, process, workdir

CONFIG = config_flags.DEFINE_config_file("config", None, "config file, such as configs/toy.py")
WORKDIR = flags.DEFINE_string("workdir", "runs/evaluate", "where records and summary.json go")
flags.mark_flag_as_required("config")


def main(argv: list[str]) -> None:
    """Runs the evaluation; a setting that does not fit ends it with one line."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    process.start()
    try:
        prepared = evaluate.prepare(CONFIG.value, Path(WORKDIR.value))
    except (ValueError, FileNotFoundError, ModuleNotFoundError) as error:
        raise app.UsageError(str(error)) from error
    try:
        evaluate.run(prepared, Console())
    except rollout.TooManyFailures as error:
        raise SystemExit(
            f"stopped: {error}. Mend what failed; the same command plays what failed or is missing"
        ) from error
    except workdir.InUse as error:
        raise SystemExit(f"stopped: {error}") from error


if __name__ == "__main__":
    app.run(main)
