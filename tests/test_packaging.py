"""setup.py and the lock agree, so that both ways of installing give packages that work together."""

import importlib.metadata
import re

from conftest import ROOT
from packaging.requirements import Requirement


def lock() -> dict[str, str]:
    """Versions by name."""
    pinned = {}
    for line in (ROOT / "launch" / "constraints.txt").read_text().splitlines():
        name, equals, version = line.partition("==")
        if equals:
            pinned[name.lower().replace("-", "_")] = version
    return pinned


def test_the_lock_contradicts_nothing_that_the_extra_tpu_brings():
    wanted = [Requirement(text) for text in importlib.metadata.requires("jax")]
    wanted = [r for r in wanted if r.marker and r.marker.evaluate({"extra": "tpu"})]
    assert any(r.name == "libtpu" for r in wanted)
    pinned = lock()
    for r in wanted:
        version = pinned.get(r.name.lower().replace("-", "_"))
        assert version is None or r.specifier.contains(version), str(r)


def test_the_lock_satisfies_every_requirement_of_setup():
    listed = re.findall(
        r'"([A-Za-z][\w-]*(?:\[\w+\])?[><=][^"]*)"', (ROOT / "setup.py").read_text()
    )
    # the compiler of plans stands apart, see below
    requirements = [r for r in map(Requirement, listed) if r.name not in ("python", "libtpu")]
    pinned = lock()
    assert len(requirements) > 30
    wrong = {
        str(r): pinned.get(r.name.lower().replace("-", "_"))
        for r in requirements
        if not r.specifier.contains(pinned.get(r.name.lower().replace("-", "_"), "0"))
    }
    assert wrong == {}
