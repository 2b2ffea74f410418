"""Trains a team: `python launch/train.py --config=configs/toy.py --workdir=DIR`.

Any value of the config can be changed: `--config.seed=1`. Interrupted, the same command goes on
where it stopped. On several hosts the same command runs on each, with a workdir that all share.
"""

import logging
import sys
from pathlib import Path

import jax
from absl import app, flags
from ml_collections import config_flags
from rich.console import Console

from mas_jax.agents import rollout
from mas_jax.learning import certificate, hosts, loop, pipeline, process, workdir

CONFIG = config_flags.DEFINE_config_file("config", None, "config file, such as configs/opd.py")
WORKDIR = flags.DEFINE_string("workdir", None, "where checkpoints, metrics and policies go")
KEEP_EPISODES = flags.DEFINE_bool(
    "keep_episodes", False, "whether WORKDIR/STAGE/episodes holds all that is played"
)
flags.mark_flags_as_required(["config", "workdir"])


def main(argv: list[str]) -> None:
    """Runs the config's stages; a setting that does not fit ends it with one line."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    try:
        code = hosts.supervise(Path(WORKDIR.value))
        if code is not None:
            sys.exit(code)
        hosts.initialize()
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    process.start()
    with hosts.together():
        done = _run(Console(quiet=jax.process_index() > 0))
    for name, directory in done.items():
        logging.info("%s: policy in %s", name, directory)


def _run(console: Console) -> dict[str, Path]:
    """The policies of all stages; ends the process where a run cannot or must not go on."""
    try:
        prepared = pipeline.prepare(
            CONFIG.value, Path(WORKDIR.value), keep_episodes=KEEP_EPISODES.value
        )
    except (ValueError, FileNotFoundError, ModuleNotFoundError) as error:
        raise app.UsageError(str(error)) from error
    try:
        return pipeline.run(prepared, console)
    except rollout.TooManyFailures as error:
        raise SystemExit(
            f"stopped: {error}. Mend what failed; the same command goes on from the last checkpoint"
        ) from error
    except (certificate.NotCertified, workdir.InUse) as error:
        raise SystemExit(f"stopped: {error}") from error
    except loop.Interrupted as stop:
        logging.info("%s", stop)
        sys.exit(hosts.interrupted_code())


if __name__ == "__main__":
    app.run(main)
