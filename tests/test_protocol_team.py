"""The offline system: the script plays all of it, an endpoint may fail, a build goes on."""

import asyncio
import collections
import dataclasses
import json

import pytest
from chat_server import ChatServer, Reply, answer, failure

from mas_jax.agents import protocol_files, protocol_oracle
from mas_jax.agents.protocol import rejection
from mas_jax.agents.protocol_files import build, read, read_protocols, summarise
from mas_jax.agents.protocol_oracle import STYLES, Oracle
from mas_jax.agents.protocol_roles import ROLES, Limits, instructions, parse_object
from mas_jax.agents.protocol_team import Desk, work_on
from mas_jax.agents.rollout import TooManyFailures
from mas_jax.config import default_config
from mas_jax.data.world import make_world
from mas_jax.records import Passage, Question, SearchFailure, WorldError
from mas_jax.retrieval.hashed_ngrams import HashedNgrams
from mas_jax.retrieval.index import IndexConfig, Retriever
from mas_jax.sampling.api import Client, Endpoint
from mas_jax.sampling.api_budget import Price
from mas_jax.sampling.api_request import Completion

LIMITS = Limits()


@pytest.fixture(scope="module")
def world():
    return make_world(0, closed_share=0.0, train=28, held_out=7)


@pytest.fixture(scope="module")
def search(world):
    return Retriever.build(world.passages, HashedNgrams(), IndexConfig(backend="exact")).search


def scripted(world, search, **oracle):
    made = Oracle(world, **oracle)
    return Desk(protocol_oracle.local(made, LIMITS), search, f"oracle-{made.style}")


def run(questions, desk):
    async def _all():
        return await asyncio.gather(*(work_on(question, desk) for question in questions))

    return asyncio.run(_all())


def test_the_script_works_on_every_family_and_its_protocols_pass(world, search):
    questions = world.questions["train"]
    records = run(questions, scripted(world, search))
    assert {q.dataset for q in questions} == {q.dataset for q in world.questions["test"]}
    right = [r for r in records if r.is_correct]
    assert len(right) >= 0.9 * len(records)
    assert all(r.protocol is not None for r in records), [r for r in records if r.reason]
    texts = {passage.id: passage for passage in world.passages}
    for question, record in zip(questions, records, strict=True):
        assert rejection(record.protocol, question, texts) is None
        assert ("answer" in record.protocol) == record.is_correct
        hops = len(question.decomposition)
        assert len(record.protocol["reasoning_plan"]) == hops
        if record.is_correct and not record.repairs:
            # one orchestrator, two a hop, answerer, protocolizer
            assert (record.calls, record.malformed) == (3 + 2 * hops, 0)
        assert record.cost == 0.0 < record.input_tokens


def test_hops_that_wait_for_nothing_are_searched_at_once(world, search):
    comparison = next(q for q in world.questions["train"] if q.dataset == "2wiki_like")
    chain = next(q for q in world.questions["train"] if q.dataset == "musique_like")
    steps = {}
    for question in (comparison, chain):
        running = most = 0

        async def _counted(queries, k):
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.01)
            running -= 1
            return await search(queries, k)

        desk = dataclasses.replace(scripted(world, search), search=_counted)
        (record,) = run([question], desk)
        assert record.is_correct
        steps[question.dataset] = most
    assert steps == {"2wiki_like": 2, "musique_like": 1}


def test_one_model_alone_passes_the_same_gates_and_says_what_it_did(world, search):
    questions = world.questions["train"]
    desk = dataclasses.replace(scripted(world, search), is_alone=True)
    records = run(questions, desk)
    texts = {passage.id: passage for passage in world.passages}
    assert sum(r.is_correct for r in records) >= 0.9 * len(records)
    for question, record in zip(questions, records, strict=True):
        assert (record.reason, record.repairs, record.is_alone) == ("", 0, True)
        assert rejection(record.protocol, question, texts) is None
        # a turn for each search and one to answer, then the protocolizer
        assert record.calls == record.rounds + 1 == len(record.findings) + 2
        assert [len(f.queries) for f in record.findings] == [1] * len(record.findings)
    assert all(f.objective == f.summary == "" for r in records for f in r.findings)
    talk = dataclasses.replace(scripted(world, search, style="talkative"), is_alone=True)
    for one, other in zip(records, run(questions, talk), strict=True):
        assert [f.queries for f in one.findings] == [f.queries for f in other.findings]
        assert all(f.objective for f in other.findings)
        assert any(f.summary for f in other.findings) == bool(other.protocol["grounding_facts"])
    # without skill it reads nothing, searches once more in other words and gives up
    (lost,) = run(questions[:1], dataclasses.replace(
        scripted(world, search, skill=0.0), is_alone=True))  # fmt: skip
    assert [len(lost.findings), lost.answer, lost.protocol["partial_findings"]] == [
        2, None, ["not found"],
    ]  # fmt: skip


def test_without_skill_nothing_is_answered_and_findings_are_told(world, search):
    questions = world.questions["train"][:4]
    records = run(questions, scripted(world, search, skill=0.0))
    for record in records:
        assert (record.is_correct, record.rounds, record.repairs) == (False, 2, 2)
        assert "answer" not in record.protocol
        assert record.protocol["partial_findings"]


def test_a_talkative_teacher_is_made_plain_and_it_is_counted(world, search):
    question = world.questions["train"][:7]
    plain = run(question, scripted(world, search))
    talk = scripted(world, search, style="talkative")
    cleaned = run(question, talk)
    raw = run(question, dataclasses.replace(talk, normalise_style=False))
    for one, other, wordy in zip(plain, cleaned, raw, strict=True):
        assert one.protocol == other.protocol != wordy.protocol
        assert other.cleaned.self_talk > 0 < other.cleaned.repeated
        assert wordy.cleaned is None
    other_words = run(question, scripted(world, search, style="other_words"))
    assert [r.is_correct for r in other_words] == [r.is_correct for r in plain]
    assert [r.protocol for r in other_words] != [r.protocol for r in plain]


# --- what a model may say -------------------------------------------------------------------------


QUESTION = Question("q", "d", "Where was Ann born?", ("Rome",))
FOUND = [Passage("p1", "Ann", "Ann was born in Rome.")]
GOOD = {
    "orchestrator": {"task_type": "single_hop", "subtasks": [
        {"id": "s1", "objective": "where Ann was born", "depends_on": ["s1", "s9"]}]},
    "searcher": {"queries": ["Ann born", 7, " "]},
    "summarizer": {"summary": "Ann was born in Rome.", "evidence_ids": ["p1", "p1", "p5"]},
    "answerer": {"answer": "Rome"},
    "repair": {"failure_type": "expression", "diagnosis": "too long", "subtasks": []},
    "solver": {"task_type": "single_hop", "finding": "Ann was born in Rome.",
               "evidence_ids": ["p1", "p5"], "goal": "where Ann was born",
               "queries": ["Ann born", 7, " "], "answer": "Rome"},
    "protocolizer": {
        "task_type": "single_hop",
        "reasoning_plan": [{"goal": "Find where Ann was born.", "tool": "search",
                            "query_hint": "Ann birthplace", "expected": "a city"}],
        "grounding_facts": [{"fact": "Ann was born in Rome.", "passage_id": "p1"}],
        "answer": "Rome", "answer_grounded": True,
    },
}  # fmt: skip


async def find(queries, k):
    return [FOUND for _ in queries]


def desk_of(*, is_alone=False, **replies):
    """A desk whose roles say what is listed, one after another, the last one again and again."""
    waiting = {role: list(said) for role, said in replies.items()}
    asked = collections.defaultdict(list)

    async def complete(messages, *, model, **_):
        role = protocol_oracle.role_of(messages, LIMITS)
        asked[role].append(json.loads(messages[1]["content"]))
        said = waiting.get(role) or [GOOD[role]]
        reply = said.pop(0) if len(said) > 1 else said[0]
        text = reply if isinstance(reply, str) else json.dumps(reply)
        refusal = "no" if reply == "refused" else None
        return Completion(text, "stop", refusal, 10, 5, 0.25, False, model)

    return Desk(complete, find, "m", is_alone=is_alone), asked


def one(**replies):
    desk, asked = desk_of(**replies)
    (record,) = run([QUESTION], desk)
    return record, asked


def test_a_plan_that_waits_in_a_circle_or_for_nobody_is_worked_on():
    record, asked = one()
    assert (record.is_correct, record.calls, record.cost) == (True, 5, 1.25)
    assert record.protocol["grounding_facts"][0]["passage_id"] == "p1"
    assert asked["summarizer"][0]["passages"][0]["id"] == "p1"


def test_only_repair_sees_the_accepted_answers():
    record, asked = one(answerer=[{"answer": "Roma, Italy"}, {"answer": "Rome"}])
    assert (record.is_correct, record.repairs) == (True, 1)
    for role in set(ROLES) - {"repair"}:
        for payload in asked[role]:
            assert "accepted_answers" not in payload
    assert asked["repair"][0]["accepted_answers"] == ["Rome"]
    assert asked["answerer"][1]["diagnosis"] == "too long"


def test_a_repair_that_tells_the_answer_is_thrown_away():
    told = {"failure_type": "expression", "diagnosis": "say Rome", "subtasks": []}
    record, asked = one(answerer=[{"answer": "Paris"}], repair=[told])
    assert (record.leaks, record.is_correct, len(asked["answerer"])) == (2, False, 1)


def test_a_search_repair_adds_findings():
    more = {"failure_type": "search", "diagnosis": "not found", "subtasks": [
        {"id": "r1", "objective": "Ann's birthplace", "depends_on": []}]}  # fmt: skip
    record, asked = one(answerer=[{"answer": "Paris"}, {"answer": "Rome"}], repair=[more])
    assert (record.is_correct, record.repairs, len(asked["searcher"])) == (True, 1, 2)
    assert [f["id"] for f in asked["protocolizer"][0]["findings"]] == ["w1.s1", "r1.r1"]


ODD = {"task_type": "single_hop", "subtasks": [
    {"id": "s1", "objective": "x", "depends_on": [{"id": "s0"}]}]}  # fmt: skip


def test_one_model_may_search_until_its_last_turn_and_answers_then():
    record, asked = one(is_alone=True)  # it never stops searching
    turns = Limits().turns
    assert (record.rounds, record.calls, record.answer) == (turns, turns + 1, "Rome")
    assert [p["turns_left"] for p in asked["solver"]] == list(range(turns - 1, -1, -1))
    assert asked["solver"][1]["turns"][0]["queries"] == ["Ann born"]
    first = record.findings[0]
    assert (first.id, first.objective, first.queries, first.summary, first.evidence_ids) == (
        "t1", "where Ann was born", ("Ann born",), "Ann was born in Rome.", ("p1",),
    )  # fmt: skip
    assert set(asked) == {"solver", "protocolizer"}  # nobody plans, repairs or sees the gold


def test_one_model_that_speaks_out_of_form_ends_with_what_it_has():
    gone, _ = one(is_alone=True, solver=["no"])
    assert (gone.protocol, gone.reason, gone.malformed) == (None, "solver", 2)
    finish = GOOD["solver"] | {"queries": []}
    record, _ = one(is_alone=True, solver=[GOOD["solver"], GOOD["solver"], "no"])
    assert (record.rounds, record.answer, len(record.findings)) == (2, None, 1)
    record, _ = one(is_alone=True, solver=[finish | {"answer": None}])
    assert (record.rounds, record.answer, record.reason) == (1, None, "answer")


@pytest.mark.parametrize(
    "bad",
    ["not json", "[1]", "refused", {"queries": "one"}, '{"task_type"', ODD, '{"a": "\\ud83d"}'],
)
def test_a_malformed_reply_is_asked_again_and_counted(bad):
    record, _ = one(orchestrator=[bad, GOOD["orchestrator"]])
    assert (record.malformed, record.is_correct, record.reason) == (1, True, "")
    gone, _ = one(orchestrator=[bad])
    assert (gone.protocol, gone.reason, gone.malformed) == (None, "orchestrator", 2)


def test_evidence_that_is_no_list_of_names_is_asked_for_again():
    record, _ = one(summarizer=[{"summary": "x", "evidence_ids": [["p1"]]}, GOOD["summarizer"]])
    assert (record.malformed, record.is_correct) == (1, True)


def test_a_protocol_that_fails_a_gate_is_none_with_its_reason():
    leaking = GOOD["protocolizer"] | {
        "reasoning_plan": [GOOD["protocolizer"]["reasoning_plan"][0] | {"goal": "Look up Rome."}]
    }
    record, _ = one(protocolizer=[leaking])
    assert (record.protocol, record.reason, record.is_correct) == (None, "leak", True)
    assert "Rome" in record.message


def test_a_dead_retriever_is_a_failure_of_the_world():
    desk, _ = desk_of()

    async def _down(queries, k):
        return [SearchFailure("down", "no route") for _ in queries]

    with pytest.raises(WorldError, match="every search failed: no route"):
        run([QUESTION], dataclasses.replace(desk, search=_down))


def test_replies_in_a_fence_are_read():
    assert parse_object('```json\n{"a": 1}\n```') == {"a": 1}
    assert parse_object(' {"a": 1} ') == {"a": 1}
    assert parse_object(None) is parse_object("") is parse_object("{}x") is None


# --- an endpoint, and files -----------------------------------------------------------------------


def served(world, faults=()):
    """A script of a server at which the toy world's script sits; the first requests get faults."""
    made, waiting = Oracle(world), list(faults)

    def _reply(body):
        if waiting:
            return waiting.pop(0)
        role = protocol_oracle.role_of(body["messages"], LIMITS)
        style = dataclasses.replace(made, style=body["model"])
        said = style.reply(role, json.loads(body["messages"][1]["content"]))
        return answer(json.dumps(said))

    return _reply


def endpoint(url, **knobs):
    quick = dict(backoff_s=0.001, max_wait_s=0.01, timeout_s=5.0, retries=3)
    return Client(Endpoint(url, "", **quick | knobs))


def test_a_build_through_an_endpoint_with_faults_is_the_one_without(world, search, tmp_path):
    questions = world.questions["train"][:6]
    faults = [
        failure(429), failure(500), failure(503), Reply(b"<html>", content_type="text/html"),
        dataclasses.replace(answer("{}"), is_cut=True), Reply(is_dropped=True),
        answer("I cannot help with that.", refusal="policy"), answer('{"half'),
    ]  # fmt: skip
    with ChatServer(served(world, faults)) as server:
        client = endpoint(server.url, retries=10)
        # both malformed replies may be to one request
        patient = dict(limits=Limits(attempts=3))
        desks = [Desk(client.complete, search, m, **patient) for m in ("plain", "other_words")]
        path = tmp_path / "protocols.jsonl"
        asyncio.run(build(questions, desks, path, concurrency=2, failure_frac=0.0))
    records = {record["question"]: record for record in read(path)}
    assert {r["model"] for r in records.values()} == {"plain", "other_words"}
    assert sum(r["malformed"] for r in records.values()) == 2
    for number, question in enumerate(questions):
        style = ("plain", "other_words")[number % 2]
        (alone,) = run([question], scripted(world, search, style=style))
        assert records[question.uid]["protocol"] == alone.protocol
    assert read_protocols(path).keys() == {q.uid for q in questions}
    shown = summarise(list(records.values()))
    assert shown.startswith("all: 6 of 6 passed, 6 answered rightly, right protocols 100.0%")
    assert "price unknown" in shown
    assert "plain: 3 of 3" in shown


def test_each_writers_share_cost_and_tokens_are_told_by_name(world, search, tmp_path):
    questions = world.questions["train"][:8]
    with ChatServer(served(world, [])) as server:
        prices = {"plain": Price(2e3, 1e4), "other_words": Price(0.0, 1e3)}
        client = endpoint(server.url, prices=prices)
        desks = [Desk(client.complete, search, model, limits=LIMITS) for model in prices]
        path = tmp_path / "protocols.jsonl"
        asyncio.run(build(questions, desks, path, concurrency=2, failure_frac=0.0))
    records = read(path)
    # the first of one writer's four rejected, its second of the evidence variant
    own = [record for record in records if record["model"] == "plain"]
    own[0].update(protocol=None, reason="grounding")
    own[1]["protocol"] = {
        key: x for key, x in own[1]["protocol"].items() if key not in ("answer", "answer_grounded")
    } | {"partial_findings": ["x"]}
    every, other, plain = summarise(records).splitlines()
    # 2 of 4 and 4 of 4: 6 of 8
    assert plain.startswith(
        "plain: 3 of 4 passed, 4 answered rightly, right protocols 50.0%; rejected: grounding 1; "
    )
    assert other.startswith(
        "other_words: 4 of 4 passed, 4 answered rightly, right protocols 100.0%; rejected: none; "
    )
    assert "7 of 8 passed, 8 answered rightly, right protocols 75.0%" in every
    for line, price, name in ((plain, (2e3, 1e4), "plain"), (other, (0, 1e3), "other_words")):
        mine = [record for record in records if record["model"] == name]
        calls, read_, wrote = (
            sum(record[key] for record in mine)
            for key in ("calls", "input_tokens", "output_tokens")
        )
        spent = (price[0] * read_ + price[1] * wrote) / 1e6
        assert (
            f"a question: {calls / 4:.1f} calls, {read_ / 4:,.0f} + {wrote / 4:,.0f} tokens" in line
        )
        assert line.endswith(f"cost {spent:.4f}")


def test_a_killed_build_goes_on_and_a_dead_endpoint_stops_it(world, search, tmp_path, monkeypatch):
    questions = world.questions["train"][:6]
    path = tmp_path / "deep" / "protocols.jsonl"
    desk = scripted(world, search)
    asyncio.run(build(questions[:3], [desk], path, concurrency=2, failure_frac=0.0))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20] + "é".encode()[:1])  # killed while it wrote a character
    assert len(read(path)) == 2

    async def _dead(*_, **__):
        raise WorldError("api", "no route to host")

    monkeypatch.setattr(protocol_files, "MIN_FAILURES", 2)
    with pytest.raises(
        TooManyFailures, match=r"2 of \d questions failed, such as: no route.*2 are"
    ):
        dead = dataclasses.replace(desk, complete=_dead)
        asyncio.run(build(questions, [dead], path, concurrency=2, failure_frac=0.1))
    told = []
    asyncio.run(
        build(questions, [desk], path, concurrency=2, failure_frac=0.0,
              tell=lambda *numbers: told.append(numbers))
    )  # fmt: skip
    assert told[-1] == (4, 4, 0)
    assert sorted(r["question"] for r in read(path)) == sorted(q.uid for q in questions)


def test_files_that_are_not_protocols_are_errors(tmp_path):
    path = tmp_path / "p.jsonl"
    with pytest.raises(FileNotFoundError, match=r"launch/build_protocols\.py"):
        read_protocols(path)
    path.write_text("{}\nnonsense\n{}\n")
    with pytest.raises(ValueError, match="line 2 is no record"):
        read(path)
    line = json.dumps({"question": "q", "protocol": None}) + "\n"
    path.write_text(line * 2)
    with pytest.raises(ValueError, match="two records of 'q'"):
        read_protocols(path)


def test_a_file_is_of_one_kind(world, search, tmp_path):
    path, desk = tmp_path / "p.jsonl", scripted(world, search)
    protocol_files.check_kind(path, is_alone=True, normalise_style=True)  # nothing is there
    asyncio.run(build(world.questions["train"][:1], [desk], path, concurrency=1, failure_frac=0.0))
    protocol_files.check_kind(path, is_alone=False, normalise_style=True)
    with pytest.raises(ValueError, match="records of the team, and these would be of one model al"):
        protocol_files.check_kind(path, is_alone=True, normalise_style=True)
    with pytest.raises(ValueError, match="with normalised style, and these would be without it"):
        protocol_files.check_kind(path, is_alone=False, normalise_style=False)


def test_every_role_is_told_its_budgets():
    for role in ROLES:
        text = instructions(role, Limits(subtasks=7, queries=9))
        assert "{subtasks}" not in text
        assert "{queries}" not in text
        assert "{schema}" not in text
    assert "at most 7 subtasks" in instructions("orchestrator", Limits(subtasks=7))
    assert "grounding_facts" in instructions("protocolizer", Limits())
    assert set(STYLES) == {"plain", "other_words", "talkative"}


def test_budgets_of_a_config_are_those_of_the_system_and_impossible_ones_are_named():
    assert Limits(**default_config().offline) == LIMITS
    assert Limits(repairs=0).repairs == 0
    with pytest.raises(ValueError, match=r"offline\.rounds=0: want a whole number of at least 1"):
        Limits(rounds=0)
    with pytest.raises(ValueError, match=r"offline\.turns=2\.5: want a whole number"):
        Limits(turns=2.5)
