"""setup.py and the lock agree, so that both ways of installing give packages that fit, and
a plain one is enough for all but what an extra is for."""

import ast
import importlib.metadata
import re
import sys
from collections.abc import Iterable

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


# of extras, and of benchmarks against peers
OPTIONAL = {
    "bm25s",
    "datasets",
    "libtpu",
    "openai",
    "starlette",
    "torch",
    "trl",
    "tunix",
    "uvicorn",
}
# imported by a package that does not ask for it: transformers renders chat templates with it
INDIRECT = {"jinja2"}


def plain_requirements() -> list[Requirement]:
    """install_requires of setup.py."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    (found,) = (
        keyword.value for node in ast.walk(tree) if isinstance(node, ast.Call)
        for keyword in node.keywords if keyword.arg == "install_requires"
    )  # fmt: skip
    return [Requirement(item.value) for item in found.elts]


def brought_by(requirements: Iterable[Requirement]) -> set[str]:
    """Names of all distributions that these requirements install."""
    found: set[str] = set()
    open_ = [(r, "") for r in requirements]
    while open_:
        requirement, extra = open_.pop()
        name = requirement.name.lower().replace("_", "-")
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        if name in found and not requirement.extras:
            continue
        found.add(name)
        for text in importlib.metadata.requires(name) or ():
            open_ += [(Requirement(text), extra) for extra in ("", *requirement.extras)]
    return found


def test_a_plain_installation_brings_what_is_imported():
    imported = set(INDIRECT)
    for folder in ("mas_jax", "launch"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    imported |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    imported.add(node.module.partition(".")[0])
    imported -= {*sys.stdlib_module_names, "mas_jax", *OPTIONAL}
    assert len(imported) > 15
    whose = importlib.metadata.packages_distributions()
    there = brought_by(plain_requirements())
    missing = {
        name for name in imported
        if not {d.lower().replace("_", "-") for d in whose.get(name, ())} & there
    }  # fmt: skip
    assert missing == set()
