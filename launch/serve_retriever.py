"""Serves a corpus over HTTP: `python launch/serve_retriever.py --corpus=FILE [--index=DIR]`.

Routes: POST /retrieve and /search, GET /health and /metrics, see mas_jax/retrieval/server.py. For
an E5 encoder: `--encoder=DIR --query_prefix="query: " --passage_prefix="passage: "`.
"""

import logging
import signal
import socket
import sys
from pathlib import Path

import uvicorn
from absl import app, flags

from mas_jax.model import packaged
from mas_jax.retrieval import server
from mas_jax.retrieval.corpus import open_corpus
from mas_jax.retrieval.hashed_ngrams import HashedNgrams
from mas_jax.retrieval.index import Encoder, IndexConfig, Retriever

CORPUS = flags.DEFINE_string("corpus", None, ".jsonl or .jsonl.gz of passages", required=True)
INDEX = flags.DEFINE_string("index", "", "directory of a built index; empty builds it in memory")
BACKEND = flags.DEFINE_enum("backend", "auto", ["auto", "exact", "scann"], "what searches")
ENCODER = flags.DEFINE_string("encoder", "hashed", '"hashed", "package:minilm", or a directory')
QUERY_PREFIX = flags.DEFINE_string("query_prefix", "", "put before every query")
PASSAGE_PREFIX = flags.DEFINE_string("passage_prefix", "", "put before every passage")
MAX_TOKENS = flags.DEFINE_integer("max_tokens", 256, "of a text; the rest is not encoded")
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
            max_tokens=MAX_TOKENS.value,
        )
    )  # fmt: skip


def bind() -> socket.socket:
    """The place that the flags name, taken before anything is loaded. Raises: OSError."""
    listener = socket.socket(socket.AF_INET6 if ":" in HOST.value else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST.value, PORT.value))
    except OSError as error:
        raise OSError(f"cannot listen on {HOST.value} port {PORT.value}: {error}") from error
    return listener


def main(argv: list[str]) -> None:
    """Loads and serves until SIGTERM or Ctrl-C, then answers what is in progress and ends."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    logging.getLogger().setLevel(logging.INFO)
    config = IndexConfig(backend=BACKEND.value)
    try:
        listener = bind()
        corpus, encoder = open_corpus(Path(CORPUS.value)), make_encoder()
        if INDEX.value:
            retriever = Retriever.load(Path(INDEX.value), corpus, encoder, config)
        else:
            retriever = Retriever.build(corpus, encoder, config)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
    identity = server.identify(corpus, encoder.fingerprint, config)
    logging.info("serving %d passages, index %s", len(corpus), identity)
    settings = uvicorn.Config(
        server.make_app(retriever, identity),
        log_level="warning", timeout_keep_alive=60, timeout_graceful_shutdown=10,
    )  # fmt: skip
    uvicorn.Server(settings).run(sockets=[listener])


if __name__ == "__main__":
    app.run(main)
