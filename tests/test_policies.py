"""Several policies in one run: who answers, what is computed once, and what an endpoint costs."""

import asyncio
import dataclasses

import pytest

from mas_jax.records import FailureKind, Sample, SampleKey, Stop, StopReason, WorldError
from mas_jax.sampling import policies as policies_module
from mas_jax.sampling.api_budget import Counts
from mas_jax.sampling.api_request import Completion
from mas_jax.sampling.policies import (
    Policies,
    Remembering,
    endpoint_complete,
    endpoint_metrics,
)

KEY = SampleKey(0, "train", 1, "q", 0, "solve", 0)
KNOBS = dict(max_tokens=5, top_p=1.0, top_k=0, stop=Stop((1,)), policy="actor")


class Counting:
    """A sampler that says which of its calls this is, after a moment; it may fail first."""

    def __init__(self, failures=0):
        self.calls, self.failures, self.params = 0, failures, None

    async def sample(self, prompt, *, key, n, **knobs):
        self.calls += 1
        number = self.calls
        await asyncio.sleep(0)
        if number <= self.failures:
            raise WorldError(FailureKind.SAMPLER, "full")
        return [Sample((number, 1), (-0.25, 0.0), StopReason.TOKEN)] * n

    def set_params(self, params):
        self.params = params

    @property
    def metrics(self):
        return {"device_s": 2.0, "calls": float(self.calls)}


def ask(remembering, prompts, *, temperature=0.0, n=1, **changes):
    async def all_at_once():
        asked = [
            remembering.sample(p, key=KEY, n=n, temperature=temperature, **{**KNOBS, **changes})
            for p in prompts
        ]
        return await asyncio.gather(*asked, return_exceptions=True)

    return asyncio.run(all_at_once())


def test_a_greedy_continuation_is_computed_once_whatever_asks_for_it():
    own = Counting()
    remembering = Remembering(own, {"weights": "w"}, None)
    found = ask(remembering, [(7, 8), (7, 8), (7, 9), (7, 8)])
    assert own.calls == 2
    assert found[0] == found[1] == found[3] != found[2]
    assert ask(remembering, [(7, 8)], n=3) == [found[0] * 3]  # in another event loop too
    assert own.calls == 2
    assert remembering.metrics == {"device_s": 2.0, "calls": 2.0, "recalled": 5.0}
    ask(remembering, [(7, 8)], max_tokens=6)
    assert own.calls == 3
    ask(remembering, [(7, 8), (7, 8)], temperature=0.7)
    assert own.calls == 5


def test_what_one_run_computed_the_next_one_reads(tmp_path):
    first, second = Counting(), Counting()
    found = ask(Remembering(first, {"weights": "w"}, tmp_path), [(7, 8)])
    assert ask(Remembering(second, {"weights": "w"}, tmp_path), [(7, 8)]) == found
    assert (first.calls, second.calls) == (1, 0)
    ask(Remembering(second, {"weights": "other"}, tmp_path), [(7, 8)])
    assert second.calls == 1


def test_what_was_not_asked_for_longest_is_forgotten_first(monkeypatch):
    monkeypatch.setattr(policies_module, "MOST_KNOWN", 2)
    own = Counting()
    remembering = Remembering(own, {}, None)
    for token in (1, 2, 1, 3, 1, 2):  # 3 takes the place of 2, and 2 is asked for again
        ask(remembering, [(token,)])
    assert own.calls == 4


def test_a_failure_is_not_remembered_and_the_next_one_in_line_asks():
    own = Counting(failures=1)
    found = ask(Remembering(own, {}, None), [(7,), (7,), (7,)])
    assert isinstance(found[0], WorldError) and found[1] == found[2]
    assert own.calls == 2


def test_each_policy_is_asked_by_its_name_and_only_the_trained_one_gets_weights():
    trained, frozen = Counting(), Counting()
    policies = Policies(trained, "student", {"actor": Remembering(frozen, {}, None)})

    def sample(policy):
        knobs = {**KNOBS, "policy": policy}
        return asyncio.run(policies.sample((1,), key=KEY, n=1, temperature=0.0, **knobs))

    sample("student"), sample("student"), sample("actor"), sample("actor")
    assert (trained.calls, frozen.calls) == (2, 1)
    policies.set_params("new")
    assert trained.params == "new" and frozen.params is None
    assert policies.metrics == {
        "device_s": 4.0, "calls": 2.0,
        "actor_device_s": 2.0, "actor_calls": 1.0, "actor_recalled": 1.0,
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"no policy 'judge'; there are \['student', 'actor'\]"):
        sample("judge")
    with pytest.raises(ValueError, match="two policies are named 'actor'"):
        Policies(trained, "actor", {"actor": Remembering(frozen, {}, None)})


def test_an_endpoints_draws_are_numbered_and_greedy_ones_are_not():
    asked = []

    async def complete(messages, **request):
        asked.append(request)
        return Completion("hm", "length", None, 9, 3, 0.5, False, "m")

    reply = endpoint_complete(complete, model="m")
    knobs = dict(policy="actor", max_tokens=4)
    message = [{"role": "user", "content": "?"}]

    def ask_of(key, temperature):
        return asyncio.run(reply(message, key=key, temperature=temperature, **knobs))

    said = ask_of(KEY, 0.0)
    assert (said.text, said.input_tokens, said.output_tokens) == ("hm", 9, 3)
    assert said.stop_reason == StopReason.LENGTH and not said.is_refused
    for key in (KEY, KEY, dataclasses.replace(KEY, rollout=1)):
        ask_of(key, 0.7)
    numbers = [request["sample"] for request in asked]
    assert numbers[0] is None and numbers[1] == numbers[2] != numbers[3]
    assert asked[0]["model"] == "m" and asked[0]["max_tokens"] == 4


def test_a_refusal_is_no_text():
    async def complete(messages, **request):
        return Completion("I can't", "stop", "no", 9, 3, None, False, "m")

    reply = endpoint_complete(complete, model="m")
    said = asyncio.run(reply([], key=KEY, temperature=0.0, policy="actor", max_tokens=4))
    assert (said.text, said.is_refused, said.output_tokens) == ("", True, 3)


def test_an_endpoints_counts_are_metrics():
    counts = {"a": Counts(requests=3, calls=2, cost=0.5), "b": Counts(requests=1, retries=1)}
    found = endpoint_metrics(counts)
    assert found["requests"] == 4 and found["calls"] == 2 and found["retries"] == 1
    assert "cost" not in found  # b has no price, and what it cost is not 0
    assert endpoint_metrics({"a": counts["a"]})["cost"] == 0.5
    assert endpoint_metrics({}) == {}
