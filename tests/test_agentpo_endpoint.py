"""An Actor behind an endpoint, end to end: our own policy served over loopback, faults included.

`launch/serve_policy.py` serves the toy Actor; a server of the tests stands before it, passes
requests on and misbehaves as its script says.
"""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest
from chat_server import ChatServer, Reply, answer, failure, silence
from config_files import load
from conftest import ROOT
from ml_collections import ConfigDict
from rich.console import Console
from tiny_agentpo import small_config, weights

from mas_jax import metrics
from mas_jax.agents import rollout
from mas_jax.agents.speaker import aloud
from mas_jax.benchmarks.serving import free_port
from mas_jax.evaluation import records_file
from mas_jax.learning import evaluate, pipeline, policy_files

QUIET = Console(quiet=True)
SHIPPED = ("asset:math/collaborator_policy", "asset:math/actor_policy")
SIZES = {  # two updates of 12 episodes each
    "collaboration.max_tokens": 32, "actor.max_tokens": 32, "train.questions": 3,
    "train.group_size": 4, "train.validation_interval": 0, "rollout.min_episodes": 10,
}  # fmt: skip
KEY = "sk-loopback-0123456789abcdef"


def toy(team="hint", **changes):
    """The shipped policies of toy mathematics."""
    return small_config(SHIPPED, team, **SIZES | changes)


def at(url, **changes):
    """The same with the Actor behind an endpoint."""
    knobs = dict(kind="api", base_url=url, model="policy", checkpoint="") | changes
    return toy(**{f"actor.{key}": value for key, value in knobs.items()})


def flags(config, start):
    """Command-line flags that turn a config into another."""
    base, found = dict(_flat(start)), []
    for key, value in _flat(config):
        if value != base.get(key):
            found.append(f"--config.{key}={value if isinstance(value, str) else repr(value)}")
    return found


def _flat(config, prefix=""):
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def environment(**more):
    return os.environ | {"PYTHONPATH": str(ROOT)} | more


# --- the server -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """URL of the toy Actor, in a process of its own, with the engine that a local one has."""
    port = free_port()
    command = [sys.executable, "launch/serve_policy.py", "--config=configs/agentpo_toy.py",
               f"--port={port}"]  # fmt: skip
    engine = flags(toy(), load("agentpo_toy").get_config())
    command += [flag for flag in engine if flag.startswith("--config.actor.engine.")]
    log = (tmp_path_factory.mktemp("served") / "log").open("wb")
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stderr=log)
    while process.poll() is None:
        try:
            httpx2.get(f"http://127.0.0.1:{port}/health", trust_env=False, timeout=60)
            break
        except httpx2.TransportError:
            time.sleep(0.1)
    assert process.poll() is None, Path(log.name).read_text()[-2000:]
    yield f"http://127.0.0.1:{port}/v1"
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0


def passing(url, faults=None, is_dead=lambda: False):
    """A script that passes requests on to a server, but for those whose number has a fault."""
    numbers, faults = itertools.count(1), dict(faults or {})

    def _reply(body):
        number = next(numbers)
        if is_dead():
            return failure(500, "out of order")
        if number in faults:
            return faults[number]
        found = httpx2.post(f"{url}/chat/completions", json=body, trust_env=False, timeout=120)
        return Reply(found.content, found.status_code, found.headers["content-type"])

    return _reply


FAULTS = {
    1: failure(429, "slow down", {"Retry-After": "1"}),
    2: failure(429, "slow down"),
    4: failure(500),
    5: silence(),
    7: Reply(answer("x").body, is_cut=True),
    8: Reply(b"<html>sorry</html>", content_type="text/html"),
    9: Reply(is_dropped=True),
}


def train(config, workdir):
    done = pipeline.run(pipeline.prepare(config, workdir), QUIET)
    return weights(done["agentpo"]), metrics.read(workdir / "agentpo" / "metrics.jsonl")


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
    """Weights and metrics of a run whose Actor is played locally."""
    return train(toy(), tmp_path_factory.mktemp("local"))


def test_a_run_through_faults_is_the_run_beside_a_local_actor(served, beside, tmp_path):
    with ChatServer(passing(served, FAULTS)) as server:
        config = at(server.url, cache=str(tmp_path / "answers"), timeout_s=6.0, price=(2.0, 12.0))
        trained, lines = train(config, tmp_path / "run")
        num_asked = len(server.bodies)
        again, _ = train(config, tmp_path / "again")
        assert len(server.bodies) == num_asked  # greedy answers serve for good
    local, expected = beside
    assert trained == again == local
    assert trained != weights(policy_files.asset("math/collaborator_policy"))
    for ours, theirs in zip(lines, expected, strict=True):
        assert ours["rollout/reward"] == theirs["rollout/reward"]
        for name in ("input_tokens", "output_tokens"):
            assert ours[f"cost/actor/{name}"] == theirs[f"cost/actor/{name}"] > 0
        assert ours["rollout/failure_frac"] == 0 and "rollout/errors/api" not in ours
    counts = {
        name.removeprefix("engine/endpoint_"): value
        for name, value in lines[-1].items()
        if name.startswith("engine/endpoint_")
    }
    assert counts["requests"] == 24 and counts["failed"] == 0
    assert counts["calls"] == num_asked and counts["retries"] >= len(FAULTS)
    # a repeated request is one call, and every call that was no retry answered one
    assert counts["calls"] - counts["retries"] == counts["requests"] - counts["cached"]
    price = (2.0 * counts["input_tokens"] + 12.0 * counts["output_tokens"]) / 1e6
    assert counts["cost"] == pytest.approx(price) and price > 0
    assert counts["uncertain_cost"] > 0  # of the answers that were lost


@pytest.mark.parametrize("team", ["hint", "critic"])
def test_a_greedy_actor_says_the_same_locally_and_behind_an_endpoint(served, tmp_path, team):
    said = {}
    for name, config in (("local", toy(team)), ("api", at(served))):
        config.evaluation.teams = ("actor", team)
        prepared = evaluate.prepare(config, tmp_path / name)
        evaluate.run(prepared, QUIET)
        tokenizer = prepared.scene.tokenizer
        said[name] = {
            key: found
            for system, plan in prepared.plans.items()
            for episode in records_file.read(prepared.path(system), plan)
            for key, found in words(episode, tokenizer)
        }
    assert said["local"] == said["api"]
    assert len(said["local"]) >= 6 * 3  # problems x what is said of each


def words(episode, tokenizer):
    """What everybody said in an episode, numbers of tokens, why each ended, and the result."""
    yield (episode.team, episode.question), (episode.predictions, episode.correct, episode.outcome)
    for trace in episode.traces:
        agent, _, number = trace.path.partition("/")
        for index, turn in enumerate(trace.turns):
            text = turn.text
            if not text:
                ids = [t for t in trace.tokens[turn.start : turn.end]
                       if t not in tokenizer.stop_ids]  # fmt: skip
                text = tokenizer.decode(ids)
            key = (episode.team, episode.question, agent, int(number or index))
            yield key, (aloud(text), turn.start, turn.end, turn.action, turn.stop_reason)


# --- an endpoint that is gone ---------------------------------------------------------------------


def test_a_dead_endpoint_ends_the_command_with_one_message_and_a_live_one_goes_on(
    served, beside, tmp_path
):
    """The first step is played; then every answer is a 500, until a server elsewhere is named."""
    run, lines = tmp_path / "run", tmp_path / "run" / "agentpo" / "metrics.jsonl"

    def is_played():
        return lines.exists() and lines.stat().st_size > 0

    start = load("agentpo_toy").get_config()

    def command(url):
        config = at(url, retries=1, key_variable="LOOPBACK_KEY")
        return subprocess.run(
            [sys.executable, "launch/train.py", "--config=configs/agentpo_toy.py",
             f"--workdir={run}", *flags(config, start)],
            cwd=ROOT, capture_output=True, text=True, env=environment(LOOPBACK_KEY=KEY),
        )  # fmt: skip

    with ChatServer(passing(served, is_dead=is_played)) as server:
        dead = command(server.url)
        assert {r.headers["authorization"] for r in server.received} == {f"Bearer {KEY}"}
    assert dead.returncode == 1
    assert "Traceback" not in dead.stderr and KEY not in dead.stdout + dead.stderr
    last = dead.stderr.splitlines()[-1]
    assert last.startswith("stopped: ") and server.url in last
    assert "HTTP 500: " in last and "out of order" in last
    assert "episodes failed, more than 0.1 of them; api: " in last
    assert last.endswith("the same command goes on from the last checkpoint")
    (first,) = lines.read_text().splitlines()
    with ChatServer(passing(served)) as server:
        live = command(server.url)
        assert live.returncode == 0, live.stderr[-2000:]
    assert "agentpo: going on from step 1" in live.stderr
    assert lines.read_text().splitlines()[0] == first
    assert [line["step"] for line in metrics.read(lines)] == [0, 1]
    assert weights(run / "agentpo" / "policy") == beside[0]


def test_a_refused_connection_stops_even_a_run_of_few_episodes(tmp_path):
    url = f"http://127.0.0.1:{free_port()}/v1"
    config = at(url, retries=0)
    config.rollout.min_episodes = 1000
    with pytest.raises(rollout.TooManyFailures) as stopped:
        train(config, tmp_path / "run")
    message = str(stopped.value)
    assert "12 of 12 episodes failed" in message
    assert f"no answer from 'policy' at {url} in 1 call(s): ConnectError" in message


def test_money_that_is_used_up_stops_the_run(served, tmp_path):
    config = at(served, price=(10.0, 10.0), max_cost=0.01)
    with pytest.raises(rollout.TooManyFailures, match=r"above max_cost=0\.01; raise max_cost"):
        train(config, tmp_path / "run")


def test_an_evaluation_plays_again_what_a_dead_endpoint_failed(served, tmp_path):
    is_dead = True
    with ChatServer(passing(served, is_dead=lambda: is_dead)) as server:

        def evaluated(place, url):
            config = at(url, retries=0)
            config.evaluation.teams, config.rollout.min_episodes = ("hint",), 1000
            return evaluate.run(evaluate.prepare(config, tmp_path / place), QUIET)

        with pytest.raises(rollout.TooManyFailures, match="out of order"):
            evaluated("run", server.url)
        assert len((tmp_path / "run" / "hint.jsonl").read_text().splitlines()) >= 4
        is_dead = False
        found, whole = (evaluated(place, server.url)["teams"]["hint"] for place in ("run", "whole"))
        assert found["num_failed"] == 0 and found["macro"] == whole["macro"]


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--policy=/nowhere", "/nowhere"),
        ("--port={taken}", "cannot listen on 127.0.0.1 port"),
        ("--config.actor.template=chat", "actor.template: 'chat' is unknown"),
    ],
)
def test_what_cannot_be_served_ends_the_command_with_one_line(served, flag, message):
    taken = served.removesuffix("/v1").rpartition(":")[2]
    command = [sys.executable, "launch/serve_policy.py", "--config=configs/agentpo_toy.py",
               flag.format(taken=taken)]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment())
    assert done.returncode == 1 and "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ") and message in last
