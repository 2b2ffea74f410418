"""Benchmarks that a process of their own imports fast."""

import json
from pathlib import Path


def good(out: Path, sizes: list[str] | None) -> None:
    """Writes a record."""
    out.write_text(json.dumps({"value": 1, "sizes": sizes}))


def bad(out: Path, sizes: list[str] | None) -> None:
    """Fails after it wrote something, which is no record."""
    out.write_text("{}")
    raise ValueError("this one cannot run here")
