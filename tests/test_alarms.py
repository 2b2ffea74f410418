"""Early warning: when an alarm is raised, once, and when again; a resumed run warns alike."""

import dataclasses
import io
import math

import numpy as np
import pytest
from rich.console import Console

from mas_jax import metrics
from mas_jax.learning.alarms import Alarms, AlarmSettings
from mas_jax.metrics import Writer

SETTINGS = AlarmSettings(
    window=4, searches=0.5, valid_actions=0.8, entropy=0.25, failure_frac=0.1, distilled=()
)


def raised(lines, settings: AlarmSettings = SETTINGS) -> list[tuple[int, str]]:
    """(step, name) of every alarm over the lines, steps counted from 0."""
    alarms = Alarms(settings)
    return [
        (alarm.step, alarm.name) for i, line in enumerate(lines) for alarm in alarms.check(i, line)
    ]


def raised_over(metric: str, values, settings: AlarmSettings = SETTINGS) -> list[int]:
    return [step for step, _ in raised([{metric: value} for value in values], settings)]


def test_collapse_of_searches_by_hand():
    # norm (1 + 2 + 3 + 2) / 4 = 2: bad below 1, good again from 1.5
    values = [1, 2, 3, 2, 1.0, 0.99, 0.5, 1.2, 0.9, 1.49, 0.9, 1.5, 0.98, 0.2]
    assert raised_over("rollout/searches", values) == [5, 12]
    alarms = Alarms(SETTINGS)
    for step, value in enumerate(values[:5]):
        assert not alarms.check(step, {"rollout/searches": value})
    (alarm,) = alarms.check(5, {"rollout/searches": 0.99})
    assert alarm.message == (
        "rollout/searches is 0.99, below 0.5 of the 2 of the run's first 4 steps"
    )


@pytest.mark.parametrize(
    ("metric", "share", "name"),
    [
        ("rollout/searches", 0.5, "searches"),
        ("rollout/valid_action_frac", 0.8, "valid_actions"),
        ("update/searcher/entropy", 0.25, "entropy/searcher"),
        ("update/leader/entropy", 0.25, "entropy/leader"),
    ],
)
def test_each_metric_has_its_limit_and_its_name(metric, share, name):
    norm = [{metric: 0.6}] * 4
    assert raised([*norm, {metric: 0.6 * share * 1.001}]) == []
    assert raised([*norm, {metric: 0.6 * share * 0.999}]) == [(4, name)]


def test_no_alarm_within_the_window_or_for_other_metrics():
    assert raised_over("rollout/searches", [2, 0, 0, 0]) == []
    assert raised_over("update/entropy", [1, 1, 1, 1, 0, 0]) == []
    assert raised_over("rollout/reward", [1, 1, 1, 1, 0, 0]) == []


def test_roles_collapse_apart():
    one, two = "update/leader/entropy", "update/searcher/entropy"
    lines = [{one: 1.0, two: 1.0}] * 4 + [{one: 0.1, two: 1.0}, {one: 0.1, two: 0.1}]
    assert raised(lines) == [(4, "entropy/leader"), (5, "entropy/searcher")]


def test_absent_and_nonfinite_values_change_nothing():
    values = [1.0, 2.0, 3.0, 2.0, 0.9, 1.5, 0.9]
    lines = [{"rollout/searches": value} for value in values]
    gaps = [{}, {"rollout/searches": math.nan}, {"rollout/searches": -math.inf}]
    mixed = [line for value in lines for line in (*gaps, value)]
    assert [step // 4 for step, _ in raised(mixed)] == [step for step, _ in raised(lines)] == [4, 6]


def test_compilations_after_the_warm_up_are_alarms():
    # rise in steps 0 to 3 is warm-up; 6 to 7 rises, goes on at once, pauses, rises
    assert raised_over("engine/compilations", [3, 5, 6, 6, 6, 7, 8, 8, 9]) == [5, 8]
    # a new process starts to count at step 5 and has its own four steps
    assert raised_over("engine/compilations", [3, 6, 6, 6, 6, 2, 3, 4, 6, 7]) == [9]


def test_failures_of_the_world_by_hand():
    # bad above 0.1, good again at 0.05; no window: an outage at the start is one too
    values = [0.2, 0.3, 0.06, 0.11, 0.05, 0.1, 0.11]
    assert raised_over("rollout/failure_frac", values) == [0, 6]


def test_a_distillation_stream_without_tokens_is_an_alarm():
    settings = dataclasses.replace(SETTINGS, distilled=("searcher",))
    metric = "update/searcher/distillation_tokens"
    assert raised_over(metric, [5, 0, 0, 7, 0], settings) == [1, 4]
    name = "distillation/searcher"
    # the metric is missing from an update: the path never ran
    assert raised([{"update/loss": 1.0}], settings) == [(0, name)]
    # no update in the step: nothing to say
    assert raised([{"rollout/searches": 2.0}, {}], settings) == []
    # no such row
    assert raised([{metric: 0.0}]) == []


def random_lines(rng: np.random.Generator, num_lines: int) -> list[dict[str, float]]:
    """All watched metrics, each often bad, sometimes missing or not a number."""
    lines, compilations = [], 0
    for step in range(num_lines):
        compilations = 2 if step == 20 else compilations + (rng.random() < 0.3)
        values = {
            "rollout/searches": rng.choice([0.2, 1.2, 2.0]),
            "rollout/valid_action_frac": rng.choice([0.5, 0.9, 1.0]),
            "update/searcher/entropy": rng.choice([0.1, 0.5, 1.0]),
            "update/searcher/distillation_tokens": rng.choice([0.0, 50.0]),
            "rollout/failure_frac": rng.choice([0.0, 0.08, 0.3]),
            "engine/compilations": compilations,
        }
        kept = {name: float(value) for name, value in values.items() if rng.random() < 0.9}
        lines.append({name: math.nan if rng.random() < 0.05 else x for name, x in kept.items()})
    return lines


@pytest.mark.parametrize("seed", range(5))
def test_a_run_resumed_from_its_file_warns_like_the_uninterrupted_one(tmp_path, seed):
    settings = dataclasses.replace(SETTINGS, distilled=("searcher", "leader"))
    rng = np.random.default_rng(seed)
    lines = random_lines(rng, 40)
    whole = Alarms(settings)
    expected = [whole.check(step, line) for step, line in enumerate(lines)]
    assert len({alarm.name for found in expected for alarm in found}) >= 5
    for cut in (0, 2, 4, 11, 25):
        writer = Writer(
            tmp_path, active=True, console=Console(file=io.StringIO()),
            total_steps=40, start_step=0, log_interval_s=1e9,
        )  # fmt: skip
        with writer:
            for step, line in enumerate(lines[:cut]):
                writer.write(step, {**line, "alarm/searches": 1.0})  # alarms are no evidence
        resumed = Alarms.from_history(settings, metrics.read(tmp_path / "metrics.jsonl"))
        assert [resumed.check(cut + i, line) for i, line in enumerate(lines[cut:])] == expected[
            cut:
        ]
