"""Judges: what counts as a score, what they are asked, the toy world's truth, a training step."""

import asyncio
import dataclasses
import functools
import math

import numpy as np
import pytest
from api_calls import endpoint
from chat_server import ChatServer, answer, failure
from config_files import load
from rich.console import Console
from scripted_team import CharTokenizer, cut
from small_runs import save_start, scripted_stage, small_config, small_pipeline

from mas_jax import metrics
from mas_jax.agents import chat
from mas_jax.agents.judge import (
    api_judge,
    length_judge,
    make_truth,
    oracle_judge,
    parse_score,
    policy_judge,
    written,
)
from mas_jax.agents.oracle import follow
from mas_jax.agents.prompts import load_judge_prompt
from mas_jax.agents.setting import JudgeJob
from mas_jax.data.world import make_world
from mas_jax.data.world_facts import draw_parts
from mas_jax.data.world_text import RELATIONS
from mas_jax.learning import judges, loop, pipeline
from mas_jax.records import Judgement, SampleKey, WorldError
from mas_jax.sampling.api import Client

KEY = SampleKey(3, "train", 7, "toy/1", 0, "leader/w1.s2/judge", 0)
JOB = JudgeJob(
    question="who founded the firm of ada",
    path="leader/w1.s2",
    subtask="where does ada work",
    searches=(("ada job", ("ada: works for {report}", "bob: a poet")), ("firm", ())),
    report="ada works for engines",
)


@functools.cache
def world():
    return make_world(0)


def say(judge, job=JOB, key=KEY):
    return asyncio.run(judge(job, key=key)).score


def say_all(judge, job, keys):
    """Scores of one job under many keys, asked for at once."""

    async def main():
        found = await asyncio.gather(*(judge(job, key=key) for key in keys))
        return [judgement.score for judgement in found]

    return asyncio.run(main())


# --- what counts as a score -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<score>7</score>", 0.7),
        ("Well searched.\n<score> 10 </score>", 1.0),
        ("<score>0</score> of ten", 0.0),
        ("<score>7.5</score>", 0.75),
        ("8", 0.8),
        (" 3 \n", 0.3),
        ("<think><score>1</score> or 2?</think>\n\n<score>9</score>", 0.9),
        ("", None),
        ("good", None),
        ("7/10", None),
        ("I say 7", None),
        ("-1", None),
        ("11", None),
        ("<score>10.5</score>", None),
        ("<score>100</score>", None),
        ("<score>seven</score>", None),
        ("<score>7", None),
        ("7</score>", None),
        ("<score>7</score><score>8</score>", None),
        ("<score>7</score> <score>", None),
        ("<score>nan</score>", None),
        ("<score>\u0667</score>", None),
        ("1e1", None),
        ("<score>7</score></think>", None),
    ],
)
def test_a_score_is_one_number_from_0_to_10_or_nothing(text, score):
    assert parse_score(text) == (None if score is None else pytest.approx(score, abs=1e-15))


# --- what a language model is asked ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["full", "small"])
def test_the_prompts_show_the_subtask_its_searches_and_the_report(name):
    text = written(JOB, load_judge_prompt(name), lambda text: True)
    for part in ("where does ada work", "1. ada job", "bob: a poet", "2. firm", "for engines"):
        assert text.count(part) == 1
    assert "works for {report}" in text  # outside text is not read for placeholders
    none = dataclasses.replace(JOB, searches=(), report="")
    assert "Report: -" in written(none, load_judge_prompt(name), lambda text: True)


def test_searches_are_left_out_until_the_prompt_fits():
    prompt = load_judge_prompt("small")
    whole = written(JOB, prompt, lambda text: True)
    assert "2. firm" not in written(JOB, prompt, lambda text: len(text) < len(whole))
    shortest = len(written(dataclasses.replace(JOB, searches=()), prompt, lambda text: True))
    short = written(JOB, prompt, lambda text: len(text) <= shortest + 20)
    assert "1. ada job" in short and " [cut]" in short
    assert "poet" not in short and "for engines" in short


def test_a_prompt_set_without_a_judges_prompt_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"prompts toy: there is no judge\.txt; take 'full'"):
        load_judge_prompt("toy")
    (tmp_path / "judge.txt").write_text("{subtask}")
    with pytest.raises(ValueError, match="judge has placeholders"):
        load_judge_prompt(tmp_path)


def policy_says(text, context=4000):
    """A judge over a policy that always says this, and its requests."""
    requests = []

    async def sample(prompt, **request):
        requests.append((CharTokenizer().decode(prompt), request))
        return [cut(text, request["max_tokens"], request["stop"])]

    made = policy_judge(
        sample, chat=chat.make_chat(CharTokenizer(), chat.INSTRUCT), policy="start",
        prompt=load_judge_prompt("full"), context=context, max_tokens=30,
    )  # fmt: skip
    return made, requests


def test_a_policy_judges_greedily_with_the_frozen_weights():
    judge, requests = policy_says("fine <score>6</score> and more")
    assert say(judge) == 0.6
    ((prompt, request),) = requests
    assert prompt.startswith("<|im_start|>user\nYou grade") and "ada job" in prompt
    assert (request["policy"], request["key"], request["n"]) == ("start", KEY, 1)
    assert (request["temperature"], request["max_tokens"]) == (0.0, 30)
    assert say(policy_says("4")[0]) == 0.4  # ended by the stop token
    assert say(policy_says("hm")[0]) is None
    assert say(policy_says("long" * 10 + "<score>6</score>")[0]) is None  # cut off before it


def test_a_policys_prompt_leaves_room_for_its_judgement():
    judge, requests = policy_says("4")
    long = dataclasses.replace(JOB, searches=(("q", ("word " * 2000,)),))
    assert say(judge, long) == 0.4
    assert 3900 < len(CharTokenizer().encode_template(requests[0][0])) + 30 <= 4000


def test_an_endpoint_judges_over_http():
    script = [answer("<score>8</score>"), answer("no idea"), answer("9", refusal="I must not")]
    with ChatServer([*script, failure(401)]) as server:
        client = Client(endpoint(server))
        prompt = load_judge_prompt("full")
        judge = api_judge(client.complete, prompt=prompt, model="m", max_chars=9000, max_tokens=50)
        assert [say(judge) for _ in script] == [0.8, None, None]
        with pytest.raises(WorldError, match="401"):
            say(judge)
    body = server.bodies[0]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0.0, 50)
    assert body["messages"] == [{"role": "user", "content": written(JOB, prompt, len)}]


# --- the toy world's truth ------------------------------------------------------------------------


def a_question(family):
    return next(q for q in world().questions["train"] if q.dataset == family)


@functools.cache
def facts_by_name():
    parts = draw_parts(0).values()
    return {(f.relation, n): f for p in parts for f in p.facts for n in f.subject.names}


def true_statements(question):
    """The statement of every hop, by the world's facts."""
    facts, found = facts_by_name(), []
    for ask in question.decomposition:
        for hop, fact in enumerate(found, start=1):
            ask = ask.replace(f"#{hop}", fact.object.name)
        (step,) = follow(world(), ask, [])
        found.append(facts[step.relation, step.subject])
    return [RELATIONS[f.relation].statement.format(s=f.subject.name, o=f.object.name)
            for f in found]  # fmt: skip


def job(subtask, report):
    return dataclasses.replace(JOB, subtask=subtask, report=report)


@pytest.mark.parametrize("family", ["popqa_like", "hotpotqa_like", "2wiki_like", "musique_like"])
def test_the_oracle_knows_right_wrong_and_empty_reports(family):
    judge, question = oracle_judge(world(), accuracy=1.0), a_question(family)
    right = true_statements(question)
    other = true_statements(
        next(q for q in world().questions["train"] if q.dataset == "triviaqa_like")
    )
    task = question.text
    assert say(judge, job(task, " ; ".join(right))) == 1.0
    assert say(judge, job(task, " ; ".join([*reversed(right), *other]))) == 1.0
    assert say(judge, job(task, " ; ".join([*other, *right]))) == 1.0  # about something else
    for bad in ("", "not found", *other, " ; ".join(right[:-1]), " ".join(right) + " maybe"):
        assert say(judge, job(task, bad)) == 0.0
    wrong = right[-1].rsplit(" ", 1)[0] + " " + right[-1].split()[0]
    assert wrong != right[-1]
    assert say(judge, job(task, " ; ".join([*right[:-1], wrong]))) == 0.0
    # the first statement is what a reader takes: a list of guesses is not an answer
    assert say(judge, job(task, " ; ".join([*right[:-1], wrong, right[-1]]))) == 0.0
    assert say(judge, job("hum a tune", " ; ".join(right))) == 0.0


def test_either_name_and_any_wording_of_a_fact_is_right():
    is_right = make_truth(world())
    fact = next(f for f in draw_parts(0)["train"].facts if f.object.alias and f.subject.alias)
    relation = RELATIONS[fact.relation]
    for ask in (text for texts in relation.asks.values() for text in texts):
        for asked in fact.subject.names:
            for form in relation.passages:
                for subject in fact.subject.names:
                    for name in fact.object.names:
                        report = form.format(s=subject, o=name)
                        assert is_right(ask.format(s=asked), report)
                        assert not is_right(ask.format(s=asked), form.format(s=name, o=subject))


def test_every_hop_of_a_subtask_by_itself_has_a_truth():
    is_right = make_truth(world())
    for question in world().questions["test"][::7]:
        statements = true_statements(question)
        assert is_right(question.text, " ; ".join(statements))
        assert is_right(question.decomposition[0], statements[0])


def keys(count):
    return [dataclasses.replace(KEY, rollout=i) for i in range(count)]


def test_an_accuracy_of_08_is_08_and_repeats():
    question = a_question("popqa_like")
    right, num = job(question.text, true_statements(question)[0]), 4000
    judge = oracle_judge(world(), accuracy=0.8)
    agreed = {}
    for name, want, one in (("right", 1.0, right), ("wrong", 0.0, job(question.text, ""))):
        scores = say_all(judge, one, keys(num))
        assert set(scores) == {0.0, 1.0}
        agreed[name] = [score == want for score in scores]
        # binomial: a deviation above 4.5 standard errors comes once in 150,000
        assert abs(np.mean(agreed[name]) - 0.8) < 4.5 * math.sqrt(0.8 * 0.2 / num)
        again = oracle_judge(world(), accuracy=0.8)
        assert say_all(again, one, keys(num)[::-1]) == scores[::-1]
    assert agreed["right"] == agreed["wrong"]  # the key decides, not the verdict
    never = oracle_judge(world(), accuracy=0.0)
    assert say_all(never, right, keys(20)) == [0.0] * 20


def test_every_part_of_the_key_draws_anew():
    judge = oracle_judge(world(), accuracy=0.5)
    for field, value in (("seed", 4), ("step", 8), ("question", "x"), ("path", "p"), ("turn", 1)):
        moved = [dataclasses.replace(key, **{field: value}) for key in keys(64)]
        assert say_all(judge, JOB, moved) != say_all(judge, JOB, keys(64))


def test_a_judge_that_likes_length():
    question = a_question("popqa_like")
    right = true_statements(question)[0]
    num_words = len(right.split())
    judge = length_judge(world(), accuracy=1.0, bias=0.25, full_words=4 * num_words)
    # 0.75 of the truth, and a quarter of the length that is worth the other quarter
    assert say(judge, job(question.text, right)) == pytest.approx(0.75 + 0.25 / 4)
    assert say(judge, job(question.text, "")) == 0.0
    reports = [job(question.text, "blah " * n) for n in range(8 * num_words)]
    scores = [say(judge, report) for report in reports]
    assert scores == sorted(scores) and scores[-1] == scores[4 * num_words] == 0.25
    only = length_judge(world(), accuracy=1.0, bias=1.0, full_words=10)
    assert say(only, job(question.text, right)) == min(num_words / 10, 1.0)


# --- a training step ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return save_start(tmp_path_factory.mktemp("start") / "policy")


def test_the_config_makes_its_judge_for_stages_that_ask(start, tmp_path):
    changes = dict(judge__kind="length", judge__length_bias=0.5, judge__full_words=10)
    config = small_config(start, teacher__checkpoint=str(start), **changes)
    made = small_pipeline(config, tmp_path)
    assert pipeline.make_stage(made, "student").world.judge is None
    config.stages.student.programme.searcher.behaviour = "judge"
    question = a_question("popqa_like")
    right = true_statements(question)[0]
    want = 0.5 + 0.5 * min(len(right.split()) / 10, 1.0)
    judge = pipeline.make_stage(made, "student").world.judge
    assert say(judge, job(question.text, right)) == want
    config.judge.update(dict(kind="oracle", accuracy=0.0))
    assert say(judges.make_judge(config, made.scene, start), job(question.text, right)) == 0.0
    with ChatServer([answer("<score>5</score>"), failure(500)]) as server:
        config.judge.update(
            dict(kind="api", base_url=server.url, model="m", cache=str(tmp_path / "answers"))
        )
        judge = judges.make_judge(config, made.scene, start)
        assert [say(judge), say(judge)] == [0.5, 0.5]
        assert len(server.bodies) == 1  # the second is from the cache
    # "policy" has engines of its own, with the starting weights
    config.judge.update(dict(kind="policy", prompts="small", max_tokens=4))
    assert say(judges.make_judge(config, made.scene, start)) is None  # it babbles


def test_a_stage_with_a_judge_trains_and_counts_what_the_judge_did(start, tmp_path):
    config = small_config(start, teacher__checkpoint=str(start), stages__student__steps=1)
    critic = load("toy_prompted_critic").get_config()
    config.stages.student.programme = critic.stages.student.programme
    config.train.stages = ("student",)
    stage = scripted_stage(config, tmp_path, "student", chaotic=False)
    truth, asked = stage.world.judge, []

    async def judge(job, *, key):
        asked.append((key, job))
        if key.question == asked[0][0].question and key.rollout == 0:
            return Judgement(job.path, None) if len(asked) % 2 else 1 / 0
        return await truth(job, key=key)

    stage = dataclasses.replace(stage, world=dataclasses.replace(stage.world, judge=judge))
    limits = dataclasses.replace(stage.limits, min_episodes=10**6)
    loop.train(dataclasses.replace(stage, limits=limits), tmp_path / "run", Console(quiet=True))
    (line,) = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert {key.path for key, _ in asked} == {f"{job.path}/judge" for _, job in asked}
    assert line["rollout/judgements"] == line["credit/searcher/num_agents"] == len(asked) >= 4
    failed = line["credit/searcher/judge_failures"]
    assert 1 <= failed == line["rollout/errors/judge"] < len(asked)
    assert line["rollout/failure_frac"] == line["credit/failed_episodes"] == 0.0
    assert 0.0 <= line["credit/searcher/judge_score"] <= 1.0
    assert 1.0 <= line["credit/searcher/aligned_to"] <= 12.0
    assert line["update/searcher/tokens"] > 0 and math.isfinite(line["update/loss"])
    assert line["credit/leader/num_traces"] == 4
