"""A run of the study: its record, what it needs, and that it is done once."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from mas_jax.evaluation import study as records
from mas_jax.learning import study, study_freeze
from mas_jax.learning.study_agentpo import OTHER_STARTS
from mas_jax.learning.study_cells import make_config
from mas_jax.learning.study_grid import CELLS


def quiet() -> Console:
    return Console(file=io.StringIO())


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> study.Lab:
    return study.rehearsal(tmp_path_factory.mktemp("study"))


def test_an_untrained_cell_leaves_a_record_of_all_plays(lab):
    record = study.run("cascade_base", 0, lab, quiet())
    assert tuple(record["plays"]) == study.PLAYS
    free = record["plays"]["free"]
    assert {len(digits) for digits in free["right"].values()} == {2}  # 14 questions of 7 families
    assert free["num_runs"] == 2
    for name, play in record["plays"].items():
        if name.startswith("searches_"):
            assert play["per_workflow"]["searches"] <= int(name.removeprefix("searches_"))
            assert play["num_runs"] == 1
    free_tokens = records.spent(record, "free", "tokens")
    for name in (
        "tokens_120",
        "tokens_200",
    ):
        assert records.spent(record, name, "tokens") <= 1.2 * free_tokens
    assert record["training"]["training_tokens"] == 0
    assert record["curves"] == {}
    assert records.read(lab.results)["cascade_base"][0] == json.loads(json.dumps(record))


def test_a_record_of_a_collaborator_says_what_each_party_spent(lab):
    record = study.run("agentpo_hint_base", 0, lab, quiet())
    assert list(record["plays"]) == ["free"]  # nothing is searched for
    free = record["plays"]["free"]
    assert sum(map(len, free["right"].values())) == 14
    tokens = free["tokens"]
    for kind in ("input", "output"):  # 14 problems, two runs of each
        both = tokens["collaborator"][kind] + tokens["actor"][kind]
        assert both == pytest.approx(28 * free["per_workflow"][f"{kind}_tokens"])
        assert tokens["collaborator"][kind] > 0 and tokens["actor"][kind] > 0
    assert 0 <= free["answers"]["told"] <= free["answers"]["episodes"] <= 28
    assert record["world"] == study_freeze.describe(CELLS["agentpo_hint_base"])["world"]
    assert record["start"] != study_freeze.describe(CELLS["agentpo_solver"])["start"]


@pytest.mark.parametrize("shape", OTHER_STARTS)
def test_a_collaborator_of_another_shape_speaks_to_the_same_actor(lab, shape):
    """It ends what it says, in the first one's format, from its first evaluation on."""
    cell = f"agentpo_hint_{shape}_base"
    record = study.run(cell, 0, lab, quiet())
    free = record["plays"]["free"]
    assert free["failures"] == 0 and free["invalid_action_frac"] == 0
    assert record["start"] == study_freeze.describe(CELLS[cell])["start"]
    words = free["tokens"]["collaborator"]["output"] / 28  # 14 problems, two runs of each
    assert 1 < words < make_config(CELLS[cell], 0).collaboration.max_tokens
    study.run("agentpo_hint_base", 0, lab, quiet())
    other, first = (_settings(lab, name) for name in (cell, "agentpo_hint_base"))
    assert other["actor_weights"] == first["actor_weights"]
    assert other["weights"] != first["weights"]


def test_a_record_gets_the_plays_that_it_lacks(lab, tmp_path):
    whole = study.run("cascade_base", 0, lab, quiet())
    partial = dataclasses.replace(lab, results=tmp_path)
    records.append(tmp_path, whole | {"plays": {"free": whole["plays"]["free"]}, "git": "before"})
    found = study.run("cascade_base", 0, partial, quiet())
    assert found == whole | {"git": "before"}


def test_a_cell_with_a_record_is_not_run_again(lab):
    first = study.run("cascade_base", 0, lab, quiet())
    console = quiet()
    assert study.run("cascade_base", 0, lab, console) == json.loads(json.dumps(first))
    assert "its record is in" in console.file.getvalue()


def test_a_cell_that_is_not_frozen_is_refused_before_anything_is_made(lab, tmp_path):
    frozen = tmp_path / "none.json"
    frozen.write_text('{"cells": {}}')
    strict = study.Lab(tmp_path / "runs", tmp_path / "results", frozen)
    with pytest.raises(ValueError, match="frozen before it is run"):
        study.run("cascade_base", 0, strict, quiet())
    assert list(tmp_path.iterdir()) == [frozen]


def test_numbers_that_json_cannot_hold_are_left_out():
    assert [study._rounded(x) for x in (0.1234567, float("inf"), None)] == [0.12346, None, None]


@pytest.mark.slow
def test_a_team_is_trained_after_its_teacher_which_needs_no_record(lab):
    record = study.run("opd", 0, lab, quiet())
    assert "cascade_rl" not in records.read(lab.results)
    assert (lab.directory("cascade_rl", 0) / "cascade" / "policy" / "config.json").exists()
    assert len(record["curves"]["rollout/searches"]) == 3
    assert record["training"]["training_tokens"] > 0


@pytest.mark.slow
def test_the_actor_of_a_cell_is_the_policy_that_another_one_trained(lab):
    record = study.run("agentpo_hint_base@stronger", 0, lab, quiet())
    assert (lab.directory("agentpo_solver", 0) / "agentpo" / "policy" / "config.json").exists()
    assert record["training"]["training_tokens"] == 0
    study.run("agentpo_hint_base", 0, lab, quiet())
    stronger, shipped = (_settings(lab, f"agentpo_hint_base{axis}") for axis in ("@stronger", ""))
    assert stronger["weights"] == shipped["weights"]
    assert stronger["actor_weights"] != shipped["actor_weights"]


def _settings(lab: study.Lab, cell: str) -> dict:
    """What the episodes of a cell's evaluation depended on."""
    (path,) = (lab.directory(cell, 0) / "evaluation").glob("*.jsonl")
    return json.loads(path.read_text().splitlines()[0])["settings"]
