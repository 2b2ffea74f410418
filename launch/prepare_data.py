"""Fetches, normalises and writes the training mix and the fixed evaluation panel.

python launch/prepare_data.py --out=data/qa                      from the Hugging Face hub
python launch/prepare_data.py --out=data/qa --source=DIRECTORY   from DIRECTORY/DATASET/SPLIT.jsonl
What OUT holds already is compared with its manifest, and left as it is.
"""

import logging
from pathlib import Path

from absl import app, flags

from mas_jax.data import hub, prepare
from mas_jax.data.questions import Source, jsonl

OUT = flags.DEFINE_string("out", None, "directory to write, or to verify", required=True)
SOURCE = flags.DEFINE_string("source", "", "DATASET/SPLIT.jsonl here, not FlashRAG's")
REVISION = flags.DEFINE_string("revision", "", "revision of FlashRAG's collection")
MIX_REVISION = flags.DEFINE_string("mix_revision", "", "revision of Search-R1's mix")
MIX = flags.DEFINE_enum("mix", "flashrag", prepare.MIXES, "whose NQ and HotpotQA to train on")
FORMAT = flags.DEFINE_enum("format", "jsonl", prepare.FORMATS, "JSON lines, or ArrayRecord")
VALIDATION = flags.DEFINE_integer("validation", 0, "held out of each training set", lower_bound=0)


def _fetch_set(dataset: str, split: str) -> Source:
    """A set of FlashRAG's form."""
    if not SOURCE.value:
        return hub.flashrag(dataset, split, revision=REVISION.value or None)
    path = Path(SOURCE.value) / dataset / f"{split}.jsonl"
    return jsonl(path, dataset=dataset, split=split)


def _fetch_mix(dataset: str, split: str) -> Source:
    """What Search-R1's mix has of a training set."""
    return hub.search_r1_mix(dataset, split, revision=MIX_REVISION.value or None)


def main(_: list[str]) -> None:
    """Prepares the data, or verifies what is there, and says what there is."""
    logging.getLogger().setLevel(logging.INFO)
    settings = prepare.Settings(
        format=FORMAT.value,
        mix=MIX.value,
        source=SOURCE.value,
        revision=REVISION.value,
        mix_revision=MIX_REVISION.value,
        validation=VALIDATION.value,
    )
    training = _fetch_set if MIX.value == "flashrag" else _fetch_mix
    out = Path(OUT.value)
    try:
        if out.exists():
            manifest = prepare.check_existing(out, settings)
            logging.info("%s exists: every file is as its manifest says", out)
        else:
            manifest = prepare.prepare(_fetch_set, training, out, settings)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    for name, entry in manifest["files"].items():
        logging.info("%s/%s: %d questions", out, name, entry["questions"])


if __name__ == "__main__":
    app.run(main)
