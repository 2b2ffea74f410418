"""The main job: `bash launch/demo.sh`; flags such as `--config.seed=1 --workdir=DIR` pass through.

Interrupted, the same command goes on where it stopped. `--collect=DIR,DIR` writes the record of
finished demos and prints README's tables.
"""

import json
import logging
import sys
from pathlib import Path

from absl import app, flags
from ml_collections import config_flags
from rich.console import Console

from mas_jax.agents import rollout
from mas_jax.learning import certificate, demo, loop, pipeline, process, workdir

RECORD = Path("mas_jax/benchmarks/records/demo.json")
CONFIG = config_flags.DEFINE_config_file("config", "configs/demo.py", "config file")
COLLECT = flags.DEFINE_list("collect", [], "workdirs of finished demos: their record and table")
WORKDIR = flags.DEFINE_string("workdir", "runs/demo", "where policies, records and the plot go")


def main(argv: list[str]) -> None:
    """Trains, evaluates, prints; a setting that does not fit ends it with one line."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    if COLLECT.value:
        record = demo.collect([Path(directory) for directory in COLLECT.value])
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        sys.stdout.write(demo.markdown(record))
        return
    process.start()
    try:
        prepared = pipeline.prepare(CONFIG.value, Path(WORKDIR.value))
    except (ValueError, FileNotFoundError) as error:
        raise app.UsageError(str(error)) from error
    try:
        demo.run(prepared, Console())
    except (certificate.NotCertified, rollout.TooManyFailures, workdir.InUse) as error:
        raise SystemExit(f"stopped: {error}") from error
    except loop.Interrupted as stop:
        logging.info("%s", stop)


if __name__ == "__main__":
    app.run(main)
