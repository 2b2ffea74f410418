"""The retriever: a corpus, its index on disk or in memory, and the `search` that agents await.

Concurrent callers share one batch: while a batch is being searched, whoever asks next joins the
following one. A (query, k) has one answer, whatever is asked beside it.
Letters: N passages, Q queries, M vectors of a shard, E dimensions, R results. Must not know:
agents, models, jax.
"""

import asyncio
import dataclasses
import hashlib
import itertools
import json
import logging
import os
import shutil
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from mas_jax.records import Passage, SearchFailure
from mas_jax.retrieval import exact_index, scann_index
from mas_jax.retrieval.corpus import Corpus

MAX_QUERY_CHARS = 4096  # the rest of a longer query is not read
MAX_CACHED_ANSWERS = 100_000
MANIFEST = "manifest.json"
FORMAT = 1
_CHECK_ROWS = 65_536
BACKENDS = ("auto", "exact", "scann", "device")

Answer = list[Passage] | SearchFailure


class Encoder(Protocol):
    """Turns texts into vectors; `fingerprint` names everything that these depend on."""

    fingerprint: str

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors [N, E] f32."""

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors [N, E] f32 of texts as `contents` makes them."""


@dataclass(frozen=True)
class IndexConfig:
    """How a corpus is indexed.

    backend: "exact", "scann", "auto" (ScaNN where it is installed), or "device", exact search on
    this host's accelerators, which keep the vectors. max_exact: largest shard that ScaNN scores
    exactly; above it, a tree whose sizes follow `scann_index.choose_sizes` unless given. max_shard:
    vectors of a shard at most; shards are searched one by one and merged.
    """

    backend: str = "auto"
    max_exact: int = 20_000
    max_shard: int = 1_000_000
    leaves: int | None = None
    leaves_to_search: int | None = None
    reorder: int | None = None

    def resolve_backend(self) -> str:
        """The backend, "auto" resolved. Raises: ValueError for one unknown or not installed."""
        if self.backend not in BACKENDS:
            raise ValueError(f"backend={self.backend!r}: choose from {BACKENDS}")
        if self.backend == "scann" and not scann_index.is_available():
            raise ValueError("backend='scann', but no scann package is installed; take 'auto'")
        if self.backend != "auto":
            return self.backend
        return "scann" if scann_index.is_available() else "exact"

    def tree_sizes(self, num_vectors: int) -> scann_index.TreeSizes | None:
        """Sizes of a shard's tree, None where it is scored exactly."""
        if num_vectors <= self.max_exact:
            return None
        given = {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if name in ("leaves", "leaves_to_search", "reorder") and value is not None
        }
        return dataclasses.replace(scann_index.choose_sizes(num_vectors), **given)


def contents(passage: Passage) -> str:
    """What of a passage is encoded: title line and text."""
    return f"{passage.title}\n{passage.text}"


def hash_corpus(passages: Sequence[Passage]) -> str:
    """Digest of ids, titles and texts in order; of its bytes for a corpus on disk."""
    if isinstance(passages, Corpus):
        return passages.fingerprint
    digest = hashlib.blake2b(digest_size=16)
    for passage in passages:
        fields = (passage.id, passage.title, passage.text)
        digest.update(json.dumps(fields).encode())  # unambiguous where one field ends
    return digest.hexdigest()


def split_rows(num_vectors: int, max_shard: int) -> list[tuple[int, int]]:
    """(start, end) of as few shards of nearly equal size as `max_shard` allows."""
    if max_shard < 1:
        raise ValueError(f"max_shard={max_shard} must be at least 1")
    num_shards = -(-num_vectors // max_shard)
    edges = [num_vectors * shard // num_shards for shard in range(num_shards + 1)]
    return list(itertools.pairwise(edges))


def ram_bytes(num_vectors: int, dim: int, config: IndexConfig) -> int:
    """Bytes that the index holds in memory: the vectors and what ScaNN adds to them."""
    total = num_vectors * dim * 4
    if config.resolve_backend() == "scann":
        for start, end in split_rows(num_vectors, config.max_shard):
            sizes = config.tree_sizes(end - start)
            total += scann_index.extra_ram_bytes(end - start, dim, sizes)
    return total


def _check_vectors(vectors_NE: np.ndarray, passages: Sequence[Passage]) -> None:
    if vectors_NE.ndim != 2 or len(vectors_NE) != len(passages):
        raise ValueError(
            f"vectors have shape {vectors_NE.shape}, wanted [{len(passages)} passages, dimensions]"
        )
    for start in range(0, len(vectors_NE), _CHECK_ROWS):
        finite = np.isfinite(vectors_NE[start : start + _CHECK_ROWS]).all(axis=1)
        if not finite.all():
            row = start + int(np.argmin(finite))
            raise ValueError(
                f"vector of row {row} (passage {passages[row].id!r}) is not finite; "
                "look at what the encoder makes of this passage"
            )


def _describe(
    passages: Sequence[Passage], fingerprint: str, config: IndexConfig
) -> dict[str, object]:
    """What a saved index must have been made from to be this one."""
    settings = dataclasses.asdict(config)
    del settings["backend"]  # the vectors serve other backends too; `load` compares what is in use
    return {
        "format": FORMAT,
        "corpus": hash_corpus(passages),
        "passages": len(passages),
        "encoder": fingerprint,
        **{f"config.{name}": value for name, value in settings.items()},
    }


def write_manifest(
    directory: Path, passages: Sequence[Passage], fingerprint: str, config: IndexConfig
) -> None:
    """Writes what `Retriever.load` compares: corpus, encoder, settings and backend."""
    manifest = _describe(passages, fingerprint, config) | {"backend": config.resolve_backend()}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1))


class Shard(Protocol):
    """The index of M vectors."""

    def search(self, queries_QE: np.ndarray, k: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each query the scores (f32) and rows of its best min(k, M) vectors, ranked."""

    def save(self, directory: Path) -> None:
        """Writes its files into an existing directory."""


def make_shard(vectors_ME: np.ndarray, config: IndexConfig) -> Shard:
    """The index of one shard's vectors."""
    backend = config.resolve_backend()
    if backend == "scann":
        return scann_index.ScannShard(vectors_ME, config.tree_sizes(len(vectors_ME)))
    return _exact_shard(vectors_ME, backend)


def _exact_shard(vectors_ME: np.ndarray, backend: str) -> Shard:
    """Exact search on the host, or on its devices."""
    if backend == "exact":
        return exact_index.ExactShard(vectors_ME)
    from mas_jax.retrieval import device_index  # loads jax, which the others do without

    return device_index.on_this_host(vectors_ME)


class _Batch:
    """Queries of one call to the index, and the task that answers them."""

    def __init__(self) -> None:
        self.wanted: dict[tuple[str, int], None] = {}
        self.task: asyncio.Task[dict[tuple[str, int], Answer]]


class Retriever:
    """A searchable corpus; make one with `build` or `load`.

    Use it from one event loop at a time. `counts`: "queries" asked, "searched" (neither duplicates
    nor known answers), "batches", and "search_s", the seconds that these took.
    """

    def __init__(
        self, passages: Sequence[Passage], encoder: Encoder, config: IndexConfig,
        shards: Sequence[Shard],
    ) -> None:  # fmt: skip
        self.passages, self.config = passages, config
        self.counts = {"queries": 0, "searched": 0, "batches": 0, "search_s": 0.0}
        self._encoder, self._shards = encoder, shards
        self._starts = [start for start, _ in split_rows(len(passages), config.max_shard)]
        self._answers: OrderedDict[tuple[str, int], Answer] = OrderedDict()
        self._open: _Batch | None = None  # takes queries
        self._last: asyncio.Task | None = None  # of the newest batch

    @classmethod
    def build(
        cls,
        passages: Sequence[Passage],
        encoder: Encoder,
        config: IndexConfig,
        vectors_NE: np.ndarray | None = None,
    ) -> "Retriever":
        """Indexes a corpus; logs the RAM needed first.

        vectors_NE: the passages' vectors where they exist already (a memory map will do).
        Raises: ValueError for an empty corpus, or vectors that are not finite or do not fit it.
        """
        if not len(passages):
            raise ValueError("the corpus is empty: an index needs at least one passage")
        backend = config.resolve_backend()
        if vectors_NE is None:
            vectors_NE = encoder.encode_passages([contents(passage) for passage in passages])
        _check_vectors(vectors_NE, passages)
        vectors_NE = np.ascontiguousarray(vectors_NE, np.float32)
        pieces = split_rows(len(passages), config.max_shard)
        logging.info(
            "indexing %d vectors of %d dimensions with %s, %d shard(s); needs about %.2f GB of RAM",
            *vectors_NE.shape, backend, len(pieces),
            ram_bytes(*vectors_NE.shape, config) / 1e9,
        )  # fmt: skip
        shards = [make_shard(vectors_NE[start:end], config) for start, end in pieces]
        return cls(passages, encoder, config, shards)

    def save(self, directory: Path) -> None:
        """Writes the index to a new directory, which appears only when it is complete.

        Raises: FileExistsError if the directory exists.
        """
        if directory.exists():
            raise FileExistsError(f"{directory} exists; remove it or save the index elsewhere")
        partial = directory.with_name(f"{directory.name}.partial-{os.getpid()}")
        shutil.rmtree(partial, ignore_errors=True)
        for number, shard in enumerate(self._shards):
            shard_directory = partial / f"shard-{number}"
            shard_directory.mkdir(parents=True)
            shard.save(shard_directory)
        write_manifest(partial, self.passages, self._encoder.fingerprint, self.config)
        partial.rename(directory)

    @classmethod
    def load(
        cls,
        directory: Path,
        passages: Sequence[Passage],
        encoder: Encoder,
        config: IndexConfig,
    ) -> "Retriever":
        """Reads an index that `save` wrote, wherever its directory lies now.

        "exact" and "device" read the vectors of every index; so does "auto" without ScaNN.
        Raises: ValueError that says what differs if it was made from another corpus, encoder or
        configuration; FileNotFoundError if there is no index.
        """
        if not (directory / MANIFEST).is_file():
            raise FileNotFoundError(f"no index in {directory}: {MANIFEST} is missing; build it")
        saved = json.loads((directory / MANIFEST).read_text())
        built_with, backend = saved.pop("backend"), config.resolve_backend()
        wanted = _describe(passages, encoder.fingerprint, config)
        differences = [
            f"{name}: saved {saved.get(name)!r}, wanted {wanted.get(name)!r}"
            for name in sorted(saved.keys() | wanted.keys())
            if saved.get(name) != wanted.get(name)
        ]
        if built_with != backend and backend == "scann":
            differences.append(f"backend: saved {built_with!r}, wanted {backend!r}")
        if differences:
            raise ValueError(f"index {directory} is stale ({'; '.join(differences)}); rebuild it")
        shards = []
        for number, (start, end) in enumerate(split_rows(len(passages), config.max_shard)):
            shard = directory / f"shard-{number}"
            if backend == "scann":
                shards.append(scann_index.load_shard(shard, config.tree_sizes(end - start)))
            else:
                shards.append(_exact_shard(exact_index.load_vectors(shard), backend))
        return cls(passages, encoder, config, shards)

    async def search(self, queries: Sequence[str], k: int) -> list[Answer]:
        """The best min(k, N) passages of each query in order, with scores, best first.

        Ties go to the earlier passage. Queries are stripped, and read up to `MAX_QUERY_CHARS`.
        A query without words is `SearchFailure("empty_query")`; one that the encoder turns into
        something not finite is `SearchFailure("bad_vector")`. The search itself runs in a thread.
        Raises: ValueError if k < 1; whatever the encoder or the index raises.
        """
        keys = _keys(queries, k)
        if not keys:
            return []
        self.counts["queries"] += len(keys)
        loop = asyncio.get_running_loop()
        if self._last is not None and self._last.get_loop() is not loop:
            self._open = self._last = None  # of a loop that has ended
        if self._open is None or self._open.task.done():
            batch = self._open = _Batch()
            batch.task = loop.create_task(self._run(batch, self._last))
            self._last = batch.task
        batch = self._open
        batch.wanted.update(dict.fromkeys(keys))
        answers = await asyncio.shield(batch.task)  # one caller's cancellation is its own
        return [_copy(answers[key]) for key in keys]

    def search_now(self, queries: Sequence[str], k: int) -> list[Answer]:
        """`search` in the calling thread, for programs without an event loop."""
        keys = _keys(queries, k)
        self.counts["queries"] += len(keys)
        answers = self._answer(list(dict.fromkeys(keys)))
        return [_copy(answers[key]) for key in keys]

    async def _run(self, batch: _Batch, before: asyncio.Task | None) -> dict:
        """Answers a batch once the one before it has ended and this loop turn's callers joined."""
        await asyncio.sleep(0)
        if before is not None:
            await asyncio.wait([before])
        self._open = None
        return await asyncio.to_thread(self._answer, list(batch.wanted))

    def _answer(self, keys: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Answer]:
        started = time.perf_counter()
        answers = {key: self._answers[key] for key in keys if key in self._answers}
        missing = [key for key in keys if key not in answers]
        for k in {k for _, k in missing}:  # apart: a larger k would propose other rows for a tree
            texts = [text for text, wanted_k in missing if wanted_k == k]
            answers |= {
                (text, k): answer
                for text, answer in zip(texts, self._search(texts, k), strict=True)
            }
        for key in missing:
            self._answers[key] = answers[key]
        while len(self._answers) > MAX_CACHED_ANSWERS:
            self._answers.popitem(last=False)
        self.counts["searched"] += len(missing)
        self.counts["batches"] += 1
        self.counts["search_s"] += time.perf_counter() - started
        return answers

    def _search(self, texts: Sequence[str], k: int) -> list[Answer]:
        """Answers to distinct texts: failures at once, the others from all shards, merged."""
        vectors_QE = np.asarray(self._encoder.encode_queries(texts), np.float32)
        answers: list[Answer] = [_refuse(*pair) for pair in zip(texts, vectors_QE, strict=True)]
        valid_Q = [query for query, answer in enumerate(answers) if answer is None]
        if not valid_Q:
            return answers
        found = [shard.search(vectors_QE[valid_Q], k) for shard in self._shards]
        for position, query in enumerate(valid_Q):
            parts = [
                (scores_R, rows_R + start)
                for start, (scores_R, rows_R) in zip(
                    self._starts, (shard[position] for shard in found), strict=True
                )
            ]
            scores_R, rows_R = exact_index.merge(parts, k)
            answers[query] = [
                dataclasses.replace(self.passages[row], score=float(score))
                for score, row in zip(scores_R, rows_R, strict=True)
            ]
        return answers


def _keys(queries: Sequence[str], k: int) -> list[tuple[str, int]]:
    if k < 1:
        raise ValueError(f"k={k}: ask for at least one passage a query")
    return [(query.strip()[:MAX_QUERY_CHARS], k) for query in queries]


def _refuse(text: str, vector_E: np.ndarray) -> SearchFailure | None:
    """Why a query's vector cannot be searched for, None if it can."""
    if not np.isfinite(vector_E).all():
        return SearchFailure("bad_vector", "the encoder's vector of the query is not finite")
    if not text or not vector_E.any():
        return SearchFailure("empty_query", "the query holds no words to search for")
    return None


def _copy(answer: Answer) -> Answer:
    """The caller's own list: the cached one stays as it is."""
    return list(answer) if isinstance(answer, list) else answer
