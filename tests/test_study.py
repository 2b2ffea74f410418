"""The study: its grid, its records and what is made of them."""

import json

import numpy as np
import pytest

from mas_jax.choices import TEAMS
from mas_jax.collaboration_rules import TOPOLOGIES
from mas_jax.config import default_config
from mas_jax.config_rules import validate
from mas_jax.evaluation import study as records
from mas_jax.learning import study_cells, study_freeze, study_grid, study_report
from mas_jax.learning.study_grid import CELLS


def play(
    right: dict[str, str], *, num_runs: int = 4, searches: float = 1.5, tokens: float = 120
) -> dict:
    """An evaluation with these digits, and costs of little interest."""
    return {
        "num_runs": num_runs,
        "right": right,
        "avg": 0.0,
        "pass_at_k": 0.5,
        "all_at_k": 0.25,
        "per_workflow": {"searches": searches, "input_tokens": tokens - 20,
                         "output_tokens": 20.0},
    }  # fmt: skip


def record(cell: str, seed: int, right: dict[str, str]) -> dict:
    """A run's record; at 0.5 searches every question's only run is wrong."""
    none = play({f: "0" * len(digits) for f, digits in right.items()}, num_runs=1, searches=0.5)
    return {
        "cell": cell,
        "seed": seed,
        "frozen": "f",
        "plays": {"free": play(right), "searches_1": none},
        "training": {"training_tokens": 1000},
        "train_s": 90.0,
        "evaluation_accelerator_s": 30.0,
    }


def test_macro_average_weighs_families_equally():
    # family a: (4/4 + 0/4) / 2 = 1/2; family b: (1/4 + 1/4 + 1/4 + 1/4) / 4 = 1/4; mean 3/8
    assert records.accuracy(record("x", 0, {"a": "40", "b": "1111"})) == 0.375


def test_records_come_back_by_cell_and_seed_and_the_last_of_a_seed_counts(tmp_path):
    for seed, digits in ((1, "4"), (0, "0"), (1, "2")):
        records.append(tmp_path, record("opd", seed, {"a": digits}))
    records.append(tmp_path, record("no_signal", 0, {"a": "3"}))
    runs = records.read(tmp_path)
    assert {cell: list(seeds) for cell, seeds in runs.items()} == {"no_signal": [0], "opd": [0, 1]}
    assert records.accuracy(runs["opd"][1]) == 0.5


def test_a_damaged_record_names_its_line(tmp_path):
    records.append(tmp_path, record("opd", 0, {"a": "4"}))
    with (tmp_path / "opd.jsonl").open("a") as file:
        file.write('{"cell": "opd"\n')
    with pytest.raises(ValueError, match=r"opd\.jsonl, line 2: no record of a run"):
        records.read(tmp_path)


def test_comparison_is_over_the_seeds_that_both_have():
    runs = {
        "x": {s: record("x", s, {"a": d}) for s, d in ((0, "4" * 8), (1, "3" * 8), (2, "4" * 8))},
        "y": {s: record("y", s, {"a": "2" * 8}) for s in (0, 1)},
    }
    found = records.compare(runs, "x", "y")
    assert found.seeds == (0, 1)
    # differences 1/2 and 1/4: mean 3/8, standard error 1/8, t(1, 0.975) = 12.706
    assert found.interval.difference == pytest.approx(0.375)
    assert found.interval.low == pytest.approx(0.375 - 12.7062 / 8, abs=1e-4)
    assert not found.supported
    assert records.compare(runs, "x", "z") is None


def test_one_seed_is_compared_over_questions():
    runs = {
        "x": {0: record("x", 0, {"a": "4" * 30})},
        "y": {0: record("y", 0, {"a": "40" * 15})},
    }
    found = records.compare(runs, "x", "y")
    assert found.interval.difference == 0.5
    assert 0.25 < found.interval.low < 0.5 < found.interval.high < 0.75
    assert found.supported
    assert records.shown(found).startswith("+50.0 [")


def test_seeds_that_are_the_same_run_are_compared_over_questions():
    first, second = ({s: record(c, s, {"a": d}) for s in (0, 1, 2)} for c, d in
                     (("x", "4" * 30), ("y", "40" * 15)))  # fmt: skip
    once = records.compare({"x": {0: first[0]}, "y": {0: second[0]}}, "x", "y")
    found = records.compare({"x": first, "y": second}, "x", "y")
    assert found.interval == once.interval and found.supported
    assert found.seeds == (0, 1, 2)


def test_cell_grid_shows_means_and_spread():
    runs = {"x": {s: record("x", s, {"a": d}) for s, d in ((0, "4"), (1, "2"))}}
    runs["teacher"] = {0: record("teacher", 0, {"a": "1"}) | {"training": {"training_tokens": 400}}}
    budgets = {"searches": 1.0, "tokens": 50.0}
    grid = records.cell_grid(
        runs, ["x", "never_run"], {"x": ["teacher"]}, budgets=budgets, title="t"
    )
    # (100 + 50) / 2, and sqrt((25^2 + 25^2) / 1)
    assert grid.rows[0][:6] == ("x", "2", "75.0", "35.4", "50.0", "25.0")
    # half way from 0.5 searches, where nothing was right, to 1.5; all plays cost 120 tokens
    assert grid.rows[0][9:11] == ("37.5", "-")
    # seed 0 also needed its teacher's 400: (1400 + 1000) / 2; (90 + 30) s
    assert grid.rows[0][11:] == ("1,000", "1,200", "2.0")
    assert len(grid.rows) == 1


def test_accuracy_at_a_spend_lies_between_the_plays_that_cost_next_to_it():
    one = record("x", 0, {"a": "40"})
    for budget, wanted in (
        (0.4, None),
        (0.5, [0, 0]),
        (0.75, [0.25, 0]),
        (1.5, [1, 0]),
        (9, [1, 0]),
    ):
        found = records.at_spend(one, "searches", budget)
        assert (found is None) == (wanted is None)
        if wanted is not None:
            np.testing.assert_allclose(found["a"], wanted)


def test_a_cap_on_searches_spares_tokens_and_a_cap_on_tokens_no_searches():
    one = record("x", 0, {"a": "4"})
    one["plays"] = {
        "free": play({"a": "4"}, tokens=300, searches=2.0),
        "tokens_120": play({"a": "3"}, tokens=200, searches=1.0),
        "searches_1": play({"a": "0"}, tokens=100, searches=1.5),
    }
    for kind, budget, wanted in (("tokens", 250, 0.875), ("tokens", 150, 0.375),
                                 ("searches", 1.75, 0.5), ("searches", 1.2, None)):  # fmt: skip
        found = records.at_spend(one, kind, budget)
        assert (None if found is None else found["a"].tolist()) == (wanted and [wanted])


def test_a_cell_says_how_many_of_its_seeds_reach_a_budget():
    runs = {"x": {s: record("x", s, {"a": "4"}) for s in (0, 1)}}
    del runs["x"][1]["plays"]["searches_1"]
    grid = records.cell_grid(runs, ["x"], {}, budgets={"searches": 1.0, "tokens": 9}, title="t")
    assert grid.rows[0][9:11] == ("50.0 (1)", "-")


def test_equal_teaching_is_shown_only_by_an_interval_inside_the_margin():
    def seeds(cell, *digits):
        return {s: record(cell, s, {"a": d}) for s, d in enumerate(digits)}

    runs = {
        "x": seeds("x", "2" * 100, "2" * 100, "2" * 100),
        "near": seeds("near", "2" * 99 + "3", "2" * 99 + "1", "2" * 100),
        "far": seeds("far", "2" * 60 + "3" * 40, "2" * 100, "2" * 100),
        "once": seeds("once", "2" * 100),
    }
    pairs = [("x", "near"), ("x", "far"), ("x", "once"), ("x", "never")]
    grid = records.equivalence_grid(runs, pairs, margin=0.02, title="t")
    assert [(row[1], row[3], row[5]) for row in grid.rows] == [
        ("near", "3", "yes"), ("far", "3", "not shown")
    ]  # fmt: skip
    # differences -0.0025, 0.0025, 0: standard error 0.0025 / sqrt(3), t(2, 0.95) = 2.92
    assert grid.rows[0][2] == "+0.0 [-0.4, 0.4]"


def test_families_are_shown_where_a_world_has_them():
    runs = {
        "x": {0: record("x", 0, {"a": "40", "b": "2"}), 1: record("x", 1, {"a": "44", "b": "2"})},
        "y": {0: record("y", 0, {"b": "1"})},
    }
    grid = records.family_grid(runs, ["x", "y", "never"], title="t")
    assert grid.header == ("cell", "a", "b")
    assert grid.rows == (("x", "75.0", "50.0"), ("y", "-", "25.0"))


def test_a_record_of_another_freeze_is_refused(tmp_path):
    frozen = tmp_path / "frozen.json"
    frozen.write_text(json.dumps({"cells": {"opd": {"seeds": 5}}}))
    one = record("opd", 0, {"a": "4"}) | {"frozen": study_freeze.digest({"seeds": 5})}
    records.append(tmp_path, one)
    assert list(study_report.read(tmp_path, frozen)) == ["opd"]
    records.append(tmp_path, one | {"seed": 1, "frozen": "other"})
    with pytest.raises(ValueError, match=r"record of opd, seed 1, .* is of no cell"):
        study_report.read(tmp_path, frozen)


def test_question_values_are_shares_of_runs():
    values = records.question_values(record("x", 0, {"a": "0134"}))
    np.testing.assert_array_equal(values["a"], [0, 0.25, 0.75, 1])


@pytest.mark.parametrize("name", CELLS)
def test_every_cell_makes_a_config_of_its_own(name, tmp_path):
    cell = CELLS[name]
    config = study_cells.make_config(cell, 3)
    config.teacher.checkpoint = str(tmp_path)
    if cell.protocols:
        config.privileged.protocols = str(tmp_path / "protocols.jsonl")
        config.trajectories = config.privileged.protocols
        (tmp_path / "protocols.jsonl").write_text("")
    validate(config)
    assert config.seed == 3
    assert cell.team in (*TEAMS, *TOPOLOGIES)
    assert cell.policy in ("own", "start") or cell.policy in CELLS
    assert set(cell.needs) <= set(CELLS)
    if cell.policy == "own":
        assert config.stages[config.train.stages[-1]].team == cell.team


def test_no_two_cells_that_train_are_the_same():
    seen = {}
    for cell in CELLS.values():
        config = json.loads(study_cells.make_config(cell, 0).to_json_best_effort())
        parts = (
            cell.team, cell.policy, cell.teacher, cell.start, cell.protocols, cell.actor
        )  # fmt: skip
        key = json.dumps([config, *parts], sort_keys=True)
        assert key not in seen, f"{cell.name} is {seen.get(key)}"
        seen[key] = cell.name


def test_a_cell_leaves_the_defaults_alone():
    before = default_config().to_json_best_effort()
    for cell in CELLS.values():
        study_cells.make_config(cell, 0)
    assert default_config().to_json_best_effort() == before


def test_claims_name_cells():
    r = study_report
    claims = (*r.CLAIMS, *r.AXIS_CLAIMS, *r.MAPD_CLAIMS, *r.AGENTPO_CLAIMS, *r.SAME_TEACHING)
    for pair in claims:
        assert set(pair) <= set(CELLS)


def test_jobs_go_seed_by_seed_and_a_wrong_name_is_told_the_nearest():
    assert study_grid.jobs(["opd", "cascade_rl"], [1, 0]) == [
        ("cascade_rl", 0), ("opd", 0), ("cascade_rl", 1), ("opd", 1)
    ]  # fmt: skip
    assert len(study_grid.jobs(["all"], [])) == sum(cell.seeds for cell in CELLS.values())
    # a seed that a cell has not is no job of it; one that none has is an error
    assert study_grid.jobs(["opd", "opd_exact"], [4]) == [("opd", 4)]
    with pytest.raises(
        ValueError, match=r"--seed=\[7\]: these cells have the seeds \[0, 1, 2, 3, 4\]"
    ):
        study_grid.jobs(["opd"], [7])
    assert {name for name, _ in study_grid.jobs(["critics"], [])} == {
        cell.name for cell in study_grid.GROUPS["critics"]
    }
    with pytest.raises(ValueError, match="did you mean 'no_signal'"):
        study_grid.jobs(["no_signals"], [])


def test_no_name_is_of_a_group_and_of_a_cell():
    """`--run` takes both."""
    assert not set(study_grid.GROUPS) & set(study_grid.CELLS)


def test_listing_shows_what_has_a_record(tmp_path):
    records.append(tmp_path, record("opd", 1, {"a": "4"}))
    lines = study_report.listing(tmp_path).splitlines()
    assert lines[0].startswith(f"{len(CELLS)} cells")
    (line,) = [line for line in lines if line.startswith("opd ")]
    assert ".x..." in line
