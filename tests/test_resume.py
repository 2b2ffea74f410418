"""Killed and started again: the same parameters to the bit, each step once, one final policy."""

import dataclasses
import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from conftest import ROOT
from rich.console import Console
from small_runs import SMALL, save_start, scripted_stage, small_config, weights

from mas_jax import metrics
from mas_jax.config import role
from mas_jax.learning import loop

# reads that Orbax gives up halfway, because a file is damaged, leave coroutines that complain
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

QUIET = Console(quiet=True)
STEPS = 6


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    yield save_start(tmp_path_factory.mktemp("start") / "policy")
    gc.collect()


# --- in one process: every step -------------------------------------------------------------------


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
    return dataclasses.replace(stage, questions=stage.questions[:3])


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


def after_update(stage, act):
    """The stage, which calls `act` after its first update from here, before that is written."""
    return dataclasses.replace(stage, sampler_counts=act)


def written(place):
    """The lines of metrics without times."""
    return [
        {name: value for name, value in line.items() if not name.startswith("time/")}
        for line in metrics.read(place / "metrics.jsonl")
    ]


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


def test_killed_and_resumed_at_every_step_gives_the_same_bits(whole, tmp_path):
    stage, place, params = whole
    attempts = [
        (before_play(stage, 1, terminate), "saved at step 1 of 6"),
        (before_play(stage, 2, kill), None),  # just after the save at 2
        (before_play(stage, 2, kill), None),  # step 2 is done and written, but not saved
        (before_play(stage, 1, terminate), "saved at step 3 of 6"),
        (before_play(stage, 1, terminate), "saved at step 4 of 6"),
        (after_update(stage, kill), None),
        (before_play(stage, 1, terminate), "saved at step 5 of 6"),
        (before_play(stage, 1, terminate), "saved at step 6 of 6"),
    ]
    last_saved = [1, 2, 2, 3, 4, 4, 5, 6]
    for (attempt, message), step in zip(attempts, last_saved, strict=True):
        with pytest.raises(Killed if message is None else loop.Interrupted, match=message):
            loop.train(attempt, tmp_path, QUIET)
        assert max(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == step
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


def test_a_run_goes_on_with_another_number_of_devices(start, tmp_path):
    # the script plays without looking at the weights: roundings shall change no episode
    one = stateful_stage(start, tmp_path, chaotic=False)
    with pytest.raises(Killed):
        loop.train(before_play(one, 3, kill), tmp_path / "run", QUIET)
    shutil.copytree(tmp_path / "run", tmp_path / "same")
    alone = loop.train(dataclasses.replace(one), tmp_path / "same", QUIET)
    mesh = dict(train__mesh__data=2, train__mesh__fsdp=2)
    four = stateful_stage(start, tmp_path, chaotic=False, **mesh)
    together = loop.train(four, tmp_path / "run", QUIET)
    assert all(len(x.sharding.device_set) == 4 for x in jax.tree.leaves(together))
    for left, right in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-5)
    assert [line["step"] for line in written(tmp_path / "run")] == list(range(STEPS))


# --- the real process -----------------------------------------------------------------------------

COMMAND = [
    sys.executable, "launch/train.py", "--config=configs/toy.py", "--config.certify.ignore=True",
    *(f"--config.{name}={value}" for name, value in SMALL.items()),
    "--config.engine.decode_rows=64", "--config.engine.prefill_blocks=64",
]  # fmt: skip
ENVIRONMENT = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0",
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
    "PYTHONPATH": str(ROOT),
}
STAGES = ("teacher", "student")


def launch(start, place):
    """The training command, its log in place.log."""
    with place.with_suffix(".log").open("a") as log:
        return subprocess.Popen(
            [*COMMAND, f"--config.model.checkpoint={start}", f"--workdir={place}"],
            cwd=ROOT, env=ENVIRONMENT, stdout=log, stderr=log,
        )  # fmt: skip


def wait_for(process, condition):
    """Returns once the condition holds; fails if the process ends before."""
    while not condition():
        assert process.poll() is None, "the process ended first"
        time.sleep(0.001)


def has_entries(directory):
    return directory.is_dir() and any(directory.iterdir())


@pytest.fixture(scope="module")
def finished(start, tmp_path_factory):
    """The workdir of a process that nothing disturbs; it runs beside the first test of it."""
    place = tmp_path_factory.mktemp("finished") / "run"
    process = launch(start, place)
    yield process, place
    process.kill()
    process.wait()


def assert_same_result(place, finished):
    process, reference = finished
    assert process.wait() == 0, reference.with_suffix(".log").read_text()
    for stage in STAGES:
        assert weights(place / stage / "policy") == weights(reference / stage / "policy")
        lines, wanted = written(place / stage), written(reference / stage)
        assert [line["step"] for line in lines] == [0, 1]
        for line, other in zip(lines, wanted, strict=True):
            for name in other.keys() - {n for n in other if n.startswith("engine/")}:
                assert line[name] == other[name], name
    certificates = [(p / "teacher/certificate.json").read_text() for p in (place, reference)]
    assert certificates[0] == certificates[1]
    leftovers = [path.name for path in place.rglob("*partial*")]
    assert not leftovers


def test_the_process_killed_in_a_save_and_terminated_in_a_stage_ends_with_the_same_policy(
    start, finished, tmp_path
):
    place = tmp_path / "run"
    process = launch(start, place)
    wait_for(process, lambda: has_entries(place / "teacher" / "checkpoints"))
    process.send_signal(signal.SIGKILL)
    process.wait()
    process = launch(start, place)
    wait_for(process, (place / "student" / "metrics.jsonl").exists)
    process.send_signal(signal.SIGTERM)
    log = place.with_suffix(".log")
    assert process.wait() == 0, log.read_text()
    assert "student: saved at step 1 of 2" in log.read_text()
    assert not (place / "student" / "policy").exists()
    process = launch(start, place)
    assert process.wait() == 0, log.read_text()
    assert_same_result(place, finished)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_process_killed_at_random_moments_ends_with_the_same_policy(
    start, finished, tmp_path, seed
):
    rng, place = random.Random(seed), tmp_path / "run"
    process, _ = finished
    process.wait()  # so that the moments below are of a process on its own
    signals = (signal.SIGKILL, signal.SIGTERM)
    for attempt in range(40):
        process = launch(start, place)
        try:
            # from imports to the second stage; longer and longer, so that it comes to an end
            code = process.wait(timeout=rng.uniform(2, 25 + 2 * attempt))
        except subprocess.TimeoutExpired:
            process.send_signal(rng.choice(signals))
            assert process.wait() in (0, -signal.SIGTERM, -signal.SIGKILL), place.with_suffix(".log").read_text()
        else:
            assert code == 0, place.with_suffix(".log").read_text()
            break
    assert_same_result(place, finished)
