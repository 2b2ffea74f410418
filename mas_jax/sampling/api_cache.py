"""Answers on disk, found by the content of the question: one JSON file an entry.

An entry appears complete or not at all, and says what it answers; several processes may share a
directory. Must not know: HTTP, money, what the values mean.
"""

import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path

FORMAT = 1


def hash_fields(fields: Mapping[str, object]) -> str:
    """Hex digest of JSON values, whatever the order of their keys. blake2b of canonical JSON.

    Raises: ValueError for a number that is not finite.
    """
    text = json.dumps(fields, allow_nan=False, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()


def entry_path(directory: Path, fields: Mapping[str, object]) -> Path:
    """Where the answer to `fields` lies: a subfolder named by two characters, then the rest."""
    digest = hash_fields({"format": FORMAT, "request": fields})
    return directory / digest[:2] / f"{digest[2:]}.json"


def read(directory: Path, fields: Mapping[str, object]) -> dict | None:
    """The stored answer, None if there is none or its file is damaged.

    Raises: OSError if a file is there and cannot be read.
    """
    try:
        entry = json.loads(entry_path(directory, fields).read_bytes())
        digest = entry.pop("digest")
        intact = digest == hash_fields(entry) and entry["request"] == fields
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # not JSON, or not of this form
    return entry["answer"] if intact else None


def write(directory: Path, fields: Mapping[str, object], answer: Mapping[str, object]) -> None:
    """Stores an answer, in place of whatever is there. Raises: OSError if it cannot be written."""
    path = entry_path(directory, fields)
    entry = {"request": fields, "answer": answer}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}-{uuid.uuid4().hex}")
    partial.write_text(json.dumps(entry | {"digest": hash_fields(entry)}, allow_nan=False))
    partial.replace(path)
