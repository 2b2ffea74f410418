"""The README is true: its snippet runs and prints what it says, its paths and commands exist."""

import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT

from mas_jax.benchmarks import (
    encoder,
    index_build,
    model,
    retrieval,
    retrieval_quality,
    rollout,
    serving,
    update,
)
from mas_jax.config import default_config
from mas_jax.data.world import make_world
from mas_jax.learning import demo

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


def read_record(name: str) -> dict:
    return json.loads((ROOT / f"mas_jax/benchmarks/records/{name}.json").read_text())


@pytest.mark.parametrize("benchmark", [model, rollout, update], ids=["model", "rollout", "update"])
def test_the_tables_of_measurements_are_the_committed_records(benchmark):
    cases = read_record(benchmark.__name__.rpartition(".")[2])["cases"]
    assert len(cases) == len(benchmark.CASES)
    assert benchmark.markdown(cases) in README


@pytest.mark.parametrize(
    "benchmark",
    [encoder, index_build, retrieval_quality, serving],
    ids=["encoder", "index_build", "retrieval_quality", "serving"],
)
def test_the_figures_of_real_text_are_the_committed_records(benchmark):
    record = read_record(benchmark.__name__.rpartition(".")[2])
    assert benchmark.markdown(record).strip() in README


def test_the_table_of_the_retriever_is_the_committed_record():
    record = read_record("retrieval")
    assert [case["vectors"] for case in record["cases"]] == list(retrieval.SIZES.values())
    assert retrieval.markdown(record) in README


def test_the_tables_of_the_demo_are_the_committed_record_in_the_frozen_world():
    record = read_record("demo")
    assert [entry["seed"] for entry in record] == [0, 1, 2]
    world = make_world(0, closed_share=default_config().world.closed_share)
    assert {entry["world"] for entry in record} == {world.fingerprint}
    assert {(entry["num_questions"], entry["num_runs"]) for entry in record} == {(560, 4)}
    assert demo.markdown(record) in README


def test_the_benchmark_refuses_what_it_does_not_know():
    def bench(*arguments):
        command = [sys.executable, "launch/bench.py", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)

    unknown = bench("modle")
    assert unknown.returncode != 0
    assert "name one benchmark of ['all', 'device', 'encoder'" in unknown.stderr
    size = bench("model", "--sizes=toy-2m")
    assert size.returncode != 0 and "unknown sizes ['toy-2m']; choose from" in size.stderr
