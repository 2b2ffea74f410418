"""Corpora on disk: passages of a JSONL file of any size, each read when it is asked for.

A line holds `id` and either `contents` ("Title\\ntext", the title in double quotes or not) or
`title` and `text`. Opening a file the first time reads it once, for the place of every line and a
digest of all of them, which are kept in a cache. Must not know: vectors, indexes.
"""

import gzip
import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import SupportsIndex, overload

import numpy as np

from mas_jax.files import write_json
from mas_jax.model.packaged import cache_directory
from mas_jax.records import Passage

_READ_BYTES = 1 << 24


def split_contents(contents: str) -> tuple[str, str]:
    """Title and text of "Title\ntext"; double quotes around a title are taken off."""
    title, _, text = contents.partition("\n")
    if len(title) > 1 and title[0] == title[-1] == '"':
        title = title[1:-1]
    return title, text


def parse(line: bytes) -> Passage:
    """The passage of one line; a title's double quotes, as wiki-18 has them, are taken off.

    Raises: ValueError for a line that is not a passage.
    """
    fields = json.loads(line)
    if not isinstance(fields, dict) or not isinstance(fields.get("id"), (str, int)):
        raise ValueError("no id")
    if "contents" in fields:
        return Passage(str(fields["id"]), *split_contents(fields["contents"]))
    return Passage(str(fields["id"]), fields["title"], fields["text"])


class Corpus(Sequence[Passage]):
    """The passages of a file in its order; safe to read from several threads.

    `fingerprint` is a digest of the file's bytes. `open_corpus` makes one.
    """

    def __init__(self, path: Path, starts_N: np.ndarray, fingerprint: str) -> None:
        self.path, self.fingerprint = path, fingerprint
        self._starts = starts_N  # byte of each line's beginning, and the file's end
        self._file = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if "_file" in vars(self):
            os.close(self._file)

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: SupportsIndex) -> Passage: ...
    @overload
    def __getitem__(self, index: slice) -> list[Passage]: ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = range(len(self))[index]
        start, end = int(self._starts[row]), int(self._starts[row + 1])
        try:
            return parse(os.pread(self._file, end - start, start))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(
                f"{self.path}: passage {row} (byte {start}) is not a passage: {error!r}; wanted "
                "id and contents, or id, title and text"
            ) from error


def _unpacked(path: Path, directory: Path) -> Path:
    """The plain file of a .gz, unpacked once: a packed file has no places of lines."""
    plain = directory / f"{path.name.removesuffix('.gz')}"
    if not plain.is_file() or plain.stat().st_mtime < path.stat().st_mtime:
        partial = plain.with_name(f"{plain.name}.partial-{uuid.uuid4().hex}")
        with gzip.open(path, "rb") as packed, partial.open("wb") as file:
            shutil.copyfileobj(packed, file, _READ_BYTES)
        partial.rename(plain)
    return plain


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            yield block


def _scan(path: Path) -> tuple[np.ndarray, str]:
    """Where each line that is not blank begins, and where the last one ends; a digest of all."""
    digest, parts, offset, last = hashlib.blake2b(digest_size=16), [np.zeros(1, np.int64)], 0, b""
    for block in _blocks(path):
        digest.update(block)
        ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
        parts.append(ends.astype(np.int64) + offset + 1)
        offset, last = offset + len(block), block[-1:]
    starts_N = np.concatenate(parts)
    if offset and last != b"\n":
        starts_N = np.append(starts_N, offset)
    return starts_N, digest.hexdigest()


def _kept(notes: Path, starts: Path, size_and_time: Sequence[int]) -> tuple[np.ndarray, str] | None:
    """Places of lines and digest that an earlier opening kept of this file, None if it did not, or
    if what it kept is damaged."""
    try:
        kept, starts_N = json.loads(notes.read_bytes()), np.load(starts, mmap_mode="r")
        is_this = kept["size_and_time"] == size_and_time and starts_N[-1] == size_and_time[0]
        return (starts_N, kept["fingerprint"]) if is_this else None
    except (FileNotFoundError, ValueError, EOFError, LookupError, TypeError):
        return None


def open_corpus(path: Path, *, cache: Path | None = None) -> Corpus:
    """The corpus of a .jsonl or .jsonl.gz file.

    cache: where places and digest of its lines are kept, and a .gz is unpacked to (default: a
    directory for this file under `packaged.cache_directory`).
    Raises: FileNotFoundError; ValueError for a file without lines, or with a blank line among them.
    """
    if not path.is_file():
        raise FileNotFoundError(f"corpus {path} does not exist; wanted a .jsonl or .jsonl.gz file")
    if cache is None:
        name = hashlib.blake2b(str(path.resolve()).encode(), digest_size=6).hexdigest()
        cache = cache_directory() / "corpora" / name
    cache.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        path = _unpacked(path, cache)
    size_and_time = [path.stat().st_size, path.stat().st_mtime_ns]
    notes, starts = cache / f"{path.name}.lines.json", cache / f"{path.name}.lines.npy"
    if (kept := _kept(notes, starts, size_and_time)) is not None:
        return Corpus(path, *kept)
    logging.info("reading %s once for the places of its lines", path)
    starts_N, fingerprint = _scan(path)
    if len(starts_N) < 2:
        raise ValueError(f"corpus {path} is empty: wanted a passage a line")
    if np.any(np.diff(starts_N) < 3):
        row = int(np.argmax(np.diff(starts_N) < 3))
        raise ValueError(f"corpus {path}: line {row + 1} is blank; remove it")
    partial = starts.with_name(f"{starts.name}.partial-{uuid.uuid4().hex}.npy")
    np.save(partial, starts_N)
    partial.rename(starts)
    write_json(notes, {"size_and_time": size_and_time, "fingerprint": fingerprint})
    return Corpus(path, starts_N, fingerprint)
