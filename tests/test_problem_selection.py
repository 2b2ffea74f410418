"""Selecting problems: by hand, its order, kills, failures, and the Actors that are asked."""

import asyncio
import dataclasses
import json
import os
import subprocess
import sys

import pytest
from api_calls import endpoint
from chat_server import ChatServer, answer, failure
from conftest import ROOT
from scripted_problems import make_problems, says
from shared_data import shared
from small_runs import save_start, small_config

from mas_jax.agents.rollout import TooManyFailures
from mas_jax.data import problems
from mas_jax.evaluation import problem_selection
from mas_jax.evaluation.problem_selection import Criteria, Records, check, in_order, select, write
from mas_jax.learning import actors, policy_files
from mas_jax.records import FailureKind, WorldError
from mas_jax.rewards.math_answer import extract
from mas_jax.sampling.api import Client

ACTOR = {"model": "scripted"}
FOUND = make_problems(60)
FEW = Criteria(count=10)


async def grade(problem, solutions):
    return tuple(float(extract(text) in problem.golden_answers) for text in solutions)


async def scripted(problem, sample):
    """Right in as many of 8 samples as the problem's number modulo 9 says."""
    await asyncio.sleep(0.001 * (hash_free(problem) % 5))  # later ones may end before
    return says(problem, sample < hash_free(problem) % 9)


def hash_free(problem):
    return int(problem.uid.rsplit("/", 1)[1])


def run(path, ask=scripted, criteria=FEW, found=FOUND, concurrency=4, **changes):
    records = Records(path, actor=ACTOR, samples=criteria.samples)
    arguments = dict(concurrency=concurrency, failure_frac=0.1) | changes
    return asyncio.run(select(found, ask, grade, records, criteria, **arguments))


def expected(criteria=FEW, found=FOUND):
    """By the definition: the first in order whose number modulo 9 is 1, 2, 3 or 4 of 8."""
    ordered = in_order(found, criteria)
    return [p.uid for p in ordered if 1 <= hash_free(p) % 9 <= 4][: criteria.count]


def test_those_that_are_right_sometimes_are_taken_and_no_others():
    # of 8 samples at most half: 1 to 4
    assert [Criteria().takes(right) for right in range(9)] == [False, *[True] * 4, *[False] * 4]
    assert [Criteria(most=0.25).takes(right) for right in range(4)] == [False, True, True, False]


@pytest.mark.parametrize("concurrency", [1, 4, 60])
def test_the_first_in_order_are_selected_whatever_runs_at_once(tmp_path, concurrency):
    selection = run(tmp_path / "counts.jsonl", concurrency=concurrency)
    assert [problem.uid for problem, _ in selection.problems] == expected()
    assert all(right == hash_free(problem) % 9 for problem, right in selection.problems)
    assert selection.failed == 0
    if concurrency == 1:  # it stops where it has enough
        ordered = [p.uid for p in in_order(FOUND, FEW)]
        assert selection.looked_at == ordered.index(expected()[-1]) + 1 < len(ordered)


def test_the_order_is_the_seeds_and_levels_are_kept():
    levels = Criteria(levels=(3,))
    assert {problem.level for problem in in_order(FOUND, levels)} == {3}
    assert in_order(FOUND, FEW) == in_order(FOUND[::-1], FEW)
    other = in_order(FOUND, dataclasses.replace(FEW, seed=1))
    assert other != in_order(FOUND, FEW)
    assert set(other) == set(in_order(FOUND, FEW))
    with pytest.raises(ValueError, match=r"level of \(9,\); there are \[1, 2, 3, 4, 5\]"):
        in_order(FOUND, Criteria(levels=(9,)))


def test_a_killed_selection_goes_on_and_ends_as_if_it_had_not_been(tmp_path):
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    wanted = run(whole, concurrency=1)
    lines = whole.read_bytes().splitlines(keepends=True)
    killed.write_bytes(b"".join(lines[:7]) + lines[7][:9])  # while it wrote a line
    asked = []

    async def counted(problem, sample):
        asked.append(problem.uid)
        return await scripted(problem, sample)

    assert run(killed, counted, concurrency=1) == wanted
    assert killed.read_bytes() == whole.read_bytes()
    assert len(set(asked)) == wanted.looked_at - 6  # the header is a line
    assert (
        run(whole, counted, criteria=dataclasses.replace(FEW, count=5)).problems
        == (wanted.problems[:5])
    )


def test_counts_of_another_actor_or_none_are_an_error(tmp_path):
    path = tmp_path / "counts.jsonl"
    run(path)
    with pytest.raises(ValueError, match=r"'other'.*another path"):
        Records(path, actor={"model": "other"}, samples=8)
    with pytest.raises(ValueError, match="another path"):
        Records(path, actor=ACTOR, samples=4)
    path.write_text("nonsense\n")
    with pytest.raises(ValueError, match="no file of pass counts"):
        Records(path, actor=ACTOR, samples=8)


def test_failed_problems_are_counted_left_out_and_asked_again(tmp_path):
    path, dead = tmp_path / "counts.jsonl", set(expected()[:2])

    async def fails(problem, sample):
        if problem.uid in dead and sample == 7:
            raise WorldError(FailureKind.API, "no answer")
        return await scripted(problem, sample)

    told = []
    selection = run(path, fails, tell=lambda *numbers: told.append(numbers))
    assert selection.failed == 2 and told[-1][2] == 2
    assert not dead & {problem.uid for problem, _ in selection.problems}
    assert len(selection.problems) == 10
    assert [problem.uid for problem, _ in run(path).problems] == expected()


def test_a_dead_actor_ends_it_with_what_is_known_kept(tmp_path):
    path = tmp_path / "counts.jsonl"
    alive = {p.uid for p in in_order(FOUND, FEW)[:5]}

    async def dies(problem, sample):
        if problem.uid not in alive:
            raise WorldError(FailureKind.API, "no route to host")
        return await scripted(problem, sample)

    with pytest.raises(TooManyFailures, match=r"10 of \d+ problems failed, such as: no route.*5 a"):
        run(path, dies, concurrency=1)
    assert [problem.uid for problem, _ in run(path).problems] == expected()


def test_too_few_are_returned_as_they_are(tmp_path):
    selection = run(tmp_path / "counts.jsonl", criteria=Criteria(count=1000))
    assert [p.uid for p, _ in selection.problems] == expected(Criteria(count=1000))
    assert selection.looked_at == len(in_order(FOUND, FEW))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(levels=()), "levels"),
        (dict(samples=0), "samples=0"),
        (dict(most=0.0), "most=0.0"),
        (dict(most=0.1), "most=0.1 of samples=8"),
        (dict(count=0), "count=0"),
    ],
)
def test_criteria_that_nothing_can_meet_are_an_error(changes, words):
    with pytest.raises(ValueError, match=words):
        check(Criteria(**changes))


def test_the_selection_is_written_as_training_reads_it(tmp_path):
    selection = run(tmp_path / "counts.jsonl")
    write(selection, tmp_path / "math.jsonl", FEW)
    found = problems.read_jsonl(tmp_path / "math.jsonl", split="train")
    assert found == tuple(problem for problem, _ in selection.problems)
    line = json.loads((tmp_path / "math.jsonl").read_text().splitlines()[0])
    assert line["metadata"]["actor_samples"] == 8
    assert line["metadata"]["actor_right"] == selection.problems[0][1]


# --- the Actors -----------------------------------------------------------------------------------

DRAWING = actors.Drawing(temperature=0.7, max_tokens=64, seed=3)


def test_an_endpoint_is_asked_for_independent_samples(tmp_path):
    with ChatServer(lambda body: answer(r"\boxed{5}")) as server:
        client = Client(endpoint(server), tmp_path)
        actor = actors.remote(client, "m", DRAWING)

        async def main():
            try:
                return await asyncio.gather(*(actor.ask(FOUND[0], n) for n in (0, 1, 0)))
            finally:
                await client.close()

        assert asyncio.run(main()) == [r"\boxed{5}"] * 3
    assert len(server.bodies) == 2  # sample 0 is one draw
    (first, second) = server.bodies
    assert first == second and first["temperature"] == 0.7 and first["max_tokens"] == 64
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert first["messages"][1]["content"].startswith(FOUND[0].text)
    assert actor.identity["model"] == "m" and "seed" not in actor.identity


def test_a_local_policy_is_asked_with_keys_of_its_own(tmp_path):
    from mas_jax.agents.chat import TOY, make_chat
    from mas_jax.data.tokenizer import make_toy_tokenizer
    from mas_jax.records import Sample, StopReason

    chat = make_chat(make_toy_tokenizer(), TOY)
    calls = []

    async def sample(prompt, **arguments):
        calls.append((prompt, arguments))
        text = chat.tokenizer.encode(" Paris")
        return [Sample((*text, chat.tokenizer.stop_ids[0]), (0.0,) * (len(text) + 1),
                       StopReason.TOKEN)]  # fmt: skip

    ask = actors.sampled(sample, chat, DRAWING, actors.SOLVE, policy="student", context=10_000)
    said = [asyncio.run(ask(FOUND[0], number)) for number in (0, 1)]
    assert said[0] == said[1] == chat.tokenizer.decode(chat.tokenizer.encode(" Paris"))
    keys = [arguments["key"] for _, arguments in calls]
    assert [key.rollout for key in keys] == [0, 1]
    assert {(key.seed, key.question, key.path) for key in keys} == {(3, FOUND[0].uid, "actor")}
    assert calls[0][1]["max_tokens"] == 64 and calls[0][0] == calls[1][0]
    length = len(calls[0][0])
    tight = actors.sampled(
        sample, chat, DRAWING, actors.SOLVE, policy="student", context=length + 5
    )
    asyncio.run(tight(FOUND[0], 0))
    assert calls[-1][1]["max_tokens"] == 5
    none = actors.sampled(sample, chat, DRAWING, actors.SOLVE, policy="student", context=length)
    assert asyncio.run(none(FOUND[0], 0)) == "" and len(calls) == 3


def test_a_policy_in_our_engine_draws_the_same_samples_again_and_others_for_another_number(
    tmp_path,
):
    config = small_config(save_start(tmp_path / "start"))
    actor = actors.local(config, actors.Drawing(temperature=1.0, max_tokens=8, seed=0))

    async def main():
        return await asyncio.gather(*(actor.ask(FOUND[0], number) for number in (0, 1, 0)))

    first, second, again = asyncio.run(main())
    assert first == again != second
    assert actor.identity["weights"] == policy_files.weights_digest(tmp_path / "start")
    assert actor.identity["context"] == config.engine.context


def test_the_frozen_actor_of_a_config_is_who_is_asked(tmp_path):
    """Not the Collaborator; and its identity is what it is, not where it lies."""
    config = small_config(save_start(tmp_path / "start"))
    one, same, other = (save_start(tmp_path / name, seed=1) for name in ("one", "same", "other"))
    path = other / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 1e-5}))
    config.actor.update(dict(kind="policy", engine=config.engine.to_dict()))
    found = []
    for place in (one, same, other):
        config.actor.checkpoint = str(place)
        found.append(actors.local(config, DRAWING).identity)
    config.actor.engine.weights = "int8"
    found.append(actors.local(config, DRAWING).identity)
    assert found[0] == found[1] and found[0]["weights"] == policy_files.weights_digest(one)
    assert len({json.dumps(identity) for identity in found}) == 3
    assert found[0]["context"] == config.actor.engine.context


def test_problems_that_are_tested_are_not_selected():
    tested = [dataclasses.replace(FOUND[3], uid="t", text=FOUND[3].text.upper() + " ?")]
    left = problem_selection.asked_nowhere_else(FOUND, tested)
    assert left == (*FOUND[:3], *FOUND[4:])
    paths = [shared("math") / f"{name}.jsonl" for name in ("math_train", "math500")]
    trained, tested = (problems.read_jsonl(path, split="test") for path in paths)
    left = {p.uid for p in problem_selection.asked_nowhere_else(trained, tested)}
    assert {p.uid for p in trained} - left == {"math/test/math_train_7163"}


# --- the command ----------------------------------------------------------------------------------


def command(tmp_path, server, *more):
    return subprocess.run(
        [sys.executable, "launch/select_problems.py", f"--problems={tmp_path}/math_train.jsonl",
         f"--base_url={server.url}", "--model=m", f"--out={tmp_path}/out", "--count=4",
         "--workers=1", *more],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_the_command_selects_through_an_endpoint_with_faults(tmp_path):
    found = make_problems(30)
    by_text = {problem.text: problem for problem in found}  # one line each
    problems.write_jsonl(tmp_path / "math_train.jsonl", (problems.as_line(p, {}) for p in found))
    drawn, faults = {}, [failure(429), failure(500)]

    def reply(body):
        if faults:
            return faults.pop()
        problem = by_text[body["messages"][1]["content"].splitlines()[0]]
        drawn[problem.uid] = drawn.get(problem.uid, 0) + 1
        return answer(says(problem, drawn[problem.uid] <= hash_free(problem) % 9))

    with ChatServer(reply) as server:
        done = command(tmp_path, server)
        assert done.returncode == 0, done.stderr
        assert "4 problems of" in done.stdout
        asked = len(server.received)
        again = command(tmp_path, server)
        assert again.returncode == 0 and len(server.received) == asked
        other = command(tmp_path, server, "--max_tokens=9")
        assert other.returncode != 0 and "give another path" in other.stderr + other.stdout
    selected = problems.read_jsonl(tmp_path / "out" / "math.jsonl", split="train")
    assert [p.uid for p in selected] == expected(Criteria(count=4), found)


def test_the_command_wants_one_actor(tmp_path):
    problems.write_jsonl(
        tmp_path / "math_train.jsonl", (problems.as_line(p, {}) for p in make_problems(9))
    )
    done = subprocess.run(
        [sys.executable, "launch/select_problems.py", f"--problems={tmp_path}/math_train.jsonl"],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode != 0
    assert "give --base_url and --model of an endpoint, or --config" in done.stderr + done.stdout
    assert not (tmp_path / "out").exists()


def test_the_defaults_are_those_of_the_method():
    assert problem_selection.Criteria() == Criteria((3, 4, 5), 8, 0.5, 1000, 0)
