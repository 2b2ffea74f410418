"""Vectors of a corpus on disk, made in pieces at constant memory; a killed run goes on.

The vectors are one tensorstore array [N, E] (zarr), a chunk a piece. A piece that is written whole
has a mark; several hosts each take every num_hosts-th piece.
Letters: N passages, E dimensions. Must not know: indexes, how texts become vectors.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import tensorstore

from mas_jax.files import write_json
from mas_jax.records import Passage

Encode = Callable[[Sequence[str]], np.ndarray]

NOTES = "embeddings.json"


def _store(directory: Path, **settings) -> tensorstore.TensorStore:
    kvstore = {"driver": "file", "path": str(directory.absolute() / "vectors")}
    return tensorstore.open({"driver": "zarr", "kvstore": kvstore}, **settings).result()


class Embeddings:
    """The vectors of a corpus in a directory, finished or not.

    settings: everything that they depend on; they must be those of the run that began it.
    Raises: ValueError naming the settings that differ, or a damaged file that should hold them.
    """

    def __init__(
        self, directory: Path, num_passages: int, dim: int, *, piece: int, settings: dict
    ) -> None:
        self.directory, self.num_passages, self.piece = directory, num_passages, piece
        wanted = settings | {"passages": num_passages, "dim": dim, "piece": piece}
        directory.mkdir(parents=True, exist_ok=True)
        found = self._noted()
        if found is None:
            write_json(directory / NOTES, wanted)
        else:
            differ = [
                f"{key}: has {found.get(key)!r}, wanted {wanted.get(key)!r}"
                for key in sorted(found.keys() | wanted.keys())
                if found.get(key) != wanted.get(key)
            ]
            if differ:
                raise ValueError(
                    f"embeddings in {directory} are of another run ({'; '.join(differ)}); remove "
                    "them or build elsewhere"
                )
        self._store = _store(
            directory, open=True, create=True, dtype=tensorstore.float32,
            shape=[num_passages, dim],
            chunk_layout=tensorstore.ChunkLayout(chunk_shape=[piece, dim]),
        )  # fmt: skip

    def _noted(self) -> dict | None:
        """The settings of the run that began here; None where nothing is written yet."""
        notes = self.directory / NOTES
        try:
            found = json.loads(notes.read_bytes())
        except (FileNotFoundError, ValueError):
            found = None
        if isinstance(found, dict):
            return found
        if any(self.directory.glob("piece-*")):
            raise ValueError(
                f"{notes} is absent or damaged, so that nothing says how the vectors beside it "
                f"were made; restore it, or remove {self.directory} to encode them again"
            )
        return None

    def missing(self) -> list[int]:
        """Numbers of the pieces that are not written yet."""
        pieces = range(-(-self.num_passages // self.piece))
        return [number for number in pieces if not self._mark(number).is_file()]

    def _mark(self, number: int) -> Path:
        return self.directory / f"piece-{number:06d}"

    def write(
        self,
        passages: Sequence[Passage],
        text_of: Callable[[Passage], str],
        encode: Encode,
        *,
        host: int,
        num_hosts: int,
        report: Callable[[int], None],
    ) -> None:
        """Encodes this host's missing pieces; report(passages done in this call) after each.

        Raises: ValueError naming the passage whose vector is not finite.
        """
        done = 0
        for number in self.missing():
            if number % num_hosts != host:
                continue
            start = number * self.piece
            block = passages[start : start + self.piece]
            vectors_NE = np.asarray(encode([text_of(passage) for passage in block]), np.float32)
            finite_N = np.isfinite(vectors_NE).all(axis=1)
            if not finite_N.all():
                row = int(np.argmin(finite_N))
                raise ValueError(
                    f"the vector of passage {start + row} ({block[row].id!r}) is not finite; look "
                    "at what the encoder makes of it"
                )
            self._store[start : start + len(block)].write(vectors_NE).result()
            self._mark(number).touch()
            done += len(block)
            report(done)

    def read(self, start: int, end: int) -> np.ndarray:
        """Vectors [end - start, E] f32. Raises: RuntimeError while pieces are missing."""
        if missing := self.missing():
            raise RuntimeError(
                f"{len(missing)} pieces of the embeddings in {self.directory} are not written yet, "
                f"the first is number {missing[0]}; let every host finish its share"
            )
        return np.asarray(self._store[start:end].read().result())
