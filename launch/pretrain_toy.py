"""Rebuilds a toy starting policy: `python launch/pretrain_toy.py --out=DIR`.

About a quarter of an hour on two cores; the shipped one is mas_jax/assets/toy_policy. Of toy
mathematics (`--config=configs/agentpo_toy.py`) there are two, DIR/actor_policy and
DIR/collaborator_policy; the shipped ones are in mas_jax/assets/math. With
`--config.math_pretrain.preset=toy-300k` or `=toy-1m-qwen2.5` the second is what is shipped as
collaborator_small_policy or collaborator_family_policy.
"""

from pathlib import Path

from absl import app, flags
from ml_collections import config_flags
from rich.console import Console

from mas_jax.config_rules import validate
from mas_jax.learning import math_policy, toy_policy

CONFIG = config_flags.DEFINE_config_file("config", "configs/toy.py", "config file")
OUT = flags.DEFINE_string("out", "runs/toy_policy", "new directory for the policy")


def main(argv: list[str]) -> None:
    """Makes traces, trains, writes."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    is_math = CONFIG.value.data.subject == "mathematics"
    try:
        validate(CONFIG.value, has_weights=not is_math)  # those are what is made here
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    if Path(OUT.value).exists():
        raise app.UsageError(f"{OUT.value} exists; remove it or name another directory")
    config, out, console = CONFIG.value, Path(OUT.value), Console()
    if is_math:
        math_policy.make(config, out, console)
        console.log("accuracy of the Actor:", math_policy.measure(config, out))
    else:
        toy_policy.make(config, out, console)


if __name__ == "__main__":
    app.run(main)
