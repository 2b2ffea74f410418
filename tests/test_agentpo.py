"""A Collaborator for a frozen Actor, end to end with tiny policies: local and at an endpoint."""

import asyncio
import collections
import dataclasses
import io
import itertools
import json
import threading

import pytest
from chat_server import ChatServer, answer, failure
from rich.console import Console
from tiny_agentpo import save_both, small_config, weights

from mas_jax import metrics
from mas_jax.agents import rollout
from mas_jax.agents.math_oracle import MathFlaws, Player
from mas_jax.data.questions import write_jsonl
from mas_jax.learning import evaluate, loop, pipeline
from mas_jax.records import SampleKey, Stop

QUIET = Console(quiet=True)
PERFECT = MathFlaws()


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return save_both(tmp_path_factory.mktemp("policies"))


def train(config, workdir):
    done = pipeline.run(pipeline.prepare(config, workdir), QUIET)
    return done["agentpo"], metrics.read(workdir / "agentpo" / "metrics.jsonl")


# --- a frozen policy of its own -------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(places, tmp_path_factory):
    """A run of two steps."""
    return train_by_turns(small_config(places), tmp_path_factory.mktemp("run"))


def train_by_turns(config, workdir):
    """What policies say before and after, and the metrics, of a run in which every other episode of
    each problem is right: tiny Actors never box a number, and a group of equals teaches nothing."""
    made = pipeline.prepare(config, workdir)
    played = collections.Counter()

    async def reward(question, predictions):
        played[question.uid] += 1
        return (float(played[question.uid] % 2),) * len(predictions)

    stage = pipeline.make_stage(made, "agentpo")
    stage = dataclasses.replace(stage, world=dataclasses.replace(stage.world, reward=reward))
    before = said(made.engines)
    loop.train(stage, workdir / "agentpo", QUIET)
    lines = metrics.read(workdir / "agentpo" / "metrics.jsonl")
    return before, said(made.engines), lines


def said(policies):
    """What each policy says to one prompt, with log-probs, whatever was said before."""
    key = SampleKey(0, "eval", 0, "q", 0, "solve", 0)
    knobs = dict(n=1, max_tokens=4, temperature=1.0, top_p=1.0, top_k=0, stop=Stop())
    return {
        name: asyncio.run(policies.sample((300, 301), key=key, policy=name, **knobs))
        for name in ("student", "actor")
    }


def test_only_the_collaborators_tokens_are_trained_and_the_actors_are_costed(trained):
    _, _, lines = trained
    assert [line["step"] for line in lines] == [0, 1]
    for line in lines:
        assert line["rollout/episodes"] == 6
        assert line["cost/actor/output_tokens"] > 0 and line["cost/actor/input_tokens"] > 0
        assert line["cost/collaborator/training_tokens"] > 0
        assert "cost/actor/training_tokens" not in line
        assert line["batch/skipped_traces"] == 6  # the Actor's
        assert line["update/collaborator/tokens"] > 0 and "update/actor/tokens" not in line
        assert line["engine/actor_replacements"] == 0
        assert line["engine/replacements"] >= 1 + line["step"]
    assert lines[-1]["engine/actor_prompt_tokens"] > 0


def test_the_collaborator_moves_and_the_actor_stays(trained):
    before, after, _ = trained
    assert after["actor"] == before["actor"]
    assert after["student"] != before["student"]


def test_drafts_of_a_group_are_computed_once(places, tmp_path):
    """Six episodes of two problems: two drafts, and the rest is asked for anew."""
    config = small_config(places, "critic", **{"stages.agentpo.steps": 1})
    config.actor.remember = str(tmp_path / "drafts")
    _, lines = train(config, tmp_path / "run")
    assert lines[0]["engine/actor_recalled"] >= 4
    assert list((tmp_path / "drafts").rglob("*.json"))
    assert lines[0]["cost/actor/output_tokens"] > 0


@pytest.mark.parametrize("team", ["debate", "solver"])
def test_other_topologies_train_by_the_same_config(places, tmp_path, team):
    """One update of rewards that differ: the Collaborator's words move, whatever it has to say."""
    config = small_config(places, team, **{"stages.agentpo.steps": 1})
    before, after, lines = train_by_turns(config, tmp_path / "run")
    assert before["student"] != after["student"] and before["actor"] == after["actor"]
    assert ("cost/actor/output_tokens" in lines[0]) == (team != "solver")
    assert lines[0]["cost/collaborator/training_tokens"] > 0


def test_teams_and_baselines_are_evaluated_side_by_side(places, tmp_path):
    config = small_config(places)
    config.evaluation.teams = ("actor", "vote", "hint")
    prepared = evaluate.prepare(config, tmp_path / "eval")
    summary = evaluate.run(prepared, QUIET)
    assert set(summary["teams"]) == {"actor", "vote", "hint"}
    tokens = {
        name: sum(team["per_workflow"][f"{kind}_tokens"] for kind in ("input", "output"))
        for name, team in summary["teams"].items()
    }
    assert tokens["vote"] > 1.5 * tokens["actor"] and tokens["hint"] > tokens["actor"]
    assert "Cost a workflow by role" in (tmp_path / "eval" / "tables.md").read_text()
    other = small_config(places)
    other.evaluation.teams, other.collaboration.votes = ("vote",), 3
    with pytest.raises(ValueError, match=r"settings\.collaboration"):
        evaluate.prepare(other, tmp_path / "eval")


# --- an Actor at an endpoint ----------------------------------------------------------------------


def told(body):
    """The problem and the hint in a request to the Actor."""
    text = body["messages"][-1]["content"]
    problem, _, hint = text.removeprefix(" solve ").partition(" with ")
    return problem, hint


def solver(body):
    """An Actor that is right where it is told something of even length."""
    problem, hint = told(body)
    right = Player(PERFECT, 0).say([f" solve {problem}"], [])
    return answer(right if len(hint) % 2 == 0 else r"\boxed{99}")


def at_endpoint(places, server, **changes):
    config = small_config(places, **changes)
    config.actor.update(dict(kind="api", base_url=server.url, model="m", retries=0, timeout_s=20.0))
    return config


def test_an_actor_at_an_endpoint_teaches_the_collaborator_and_is_counted(places, tmp_path):
    with ChatServer(solver) as server:
        config = at_endpoint(places, server)
        config.actor.cache = str(tmp_path / "answers")
        policy, lines = train(config, tmp_path / "run")
    assert weights(policy) != weights(places[0])
    asked = {json.dumps(body["messages"]) for body in server.bodies}
    assert len(asked) == len(server.bodies)  # equal greedy requests are one call
    assert all(body["temperature"] == 0.0 for body in server.bodies)
    last = lines[-1]
    # 6 episodes a step, 4 of validation after the last: not yet there when its line is made
    assert 12 <= last["engine/endpoint_requests"] <= 16
    assert last["engine/endpoint_calls"] <= len(server.bodies)
    assert last["cost/actor/input_tokens"] == 6 * 10 and last["cost/actor/output_tokens"] == 6 * 2
    with ChatServer([]) as other:  # the same questions again: nothing is asked
        again = at_endpoint(places, other)
        again.actor.update(dict(cache=str(tmp_path / "answers"), base_url=server.url))
        repeated, _ = train(again, tmp_path / "again")
    assert other.bodies == [] and weights(repeated) == weights(policy)


def test_a_hints_reward_is_the_mean_of_the_actors_samples(places, tmp_path):
    """An Actor that is right in every other answer: means and errors of 4 between 0 and 1."""
    numbers = itertools.count()

    def either(body):
        return solver(body) if next(numbers) % 2 else answer(r"\boxed{99}")

    with ChatServer(either) as server:
        config = at_endpoint(places, server, **{"collaboration.actor_samples": 4})
        _, lines = train(config, tmp_path / "run")
    first = lines[0]
    assert first["cost/actor/output_tokens"] == 6 * 4 * 2 and first["rollout/actor/agents"] == 4
    assert 0 < first["credit/collaborator/reward"] < 1
    # 0 or 4 of 4 right: sqrt(5/144), 2 of 4: 1/4
    assert (5 / 144) ** 0.5 <= first["credit/collaborator/reward_error"] <= 0.25
    assert 1.0 <= first["credit/collaborator/weight_max"] < 2.0
    sampled = [body for body in server.bodies if body["temperature"] == 0.7]
    assert len(sampled) == 2 * 6 * 4  # of two steps; validation is greedy, one solution each
    assert {body["temperature"] for body in server.bodies} == {0.0, 0.7}


def test_problems_of_files_are_graded_by_value_in_an_evaluation(places, tmp_path):
    golds = {"a": r"\frac{1}{2}", "b": "7", "c": "0.25"}
    said = {"a": r"\boxed{0.5}", "b": r"\boxed{8}", "c": "no idea"}
    lines = [{"id": i, "question": f"{i}?", "golden_answers": [golds[i]]} for i in golds]
    write_jsonl(tmp_path / "math500.jsonl", lines)

    def solve(body):
        (name,) = (i for i in said if f"{i}?" in body["messages"][-1]["content"])
        return answer(said[name])

    with ChatServer(solve) as server:
        config = at_endpoint(places, server)
        config.data.test = (str(tmp_path / "math500.jsonl"),)
        config.evaluation.teams = ("actor",)
        summary = evaluate.run(evaluate.prepare(config, tmp_path / "eval"), QUIET)
    assert summary["teams"]["actor"]["macro"]["avg"] == pytest.approx(1 / 3)
    assert (summary["graded"]["jobs"], summary["graded"]["no_answer"]) == (2, 1)
    graders = summary["graders"]["actor"]
    assert (graders["both"], graders["neither"]) == (1, 1) and not graders["only_second"]
    row = summary["problem_sets"]["actor"]["math500"]
    assert row["num_problems"] == 3 and row["avg"]["difference"] == pytest.approx(1 / 3)
    assert row["tokens"] == {"actor": {"input": 10.0, "output": 2.0}}


def test_answers_that_only_one_grader_takes_are_listed(places, tmp_path):
    """The second grader reads no thousands between {,}."""
    line = {"id": "a", "question": "a?", "golden_answers": ["10{,}000"]}
    write_jsonl(tmp_path / "math500.jsonl", [line])
    with ChatServer(lambda body: answer(r"\boxed{10000}")) as server:
        config = at_endpoint(places, server)
        config.data.test = (str(tmp_path / "math500.jsonl"),)
        config.evaluation.teams = ("actor",)
        console = Console(record=True, file=io.StringIO(), width=200)
        summary = evaluate.run(evaluate.prepare(config, tmp_path / "eval"), console)
    (found,) = summary["graders"]["actor"]["only_first"]
    assert (found["golds"], found["prediction"]) == (("10{,}000",), "10000")
    assert "actor: graders agree on 0 of 1" in console.export_text()
    written = json.loads((tmp_path / "eval" / "summary.json").read_text())
    assert written["graders"]["actor"]["only_first"][0]["question"] == "math500/test/a"


def test_what_a_hint_is_worth_and_votes_at_its_tokens_come_from_one_evaluation(places, tmp_path):
    """An Actor of 10 + 2 tokens; a vote of v costs 12 v."""

    def evaluated(server):
        config = at_endpoint(places, server)
        config.actor.cache = str(tmp_path / "answers")
        config.evaluation.update(
            dict(teams=("actor", "hint"), controls=("other_problem", "no_answer"),
                 matched_votes="hint")
        )  # fmt: skip
        return evaluate.run(evaluate.prepare(config, tmp_path / "eval"), QUIET)

    with ChatServer(solver) as server:
        summary = evaluated(server)
        rows = {row["system"]: row for row in summary["effect"]["hint"]}
        assert list(rows) == [
            "actor", "hint", "hint, shown another problem", "hint, without the answer"
        ]  # fmt: skip
        avg = {name: team["macro"]["avg"] for name, team in summary["teams"].items()}
        for name, row in rows.items():
            assert row["avg"]["difference"] == pytest.approx(avg[name])
            if name != "actor":
                assert row["less_alone"]["difference"] == pytest.approx(avg[name] - avg["actor"])
                assert row["answers_told"] == summary["answers_told"][name]
        matched = summary["matched_votes"]
        wanted = matched["tokens"]["team"]
        assert matched["votes"] == max(1, round(wanted / 12)) > 1
        assert matched["tokens"]["vote"] == 12 * matched["votes"]
        assert matched["ratio"] == pytest.approx(12 * matched["votes"] / wanted)
        assert "vote, at the tokens of hint" in summary["teams"]
        num_asked = len(server.bodies)
        assert evaluated(server)["matched_votes"] == matched  # plays nothing again
        assert len(server.bodies) == num_asked
    tables = (tmp_path / "eval" / "tables.md").read_text()
    for text in ("What the words of hint are worth", "Self-consistency at the tokens", "Each set"):
        assert text in tables


def test_single_faults_are_masked_and_counted_and_the_run_goes_on(places, tmp_path):
    numbers = itertools.count()

    def faulty(body):
        return failure(500) if next(numbers) == 1 else solver(body)

    with ChatServer(faulty) as server:
        config = at_endpoint(places, server, **{"rollout.failure_frac": 0.4})
        _, lines = train(config, tmp_path / "run")
    assert lines[0]["rollout/errors/api"] >= 1
    assert lines[0]["credit/failed_episodes"] >= 1
    assert [line["step"] for line in lines] == [0, 1]


def test_a_dead_endpoint_stops_the_run_with_its_message_and_it_can_be_resumed(places, tmp_path):
    is_dead = threading.Event()

    def dying(body):
        return failure(500, "gone") if is_dead.is_set() else solver(body)

    with ChatServer(dying) as server:
        first = at_endpoint(places, server, **{"stages.agentpo.steps": 2})
        made = pipeline.prepare(first, tmp_path / "run")
        stage = pipeline.make_stage(made, "agentpo")

        def dies(step):
            is_dead.set()
            return 0.5

        settings = dataclasses.replace(stage.settings, validation_interval=1)
        stage = dataclasses.replace(stage, validate=dies, settings=settings)
        with pytest.raises(rollout.TooManyFailures, match=r"api: \d+, such as .*500"):
            loop.train(stage, tmp_path / "run" / "agentpo", QUIET)
        is_dead.clear()
        _, lines = train(first, tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 1]
