"""Real questions, passages and tokenizers for tests, where this checkout has them beside it."""

import json
from pathlib import Path

import pytest
from conftest import ROOT

DIRECTORY = ROOT.parent / "shared" / "data"


def shared(name: str) -> Path:
    """A file or folder of the shared data; a test that asks for an absent one is skipped."""
    path = DIRECTORY / name
    if not path.exists():
        pytest.skip(f"needs {name} of the shared data, which is not in {DIRECTORY}")
    return path


def lines(name: str, count: int | None = None) -> list[dict]:
    """The first lines of a shared JSONL file, all of them by default."""
    with shared(name).open(encoding="utf-8", newline="\n") as file:
        return [json.loads(line) for _, line in zip(range(count or 10**9), file, strict=False)]
