"""The architecture's rules: imports go down the layers, host modules never load jax."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

PACKAGE = ROOT / "mas_jax"

# lowest first; a module imports from strictly lower layers and from its own package
LAYERS = [
    {"choices"},
    {"collaboration_rules"},
    {"stage_rules"},
    {"config_rules", "files", "records", "metrics"},
    {"config"},
    {"config_systems"},
    {"data", "model"},
    {"rewards", "retrieval"},
    {"sampling", "agents"},
    {"evaluation"},
    {"learning"},
    {"planning", "benchmarks"},
]

# host-side parts: no jax, directly or through what they import
JAX_FREE = [
    "config",
    "config_systems",
    "choices",
    "collaboration_rules",
    "stage_rules",
    "config_rules",
    "files",
    "records",
    "metrics",
    "data",
    "rewards",
    "retrieval.index",
    "retrieval.build",
    "retrieval.corpus",
    "retrieval.embeddings",
    "retrieval.server",
    "retrieval.client",
    "sampling.api",
    "sampling.policies",
    "sampling.pages",
    "agents",
    "evaluation",
]


def layer_of(package: str) -> int:
    """Index in LAYERS of a top-level part of mas_jax."""
    for index, layer in enumerate(LAYERS):
        if package in layer:
            return index
    raise AssertionError(f"mas_jax.{package} has no layer; add it to LAYERS or move it")


def imports_of(source: str) -> set[str]:
    """Dotted names of mas_jax modules that a source text imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer; write mas_jax.…"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("mas_jax.")}


def violations(path: Path, source: str) -> list[str]:
    """Imports of one file of the package that go up or sideways."""
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own == "__init__":
        return [f"{path}: mas_jax/__init__.py imports {n}" for n in imports_of(source)]
    bad = []
    for name in imports_of(source):
        target = name.split(".")[1]
        if target != own and layer_of(target) >= layer_of(own):
            bad.append(f"{path}: mas_jax.{own} may not import {name}")
    return bad


def test_every_module_imports_only_from_lower_layers():
    bad = [v for path in sorted(PACKAGE.rglob("*.py")) for v in violations(path, path.read_text())]
    assert not bad, "\n".join(bad)


def test_an_upward_import_is_found():
    source = "def f():\n    from mas_jax.learning import losses\n"
    assert violations(PACKAGE / "model" / "qwen3.py", source)
    assert violations(PACKAGE / "data" / "world.py", "import mas_jax.model.qwen3")
    assert not violations(PACKAGE / "learning" / "loop.py", "from mas_jax.model import qwen3")


def test_configs_import_only_the_config_module():
    for path in sorted((ROOT / "configs").glob("*.py")):
        modules = {".".join(name.split(".")[:2]) for name in imports_of(path.read_text())}
        assert modules <= {"mas_jax.config", "mas_jax.config_systems"}, path


def host_modules() -> list[str]:
    """Dotted names of the modules that must not load jax and that exist today."""
    names = []
    for part in JAX_FREE:
        path = PACKAGE.joinpath(*part.split("."))
        if path.with_suffix(".py").exists():
            names.append(f"mas_jax.{part}")
        elif path.is_dir():
            names += [f"mas_jax.{part}.{p.stem}" for p in path.glob("*.py") if p.stem[0] != "_"]
    return names


def loads_jax(statement: str) -> bool:
    """Whether a fresh interpreter has jax loaded after running a statement."""
    code = f"{statement}\nimport sys\nsys.exit(7 if 'jax' in sys.modules else 0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 7), done.stderr
    return done.returncode == 7


def test_host_modules_never_load_jax():
    statement = "\n".join(f"import {name}" for name in ["mas_jax", *host_modules()])
    assert not loads_jax(statement), statement


def test_the_jax_check_sees_jax():
    assert loads_jax("import mas_jax.model.qwen3")


@pytest.mark.parametrize("name", ["setup.py", "README.md", "LICENSE", "launch/test.sh", ".ci/run"])
def test_the_skeleton_has_its_parts(name):
    assert (ROOT / name).is_file()
