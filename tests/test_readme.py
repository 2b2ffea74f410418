"""The README is true: its snippet runs and prints what it says, its paths and commands exist."""

import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT

from mas_jax.benchmarks import model

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_snippet_prints_the_number_that_the_text_gives():
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", snippet], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert f"It prints `{done.stdout.strip()}`" in README


def test_the_tree_names_every_module_and_nothing_else():
    named = re.findall(r"^  (\w+\.py) ", README, re.MULTILINE)
    modules = [p.name for p in (ROOT / "mas_jax").rglob("*.py") if p.name != "__init__.py"]
    assert sorted(named) == sorted(modules)


@pytest.mark.parametrize("command", re.findall(r"^(?:bash|python) (\S+)", README, re.MULTILINE))
def test_the_commands_name_files_that_exist(command):
    assert (ROOT / command).is_file()


def test_the_table_of_measurements_is_the_committed_record():
    record = json.loads((ROOT / "mas_jax/benchmarks/records/model.json").read_text())
    rows = model.markdown(record["cases"])
    assert len(record["cases"]) == len(model.CASES)
    assert rows in README


def test_the_benchmark_refuses_what_it_does_not_know():
    def bench(*arguments):
        command = [sys.executable, "launch/bench.py", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)

    unknown = bench("modle")
    assert unknown.returncode != 0
    assert "name one benchmark of ['model', 'retrieval', 'rollout']" in unknown.stderr
    size = bench("model", "--sizes=toy-2m")
    assert size.returncode != 0 and "unknown sizes ['toy-2m']; choose from" in size.stderr
