"""Documents on disk that are whole or not there. Must not know: what they say."""

import json
import os
import uuid
from pathlib import Path
from typing import Any


def write_json(path: Path, document: Any) -> None:
    """Writes or replaces a JSON file at once: a kill leaves the old one or the new one.

    Several processes and hosts may write it at a time; one of them has the last word.
    """
    partial = path.with_name(f".{path.name}.partial-{uuid.uuid4().hex}")
    try:
        partial.write_text(json.dumps(document, indent=1) + "\n")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)  # where the disk is full
