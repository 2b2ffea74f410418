"""Serves a corpus over HTTP: `python launch/serve_retriever.py --corpus=FILE [--index=DIR]`.

Routes: POST /retrieve and /search, GET /health and /metrics, see mas_jax/retrieval/server.py. An
index takes the encoder's flags that it was built with; of an E5: `--encoder=DIR
--query_prefix="query: " --passage_prefix="passage: "`.
"""

import logging
import signal
import sys
from pathlib import Path

from absl import app, flags

from mas_jax.choices import BACKENDS
from mas_jax.model import packaged
from mas_jax.retrieval.bm25_index import Bm25Config, Bm25Retriever
from mas_jax.retrieval.corpus import Corpus, open_corpus
from mas_jax.retrieval.hashed_ngrams import HashedNgrams
from mas_jax.retrieval.index import Encoder, IndexConfig, Retriever

try:
    from mas_jax.retrieval import http_service, server
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}; a server needs pip install 'mas_jax[serve]'") from error

CORPUS = flags.DEFINE_string("corpus", None, ".jsonl or .jsonl.gz of passages", required=True)
INDEX = flags.DEFINE_string("index", "", "directory of a built index; empty builds it in memory")
BACKEND = flags.DEFINE_enum(
    "backend", "auto", BACKENDS,
    "what searches; device: this host's accelerators; bm25: words, without an encoder or an index",
)  # fmt: skip
ENCODER = flags.DEFINE_string("encoder", "hashed", '"hashed", "package:minilm", or a directory')
QUERY_PREFIX = flags.DEFINE_string("query_prefix", "", "put before every query")
PASSAGE_PREFIX = flags.DEFINE_string("passage_prefix", "", "put before every passage")
MAX_TOKENS = flags.DEFINE_integer("max_tokens", 256, "of a text; the rest is not encoded")
DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "of the encoder")
HOST = flags.DEFINE_string("host", "127.0.0.1", "0.0.0.0 serves other machines, without a password")
PORT = flags.DEFINE_integer("port", 8000, "port to listen on", lower_bound=1, upper_bound=65535)


def make_encoder() -> Encoder:
    """The encoder that the flags name. Raises: as `TextEncoder`."""
    if ENCODER.value == "hashed":
        return HashedNgrams()
    # loads jax, which a server of hashed n-grams does without
    from mas_jax.retrieval.encoder import EncoderConfig, TextEncoder

    directory = str(packaged.resolve(ENCODER.value))
    return TextEncoder(
        EncoderConfig(
            directory, query_prefix=QUERY_PREFIX.value, passage_prefix=PASSAGE_PREFIX.value,
            max_tokens=MAX_TOKENS.value, dtype=DTYPE.value,
        )
    )  # fmt: skip


def make_retriever(corpus: Corpus) -> tuple[Retriever, str]:
    """What the flags have search the corpus, and its identity. Raises: OSError, ValueError."""
    if BACKEND.value == "bm25":
        if INDEX.value or ENCODER.value != "hashed":
            raise ValueError(
                f"--backend=bm25 searches words and reads neither --index={INDEX.value} nor "
                f"--encoder={ENCODER.value}; leave both out"
            )
        words = Bm25Retriever(corpus, Bm25Config())
        return words, server.identify(corpus, words.fingerprint, words.config)
    encoder, config = make_encoder(), IndexConfig(backend=BACKEND.value)
    if INDEX.value:
        retriever = Retriever.load(Path(INDEX.value), corpus, encoder, config)
    else:
        retriever = Retriever.build(corpus, encoder, config)
    return retriever, server.identify(corpus, encoder.fingerprint, config)


def main(argv: list[str]) -> None:
    """Loads and serves until SIGTERM or Ctrl-C, then answers what is in progress and ends."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    logging.getLogger().setLevel(logging.INFO)
    try:
        listener = http_service.listen(HOST.value, PORT.value)
        corpus = open_corpus(Path(CORPUS.value))
        retriever, identity = make_retriever(corpus)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
    logging.info("serving %d passages, index %s", len(corpus), identity)
    http_service.make_server(server.make_app(retriever, identity)).run(sockets=[listener])


if __name__ == "__main__":
    app.run(main)
