"""One HTTP call to a chat-completions endpoint: what leaves, and what comes back means.

The only module that imports `openai` (extra `[api]`). Its own retries are off, and only the headers
listed here leave, so nothing that it reads from the environment does. Must not know: money, caches,
retries.
"""

import asyncio
import datetime
import email.utils
import functools
import json
import re
import ssl
import time
from collections.abc import Mapping

import httpx2
import openai

from mas_jax.sampling.api_request import Answer, CallFailed

SHOWN_CHARS = 300  # of an endpoint's words in an error
MIN_SECRET_CHARS = 20  # a shorter key ("EMPTY", "ollama") is a word that answers may hold
_SENT_HEADERS = frozenset(
    ["accept", "accept-encoding", "connection", "content-length", "content-type", "host"]
)
_CREDENTIALS = re.compile(r"\b(bearer|basic)\s+[^\s\"',;]+", re.IGNORECASE)
_RETRIED = frozenset([408, 409, 425, 429])  # and everything from 500 on
_ADVICE = {
    401: "check the key",
    403: "check what the key may do",
    404: "check base_url and model",
}


def read_retry_after(value: str | None, now: float) -> float | None:
    """Seconds that a Retry-After header asks for, None if there is none or it makes no sense.

    value: seconds, or a date as HTTP writes it; a past date is 0.0. now: seconds since the epoch.
    Source: RFC 9110, section 10.2.3.
    """
    if value is None:
        return None
    if re.fullmatch(r"\s*\d+(\.\d+)?\s*", value, re.ASCII):
        return float(value)
    try:
        until = email.utils.parsedate_to_datetime(value)
        if until.tzinfo is None:  # how "-0000" is read
            until = until.replace(tzinfo=datetime.UTC)
        return max(until.timestamp() - now, 0.0)
    except (ValueError, OverflowError):
        return None


@functools.cache
def _tls() -> ssl.SSLContext:
    """The usual checks of certificates, whose list takes tens of milliseconds to load."""
    return httpx2.create_ssl_context()


class Connection:
    """An endpoint's connections; used from one event loop."""

    def __init__(self, base_url: str, key: str, timeout_s: float) -> None:
        self._key, self._timeout_s = key, timeout_s
        # as it is, and as JSON (nested, too) and URLs write its characters
        forms = [rf"\\*(?:{re.escape(c)}|%{ord(c):02x}|%{ord(c):02X}|u00{ord(c):02x})" for c in key]
        self._key_pattern = re.compile("".join(forms) or r"(?!)")
        http = openai.DefaultAsyncHttpxClient(
            verify=_tls(),
            follow_redirects=False,  # prompts go nowhere but to base_url
            event_hooks={"request": [self._choose_headers]},
        )
        self._client = openai.AsyncOpenAI(
            api_key="set-in-the-request",  # a placeholder; `_choose_headers` sets the key
            base_url=base_url,
            max_retries=0,
            timeout=timeout_s,
            http_client=http,
        )

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.close()

    async def call(self, body: Mapping[str, object]) -> Answer:
        """The endpoint's answer to one request body.

        Raises: CallFailed.
        """
        response, failure = None, None
        try:
            async with asyncio.timeout(self._timeout_s):  # of everything, a dripping body too
                response = await self._client.post(
                    "/chat/completions", body=dict(body), cast_to=httpx2.Response
                )
        except openai.APIStatusError as error:
            failure = self._refused(error.response)
        except TimeoutError:
            failure = self._unanswered(f"no answer within {self._timeout_s:g} s", None)
        except openai.APITimeoutError as error:
            message = f"no answer within {self._timeout_s:g} s ({type(error.__cause__).__name__})"
            failure = self._unanswered(message, error.__cause__)
        except openai.APIConnectionError as error:
            message = f"{type(error.__cause__).__name__} ({error.__cause__ or 'no details'})"
            failure = self._unanswered(message, error.__cause__)
        if failure is not None:
            raise failure  # here, not above: openai's error holds the request and its headers
        return self._read(response)

    async def _choose_headers(self, request: httpx2.Request) -> None:
        for name in set(request.headers) - _SENT_HEADERS:
            del request.headers[name]
        request.headers["User-Agent"] = "mas_jax"
        if self._key:
            request.headers["Authorization"] = f"Bearer {self._key}"

    def _hide_key(self, text: str) -> str:
        return self._key_pattern.sub("[key]", text)

    def _describe(self, text: str) -> str:
        """An endpoint's words as an error shows them: on one line, short, without credentials."""
        text = " ".join(_CREDENTIALS.sub(r"\1 [key]", self._hide_key(text)).split())
        return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"

    def _refused(self, response: httpx2.Response) -> CallFailed:
        status = response.status_code
        advice = "base_url redirects; name where it leads" if status < 400 else _ADVICE.get(status)
        message = f"HTTP {status}: {self._describe(response.text) or 'an empty body'}"
        return CallFailed(
            message if advice is None else f"{message}; {advice}",
            is_retryable=status in _RETRIED or status >= 500,
            may_be_billed=False,
            retry_after_s=read_retry_after(response.headers.get("retry-after"), time.time()),
        )

    def _unanswered(self, message: str, cause: BaseException | None) -> CallFailed:
        never_connected = isinstance(cause, httpx2.ConnectError | httpx2.ConnectTimeout)
        return CallFailed(
            self._describe(message), is_retryable=True, may_be_billed=not never_connected
        )

    def _read(self, response: httpx2.Response) -> Answer:
        """The answer in a body; one that cannot be read may be whole the next time."""
        kind = response.headers.get("content-type", "").split(";")[0].strip().lower()
        try:
            if kind != "application/json" and not kind.endswith("+json"):
                raise ValueError(f"content type {kind!r}, wanted 'application/json'")
            answer = _parse(json.loads(response.content))
        except (ValueError, RecursionError) as error:
            message = f"HTTP {response.status_code} with a body that is no completion ({error})"
        else:
            return self._without_key(answer)
        start = self._describe(response.text)
        raise CallFailed(
            f"{self._describe(message)}; it begins {start!r}", is_retryable=True, may_be_billed=True
        )

    def _without_key(self, answer: Answer) -> Answer:
        if len(self._key) < MIN_SECRET_CHARS:
            return answer
        return Answer(
            text=self._hide_key(answer.text),
            finish_reason=self._hide_key(answer.finish_reason),
            refusal=None if answer.refusal is None else self._hide_key(answer.refusal),
            model=self._hide_key(answer.model),
            input_tokens=answer.input_tokens,
            output_tokens=answer.output_tokens,
        )


def _parse(value: object) -> Answer:
    """The first choice of a chat completion. Raises: ValueError that names what is wrong."""
    choices = _field(value, "choices", list)
    if not choices:
        raise ValueError("choices is missing or empty")
    message = _field(choices[0], "message", dict)
    if message is None:
        raise ValueError("choices[0].message is missing")
    if not {"content", "refusal"} & message.keys():
        raise ValueError("choices[0].message has neither content nor refusal")
    text, refusal = _field(message, "content", str), _field(message, "refusal", str)
    finish_reason = _field(choices[0], "finish_reason", str) or ""
    if refusal is None and finish_reason == "content_filter":
        refusal = finish_reason
    usage = _field(value, "usage", dict) or {}
    return Answer(
        text=text or "",
        finish_reason=finish_reason,
        refusal=refusal or None,
        model=_field(value, "model", str) or "",
        input_tokens=_tokens(usage, "prompt_tokens"),
        output_tokens=_tokens(usage, "completion_tokens"),
    )


def _field(value: object, name: str, kind: type) -> object:
    """A member of a JSON object, None if it is absent or null."""
    if not isinstance(value, dict):
        raise ValueError(f"{type(value).__name__} where an object with {name!r} should be")
    if value.get(name) is None:
        return None
    if not isinstance(value[name], kind):
        raise ValueError(f"{name} is {type(value[name]).__name__}, wanted {kind.__name__}")
    return value[name]


def _tokens(usage: Mapping[str, object], name: str) -> int | None:
    count = usage.get(name)
    return count if type(count) is int and count >= 0 else None
