"""Builds the index of a corpus of any size on disk: encoded in pieces, indexed a shard at a time.

Work in progress lies in DIRECTORY.building: embeddings, and the shards that are finished. The same
command goes on after a kill; the directory gets its name when the index is complete.
Must not know: models, agents, jax.
"""

import dataclasses
import logging
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from mas_jax.retrieval.corpus import Corpus
from mas_jax.retrieval.embeddings import Embeddings
from mas_jax.retrieval.index import (
    Encoder,
    IndexConfig,
    contents,
    make_shard,
    ram_bytes,
    split_rows,
    write_manifest,
)

# from the number of passages to encode to a context, inside which the function that it gives is
# called with how many are done
Watch = Callable[[int], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True)
class Share:
    """This host's part of the encoding: every num_hosts-th piece. Host 0 makes the index."""

    host: int = 0
    num_hosts: int = 1


def estimate_bytes(num_passages: int, dim: int, config: IndexConfig) -> dict[str, int]:
    """Bytes of disk while building and afterwards, of RAM while building and when searched.

    Building holds one shard's vectors and ScaNN's copy of them; a search needs all shards.
    """
    vectors = num_passages * dim * 4
    largest = max(end - start for start, end in split_rows(num_passages, config.max_shard))
    return {
        "disk_building": 2 * vectors,
        "disk": vectors,
        "ram_building": largest * dim * 4 + ram_bytes(largest, dim, config),
        "ram": ram_bytes(num_passages, dim, config),
    }


def build(
    corpus: Corpus,
    encoder: Encoder,
    config: IndexConfig,
    directory: Path,
    *,
    dim: int,
    piece: int,
    share: Share,
    watch: Watch,
) -> bool:
    """Encodes this host's share and, on host 0, indexes; True if the index is complete.

    dim: of the encoder's vectors; piece: passages that are encoded and written together.
    Raises: FileExistsError if the directory exists; ValueError for the backend "device", a build of
    other settings in progress, or a vector that is not finite; RuntimeError on host 0 while others
    have not finished.
    """
    if config.backend == "device":
        raise ValueError("backend='device' is of a search; build with 'exact' and load with it")
    if directory.exists():
        raise FileExistsError(f"{directory} exists; remove it or build the index elsewhere")
    building = directory.with_name(f"{directory.name}.building")
    settings = {
        "corpus": corpus.fingerprint, "encoder": encoder.fingerprint, **dataclasses.asdict(config),
    }  # fmt: skip
    embeddings = Embeddings(
        building / "embeddings", len(corpus), dim, piece=piece, settings=settings
    )
    missing = [n for n in embeddings.missing() if n % share.num_hosts == share.host]
    total = sum(min(piece, len(corpus) - n * piece) for n in missing)
    if missing:
        with watch(total) as report:
            embeddings.write(
                corpus, contents, encoder.encode_passages,
                host=share.host, num_hosts=share.num_hosts, report=report,
            )  # fmt: skip
    if share.host:
        return False
    pieces = split_rows(len(corpus), config.max_shard)
    logging.info(
        "indexing %d vectors of %d dimensions with %s, %d shard(s); a search needs about %.2f GB "
        "of RAM, building one shard %.2f GB",
        len(corpus), dim, config.resolve_backend(), len(pieces),
        *(estimate_bytes(len(corpus), dim, config)[key] / 1e9 for key in ("ram", "ram_building")),
    )  # fmt: skip
    for number, (start, end) in enumerate(pieces):
        shard = building / f"shard-{number}"
        if not shard.is_dir():
            started = time.perf_counter()
            _build_shard(embeddings, config, shard, start, end)
            logging.info(
                "shard %d of %d: %d vectors in %.0f s",
                number + 1, len(pieces), end - start, time.perf_counter() - started,
            )  # fmt: skip
    write_manifest(building, corpus, encoder.fingerprint, config)
    shutil.rmtree(building / "embeddings")
    building.rename(directory)
    return True


def _build_shard(
    embeddings: Embeddings, config: IndexConfig, shard: Path, start: int, end: int
) -> None:
    """Builds a shard beside its name and renames it when it is whole."""
    partial = shard.with_name(f"{shard.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    make_shard(embeddings.read(start, end), config).save(partial)
    partial.rename(shard)
