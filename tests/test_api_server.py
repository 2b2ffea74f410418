"""The chat-completions server of a policy: answers, what it refuses, draws, counts."""

import asyncio

import pytest
from asgi import ask

from mas_jax.agents.protocol_team import Said
from mas_jax.records import FailureKind, WorldError
from mas_jax.sampling import api_server

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Is it?"}]
BODY = {"model": "m", "messages": MESSAGES, "temperature": 0.0, "max_tokens": 9}


class Cast:
    """Answers with its own number and keeps what it was asked."""

    def __init__(self, error=None, **said):
        self.asked, self._error = [], error
        self._said = dict(refusal=None, input_tokens=7, output_tokens=2, cost=0.0) | said

    async def complete(self, messages, **knobs):
        self.asked.append((messages, knobs))
        if self._error is not None:
            raise self._error
        return Said(f"answer {len(self.asked)}", **self._said)


def serve(cast, *requests, **how):
    """Responses to (method, path, body); how: as `ask`."""
    return ask(api_server.make_app(cast.complete, model="m", max_tokens=50), *requests, **how)


def post(cast, body):
    (response,) = serve(cast, ("POST", PATH, body))
    assert response.headers["content-type"] == "application/json"
    return response.status_code, response.json()


def test_an_answer_has_the_form_that_clients_read():
    cast = Cast(finish_reason="length")
    status, value = post(cast, BODY)
    assert (status, value["object"], value["model"]) == (200, "chat.completion", "m")
    (choice,) = value["choices"]
    assert choice["message"] == {"role": "assistant", "content": "answer 1", "refusal": None}
    assert choice["finish_reason"] == "length"
    usage = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
    assert value["usage"] == usage
    knobs = dict(temperature=0.0, max_tokens=9, top_p=1.0, draw=0)
    assert cast.asked == [(tuple(MESSAGES), knobs)]


def test_answers_that_are_made_at_once_have_names_of_their_own():
    class Together(Cast):
        """Answers nobody before all three have asked."""

        async def complete(self, messages, **knobs):
            said = await super().complete(messages, **knobs)
            while len(self.asked) < 3:
                await asyncio.sleep(0)
            return said

    cast = Together()

    found = serve(cast, *[("POST", PATH, BODY)] * 3, at_once=True)
    assert len({response.json()["id"] for response in found}) == 3


def test_what_a_request_leaves_out_has_the_defaults_of_such_servers():
    cast = Cast()
    post(cast, {"model": "m", "messages": MESSAGES, "n": 1, "stream": False, "top_p": None})
    assert cast.asked[0][1] == dict(temperature=1.0, max_tokens=50, top_p=1.0, draw=0)
    post(cast, BODY | {"max_tokens": None, "max_completion_tokens": 5})
    assert cast.asked[1][1]["max_tokens"] == 5


def test_draws_differ_unless_a_seed_says_which_and_greedy_ones_are_all_the_same():
    cast = Cast()
    warm, seeded = BODY | {"temperature": 0.7}, BODY | {"temperature": 0.7, "seed": 5}
    serve(cast, *[("POST", PATH, body) for body in (warm, warm, seeded, seeded, BODY, BODY)])
    draws = [knobs["draw"] for _, knobs in cast.asked]
    assert draws == [0, 1, 5, 5, 0, 0]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "the body is no JSON"),
        ([], 400, "the body is list, wanted a JSON object"),
        (BODY | {"model": "other"}, 404, "no model 'other' here, only 'm'"),
        (BODY | {"stream": True}, 400, "stream=true is not served, only false"),
        (BODY | {"n": 2}, 400, "n=2 is not served, only 1"),
        (BODY | {"stop": ["x"]}, 400, "'stop' is not served"),
        (BODY | {"messages": "Is it?"}, 400, "messages is str, wanted a list"),
        (BODY | {"messages": [{"role": "user"}]}, 400, "want its role and content"),
        (BODY | {"messages": []}, 400, "0 messages"),
        (BODY | {"temperature": "0"}, 400, "temperature is str, wanted a number"),
        (BODY | {"temperature": -1}, 400, "temperature=-1.0: want a number of at least 0"),
        (BODY | {"temperature": 10**400}, 400, "temperature is beyond every float"),
        (BODY | {"top_p": 0}, 400, "top_p=0.0: want a number above 0"),
        (BODY | {"max_tokens": 1.5}, 400, "max_tokens is float, wanted a whole number"),
        (BODY | {"max_tokens": 0}, 400, "max_tokens=0: want at least 1"),
        (BODY | {"seed": "1"}, 400, "seed is str, wanted a whole number"),
    ],
)
def test_what_is_not_served_is_refused_by_name_before_anything_is_asked(body, status, message):
    cast = Cast()
    found, value = post(cast, body)
    assert (found, value["error"]["type"]) == (status, "invalid_request_error")
    assert message in value["error"]["message"]
    assert cast.asked == []


def test_a_body_beyond_the_limit_is_refused(monkeypatch):
    monkeypatch.setattr(api_server, "BODY_BYTES", 100)
    status, value = post(Cast(), BODY | {"user": 100 * "x"})
    assert status == 413 and "more than 100 bytes" in value["error"]["message"]


def test_a_device_that_fails_is_the_servers_error_and_bad_messages_the_clients():
    status, value = post(Cast(WorldError(FailureKind.SAMPLER, "gone")), BODY)
    assert (status, value["error"]["message"]) == (500, "gone")
    assert value["error"]["type"] == "server_error"
    status, value = post(Cast(ValueError("the last a user's")), BODY)
    assert (status, value["error"]["message"]) == (400, "the last a user's")


def test_other_routes_say_what_is_served_and_what_was_asked():
    cast = Cast()
    requests = [("POST", PATH, BODY), ("POST", PATH, b"{"), ("GET", "/health", b""),
                ("GET", "/v1/models", b""), ("GET", PATH, b"")]  # fmt: skip
    *_, health, models, wrong = serve(cast, *requests)
    counts = {"requests": 2, "input_tokens": 7, "output_tokens": 2, "failed": 1}
    assert health.json() == {"status": "ok", "model": "m"} | counts
    assert [model["id"] for model in models.json()["data"]] == ["m"]
    assert wrong.status_code == 405 and "wanted POST /v1/chat" in wrong.json()["error"]["message"]
