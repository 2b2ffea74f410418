"""Builds the index of a corpus of any size; killed, the same command goes on where it stopped.

python launch/build_index.py --corpus=wiki-18.jsonl --encoder=e5-base-v2 --out=indexes/wiki-18
python launch/build_index.py --corpus=corpus.jsonl --encoder=package:minilm --out=indexes/small

Several hosts: each with its --host of --num_hosts on a shared disk; host 0, started again when the
others have ended, makes the index.
"""

import functools
import logging
from pathlib import Path

import jax
from absl import app, flags
from rich.console import Console

from mas_jax import metrics
from mas_jax.learning import process
from mas_jax.model import packaged
from mas_jax.retrieval import build
from mas_jax.retrieval.corpus import open_corpus
from mas_jax.retrieval.encoder import EncoderConfig, TextEncoder
from mas_jax.retrieval.index import IndexConfig

CORPUS = flags.DEFINE_string("corpus", None, "JSONL file of passages, perhaps .gz", required=True)
ENCODER = flags.DEFINE_string("encoder", None, "a BERT's folder, or package:minilm", required=True)
OUT = flags.DEFINE_string("out", None, "new directory of the index", required=True)
QUERY_PREFIX = flags.DEFINE_string("query_prefix", "", "before every query; E5: 'query: '")
PASSAGE_PREFIX = flags.DEFINE_string("passage_prefix", "", "before every passage; E5: 'passage: '")
MAX_TOKENS = flags.DEFINE_integer("max_tokens", 256, "tokens of a text; the rest is not read")
DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "of the encoder")
BACKEND = flags.DEFINE_enum(
    "backend", "auto", ["auto", "exact", "scann"], "what the files are for; any serve 'device' too"
)
PIECE = flags.DEFINE_integer("piece", 16_384, "passages that are encoded and written together")
HOST = flags.DEFINE_integer("host", 0, "number of this host")
NUM_HOSTS = flags.DEFINE_integer("num_hosts", 1, "hosts that share the encoding")


def main(_: list[str]) -> None:
    """Builds the index, saying first what it takes; what does not fit ends it with one line."""
    process.start()
    config, console = IndexConfig(backend=BACKEND.value), Console()

    watch = functools.partial(metrics.watch, label="passages", console=console, interval_s=10.0)

    try:
        encoder = TextEncoder(
            EncoderConfig(
                str(packaged.resolve(ENCODER.value)), QUERY_PREFIX.value, PASSAGE_PREFIX.value,
                MAX_TOKENS.value, dtype=DTYPE.value,
            )
        )  # fmt: skip
        corpus = open_corpus(Path(CORPUS.value))
        sizes = build.estimate_bytes(len(corpus), encoder.dim, config)
        listed = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in sizes.items())
        logging.info("%d passages on %d devices; %s", len(corpus), jax.device_count(), listed)
        complete = build.build(
            corpus, encoder, config, Path(OUT.value), dim=encoder.dim, piece=PIECE.value,
            share=build.Share(HOST.value, NUM_HOSTS.value), watch=watch,
        )  # fmt: skip
    except (OSError, ValueError, RuntimeError) as error:
        raise SystemExit(f"stopped: {error}") from error
    logging.info("index in %s" if complete else "this host's share of %s is encoded", OUT.value)


if __name__ == "__main__":
    app.run(main)
