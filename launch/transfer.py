"""Evaluates each Collaborator with each Actor.

python launch/transfer.py --config=configs/agentpo_toy.py --workdir=runs/transfer \
    --collaborator=trained=runs/agentpo_toy/agentpo/policy \
    --collaborator=untrained=asset:math/collaborator_policy \
    --actor=own=asset:math/actor_policy --actor=served=http://localhost:8000/v1,MODEL

Each is NAME=CHECKPOINT, perhaps with ,TEMPLATE behind it; an Actor may be NAME=URL,MODEL. All else
is the config's, which names one team with both. Interrupted, the same command goes on.
"""

from pathlib import Path

from absl import app, flags
from ml_collections import config_flags
from rich.console import Console

from mas_jax.agents import rollout
from mas_jax.learning import process, transfer, workdir

CONFIG = config_flags.DEFINE_config_file("config", None, "such as configs/agentpo_toy.py")
COLLABORATORS = flags.DEFINE_multi_string("collaborator", [], "NAME=CHECKPOINT[,TEMPLATE]")
ACTORS = flags.DEFINE_multi_string("actor", [], "NAME=CHECKPOINT[,TEMPLATE] or NAME=URL,MODEL")
WORKDIR = flags.DEFINE_string("workdir", "runs/transfer", "where records and transfer.json go")
flags.mark_flag_as_required("config")


def main(argv: list[str]) -> None:
    """Plays all pairs; a setting that does not fit ends it with one line."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    process.start()
    try:
        configs = transfer.make_configs(
            CONFIG.value,
            transfer.read_collaborators(COLLABORATORS.value),
            transfer.read_actors(ACTORS.value),
        )
        transfer.run(configs, Path(WORKDIR.value), Console())
    except (ValueError, FileNotFoundError, ModuleNotFoundError) as error:
        raise app.UsageError(str(error)) from error
    except (rollout.TooManyFailures, workdir.InUse) as error:
        raise SystemExit(f"stopped: {error}") from error


if __name__ == "__main__":
    app.run(main)
