"""Fetches, normalises and writes the training mix and the fixed evaluation panel.

python launch/prepare_data.py --out=data/qa                      from the Hugging Face hub
python launch/prepare_data.py --out=data/qa --source=DIRECTORY   from DIRECTORY/DATASET/SPLIT.jsonl
"""

import logging
from pathlib import Path

from absl import app, flags

from mas_jax.data import hub, prepare
from mas_jax.data.questions import read_jsonl

OUT = flags.DEFINE_string("out", None, "new directory to write", required=True)
SOURCE = flags.DEFINE_string("source", None, "DATASET/SPLIT.jsonl here, not the hub")
REVISION = flags.DEFINE_string("revision", None, "revision of the hub's dataset")


def main(_: list[str]) -> None:
    """Prepares the data and says what was written."""
    logging.getLogger().setLevel(logging.INFO)

    def _fetch(dataset: str, split: str):
        if SOURCE.value is None:
            return hub.read_flashrag(dataset, split, revision=REVISION.value)
        path = Path(SOURCE.value) / dataset / f"{split}.jsonl"
        return read_jsonl(path, dataset=dataset, split=split)

    try:
        manifest = prepare.prepare(_fetch, Path(OUT.value))
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    for name, entry in manifest["files"].items():
        logging.info("%s/%s: %d questions", OUT.value, name, entry["questions"])


if __name__ == "__main__":
    app.run(main)
