"""setup.py and the lock agree, so that both ways of installing give packages that work together."""

import re

from conftest import ROOT
from packaging.requirements import Requirement


def test_the_lock_satisfies_every_requirement_of_setup():
    listed = re.findall(
        r'"([A-Za-z][\w-]*(?:\[\w+\])?[><=][^"]*)"', (ROOT / "setup.py").read_text()
    )
    requirements = [Requirement(text) for text in listed if not text.startswith("python")]
    pinned = {}
    for line in (ROOT / "launch" / "constraints.txt").read_text().splitlines():
        name, equals, version = line.partition("==")
        if equals:
            pinned[name.lower().replace("-", "_")] = version
    assert len(requirements) > 30
    wrong = {
        str(r): pinned.get(r.name.lower().replace("-", "_"))
        for r in requirements
        if not r.specifier.contains(pinned.get(r.name.lower().replace("-", "_"), "0"))
    }
    assert wrong == {}
