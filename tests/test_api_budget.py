"""The money that an endpoint takes: held before, counted after, estimated and capped."""

import asyncio
import dataclasses
import math
import threading

import pytest
from api_calls import ASK, CALL, REQUEST, ask, ask_all, endpoint, until
from chat_server import ChatServer, Reply, answer, failure, silence

from mas_jax.sampling import api, api_budget
from mas_jax.sampling.api import Client, Endpoint
from mas_jax.sampling.api_budget import BudgetExceeded, Price, prices_of

# of REQUEST: at worst 86 tokens in (as above) and 100 out
PRICES = {"m": Price(1, 10)}
WORST = (86 * 1 + 100 * 10) / 1e6
ACTUAL = (10 * 1 + 2 * 10) / 1e6


def test_the_cap_counts_the_worst_case_before_and_the_true_cost_after():
    # 2.5 worst cases, of which each call uses 30/1086: the 54th leaves 1.5 unspent, the 55th not
    affordable = 1 + math.floor(1.5 * WORST / ACTUAL)
    assert affordable == 55
    with ChatServer(lambda body: answer()) as server:
        client = Client(endpoint(server, prices=PRICES, max_cost=2.5 * WORST))

        async def main():
            for number in range(200):
                try:
                    await client.complete(ASK, **CALL)
                except BudgetExceeded as error:
                    return number, error

        number, error = asyncio.run(main())
        assert len(server.received) == number
    spent = client.counts["m"].cost
    assert spent == pytest.approx(number * ACTUAL, abs=1e-12)
    assert spent + WORST > 2.5 * WORST >= spent - ACTUAL + WORST
    assert "max_cost" in str(error) and client.counts["m"].failed == 1


def test_calls_in_flight_hold_their_worst_case():
    gate = threading.Event()
    reply = dataclasses.replace(answer(), gate=gate)
    with ChatServer(lambda body: reply) as server:
        client = Client(endpoint(server, prices=PRICES, max_cost=3.5 * WORST))

        async def main():
            calls = [asyncio.create_task(client.complete(ASK, **CALL, sample=n)) for n in range(5)]
            await until(lambda: server.open == 3 and sum(call.done() for call in calls) == 2)
            gate.set()
            done = await asyncio.gather(*calls, return_exceptions=True)
            return [type(value).__name__ for value in done], await client.complete(ASK, **CALL)

        names, later = asyncio.run(main())
        assert len(server.received) == 4
    assert names == ["Completion"] * 3 + ["BudgetExceeded"] * 2
    assert later.text == "yes"  # what the three held is free again


def test_a_cap_that_is_exactly_the_worst_case_is_enough():
    # 0.1 + 0.2 > 0.3 in floating point
    prices = {"m": Price(0, 1000.0)}  # 100 tokens at most: 0.1 a call
    with ChatServer(lambda body: answer(usage={})) as server:
        client = Client(endpoint(server, prices=prices, max_cost=0.3))
        for _ in range(3):
            ask(client)
        assert 0.1 + 0.1 + 0.1 > 0.3
        with pytest.raises(BudgetExceeded, match=r"0\.3 spent"):
            ask(client)
        assert len(server.received) == 3


@pytest.mark.parametrize(
    ("reply", "is_billed"),
    [
        (silence(), True),
        (Reply(answer().body, is_cut=True), True),
        (Reply(b"{"), True),
        (failure(429), False),
        (failure(500), False),
    ],
)
def test_a_lost_answer_counts_as_billed_and_an_error_does_not(reply, is_billed):
    with ChatServer([reply, answer()]) as server:
        client = Client(endpoint(server, prices=PRICES, max_cost=1.0, timeout_s=0.5))
        ask(client)
    assert client.counts["m"].uncertain_cost == pytest.approx(WORST * is_billed, abs=1e-12)
    assert client.counts["m"].cost == pytest.approx(ACTUAL, abs=1e-12)


def test_a_retry_must_fit_under_the_cap_too():
    with ChatServer([Reply(b"{")] * 9) as server:
        client = Client(endpoint(server, prices=PRICES, max_cost=2.5 * WORST))
        with pytest.raises(BudgetExceeded):
            ask(client)
        assert len(server.received) == 2
    assert (client.counts["m"].calls, client.counts["m"].retries) == (2, 1)


def test_a_cancelled_call_counts_as_billed_and_holds_nothing():
    with ChatServer([silence(), answer()]) as server:
        client = Client(endpoint(server, prices=PRICES, max_cost=2.5 * WORST))

        async def main():
            call = asyncio.create_task(client.complete(ASK, **(CALL | {"temperature": 1.0})))
            await until(lambda: server.open == 1)
            call.cancel()
            await asyncio.wait([call])
            return await client.complete(ASK, **CALL)

        assert asyncio.run(main()).text == "yes"
    assert client.counts["m"].uncertain_cost == pytest.approx(WORST, abs=1e-12)


def test_a_model_without_a_price_under_a_cap_is_an_error_at_once():
    with ChatServer([]) as server:
        client = Client(endpoint(server, prices=PRICES, max_cost=1.0))
        with pytest.raises(ValueError, match=r"'other' has no price.*max_cost=1\.0.*\['m'\]"):
            ask(client, model="other")
        with pytest.raises(ValueError, match="'other' has no price"):
            client.estimate([dataclasses.replace(REQUEST, model="other")])
        assert not server.received


def test_money_and_tokens_are_counted_by_model():
    prices = {"a": Price(1, 1), "b": Price(0, 5)}
    with ChatServer(lambda body: answer()) as server:
        client = Client(endpoint(server, prices=prices))
        ask_all(client, {"model": "a"}, {"model": "b"}, {"model": "b", "sample": 1})
    assert client.counts["a"].cost == pytest.approx(12e-6, abs=1e-15)
    assert client.counts["b"].cost == pytest.approx(2 * 10e-6, abs=1e-15)
    assert (client.counts["b"].input_tokens, client.counts["b"].output_tokens) == (20, 4)


def test_an_estimate_says_what_the_requests_will_take():
    # "Is it?": 6 characters are 2 tokens of prose, and 16 of template; 18 in, 100 out a call
    with ChatServer([]) as server:
        client = Client(endpoint(server, prices=PRICES))
        repeated = dataclasses.replace(REQUEST, sample=1)
        drawn = dataclasses.replace(REQUEST, temperature=1.0)
        got = client.estimate([REQUEST, repeated, repeated, drawn, drawn])
        assert not server.received and sum(c.requests for c in client.counts.values()) == 0
    assert (got.calls, got.cached, got.input_tokens, got.output_tokens) == (4, 1, 72, 400)
    assert got.cost == pytest.approx(4 * (18 + 1000) / 1e6, abs=1e-12)
    assert got.worst_cost == pytest.approx(4 * WORST, abs=1e-12)
    assert Client(Endpoint("http://h", "")).estimate([REQUEST]).cost is None
    assert client.estimate([]) == api.Estimate(0, 0, 0, 0, 0.0, 0.0)


def test_what_the_estimate_calls_the_worst_is_a_cap_that_stops_nothing():
    requests = [dataclasses.replace(REQUEST, sample=n) for n in range(20)]
    with ChatServer(lambda body: answer(usage={})) as server:
        worst = Client(endpoint(server, prices=PRICES)).estimate(requests).worst_cost
        for max_cost, num_stopped in ((worst, 0), (worst - WORST / 2, 1)):
            client = Client(endpoint(server, prices=PRICES, max_cost=max_cost))
            done = ask_all(client, *({"sample": n} for n in range(20)))
            assert sum(isinstance(value, BudgetExceeded) for value in done) == num_stopped


def test_no_text_takes_more_tokens_than_the_worst_case():
    # 1, 2, 3 and 4 bytes: the most tokens that a byte-level vocabulary can need
    for text, size in (("a", 1), ("é", 2), ("是", 3), ("🦊", 4)):
        messages = [{"role": "user", "content": text}]
        assert api_budget.worst_input_tokens(messages) == size + 16 + 64


def test_prices_are_one_for_all_models_or_one_for_each():
    assert prices_of(["a", "b"], []) == {}
    assert prices_of(["a", "b"], ["2", "12"]) == {"a": Price(2, 12), "b": Price(2, 12)}
    assert prices_of(["a", "b"], ["2", "12", "0.5", "1"]) == {"a": Price(2, 12), "b": Price(0.5, 1)}
    with pytest.raises(ValueError, match=r"--price=2,12,3: 3 numbers for 2 models; want two"):
        prices_of(["a", "b"], ["2", "12", "3"])
    with pytest.raises(ValueError, match=r"--price=2,much: .*much.*want numbers"):
        prices_of(["a"], ["2", "much"])
