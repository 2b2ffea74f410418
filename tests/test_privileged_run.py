"""Training with a privileged branch from end to end: what it is watched for, and step by step."""

import asyncio
import dataclasses

import jax
import pytest
from rich.console import Console
from small_runs import save_start, scene_of, small_config, small_pipeline, written

from mas_jax.agents import protocol_files, protocol_oracle, protocol_roles
from mas_jax.agents.protocol_team import Desk
from mas_jax.config_systems import mapd, protocol_grpo
from mas_jax.data.questions import of_step
from mas_jax.learning import kept_episodes, loop, pipeline
from mas_jax.learning.checkpoint import Checkpointer

QUIET, STEPS = Console(quiet=True), 5
WATCHED = (
    "leak/marker_frac", "leak/answer_frac", "style/unigram_drift", "style/bigram_drift",
    "rollout/searcher/length", "rollout/searches", "update/searcher/kl_to_start",
)  # fmt: skip


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return save_start(tmp_path_factory.mktemp("start") / "policy")


@pytest.fixture(scope="module")
def protocols(start, tmp_path_factory):
    path, limits = tmp_path_factory.mktemp("protocols") / "all.jsonl", protocol_roles.Limits()
    scene = scene_of(start)
    oracle = protocol_oracle.local(protocol_oracle.Oracle(scene.world), limits)
    desk = Desk(oracle, scene.retriever.search, "oracle", limits=limits)
    drawn = {
        question.uid: question
        for step in range(STEPS)
        for question in of_step(scene.training, seed=0, step=step, count=2, host=0, num_hosts=1)
    }
    questions = list(drawn.values())
    asyncio.run(protocol_files.build(questions, [desk], path, concurrency=8, failure_frac=0.0))
    return path


@pytest.fixture
def stage(start, protocols, tmp_path):
    def _make(**changes):
        config = mapd(small_config(start))
        config.update_from_flattened_dict(
            {
                "privileged.protocols": str(protocols), "stages.agent.steps": STEPS,
                "train.alarms.window": 2, "train.drift_frac": 1.0, **changes,
            }
        )  # fmt: skip
        return pipeline.make_stage(small_pipeline(config, tmp_path), "agent")

    return _make


def test_a_resumed_run_is_watched_as_an_uninterrupted_one(stage, tmp_path, caplog):
    whole = stage(**{"train.alarms.leak": -1.0})  # whatever is said is too much
    loop.train(whole, tmp_path / "whole", QUIET)
    lines = written(tmp_path / "whole")
    assert all(name in line for line in lines[3:] for name in WATCHED)
    assert "style/unigram_drift" not in lines[2]
    assert len({line["style/unigram_drift"] for line in lines[3:]}) == 2
    assert [line.get("alarm/leak/markers") for line in lines] == [1.0, *[None] * 4]
    assert "ALARM leak/markers at step 0: leak/marker_frac is 0, above -1" in caplog.text

    calls = []

    def _publish(params):
        calls.append(whole.publish(params))
        if len(calls) == 5:
            raise RuntimeError("killed in step 4")

    killed = dataclasses.replace(whole, publish=_publish)
    with pytest.raises(RuntimeError, match="killed in step 4"):
        loop.train(killed, tmp_path / "killed", QUIET)
    loop.train(killed, tmp_path / "killed", QUIET)
    assert comparable(tmp_path / "killed") == comparable(tmp_path / "whole")


def test_grpo_alone_is_watched_as_it_is_with_a_privileged_branch(start, stage, tmp_path):
    config = protocol_grpo(small_config(start))
    changes = {"stages.agent.steps": STEPS, "train.alarms.window": 2, "train.drift_frac": 1.0}
    config.update_from_flattened_dict(changes)
    alone = pipeline.make_stage(small_pipeline(config, tmp_path), "agent")
    assert alone.privilege is None
    loop.train(alone, tmp_path / "alone", QUIET)
    with_branch = stage()
    loop.train(with_branch, tmp_path / "both", QUIET)
    lines, others = (written(tmp_path / name) for name in ("alone", "both"))
    assert all(name in line for line in lines[3:] for name in WATCHED)
    # the first step, which nothing was learned before, is the same to the digit
    for name in WATCHED:
        assert lines[0].get(name) == others[0].get(name)
    restored = Checkpointer(tmp_path / "alone/checkpoints", keep=2).index(STEPS)["meta"]["style"]
    assert restored["num_steps"] == STEPS and len(restored["recent"]) == 2


def comparable(place):
    """What was written but for what an engine counts since it was made."""
    return [
        {name: x for name, x in line.items() if not name.startswith("engine/")}
        for line in written(place)
    ]


def test_steps_of_their_own_are_trained_on_with_their_views(stage, tmp_path):
    made = stage(**{"model.stepwise": True, "stages.agent.steps": 1})
    made = dataclasses.replace(made, keep_episodes=True)
    before = jax.tree.map(lambda x: x.copy(), made.reference)
    after = loop.train(made, tmp_path / "run", QUIET)
    (line,) = written(tmp_path / "run")
    (episodes,) = kept_episodes.read(tmp_path / "run").values()
    traces = [trace for episode in episodes for trace in episode.traces]
    # a random policy says nothing valid, and so has two turns an episode
    assert {len(trace.turns) for trace in traces} == {1}
    assert line["rollout/turns"] == 2 and len(traces) == 8
    assert line["credit/searcher/num_traces"] == 8
    assert line["batch/viewed_traces"] == line["batch/num_traces"] > 4
    assert line["update/searcher/view_tokens"] > 0
    assert line["update/searcher/sampler_log_ratio_abs_max"] < 1e-3
    assert line["rollout/searcher/dropped_history"] == 0
    moved = jax.tree.map(lambda a, b: float(abs(a - b).max()), after, before)
    assert max(jax.tree.leaves(moved)) > 0
