"""A stage killed and started again at every step: the same bits, each step written once."""

import dataclasses
import gc
import os
import shutil
import signal

import jax
import numpy as np
import pytest
from rich.console import Console
from small_runs import save_start, scripted_stage, small_config, written

from mas_jax.config import role
from mas_jax.data.questions import Mixture
from mas_jax.learning import cost, loop

# reads that Orbax gives up halfway, because a file is damaged, leave coroutines that complain
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

QUIET = Console(quiet=True)
STEPS = 6


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    yield save_start(tmp_path_factory.mktemp("start") / "policy")
    gc.collect()


def stateful_stage(start, workdir, *, chaotic=True, **changes):
    """The hierarchy with all that a state can hold: an average of the weights as the teacher, a
    critic, two updates a step, a schedule. An epoch of three questions ends within every other
    step of two; saved every two steps."""
    config = small_config(
        start, stages__student__steps=STEPS, train__checkpoint_interval=2, train__value_head=True,
        train__updates_per_batch=2, train__optimizer__schedule="cosine",
        train__optimizer__warmup_steps=2, train__optimizer__eps=1e-4, teacher__ema_decay=0.5,
        **changes,
    )  # fmt: skip
    config.stages.student.programme.update(
        dict(
            leader=role(behaviour="assignment"),
            searcher=role(advantages=("distillation",), teacher="ema", beta=1.0),
            answerer=role(advantages=("gae",), kl_coef=1e-2, kl_reference="initial"),
        )
    )
    stage = scripted_stage(config, workdir, "student", chaotic=chaotic)
    return dataclasses.replace(stage, questions=Mixture((stage.questions.sources[0][:3],)))


class Killed(Exception):
    """Stands for a kill: what is not saved yet is lost."""


def kill():
    raise Killed


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def before_play(stage, count, act):
    """The stage, which calls `act` as it publishes the weights of its `count`-th step from here."""
    calls = []

    def _publish(params):
        calls.append(stage.publish(params))
        if len(calls) == count:
            act()

    return dataclasses.replace(stage, publish=_publish)


def after_update(stage, count, act, monkeypatch):
    """The stage, which calls `act` after its `count`-th update from here, before it is written."""
    calls, of_step = [], cost.of_step

    def _of_step(*args, **knobs):
        calls.append(of_step(*args, **knobs))
        if len(calls) == count:
            act()
        return calls[-1]

    def _publish(params):
        monkeypatch.setattr(cost, "of_step", _of_step)
        stage.publish(params)

    return dataclasses.replace(stage, publish=_publish)


def assert_bit_equal(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for left, right in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
    """The uninterrupted run: its stage, workdir and parameters."""
    place = tmp_path_factory.mktemp("whole")
    stage = stateful_stage(start, place)
    return stage, place, loop.train(stage, place, QUIET)


def test_each_step_differs_from_the_one_before(whole):
    lines = written(whole[1])
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert len({line["update/loss"] for line in lines}) == STEPS
    for name in ("rollout/output_tokens", "update/param_norm"):
        assert len({line[name] for line in lines}) > 1
    assert all(line["update/skipped"] == 0.0 for line in lines)


def test_killed_and_resumed_at_every_step_gives_the_same_bits(whole, tmp_path, monkeypatch):
    stage, place, params = whole
    attempts = [  # with what is raised, and the newest checkpoint that is left
        (before_play(stage, 1, terminate), "saved at step 1 of 6", 1),
        (before_play(stage, 3, kill), None, 2),  # step 2 is done and written, but not saved
        (before_play(stage, 1, terminate), "saved at step 3 of 6", 3),
        (after_update(stage, 2, kill, monkeypatch), None, 4),  # step 4 is done, but not written
        (before_play(stage, 1, terminate), "saved at step 5 of 6", 5),
        (before_play(stage, 1, terminate), "saved at step 6 of 6", 6),
    ]
    for attempt, message, saved in attempts:
        with pytest.raises(Killed if message is None else loop.Interrupted, match=message):
            loop.train(attempt, tmp_path, QUIET)
        assert max(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == saved
    nothing_left = before_play(stage, 1, kill)
    assert_bit_equal(loop.train(nothing_left, tmp_path, QUIET), params)
    assert written(tmp_path) == written(place)


def test_a_damaged_newest_checkpoint_costs_its_steps_and_nothing_else(whole, tmp_path, caplog):
    stage, place, params = whole
    shutil.copytree(place, tmp_path / "run")
    files = [path for path in (tmp_path / "run/checkpoints/6/state").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    assert_bit_equal(loop.train(stage, tmp_path / "run", QUIET), params)
    assert "continuing from step 4" in caplog.text
    assert written(tmp_path / "run") == written(place)


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_devices(start, tmp_path):
    # the script plays without looking at the weights: roundings shall change no episode
    def _stage(**changes):
        config = small_config(start, train__optimizer__eps=1e-4, **changes)
        return scripted_stage(config, tmp_path, "teacher", chaotic=False)

    with pytest.raises(loop.Interrupted):
        loop.train(before_play(_stage(), 1, terminate), tmp_path / "run", QUIET)
    shutil.copytree(tmp_path / "run", tmp_path / "same")
    alone = loop.train(_stage(), tmp_path / "same", QUIET)
    together = loop.train(_stage(train__mesh__data=2, train__mesh__fsdp=2), tmp_path / "run", QUIET)
    assert all(len(x.sharding.device_set) == 4 for x in jax.tree.leaves(together))
    for left, right in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-5)
    assert [line["step"] for line in written(tmp_path / "run")] == [0, 1]
