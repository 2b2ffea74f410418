"""Joins the passages of several sets of questions into one corpus, as configs/smollm2_cpu.py wants.

python launch/join_corpora.py --data=DIRECTORY --out=runs/smollm2/data \\
  --sets=2wikimultihopqa,hotpotqa,hotpotqa_train100,musique_train100
DIRECTORY holds SET.jsonl and SET_corpus.jsonl of every set, in FlashRAG's form.
"""

import logging
from pathlib import Path

from absl import app, flags

from mas_jax.data import prepare

DATA = flags.DEFINE_string("data", None, "directory of questions and corpora", required=True)
SETS = flags.DEFINE_list("sets", None, "sets to join", required=True)
OUT = flags.DEFINE_string("out", None, "new directory to write", required=True)


def main(_: list[str]) -> None:
    """Writes OUT; what does not fit ends it with one line."""
    logging.getLogger().setLevel(logging.INFO)
    try:
        prepare.join(Path(DATA.value), SETS.value, Path(OUT.value))
    except (OSError, ValueError) as error:
        raise SystemExit(f"stopped: {error}") from error
    logging.info("%s: questions of %s, one corpus", OUT.value, ", ".join(SETS.value))


if __name__ == "__main__":
    app.run(main)
