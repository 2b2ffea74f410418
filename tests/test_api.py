"""The endpoint client: what is sent, what comes back, failures, and requests at once."""

import asyncio
import dataclasses
import gc
import json
import math
import subprocess
import sys
import threading

import openai
import pytest
from api_calls import ASK, CALL, ask, ask_all, endpoint, until
from chat_server import ChatServer, Reply, answer, completion, failure, silence
from conftest import ROOT

from mas_jax.records import FailureKind, WorldError
from mas_jax.sampling import api
from mas_jax.sampling.api import Client, Endpoint
from mas_jax.sampling.api_budget import Price

# --- one call -------------------------------------------------------------------------------------


def test_a_completion_holds_the_text_the_tokens_and_what_they_cost():
    # 10 tokens in at 3 a million and 2 out at 15: 30e-6 + 30e-6
    with ChatServer([answer("It is.")]) as server:
        client = Client(endpoint(server, prices={"m": Price(3, 15)}))
        got = ask(client)
    assert got.cost == pytest.approx(60e-6, abs=1e-15)
    assert dataclasses.replace(got, cost=None) == api.Completion(
        "It is.", "stop", None, 10, 2, None, False, "served-model"
    )
    counts = client.counts["m"]
    assert (counts.requests, counts.calls, counts.retries, counts.failed) == (1, 1, 0, 0)
    assert (counts.input_tokens, counts.output_tokens, counts.cost) == (10, 2, got.cost)


def test_the_openai_package_reads_the_same_answer():
    with ChatServer([answer("Ja, 是"), answer("Ja, 是")]) as server:
        ours = ask(Client(endpoint(server)))
        theirs = openai.OpenAI(base_url=server.url, api_key="x", max_retries=0)
        reference = theirs.chat.completions.create(
            model="m", messages=list(ASK), temperature=0, max_tokens=100
        )
        mine, reference_body = server.bodies
    choice, usage = reference.choices[0], reference.usage
    assert (ours.text, ours.finish_reason) == (choice.message.content, choice.finish_reason)
    assert (ours.input_tokens, ours.output_tokens) == (usage.prompt_tokens, usage.completion_tokens)
    assert ours.model == reference.model and mine == reference_body


def test_the_request_says_what_was_asked_and_nothing_else():
    with ChatServer(lambda body: answer()) as server:
        ask(Client(endpoint(server)))
        ask(Client(endpoint(server)), seed=7, stop=["\n", "END"], sample=3, temperature=0.5)
        ask(Client(endpoint(server, token_field="max_completion_tokens")))
        plain, full, renamed = server.bodies
        assert {request.path for request in server.received} == {"/v1/chat/completions"}
    asked = {"model": "m", "messages": list(ASK), "temperature": 0.0}
    assert plain == asked | {"max_tokens": 100}
    assert full == asked | {
        "max_tokens": 100, "temperature": 0.5, "seed": 7, "stop": ["\n", "END"]
    }  # fmt: skip
    assert renamed == asked | {"max_completion_tokens": 100}


@pytest.mark.parametrize(
    ("reply", "text", "refusal", "finish_reason"),
    [
        (answer(None, refusal="I will not."), "", "I will not.", "stop"),
        (answer("", finish_reason="content_filter"), "", "content_filter", "content_filter"),
        (answer(None, finish_reason="length"), "", None, "length"),
        (answer("Half an", finish_reason="length"), "Half an", None, "length"),
    ],
)
def test_a_refusal_is_an_answer_and_so_is_an_empty_one(reply, text, refusal, finish_reason):
    with ChatServer([reply]) as server:
        got = ask(Client(endpoint(server)))
        assert len(server.received) == 1
    assert (got.text, got.refusal, got.finish_reason) == (text, refusal, finish_reason)


@pytest.mark.parametrize(
    "usage", [{}, {"prompt_tokens": 10}, {"prompt_tokens": -1, "completion_tokens": True}]
)
def test_an_answer_without_usage_is_charged_its_worst_case(usage):
    # "Is it?" has 6 bytes, a message 16 tokens of template and the whole 64: 86 in, 100 out
    with ChatServer([answer(usage=usage)]) as server:
        client = Client(endpoint(server, prices={"m": Price(1, 10)}))
        got = ask(client)
    assert (got.input_tokens, got.output_tokens) == (86, 100)
    assert got.cost == pytest.approx((86 + 1000) / 1e6, abs=1e-12)
    assert client.counts["m"].unreported == 1


def test_without_a_price_the_cost_is_unknown_not_zero():
    with ChatServer([answer()]) as server:
        client = Client(endpoint(server))
        assert ask(client).cost is None and client.counts["m"].cost is None


# --- failures and retries -------------------------------------------------------------------------

GOOD = json.dumps(completion()).encode()
TRANSIENT = {
    "408": failure(408),
    "429": failure(429),
    "500": failure(500),
    "503 without a body": Reply(status=503),
    "529": failure(529),
    "dropped": Reply(is_dropped=True),
    "truncated on the wire": Reply(GOOD, is_cut=True),
    "truncated JSON": Reply(GOOD[:-20]),
    "no JSON": Reply(b"<html>busy</html>"),
    "too deep": Reply(b"[" * 100_000),
    "not UTF-8": Reply(b'{"choices": "\xff\xfe"}'),
    "empty body": Reply(),
    "wrong content type": Reply(GOOD, content_type="text/html; charset=utf-8"),
    "no content type": Reply(GOOD, content_type=""),
    "an error with status 200": Reply(b'{"error": {"message": "overloaded"}}'),
    "no choices": Reply(b'{"choices": []}'),
    "a choice without a message": Reply(b'{"choices": [{}]}'),
    "a message without content": Reply(b'{"choices": [{"message": {"role": "assistant"}}]}'),
    "content in parts": Reply(b'{"choices": [{"message": {"content": ["a"]}}]}'),
    "a list": Reply(b"[1]"),
}


@pytest.mark.parametrize("name", TRANSIENT)
def test_what_may_pass_is_asked_again(name):
    with ChatServer([TRANSIENT[name], TRANSIENT[name], answer("at last")]) as server:
        client = Client(endpoint(server))
        assert ask(client).text == "at last"
        assert len(server.received) == 3 and server.bodies[0] == server.bodies[2]
    counts = client.counts["m"]
    assert (counts.requests, counts.calls, counts.retries, counts.failed) == (1, 3, 2, 0)
    assert counts.input_tokens == 10


@pytest.mark.parametrize("reply", [silence(), Reply(GOOD, is_dripping=True)])
def test_a_server_that_is_too_slow_is_asked_again(reply):
    with ChatServer([reply, answer("at last")]) as server:
        client = Client(endpoint(server, timeout_s=0.4))
        assert ask(client).text == "at last"
    assert client.counts["m"].retries == 1


@pytest.mark.parametrize("name", TRANSIENT)
def test_what_does_not_pass_is_a_failure_of_the_api_after_the_retries(name):
    with ChatServer([TRANSIENT[name]] * 9) as server:
        client = Client(endpoint(server, retries=2))
        with pytest.raises(WorldError, match=r"no answer from 'm' at http.* in 3 call") as error:
            ask(client)
        assert len(server.received) == 3 and server.url in str(error.value)
    assert error.value.kind is FailureKind.API
    counts = client.counts["m"]
    assert (counts.requests, counts.calls, counts.retries, counts.failed) == (1, 3, 2, 1)


def test_an_endpoint_that_is_not_there_is_a_failure_that_costs_nothing():
    with ChatServer([]) as server:
        pass
    client = Client(endpoint(server, retries=1, prices={"m": Price(1, 1)}, max_cost=1.0))
    with pytest.raises(WorldError, match="ConnectError"):
        ask(client)
    assert client.counts["m"].retries == 1 and client.counts["m"].uncertain_cost == 0


@pytest.mark.parametrize(
    ("status", "advice"),
    [(400, ""), (401, "check the key"), (403, "check"), (404, "base_url and model"), (422, "")],
)
def test_what_will_not_pass_is_not_asked_again(status, advice):
    with ChatServer([failure(status, "no such thing"), answer()]) as server:
        client = Client(endpoint(server))
        with pytest.raises(WorldError, match=f"1 call.*HTTP {status}.*no such thing") as error:
            ask(client)
        assert len(server.received) == 1
    assert advice in str(error.value) and error.value.kind is FailureKind.API
    assert (client.counts["m"].retries, client.counts["m"].failed) == (0, 1)


def test_prompts_do_not_follow_a_redirect():
    with ChatServer(lambda body: answer()) as other:
        away = Reply(status=307, headers={"Location": f"{other.url}/chat/completions"})
        with ChatServer([away, away]) as server, pytest.raises(WorldError, match="redirects"):
            ask(Client(endpoint(server)))
        assert not other.received


def test_a_long_error_is_shown_short_and_on_one_line():
    long = failure(400, "line\n" * 10_000)
    with ChatServer([long]) as server, pytest.raises(WorldError) as error:
        ask(Client(endpoint(server)))
    assert len(str(error.value)) < 500 and "\n" not in str(error.value)


# --- at once --------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_cache", [False, True])
def test_equal_requests_at_once_make_one_call(tmp_path, with_cache):
    with ChatServer([answer("one"), answer("two"), answer("three")]) as server:
        client = Client(
            endpoint(server, prices={"m": Price(1, 10)}), tmp_path if with_cache else None
        )
        got = ask_all(client, {}, {}, {"seed": 1}, {})
        assert len(server.received) == 2
    assert got[0].text == got[1].text == got[3].text != got[2].text
    assert [value.is_cached for value in got] == [False, True, False, True]
    assert got[1].cost == 0 and got[0].cost > 0
    counts = client.counts["m"]
    assert (counts.requests, counts.calls, counts.cached) == (4, 2, 2)


def test_equal_requests_at_once_without_a_draw_are_drawn_apart():
    with ChatServer([answer("one"), answer("two")]) as server:
        got = ask_all(Client(endpoint(server)), *[{"temperature": 1.0}] * 2)
    assert sorted(value.text for value in got) == ["one", "two"]


def test_equal_requests_at_once_fail_together_and_may_be_asked_again():
    with ChatServer([failure(400), answer()]) as server:
        client = Client(endpoint(server))
        got = ask_all(client, {}, {})
        assert [type(value) for value in got] == [WorldError, WorldError]
        assert client.counts["m"].failed == 2 and client.counts["m"].cached == 0
        assert ask(client).text == "yes" and len(server.received) == 2


def test_a_caller_that_is_cancelled_leaves_the_others_their_answer():
    gate = threading.Event()
    with ChatServer([dataclasses.replace(answer(), gate=gate)]) as server:
        client = Client(endpoint(server))

        async def main():
            first, second = (asyncio.create_task(client.complete(ASK, **CALL)) for _ in range(2))
            await until(lambda: server.open == 1)
            first.cancel()
            await asyncio.wait([first])
            gate.set()
            return first.cancelled(), await second

        was_cancelled, got = asyncio.run(main())
    assert was_cancelled and got.text == "yes"


def test_no_more_requests_than_the_cap_are_open_at_once():
    gate = threading.Event()
    reply = dataclasses.replace(answer(), gate=gate)
    with ChatServer(lambda body: reply) as server:
        client = Client(endpoint(server, concurrency=3))

        async def main():
            calls = [asyncio.create_task(client.complete(ASK, **CALL, sample=n)) for n in range(10)]
            await until(lambda: server.open == 3)
            for _ in range(50):  # whoever else wanted to go would have gone
                await asyncio.sleep(0.002)
            gate.set()
            return await asyncio.gather(*calls)

        assert len(asyncio.run(main())) == 10
        assert server.most_open == 3


def test_a_client_outlives_an_event_loop(caplog):
    with ChatServer(lambda body: answer()) as server:
        client = Client(endpoint(server, concurrency=1))

        async def main(number):
            # not closed: its connections die with the loop
            return await asyncio.gather(
                *(client.complete(ASK, **CALL, sample=n + number) for n in range(3))
            )

        for number in (0, 10, 20):
            assert [value.text for value in asyncio.run(main(number))] == ["yes"] * 3
        assert len(server.received) == 9 and client.counts["m"].retries == 0
    gc.collect()  # a task whose error nobody saw is told when it goes
    assert not caplog.records


def test_a_closed_client_opens_again():
    with ChatServer(lambda body: answer()) as server:
        client = Client(endpoint(server))

        async def main():
            await client.close()
            await client.complete(ASK, **CALL)
            await client.close()
            return await client.complete(ASK, **CALL)

        assert asyncio.run(main()).text == "yes" and len(server.received) == 2


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"base_url": "h/v1"}, "base_url"),
        ({"base_url": "ftp://h"}, "base_url"),
        ({"concurrency": 0}, "concurrency=0"),
        ({"retries": -1}, "retries=-1"),
        ({"backoff_s": math.nan}, "backoff_s=nan"),
        ({"max_wait_s": math.inf}, "max_wait_s=inf"),
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"max_cost": 0}, "max_cost=0"),
        ({"max_cost": math.nan}, "max_cost=nan"),
        ({"prices": {"m": Price(1, -1)}}, "'m'.*output=-1"),
        ({"token_field": "tokens"}, "token_field='tokens'"),
    ],
)
def test_settings_that_cannot_be_meant_are_named(change, named):
    with pytest.raises(ValueError, match=named):
        Client(dataclasses.replace(Endpoint("http://h/v1", ""), **change))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"messages": ()}, "0 messages"),
        ({"model": ""}, "model ''"),
        ({"messages": "Is it?"}, "message 0 is 'I'"),
        ({"messages": [{"role": "user"}]}, "message 0 is {'role': 'user'}"),
        ({"messages": [*ASK, {"role": "oracle", "content": ""}]}, "message 1 .*'oracle'"),
        ({"messages": [{"role": "user", "content": None}]}, "None"),
        ({"messages": [{"role": "user", "content": "a\udc80"}]}, "udc80.* half a surrogate"),
        ({"stop": ("\ud800",)}, "half a surrogate"),
        ({"stop": "END"}, "stop='END' is a str"),
        ({"temperature": -1.0}, "temperature=-1"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"max_tokens": 0}, "max_tokens=0"),
    ],
)
def test_requests_that_no_endpoint_could_answer_are_named(change, named):
    with ChatServer([]) as server, pytest.raises(ValueError, match=named):
        ask(Client(endpoint(server)), **change)
    assert not server.received


def test_the_caller_may_change_its_messages_after_asking():
    with ChatServer([failure(500), answer()]) as server:
        client, messages = Client(endpoint(server)), [dict(ASK[0])]

        async def main():
            call = asyncio.create_task(client.complete(messages, **CALL))
            await until(lambda: server.received)
            messages[0]["content"] = "Is it not?"
            return await call

        asyncio.run(main())
        assert server.bodies[0] == server.bodies[1]


def test_importing_the_client_loads_neither_jax_nor_openai():
    code = "import sys, mas_jax.sampling.api; print({'jax', 'openai', 'httpx2'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def test_without_the_openai_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"mas_jax\[api\]"):
        Client(Endpoint("http://h/v1", ""))
