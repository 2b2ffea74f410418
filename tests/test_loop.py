"""A training stage and the two-stage pipeline: what they write, refuse, choose and warn of."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from rich.console import Console
from small_runs import (
    Script,
    save_start,
    scripted_stage,
    small_config,
    small_pipeline,
    weights,
)

from mas_jax import metrics
from mas_jax.agents.oracle import Flaws
from mas_jax.learning import certificate, cost, export, loop, pipeline, workdir
from mas_jax.model import hf

QUIET = Console(quiet=True)
TEAM = (
    "rollout/reward", "rollout/em", "rollout/searches", "rollout/valid_action_frac",
    "rollout/output_tokens", "rollout/failure_frac", "batch/padding_frac", "batch/num_tokens",
    "batch/too_long", "update/loss", "update/gradient_norm", "update/skipped", "time/step_s",
    "time/tokens_per_s",
)  # fmt: skip
BY_ROLE = (
    "rollout/{}/length", "rollout/{}/valid_action_frac", "credit/{}/reward", "update/{}/entropy",
    "update/{}/kl_to_start", "update/{}/clip_frac", "update/{}/sampler_trainer_kl",
    "update/{}/tokens",
)  # fmt: skip
CENSUS = ("credit/{}/groups", "credit/{}/group_size", "credit/{}/zero_variance_frac")
PHASES = {f"time/{name}_frac" for name in ("publish", "rollout", "pack", "score", "update")}


def named(patterns, roles):
    return {pattern.format(role) for pattern in patterns for role in roles}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return save_start(tmp_path_factory.mktemp("start") / "policy")


@pytest.fixture(scope="module")
def stopped(start, tmp_path_factory):
    """A workdir whose teacher was not certified, since it answers nothing, and the exception."""
    place = tmp_path_factory.mktemp("run")
    config = small_config(start, certify__ignore=False)
    with pytest.raises(certificate.NotCertified) as caught:
        pipeline.run(small_pipeline(config, place), QUIET)
    return place, caught.value


@pytest.fixture(scope="module")
def trained(stopped, start):
    """The same workdir after a second call, and the teacher's files before that."""
    place, _ = stopped
    before = weights(place / "teacher/policy"), (place / "teacher/metrics.jsonl").read_bytes()
    config = small_config(start, certify__ignore=True)
    done = pipeline.run(small_pipeline(config, place), QUIET)
    assert done == {name: place / name / "policy" for name in ("teacher", "student")}
    return place, before


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Another random policy, which teaches the hierarchy."""
    return save_start(tmp_path_factory.mktemp("other") / "policy", seed=1)


@pytest.fixture(scope="module")
def stage(start, other, tmp_path_factory):
    """Makes stages that the script plays."""

    def _make(name, steps=2, config=None, **changes):
        changed = {f"stages__{name}__steps": steps, "teacher__checkpoint": str(other)}
        made = small_config(start, **changed, **(config or {}))
        return scripted_stage(made, tmp_path_factory.mktemp("unused"), name, **changes)

    return _make


@pytest.fixture(scope="module")
def played(stage, tmp_path_factory):
    """A stage, its workdir after two steps, and its parameters before and after them."""
    made, place = stage("teacher"), tmp_path_factory.mktemp("played")
    before = jax.tree.map(np.array, made.reference)
    return made, place, before, loop.train(made, place, QUIET)


# --- the pipeline ---------------------------------------------------------------------------------


def test_a_teacher_that_is_not_better_is_a_loud_stop(stopped):
    place, error = stopped
    found = json.loads((place / "teacher/certificate.json").read_text())
    assert found["accuracy"] == {"start": 0.0, "teacher": 0.0}
    assert found["difference"] == found["low"] == 0.0
    assert "teacher 0.0 against 0.0 untrained" in str(error)
    assert "certify.ignore=True" in str(error)
    assert (place / "teacher/policy/config.json").exists()
    assert not (place / "student").exists()


def test_the_next_call_ignores_it_and_goes_on_with_the_next_stage(trained):
    place, before = trained
    after = weights(place / "teacher/policy"), (place / "teacher/metrics.jsonl").read_bytes()
    assert after == before
    assert (place / "student/policy/config.json").exists()
    assert json.loads((place / "config.json").read_text())["certify"]["ignore"] is True


def test_a_certificate_is_read_and_not_played_again(trained, start, tmp_path, caplog):
    config = small_config(start)
    made = small_pipeline(config, tmp_path)
    (tmp_path / "teacher").mkdir()
    path = tmp_path / "teacher" / "certificate.json"
    values = {"accuracy": {"start": 0.2, "teacher": 0.5}, "difference": 0.3, "low": 0.1}
    path.write_text(json.dumps({**values, "high": 0.4}))
    console = Console(record=True, quiet=False, width=200)
    pipeline.certify(made, trained[0] / "teacher/policy", console)
    assert "certified: teacher 50.0 against 20.0 untrained" in console.export_text()
    path.write_text(json.dumps({**values, "low": 0.0, "high": 0.4}))
    with pytest.raises(certificate.NotCertified, match=r"\+30\.0 \[0\.0, 40\.0\]"):
        pipeline.certify(made, trained[0] / "teacher/policy", console)
    config.certify.ignore = True
    pipeline.certify(made, trained[0] / "teacher/policy", console)
    assert "NOT CERTIFIED, and certify.ignore is set" in caplog.text


def test_the_workdir_says_what_ran(trained, start):
    place, _ = trained
    config = small_config(start, certify__ignore=True)
    assert json.loads((place / "config.json").read_text()) == pipeline.as_json(config)
    revision = json.loads((place / "revision.json").read_text())
    assert revision["packages"]["jax"] == jax.__version__
    assert revision["num_processes"] == 1


def test_a_workdir_of_another_config_is_refused_with_the_keys(trained, start):
    place, _ = trained
    other = small_config(start, seed=5, train__group_size=4, certify__ignore=True)
    before = (place / "config.json").read_bytes()
    message = r"seed: checkpoint 0, now 5; train\.group_size: checkpoint 2, now 4; use"
    with pytest.raises(ValueError, match=message):
        pipeline.prepare(other, place)  # before anything is built
    with pytest.raises(ValueError, match=message):
        pipeline.run(small_pipeline(other, place), QUIET)
    assert (place / "config.json").read_bytes() == before


def test_a_second_run_in_a_workdir_is_refused_while_the_first_one_runs(trained, start):
    place, _ = trained
    made = small_pipeline(small_config(start, certify__ignore=True), place)
    with (
        workdir.only_run(place),
        pytest.raises(workdir.InUse, match=f"another run is writing to {place}"),
    ):
        pipeline.run(made, QUIET)
    done = pipeline.run(made, QUIET)  # nothing is left to do
    assert set(done) == {"teacher", "student"}


def test_a_stages_policy_is_its_newest_checkpoint(trained, tmp_path):
    for stage in ("teacher", "student"):
        assert export.export(trained[0] / stage, tmp_path / stage, best=False) == 2
        assert weights(tmp_path / stage) == weights(trained[0] / stage / "policy")


def test_what_a_killed_export_left_is_cleared_away(trained, start, tmp_path):
    made = small_pipeline(small_config(start), tmp_path)
    leftover = tmp_path / ".policy.partial-0123abcd"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    pipeline.export(made, made.reference, tmp_path / "policy")
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    assert weights(tmp_path / "policy") == weights(start)


# --- one stage ------------------------------------------------------------------------------------


def test_the_engines_steps_are_written_once_with_every_metric(trained):
    lines = metrics.read(trained[0] / "teacher/metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1]
    roles = ("searcher", "answerer")
    wanted = {*TEAM, *PHASES, "engine/compilations", *named((*BY_ROLE, *CENSUS), roles)}
    for line in lines:
        assert wanted - line.keys() == set()
        assert abs(line["update/searcher/sampler_trainer_kl"]) < 1e-6
        assert line["update/skipped"] == 0.0


def test_a_policy_cost_what_its_own_stage_and_its_teachers_cost(trained):
    place, _ = trained
    spent = cost.of_policy(place / "student/policy")
    assert {(e.stage, e.role) for e in spent if e.role} >= {
        ("teacher", "searcher"), ("teacher", "answerer"), ("student", "leader"),
    }  # fmt: skip
    lines = metrics.read(place / "teacher/metrics.jsonl")
    teacher = [entry for entry in spent if entry.stage == "teacher"]
    assert cost.of_policy(place / "teacher/policy") == tuple(teacher)
    for field, name in (("output_tokens", "output_tokens"), ("searches", "searches")):
        per_episode = [line["rollout/episodes"] * line[f"rollout/{name}"] for line in lines]
        assert sum(getattr(e, field) for e in teacher) == pytest.approx(sum(per_episode))
    trained_on = sum(line["batch/num_tokens"] for line in lines)
    assert sum(e.training_tokens for e in teacher) == trained_on > 0
    held = ("rollout", "score", "update")
    seconds = sum(
        line["time/step_s"] * sum(line[f"time/{name}_frac"] for name in held) for line in lines
    )
    devices = jax.local_device_count()
    assert sum(e.accelerator_s for e in teacher) == pytest.approx(devices * seconds, rel=1e-4)
    assert cost.of_policy(place.parent / "elsewhere/start/policy") == ()


def test_training_ends_with_the_ledger_of_its_stages(trained, start):
    console = Console(record=True, quiet=False, width=120)
    pipeline.run(small_pipeline(small_config(start, certify__ignore=True), trained[0]), console)
    shown = console.export_text()
    assert "Cost of training" in shown
    for word in ("teacher", "student", "leader", "trained", "accelerator s"):
        assert word in shown


def test_every_role_of_the_hierarchy_has_its_metrics(stage, tmp_path):
    made = stage("student", config={"train__role_gradient_interval": 2})
    loop.train(made, tmp_path / "run", QUIET)
    lines = metrics.read(tmp_path / "run/metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1]
    roles = ("leader", "searcher", "answerer")
    wanted = {*TEAM, *PHASES, *named((*BY_ROLE, "update/{}/kl_to_teacher"), roles)}
    wanted |= named(CENSUS, ("leader", "answerer")) | {"update/searcher/distillation_tokens"}
    for line in lines:
        assert wanted - line.keys() == set()
        assert line["update/searcher/distillation_tokens"] > 0
    gradients = named(("update/{}/gradient_norm", "update/{}/gradient_share"), roles)
    assert gradients <= lines[0].keys()
    assert not gradients & lines[1].keys()
    assert sum(lines[0][f"update/{role}/gradient_share"] for role in roles) == pytest.approx(1)


def test_the_phases_of_a_step_are_all_of_it(played):
    for line in metrics.read(played[1] / "metrics.jsonl"):
        shares = [line[name] for name in PHASES]
        assert 0.9 < sum(shares) <= 1.0 + 1e-9
        assert {name for name in line if "time/" in name and "_frac" in name} == PHASES


def test_the_hosts_share_is_what_no_program_took():
    phases = loop.Phases()
    phases.seconds = {"rollout": 5.0, "pack": 1.0, "score": 1.5, "update": 2.0}
    # of ten seconds 4 in the engines, 1.5 + 2 in scores and update
    found = phases.metrics(10.0, 200, 4.0)
    assert found["time/host_frac"] == pytest.approx(0.25)
    assert found["time/tokens_per_s"] == 20.0
    assert "time/host_frac" not in phases.metrics(10.0, 200, None)


def test_the_policy_moves_and_the_start_does_not(played):
    made, _, before, after = played
    jax.tree.map(np.testing.assert_array_equal, made.reference, before)
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), after, before)
    assert min(jax.tree.leaves(moved)) > 0


def test_the_step_that_validation_found_best_is_kept_and_exported(stage, tmp_path):
    # best at step 2, equal at 4; saved for that alone: the interval is longer than the run
    measured, seen = {1: 0.25, 2: 0.5, 3: 0.375, 4: 0.5, 5: 0.25}, {}
    made = stage(
        "teacher", steps=5, chaotic=False,
        config={"train__validation_interval": 1, "train__checkpoint_interval": 100,
                "train__keep_checkpoints": 1},
    )  # fmt: skip

    def _publish(params):
        seen["published"] = jax.tree.map(np.array, params)

    def _validate(step):
        seen[step] = seen["published"]
        return measured[step]

    made = dataclasses.replace(made, publish=_publish, validate=_validate)
    place = tmp_path / "run"
    loop.train(made, place, QUIET)
    lines = metrics.read(place / "metrics.jsonl")
    assert [line["validation/avg"] for line in lines] == list(measured.values())
    assert sorted(path.name for path in (place / "checkpoints").iterdir()) == ["2", "5"]
    assert export.export(place, tmp_path / "best", best=True) == 2
    assert export.export(place, tmp_path / "newest", best=False) == 5
    for name, step in (("best", 2), ("newest", 5)):
        _, params = hf.load(tmp_path / name, dtype=np.float32)
        jax.tree.map(np.testing.assert_array_equal, params, seen[step])


def test_a_stage_ends_with_its_best_parameters_once_validation_stays_behind(stage, tmp_path):
    """Patience 2: 0.5 at step 2 is neither beaten at step 3 nor by an equal one at 4."""
    measured, seen = {1: 0.25, 2: 0.5, 3: 0.375, 4: 0.5, 5: 0.75}, {}
    made = stage(
        "teacher", steps=5, chaotic=False,
        config={"train__validation_interval": 1, "train__checkpoint_interval": 100,
                "train__keep_checkpoints": 1, "train__patience": 2},
    )  # fmt: skip

    def _publish(params):
        seen["published"] = jax.tree.map(np.array, params)

    def _validate(step):
        seen[step] = seen["published"]
        return measured[step]

    made = dataclasses.replace(made, publish=_publish, validate=_validate)
    for _ in range(2):  # the second call goes on from step 2 to the same end
        params = loop.train(made, tmp_path, QUIET)
        jax.tree.map(np.testing.assert_array_equal, params, seen[2])
        lines = metrics.read(tmp_path / "metrics.jsonl")
        assert [line["validation/avg"] for line in lines] == [0.25, 0.5, 0.375, 0.5]


def test_an_alarm_is_in_the_log_and_the_metrics_and_not_given_again(stage, start, tmp_path, caplog):
    made = stage("teacher", steps=4, config={"train__alarms__window": 2})
    scene = small_pipeline(small_config(start), tmp_path).scene
    scripts = [Script(scene, Flaws(skip_search=p), chaotic=False) for p in (0.0, 1.0)]
    killed = []

    async def _sample(prompt, *, key, **knobs):
        return await scripts[key.step >= 2].sample(prompt, key=key, **knobs)

    def _publish(params):
        killed.append(len(killed) == 3)
        if killed[-1]:
            raise RuntimeError("killed in step 3")

    world = dataclasses.replace(made.world, sample=_sample)
    made = dataclasses.replace(made, world=world, publish=_publish)
    with pytest.raises(RuntimeError, match="killed in step 3"):
        loop.train(made, tmp_path / "run", QUIET)
    assert "ALARM searches at step 2: rollout/searches is 0" in caplog.text
    caplog.clear()
    loop.train(made, tmp_path / "run", QUIET)
    assert "ALARM" not in caplog.text
    lines = metrics.read(tmp_path / "run/metrics.jsonl")
    assert [line.get("alarm/searches") for line in lines] == [None, None, 1.0, None]


def test_a_role_that_is_to_be_distilled_and_never_speaks_is_an_alarm(trained, caplog):
    # the untrained leader never hands out a subtask
    lines = metrics.read(trained[0] / "student/metrics.jsonl")
    assert [line.get("alarm/distillation/searcher") for line in lines] == [1.0, None]


def test_a_checkpoint_of_another_config_is_refused(played, stage):
    other = stage("teacher", steps=3)
    with pytest.raises(ValueError, match=r"stages\.teacher\.steps: checkpoint 2, now 3"):
        loop.train(other, played[1], QUIET)


def test_settings_that_change_no_number_may_change(played, stage):
    changed = {
        "train__checkpoint_interval": 7,
        "train__mesh__data": 2,
        "train__keep_checkpoints": 5,
    }
    _, place, _, after = played
    again = loop.train(stage("teacher", config=changed), place, QUIET)  # on two devices
    jax.tree.map(np.testing.assert_array_equal, again, after)
    assert [line["step"] for line in metrics.read(place / "metrics.jsonl")] == [0, 1]
