"""What must hold of a finished run: figures by hand, and everything that may break it."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT

from mas_jax.learning import run_checks

TEAM = {
    "num_failed": 0, "num_missing": 0, "per_workflow": {"searches": 0.5, "failed_searches": 0.0},
}  # fmt: skip
LINE = {
    "update/loss": 0.2, "update/searcher/sampler_log_ratio_abs_max": 2e-5,
    "update/leader/sampler_log_ratio_abs_max": 7e-4, "rollout/failure_frac": 0.0,
    "rollout/failed_searches": 0.0, "batch/too_long": 0.0, "update/searcher/tokens": 40.0,
}  # fmt: skip
PROGRAMME = {"searcher": {"trained": True}, "answerer": {"trained": False}}


def evaluation(place, **changes):
    """A finished evaluation of two teams; changes: of the second."""
    place.mkdir()
    teams = {"cascade": TEAM, "hierarchy": {**TEAM, **changes}}
    (place / "summary.json").write_text(json.dumps({"teams": teams}))
    return place


def configured(place, *, weights="full", sampler="policy"):
    stage = {"sampler": sampler, "programme": PROGRAMME}
    found = {"engine": {"weights": weights}, "stages": {"student": stage}}
    (place / "config.json").write_text(json.dumps(found))


def training(place, **changes):
    """A finished stage of two steps; changes: of the second one's metrics."""
    policy = place / "student" / "policy"
    policy.mkdir(parents=True)
    (policy / "config.json").write_text("{}")
    lines = [{"step": 0, **LINE}, {"step": 1, **LINE, **changes}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (place / "student" / "metrics.jsonl").write_text(text)
    configured(place)
    return place


def broken(checks):
    return [(check.part, check.figure) for check in checks if not check.holds]


def test_a_good_run_passes_with_its_largest_gap(tmp_path):
    checks = run_checks.of_training(training(tmp_path / "t"))
    assert broken(checks) == []
    assert [c.figure for c in checks if "gap" in c.what] == [7e-4]
    checks = run_checks.of_evaluation(evaluation(tmp_path / "e"))
    assert broken(checks) == []
    assert checks[-1].figure == 0.5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("update/searcher/sampler_log_ratio_abs_max", 2e-3),
        ("rollout/failure_frac", 0.125),
        ("rollout/failed_searches", 1.0),
        ("batch/too_long", 3.0),
        ("update/answerer/tokens", 7.0),
        ("engine/actor_replacements", 2.0),
    ],
)
def test_one_bad_figure_of_training_is_found(name, value, tmp_path):
    assert broken(run_checks.of_training(training(tmp_path / "t", **{name: value}))) == [
        ("student", value)
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"num_failed": 2},
        {"num_missing": 2},
        {"per_workflow": {"searches": 0.5, "failed_searches": 2}},
    ],
)
def test_one_bad_figure_of_an_evaluation_is_found(change, tmp_path):
    checks = run_checks.of_evaluation(evaluation(tmp_path / "e", **change))
    assert broken(checks) == [("hierarchy", 2)]


def test_a_loss_that_is_no_number_is_found(tmp_path):
    place = training(tmp_path / "t")
    with (place / "student" / "metrics.jsonl").open("a") as file:
        line = {name: value for name, value in LINE.items() if name != "update/loss"}
        file.write(json.dumps({"step": 2, **line, "nonfinite": {"update/loss": "nan"}}) + "\n")
    assert broken(run_checks.of_training(place)) == [("student", 1)]


def test_an_int8_samplers_gap_may_be_as_wide_as_its_weights_go(tmp_path):
    for value, want in ((0.69, []), (0.70, [("student", 0.70)])):  # ln 2 = 0.693
        place = training(
            tmp_path / str(value), **{"update/searcher/sampler_log_ratio_abs_max": value}
        )
        assert broken(run_checks.of_training(place)) == [("student", value)]
        configured(place, weights="int8")
        assert broken(run_checks.of_training(place)) == want


def test_what_is_imitated_was_drawn_by_no_sampler(tmp_path):
    place = training(tmp_path / "t", **{"update/searcher/sampler_log_ratio_abs_max": 5.0})
    configured(place, sampler="trajectories")
    checks = run_checks.of_training(place)
    assert broken(checks) == []
    assert not [check for check in checks if "gap" in check.what]


def test_teams_that_never_searched_measured_no_retrieval(tmp_path):
    place = evaluation(tmp_path / "e")
    still = {**TEAM, "per_workflow": {"searches": 0.0, "failed_searches": 0.0}}
    (place / "summary.json").write_text(json.dumps({"teams": {"cascade": still}}))
    assert broken(run_checks.of_evaluation(place)) == [("all", 0.0)]


def test_a_stage_that_trained_on_no_token_is_found(tmp_path):
    place = training(tmp_path / "t", **{"update/searcher/tokens": 0.0})
    assert broken(run_checks.of_training(place)) == []  # not in every step
    untrained = {**LINE, "step": 0, "update/searcher/tokens": 0.0}
    (place / "student" / "metrics.jsonl").write_text(json.dumps(untrained) + "\n")
    assert broken(run_checks.of_training(place)) == [("student", 0.0)]


def test_an_actor_that_stayed_is_shown_and_an_endpoints_is_not_known(tmp_path):
    what = "changes of the actor's weights"
    place = training(tmp_path / "here", **{"engine/actor_replacements": 0.0})
    (check,) = [check for check in run_checks.of_training(place) if check.what == what]
    assert (check.figure, check.holds) == (0.0, True)
    checks = run_checks.of_training(training(tmp_path / "endpoint"))
    assert what not in {check.what for check in checks}


def test_teams_of_a_topology_write_and_search_nothing(tmp_path):
    place = evaluation(tmp_path / "e")
    cost = {"searches": 0.0, "failed_searches": 0.0, "output_tokens": 90.0}
    written, silent = ({**TEAM, "per_workflow": {**cost, "output_tokens": n}} for n in (90.0, 0.0))
    controlled = "hint, without the answer"
    for teams, want in (
        ({"actor": written, controlled: written}, []),
        ({"actor": written, controlled: silent}, [(controlled, 0.0)]),
    ):
        (place / "summary.json").write_text(json.dumps({"teams": teams}))
        assert broken(run_checks.of_evaluation(place)) == want


def test_what_has_not_ended_is_no_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="train first"):
        run_checks.of_training(tmp_path)
    place = training(tmp_path / "t")
    (place / "student" / "policy" / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="let the training end"):
        run_checks.of_training(place)


def test_the_command_prints_every_figure_and_fails_where_one_does_not_hold(tmp_path):
    good, bad = training(tmp_path / "good"), training(tmp_path / "bad", **{"batch/too_long": 3.0})
    found = {}
    for place in (good, bad):
        command = [sys.executable, "launch/check_run.py", f"--training={place}"]
        found[place] = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found[good].returncode == 0 and "0.0007" in found[good].stdout
    assert "NO" not in found[good].stdout
    assert found[bad].returncode == 1 and "NO" in found[bad].stdout
    assert "not everything holds" in found[bad].stderr
