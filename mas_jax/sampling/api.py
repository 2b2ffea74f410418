"""A client for any OpenAI-compatible chat endpoint: retries, a cache on disk, counts, a cost cap.

The endpoint's failures are `WorldError`s of kind API; what it declines to answer is an ordinary
`Completion` with a `refusal`. The key comes from the environment alone and is left out of every
error and log line. Must not know: agents, prompts, jax.
"""

import asyncio
import dataclasses
import importlib.util
import logging
import math
import os
import random
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mas_jax.records import FailureKind, WorldError
from mas_jax.sampling import api_cache
from mas_jax.sampling.api_budget import (
    Budget,
    BudgetExceeded,
    Counts,
    Price,
    typical_input_tokens,
    worst_input_tokens,
)
from mas_jax.sampling.api_request import (
    Answer,
    CallFailed,
    Completion,
    Message,
    Request,
    check_request,
)

if TYPE_CHECKING:
    from mas_jax.sampling.api_http import Connection

TOKEN_FIELDS = ("max_tokens", "max_completion_tokens")


@dataclass(frozen=True)
class Endpoint:
    """Where completions come from, and how it is treated.

    base_url: up to and without "/chat/completions". key_variable: name of the environment variable
    that holds the key, "" for a server that wants none. prices: by model. max_cost: money that this
    client may spend, None for no cap. concurrency: requests in progress at once; one keeps its
    place while it waits to be retried, so an endpoint that pushes back is asked less. timeout_s: of
    one call, all of it. retries: of one request, after a wait that doubles from about backoff_s up
    to max_wait_s, or of at least what Retry-After says; if that is above max_wait_s the request
    fails at once. token_field: what the endpoint calls max_tokens (OpenAI's reasoning models want
    "max_completion_tokens").
    """

    base_url: str
    key_variable: str
    prices: Mapping[str, Price] = field(default_factory=dict)
    max_cost: float | None = None
    concurrency: int = 16
    timeout_s: float = 120.0
    retries: int = 5
    backoff_s: float = 0.5
    max_wait_s: float = 60.0
    token_field: str = "max_tokens"


@dataclass(frozen=True)
class Estimate:
    """What requests will take, retries aside.

    calls: to the endpoint; cached: requests that need none. input_tokens and cost: with prompts at
    four characters a token and every answer at its max_tokens (output_tokens). worst_cost: with
    prompts at one token a byte, which is what the cap counts before an answer is there. Both costs
    are None if a model has no price.
    """

    calls: int
    cached: int
    input_tokens: int
    output_tokens: int
    cost: float | None
    worst_cost: float | None


def check_endpoint(endpoint: Endpoint) -> None:
    """Raises: ValueError for a setting that cannot be meant, naming it."""
    url = urllib.parse.urlsplit(endpoint.base_url)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError("base_url does not start with http://host or https://host; name both")
    if "@" in url.netloc or url.query or url.fragment:
        raise ValueError(
            f"base_url of host {url.hostname!r} holds a user, a query or a fragment; keys belong "
            "into the environment variable that key_variable names"
        )
    for name, value, smallest in (
        ("concurrency", endpoint.concurrency, 1),
        ("retries", endpoint.retries, 0),
        ("backoff_s", endpoint.backoff_s, 0),
        ("max_wait_s", endpoint.max_wait_s, 0),
    ):
        if not smallest <= value < math.inf:
            raise ValueError(f"{name}={value}: want a number of at least {smallest}")
    if not 0 < endpoint.timeout_s < math.inf:
        raise ValueError(f"timeout_s={endpoint.timeout_s}: want seconds above 0")
    if endpoint.max_cost is not None and not 0 < endpoint.max_cost < math.inf:
        raise ValueError(f"max_cost={endpoint.max_cost}: want an amount above 0, or None")
    for model, price in endpoint.prices.items():
        if not (0 <= price.input < math.inf and 0 <= price.output < math.inf):
            raise ValueError(f"price of {model!r} is {price}: want amounts of at least 0")
    if endpoint.token_field not in TOKEN_FIELDS:
        raise ValueError(f"token_field={endpoint.token_field!r}: choose from {TOKEN_FIELDS}")


def read_key(variable: str) -> str:
    """The key that an environment variable holds, "" for no variable.

    Raises: ValueError that names the variable, never its value, if it is unset or no header could
    carry it.
    """
    if not variable:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(
            f"environment variable {variable} holds no key; set it, or key_variable='' for a "
            "server that wants none"
        )
    if not all("!" <= char <= "~" for char in key):
        raise ValueError(f"the key in {variable} holds spaces or characters that are not ASCII")
    return key


def wait_s(attempt: int, retry_after_s: float | None, endpoint: Endpoint, jitter: float) -> float:
    """Seconds before the next call, after `attempt` failed ones.

    backoff_s doubled after each, at most max_wait_s, of which the last half is taken by jitter in
    [0, 1]. Where Retry-After asked for a time: that, and then such a half of jitter, so that those
    who were sent away together do not come back together.
    """
    longest = min(endpoint.backoff_s * 2.0 ** min(attempt - 1, 60), endpoint.max_wait_s)
    if retry_after_s is not None:
        return retry_after_s + longest * jitter / 2
    return longest * (1 + jitter) / 2


class _Session:
    """What belongs to one event loop: connections, the free places, and shared requests."""

    def __init__(self, connection: "Connection", concurrency: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.connection = connection
        self.slots = asyncio.Semaphore(concurrency)
        self.shared: dict[str, asyncio.Task[Completion]] = {}


class Client:
    """Completions from one endpoint; `counts` by model says what they took.

    Use it from one event loop at a time. cache: directory of answers, None for no cache.
    Raises: ValueError for bad settings or a missing key; ModuleNotFoundError without `[api]`.
    """

    def __init__(self, endpoint: Endpoint, cache: Path | None = None) -> None:
        check_endpoint(endpoint)
        if importlib.util.find_spec("openai") is None:
            raise ModuleNotFoundError("no openai package: pip install 'mas_jax[api]'")
        self.endpoint, self._cache = endpoint, cache
        self._key = read_key(endpoint.key_variable)
        self._budget = Budget(endpoint.prices, endpoint.max_cost)
        self._session: _Session | None = None

    @property
    def counts(self) -> Mapping[str, Counts]:
        """What was asked of each model so far."""
        return self._budget.counts

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        model: str,
        temperature: float,
        max_tokens: int,
        seed: int | None = None,
        stop: Sequence[str] = (),
        sample: int | None = None,
    ) -> Completion:
        """The endpoint's answer to a conversation; `Request` says what the arguments mean.

        Answers to repeatable requests come from the cache, and equal ones that are in flight share
        one call. Money is held for each call, retries included, before it is sent.
        Raises: WorldError of kind API if the endpoint gave no answer within the retries, or refused
        the call as it is (most 4xx); BudgetExceeded if a call could take the spending above
        max_cost; ValueError for bad arguments, or a model without a price under a cap; OSError if
        the cache cannot be used.
        """
        if isinstance(stop, str):
            raise ValueError(f"stop={stop!r} is a str; want a sequence of strings")
        copies = tuple(dict(m) if isinstance(m, Mapping) else m for m in messages)
        request = Request(copies, model, temperature, max_tokens, seed, tuple(stop), sample)
        check_request(request)
        counts = self._budget.counts_of(model)
        counts.requests += 1
        try:
            completion = await self._answer(request)
        except (WorldError, BudgetExceeded):
            counts.failed += 1
            raise
        counts.cached += completion.is_cached
        return completion

    def estimate(self, requests: Sequence[Request]) -> Estimate:
        """What the requests would take now; nothing is sent.

        Requests that the cache answers, and repeats of repeatable ones, take no call.
        Raises: ValueError as `complete`.
        """
        calls, seen = [], set()
        for request in requests:
            check_request(request)
            self._budget.counts_of(request.model)
            fields = self._fields(request)
            key = api_cache.hash_fields(fields)
            if request.is_repeatable and (key in seen or self._stored(fields) is not None):
                continue
            seen.add(key)
            calls.append(request)
        typical = [typical_input_tokens(request.messages) for request in calls]
        worst = [worst_input_tokens(request.messages) for request in calls]
        return Estimate(
            calls=len(calls),
            cached=len(requests) - len(calls),
            input_tokens=sum(typical),
            output_tokens=sum(request.max_tokens for request in calls),
            cost=self._price(calls, typical),
            worst_cost=self._price(calls, worst),
        )

    async def close(self) -> None:
        """Closes the connections; the next request opens new ones."""
        session, self._session = self._session, None
        if session is not None and session.loop is asyncio.get_running_loop():
            await session.connection.close()

    async def _answer(self, request: Request) -> Completion:
        """From the cache, from an equal request in flight, or from the endpoint."""
        if not request.is_repeatable:
            return await self._ask(request, self._open())
        fields = self._fields(request)
        stored = self._stored(fields)
        if stored is not None:
            return stored
        key, session = api_cache.hash_fields(fields), self._open()
        is_shared = key in session.shared
        if not is_shared:
            task = session.loop.create_task(self._ask_and_store(request, session))
            session.shared[key] = task
            task.add_done_callback(lambda done: _forget(session, key, done))
        # one caller's cancellation is its own
        completion = await asyncio.shield(session.shared[key])
        return _as_cached(completion) if is_shared else completion

    def _open(self) -> _Session:
        """The session of the running loop: connections do not outlive theirs."""
        from mas_jax.sampling.api_http import Connection  # needs `[api]`, and 1 s to import

        if self._session is None or self._session.loop is not asyncio.get_running_loop():
            endpoint = self.endpoint
            connection = Connection(endpoint.base_url, self._key, endpoint.timeout_s)
            self._session = _Session(connection, endpoint.concurrency)
        return self._session

    def _fields(self, request: Request) -> dict[str, object]:
        """Everything that decides the answer, as JSON values."""
        return {
            "base_url": self.endpoint.base_url.rstrip("/"),
            "model": request.model,
            "messages": [dict(message) for message in request.messages],
            "temperature": float(request.temperature),
            "max_tokens": request.max_tokens,
            "seed": request.seed,
            "stop": list(request.stop),
            "sample": request.sample,
        }

    def _stored(self, fields: Mapping[str, object]) -> Completion | None:
        if self._cache is None:
            return None
        answer = api_cache.read(self._cache, fields)
        return None if answer is None else _as_cached(Completion(**answer))

    def _price(self, requests: Sequence[Request], input_tokens: Sequence[int]) -> float | None:
        costs = [
            self._budget.cost(request.model, tokens, request.max_tokens)
            for request, tokens in zip(requests, input_tokens, strict=True)
        ]
        return None if None in costs else math.fsum(costs)

    async def _ask_and_store(self, request: Request, session: _Session) -> Completion:
        completion = await self._ask(request, session)
        if self._cache is not None:
            api_cache.write(self._cache, self._fields(request), dataclasses.asdict(completion))
        return completion

    async def _ask(self, request: Request, session: _Session) -> Completion:
        """Calls until there is an answer, or no call is left or would help."""
        endpoint = self.endpoint
        where = f"{request.model!r} at {endpoint.base_url}"
        async with session.slots:
            for attempt in range(1, endpoint.retries + 2):
                completion, failure = await self._call(request, session, attempt > 1)
                if completion is not None:
                    return completion
                if not failure.is_retryable or attempt > endpoint.retries:
                    break
                asked_s = failure.retry_after_s
                if asked_s is not None and asked_s > endpoint.max_wait_s:
                    reason = f"Retry-After {asked_s:.6g} s, above max_wait_s={endpoint.max_wait_s}"
                    raise WorldError(
                        FailureKind.API,
                        f"no answer from {where} in {attempt} call(s): {failure} ({reason})",
                    )
                wait = wait_s(attempt, failure.retry_after_s, endpoint, random.random())
                logging.warning(
                    "call %d of at most %d to %s failed (%s); the next in %.3g s",
                    attempt, endpoint.retries + 1, where, failure, wait,
                )  # fmt: skip
                await asyncio.sleep(wait)
        raise WorldError(FailureKind.API, f"no answer from {where} in {attempt} call(s): {failure}")

    async def _call(
        self, request: Request, session: _Session, is_retry: bool
    ) -> tuple[Completion | None, CallFailed | None]:
        """One call that the budget allows: a completion, or why there is none."""
        counts = self._budget.counts_of(request.model)
        worst_input = worst_input_tokens(request.messages)
        held = self._budget.hold(request.model, worst_input, request.max_tokens)
        counts.calls += 1
        counts.retries += is_retry
        uncertain = held  # until its end is known; a cancelled call may be billed
        try:
            answer = await session.connection.call(self._body(request))
            uncertain = 0.0
        except CallFailed as failure:
            uncertain = held if failure.may_be_billed else 0.0
            return None, failure
        finally:
            self._budget.release(request.model, held, uncertain)
        return self._charge(request, answer, worst_input), None

    def _body(self, request: Request) -> dict[str, object]:
        body = {
            "model": request.model,
            "messages": [dict(message) for message in request.messages],
            "temperature": request.temperature,
            self.endpoint.token_field: request.max_tokens,
        }
        if request.seed is not None:
            body["seed"] = request.seed
        if request.stop:
            body["stop"] = list(request.stop)
        return body

    def _charge(self, request: Request, answer: Answer, worst_input: int) -> Completion:
        if answer.input_tokens is None or answer.output_tokens is None:
            self._budget.counts_of(request.model).unreported += 1
            tokens = (worst_input, request.max_tokens)
        else:
            tokens = (answer.input_tokens, answer.output_tokens)
        return Completion(
            text=answer.text,
            finish_reason=answer.finish_reason,
            refusal=answer.refusal,
            input_tokens=tokens[0],
            output_tokens=tokens[1],
            cost=self._budget.charge(request.model, *tokens),
            is_cached=False,
            model=answer.model or request.model,
        )


def _as_cached(completion: Completion) -> Completion:
    return dataclasses.replace(completion, cost=0.0, is_cached=True)


def _forget(session: _Session, key: str, done: asyncio.Task) -> None:
    """Ends the sharing of a request; its error was seen even if every caller was cancelled."""
    del session.shared[key]
    if not done.cancelled():
        done.exception()
