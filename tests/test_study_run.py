"""A run of the study: its record, what it needs, and that it is done once."""

import io
import json

import pytest
from rich.console import Console

from mas_jax.evaluation import study as records
from mas_jax.learning import study


def quiet() -> Console:
    return Console(file=io.StringIO())


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> study.Lab:
    return study.rehearsal(tmp_path_factory.mktemp("study"))


def test_an_untrained_cell_leaves_a_record_of_three_plays(lab):
    record = study.run("cascade_base", 0, lab, quiet())
    assert set(record["plays"]) == {"free", "searches", "tokens"}
    free, capped = record["plays"]["free"], record["plays"]["searches"]
    assert (free["num_runs"], capped["num_runs"]) == (2, 1)
    assert {len(digits) for digits in free["right"].values()} == {2}  # 14 questions of 7 families
    assert capped["per_workflow"]["searches"] <= study.CAPS["searches"]
    assert record["training"]["training_tokens"] == 0
    assert record["curves"] == {}
    assert records.read(lab.results)["cascade_base"][0] == json.loads(json.dumps(record))


def test_a_cell_with_a_record_is_not_run_again(lab):
    first = study.run("cascade_base", 0, lab, quiet())
    console = quiet()
    assert study.run("cascade_base", 0, lab, console) == json.loads(json.dumps(first))
    assert "its record is in" in console.file.getvalue()


def test_a_cell_that_is_not_frozen_is_refused_before_anything_is_made(lab, tmp_path):
    strict = study.Lab(tmp_path / "runs", tmp_path / "results", tmp_path / "none.json")
    with pytest.raises(ValueError, match="frozen before it is run"):
        study.run("cascade_base", 0, strict, quiet())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_team_is_trained_after_its_teacher(lab):
    record = study.run("opd", 0, lab, quiet())
    assert set(records.read(lab.results)) >= {"opd", "cascade_rl"}
    assert len(record["curves"]["rollout/searches"]) == 3
    assert record["training"]["training_tokens"] > 0
