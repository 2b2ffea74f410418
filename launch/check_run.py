"""Checks what must hold of a run: `python launch/check_run.py --evaluation=DIR --training=DIR`.

Prints every figure beside its bound; ends with 1 if one does not hold.
"""

from pathlib import Path

from absl import app, flags
from rich.console import Console

from mas_jax.evaluation.report import to_rich
from mas_jax.learning import run_checks

EVALUATION = flags.DEFINE_string("evaluation", None, "workdir of launch/evaluate.py")
TRAINING = flags.DEFINE_string("training", None, "workdir of launch/train.py")


def main(argv: list[str]) -> None:
    """Checks what is given."""
    if len(argv) > 1 or not (EVALUATION.value or TRAINING.value):
        raise app.UsageError(f"unknown arguments {argv[1:]}; give --evaluation, --training or both")
    try:
        checks = run_checks.of_evaluation(Path(EVALUATION.value)) if EVALUATION.value else []
        checks += run_checks.of_training(Path(TRAINING.value)) if TRAINING.value else []
    except FileNotFoundError as error:
        raise app.UsageError(str(error)) from error
    Console().print(to_rich(run_checks.grid(checks)))
    if not all(check.holds for check in checks):
        raise SystemExit("not everything holds")


if __name__ == "__main__":
    app.run(main)
