"""The safetensors format: tensors mapped one at a time, files written as a stream.

A file is the length of its header (8 bytes, little endian), a JSON header (name -> type, shape,
first and last byte), and the bytes of the tensors, row-major and little endian.
Why not the library: its writer wants all tensors of a file in memory at once, and its reader either
reads a tensor whole for any part of it or keeps the pages of the whole file.
Source: https://huggingface.co/docs/safetensors. Must not know: models, Hugging Face names.
"""

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """A tensor that has not been read: `code` is its type and `offset` its first byte in `path`."""

    path: Path
    code: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Entry:
    """A tensor to be written; `dtype` is a value of `DTYPES`."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of its data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of a file by name, of whatever type; the file's size is checked against them.

    Raises: ValueError if the file is truncated or its header is damaged.
    """
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        data_start = 8 + int.from_bytes(prefix, "little")
        if len(prefix) < 8 or data_start > file_bytes:
            raise ValueError(
                f"{path} is truncated: its {file_bytes} bytes end inside the header; download it "
                "again"
            )
        text = file.read(data_start - 8)
    stored, data_bytes = {}, 0
    try:
        header = dict(json.loads(text))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            code, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            if begin < 0:
                raise ValueError(f"{name} begins at byte {begin}")
            if code in DTYPES and end - begin != math.prod(shape) * DTYPES[code].itemsize:
                raise ValueError(f"{name} has {end - begin} bytes for {code} {shape}")
            stored[name] = Stored(path, code, shape, data_start + begin)
            data_bytes = max(data_bytes, end)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: damaged header ({error!r}); download it again") from error
    if file_bytes != data_start + data_bytes:
        raise ValueError(
            f"{path} is truncated or damaged: its header promises {data_start + data_bytes} bytes, "
            f"got {file_bytes}; download it again"
        )
    return stored


def map_tensor(tensor: Stored) -> np.ndarray:
    """The tensor as it lies in the file, read-only; its last view takes its pages along."""
    return np.memmap(
        tensor.path, DTYPES[tensor.code], mode="r", offset=tensor.offset, shape=tensor.shape
    )


def write(path: Path, entries: Sequence[Entry], arrays: Iterable[np.ndarray]) -> None:
    """Writes one file of `entries`; `arrays` yields their values in that order, C-contiguous."""
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}  # transformers 4 insists on one
    begin = 0
    for entry in entries:
        end = begin + entry.num_bytes
        header[entry.name] = {
            "dtype": _CODES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data start at a multiple of 8
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays:
            file.write(array.reshape(-1).view(np.uint8))
        file.flush()
        os.fsync(file.fileno())
