"""The key of an endpoint stays where it belongs, and waits are as long as it asks."""

import asyncio
import dataclasses
import email.utils
import json
import logging
import math
import time
import traceback
import urllib.parse

import pytest
from api_calls import ask, endpoint
from chat_server import ChatServer, Reply, answer, failure
from hypothesis import given, settings
from hypothesis import strategies as st

from mas_jax.records import WorldError
from mas_jax.sampling import api
from mas_jax.sampling.api import Client, Endpoint
from mas_jax.sampling.api_http import read_retry_after

KEY = 'sk-test/0123456789"abcdef+xyz'  # JSON and URLs write it differently


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """The waits between calls, which take no time."""
    seen, really = [], asyncio.sleep

    async def sleep(seconds, result=None):
        if seconds:
            seen.append(seconds)
        return await really(0, result)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return seen


# --- the key --------------------------------------------------------------------------------------


@pytest.fixture
def keyed(monkeypatch) -> str:
    """The name of a variable that holds KEY."""
    monkeypatch.setenv("SOME_KEY", f"{KEY}\n")
    return "SOME_KEY"


def test_the_key_of_the_variable_is_sent(keyed):
    with ChatServer([answer()]) as server:
        ask(Client(endpoint(server, key_variable=keyed)))
        assert server.received[0].headers["authorization"] == f"Bearer {KEY}"


def test_nothing_else_of_the_environment_is_sent(monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text("default login me password sk-netrc\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-another")
    monkeypatch.setenv("OPENAI_ADMIN_KEY", "sk-admin")
    monkeypatch.setenv("OPENAI_ORG_ID", "org-1")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "proj-1")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Secret: s3cret\nAuthorization: Bearer sk-more")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9")
    with ChatServer([answer()]) as server:
        ask(Client(endpoint(server)))
        headers = server.received[0].headers
    assert set(headers) <= {
        "host", "accept", "accept-encoding", "connection", "user-agent", "content-length",
        "content-type",
    }  # fmt: skip
    assert "sk-" not in str(headers) and headers["user-agent"] == "mas_jax"


PERCENT = urllib.parse.quote(KEY, safe="")
ECHOES = [
    KEY,
    json.dumps(KEY),
    json.dumps(json.dumps(KEY)),
    PERCENT,
    PERCENT.replace("%2F", "%2f"),
    KEY.replace("+", "\\u002b"),
    f"Authorization: Bearer {KEY}",
]


@pytest.mark.parametrize("echo", ECHOES)
@pytest.mark.parametrize("status", [200, 401, 500])
def test_a_key_that_the_server_echoes_is_in_no_error_and_no_log(keyed, caplog, echo, status):
    echoing = [
        Reply(f"{'x' * 250} your key: {echo}".encode(), status),
        Reply(echo.encode(), status, content_type="text/plain"),
        dataclasses.replace(failure(status, f"your key: {echo}"), headers={"X-Request-Id": "1"}),
    ]
    for reply in echoing:
        with caplog.at_level(logging.DEBUG), ChatServer([reply] * 2) as server:
            client = Client(endpoint(server, key_variable=keyed, retries=1))
            with pytest.raises(WorldError) as error:
                ask(client)
        error.value.__suppress_context__ = False
        shown = "".join(traceback.format_exception(error.value)) + caplog.text + repr(client)
        shown += repr(vars(error.value)) + repr(client.endpoint) + repr(client.counts)
        assert "sk-test" not in shown and "abcdef" not in shown and "[key]" in shown


def test_other_credentials_that_the_server_echoes_are_hidden(keyed):
    echo = 'got headers {"Authorization": "Basic dXNlcjpwYXNz", "Via": "Bearer tok.en-1"}'
    with ChatServer([failure(400, echo)]) as server, pytest.raises(WorldError) as error:
        ask(Client(endpoint(server, key_variable=keyed)))
    assert "dXNlcjpwYXNz" not in str(error.value) and "tok.en-1" not in str(error.value)


def test_a_key_that_the_server_answers_with_is_in_no_completion_and_no_cache(keyed, tmp_path):
    with ChatServer([answer(f"Your key is {KEY}.", model=KEY)]) as server:
        got = ask(Client(endpoint(server, key_variable=keyed), tmp_path))
    assert (got.text, got.model) == ("Your key is [key].", "[key]")
    (entry,) = tmp_path.rglob("*.json")
    assert KEY[:12] not in entry.read_text() and "Your key is [key]." in entry.read_text()


def test_a_word_that_serves_as_a_key_stays_in_answers(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "EMPTY")
    with ChatServer([answer("The set is EMPTY."), failure(400, "key EMPTY")]) as server:
        client = Client(endpoint(server, key_variable="SOME_KEY"))
        assert ask(client).text == "The set is EMPTY."
        with pytest.raises(WorldError, match=r"key \[key\]"):
            ask(client)


def test_a_missing_key_is_an_error_that_names_the_variable(monkeypatch):
    monkeypatch.delenv("NO_KEY", raising=False)
    with pytest.raises(ValueError, match="NO_KEY holds no key"):
        Client(Endpoint("http://h/v1", "NO_KEY"))
    monkeypatch.setenv("NO_KEY", " \n")
    with pytest.raises(ValueError, match="NO_KEY holds no key"):
        Client(Endpoint("http://h/v1", "NO_KEY"))


@pytest.mark.parametrize("key", ["sk-abcdef\nX-Evil: 1", "sk-abc def", "sk-abcdéf"])
def test_a_key_that_no_header_can_carry_is_an_error_without_it(monkeypatch, key):
    monkeypatch.setenv("SOME_KEY", key)
    with pytest.raises(ValueError, match="the key in SOME_KEY holds") as error:
        Client(Endpoint("http://h/v1", "SOME_KEY"))
    assert "sk-abc" not in str(error.value)


@pytest.mark.parametrize(
    "url", ["http://me:sk-secret@h/v1", "http://h/v1?key=sk-secret", "me:sk-secret@h/v1"]
)
def test_a_key_in_the_address_is_refused_without_showing_it(url):
    with pytest.raises(ValueError, match="base_url") as error:
        Client(Endpoint(url, ""))
    assert "sk-secret" not in str(error.value)


# --- how long to wait -----------------------------------------------------------------------------

NOW = 1445412420.0  # Wed, 21 Oct 2015 07:27:00 GMT


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("120", 120.0),
        (" 0 ", 0.0),
        ("1.5", 1.5),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 60.0),
        ("Wed, 21 Oct 2015 07:28:00 -0000", 60.0),
        ("Wednesday, 21-Oct-15 07:28:00 GMT", 60.0),
        ("Wed, 21 Oct 2015 07:26:00 GMT", 0.0),
        ("9" * 400, math.inf),
        (None, None),
        ("", None),
        ("-5", None),
        ("nan", None),
        ("soon", None),
        ("Wed, 99 Oct 2015 07:28:00 GMT", None),
        ("Wed, 21 Oct 99999 07:28:00 GMT", None),
    ],
)
def test_retry_after_is_seconds_or_a_date_wherever_the_machine_stands(value, seconds, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        got = read_retry_after(value, NOW)
    time.tzset()
    assert got == seconds


@given(st.text(max_size=40) | st.from_regex(r"\A\w{3}, \d+ \w{3} \d+ \d+:\d+(:\d+)? ?[+-]?\d*\Z"))
@settings(max_examples=100, deadline=None)
def test_any_retry_after_is_seconds_or_nothing(value):
    seconds = read_retry_after(value, NOW)
    assert seconds is None or seconds >= 0


def test_waits_double_from_the_backoff_up_to_the_longest():
    # 0.5, 1, 2, 4 and then 5 at most; the last half by jitter
    patient = Endpoint("http://h", "", backoff_s=0.5, max_wait_s=5.0)
    assert [api.wait_s(n, None, patient, 1.0) for n in range(1, 7)] == [0.5, 1, 2, 4, 5, 5]
    assert [api.wait_s(n, None, patient, 0.0) for n in range(1, 4)] == [0.25, 0.5, 1]
    assert api.wait_s(2, None, patient, 0.5) == 0.75
    assert api.wait_s(5000, None, patient, 1.0) == 5
    # never less than what was asked for, and half a backoff of jitter
    assert api.wait_s(1, 3.0, patient, 0.0) == 3.0
    assert api.wait_s(2, 5.0, patient, 1.0) == 5.5
    assert api.wait_s(9, 0.0, patient, 1.0) == 2.5


def test_an_endpoint_is_left_alone_for_as_long_as_it_asks(waits):
    soon = email.utils.formatdate(time.time() + 50, usegmt=True)
    replies = [failure(status, headers={"Retry-After": "7"}) for status in (429, 503)]
    replies += [failure(429, headers={"Retry-After": value}) for value in ("60", soon, "soon")]
    with ChatServer([*replies, answer("at last")]) as server:
        client = Client(endpoint(server, retries=5, backoff_s=0.25, max_wait_s=60.0))
        assert ask(client).text == "at last"
    # and up to half a backoff of 0.25, 0.5, 1, 2 more
    assert 7 <= waits[0] <= 7.125 and 7 <= waits[1] <= 7.25 and 60 <= waits[2] <= 60.5
    assert 30 < waits[3] <= 51
    assert 2 <= waits[4] <= 4  # the fifth backoff is 0.25 * 16, half of it by chance


@pytest.mark.parametrize("value", ["61", "3600", "9" * 400])
def test_who_is_sent_away_for_longer_than_the_longest_wait_fails_at_once(waits, value):
    with ChatServer([failure(429, "quota", {"Retry-After": value}), answer()]) as server:
        with pytest.raises(
            WorldError, match=r"in 1 call\(s\).*quota.*above max_wait_s=60"
        ) as error:
            ask(Client(endpoint(server, max_wait_s=60.0)))
        assert len(server.received) == 1
    assert waits == [] and f"Retry-After {float(value):.6g} s" in str(error.value)


def test_waits_are_told(waits, caplog):
    with ChatServer([failure(429, "slow down", {"Retry-After": "7"}), answer()]) as server:
        ask(Client(endpoint(server)))
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "call 1 of at most 6 to 'm'" in line and "slow down" in line and "in 7 s" in line
