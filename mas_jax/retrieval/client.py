"""Searches through a retrieval server as a `Retriever` does in the process, see `dialects.py`.

Whatever goes wrong on the way to the server, in it, or on the way back, the caller gets a
`SearchFailure` for each query that it concerns: never an exception and never an empty list.
Letters: Q queries. Must not know: agents, indexes, jax.
"""

import asyncio
import json
import logging
import random
import ssl
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import httpx2

from mas_jax.choices import check_no_secret
from mas_jax.records import Passage, SearchFailure
from mas_jax.retrieval.dialects import DIALECTS, IDENTITY_HEADER, Answer, is_text
from mas_jax.retrieval.index import MAX_QUERY_CHARS

RETRIED = (429, 500, 502, 503, 504)  # statuses that may pass
_HEADERS = {"Content-Type": "application/json"}
_AWAY = (502, 503, 504)  # what a gateway says of a server that does not answer it

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClientConfig:
    """How patient a client is, and how much it asks for at once.

    connect_timeout_s: to reach the server; timeout_s: for a whole answer, from when it is sent.
    retries: further attempts after the first; before the i-th of them the client waits a time drawn
    evenly from 0 to min(max_backoff_s, backoff_s * 2**(i-1)) ("full jitter", Brooker 2015,
    https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/).
    concurrent: requests on their way at once; batch: queries of one request; max_k: passages of a
    query; max_cached: answers kept, 0 for none.
    """

    connect_timeout_s: float = 5.0
    timeout_s: float = 30.0
    retries: int = 4
    backoff_s: float = 0.25
    max_backoff_s: float = 8.0
    concurrent: int = 64
    batch: int = 256
    max_k: int = 100
    max_cached: int = 100_000


class _Fault(Exception):
    """What went wrong with one attempt, and whether another one may do better."""

    def __init__(self, kind: str, message: str, *, again: bool) -> None:
        super().__init__(message)
        self.kind, self.again = kind, again


class RetrieverClient:
    """A server's search; proxies of the environment are not used, passwords are not known.

    Answers are kept by (index identity, query, k), the identity being what the server last named,
    or the URL where it names none. Use it from one event loop at a time, and `close` it there. The
    first failure of each kind is logged.
    `counts`: "queries" asked; "cached", those of them that were known; "requests" sent, "retries"
    among them, and "request_s", the seconds that all of them took together; "failed" queries, and
    "failed/KIND" by kind: "timeout", "unreachable" (no connection, or one that broke), "refused"
    (status 4xx), "server_error" (5xx), "bad_response", what the server says of one query, or, not
    even sent, "empty_query" and "bad_query" (no UTF-8).
    Raises: ValueError for a URL that is none or may hold a password, an unknown dialect, or
    settings below their least.
    """

    def __init__(
        self, url: str, *, dialect: str = "search-r1", config: ClientConfig | None = None
    ) -> None:
        self.config = ClientConfig() if config is None else config
        _check(url, dialect, self.config)
        self._dialect = DIALECTS[dialect]
        self._base = url.rstrip("/").removesuffix(self._dialect.path)
        self.url = self._base + self._dialect.path
        self.counts: Counter[str] = Counter(
            queries=0, cached=0, requests=0, retries=0, request_s=0.0, failed=0
        )
        self._identity = self.url
        # 40 ms of reading certificates, which plain HTTP has no use for
        encrypted = httpx2.URL(url).scheme == "https"
        self._tls = ssl.create_default_context() if encrypted else False
        self._answers: OrderedDict[tuple[str, str, int], list[Passage]] = OrderedDict()
        self._timeout = httpx2.Timeout(self.config.timeout_s, connect=self.config.connect_timeout_s)
        self._random = random.Random()
        self._loop: asyncio.AbstractEventLoop | None = None  # whose connections are open

    def identify(self) -> str:
        """The identity of the index, by the server's /health; "" from a server that names none.

        Blocks; for the start of a run. Raises: ValueError if no attempt reaches the server.
        """
        for attempt in range(self.config.retries + 1):
            if attempt:
                time.sleep(self._wait_s(attempt))
            try:
                response = httpx2.get(
                    f"{self._base}/health", timeout=self._timeout, trust_env=False, verify=self._tls
                )
            except (OSError, httpx2.HTTPError) as error:
                fault = f"{type(error).__name__}: {error}"
                continue
            if response.status_code not in _AWAY:
                self._identity = response.headers.get(IDENTITY_HEADER, self.url)
                return response.headers.get(IDENTITY_HEADER, "")
            fault = f"status {response.status_code}"
        raise ValueError(
            f"the retrieval server {self._base} does not answer, attempt {attempt + 1}: {fault}; "
            "start it, or correct the URL"
        )

    async def search(self, queries: Sequence[str], k: int) -> list[Answer]:
        """The server's best k passages of each query in order, or why there are none.

        Queries are stripped and cut as `Retriever.search` does it; equal ones are asked once.
        Raises: ValueError if k is not in 1..max_k.
        """
        if not 1 <= k <= self.config.max_k:
            raise ValueError(f"k={k}, wanted 1..{self.config.max_k} passages a query")
        texts = [query.strip()[:MAX_QUERY_CHARS] for query in queries]
        answers: dict[str, Answer] = {}
        for text in dict.fromkeys(texts):
            answer = _refuse(text) or self._answers.get((self._identity, text, k))
            if answer is not None:
                answers[text] = answer
        missing = [text for text in dict.fromkeys(texts) if text not in answers]
        cached = sum(isinstance(answers.get(text), list) for text in texts)
        size = 1 if self._dialect.single else self.config.batch
        parts = [missing[start : start + size] for start in range(0, len(missing), size)]
        self._attach()
        for part, found in zip(
            parts, await asyncio.gather(*(self._ask(part, k) for part in parts)), strict=True
        ):
            answers |= zip(part, found, strict=True)
        results = [answers[text] for text in texts]
        self._count(results, cached)
        return [list(answer) if isinstance(answer, list) else answer for answer in results]

    async def close(self) -> None:
        """Closes the connections; a later search opens new ones."""
        if self._loop is asyncio.get_running_loop():
            self._loop = None
            await self._http.aclose()

    def _count(self, results: Sequence[Answer], cached: int) -> None:
        self.counts.update(queries=len(results), cached=cached)
        for failure in results:
            if not isinstance(failure, SearchFailure):
                continue
            if not self.counts[f"failed/{failure.kind}"]:
                logger.warning(
                    "a search failed, %s: %.500r; others of this kind are only counted",
                    failure.kind, failure.message,
                )  # fmt: skip
            self.counts.update(["failed", f"failed/{failure.kind}"])

    def _attach(self) -> None:
        """Takes new connections for a new event loop; those of one that has ended are dropped."""
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        self._loop = loop
        self._places = asyncio.Semaphore(self.config.concurrent)
        self._http = httpx2.AsyncClient(
            timeout=self._timeout,
            limits=httpx2.Limits(
                max_connections=self.config.concurrent,
                max_keepalive_connections=self.config.concurrent,
            ),
            trust_env=False,
            verify=self._tls,
        )

    async def _ask(self, queries_Q: Sequence[str], k: int) -> list[Answer]:
        """Answers to one request, after as many attempts as are allowed."""
        body = json.dumps(self._dialect.write(queries_Q, k)).encode()
        for attempt in range(self.config.retries + 1):
            if attempt:
                await asyncio.sleep(self._wait_s(attempt))
                self.counts["retries"] += 1
            try:
                answers_Q, identity = await self._attempt(body, queries_Q, k)
            except _Fault as error:
                fault = error
                if not fault.again:
                    break
            else:
                self._keep(identity, queries_Q, k, answers_Q)
                return answers_Q
        message = f"{self.url}, attempt {attempt + 1}: {fault}"
        return [SearchFailure(fault.kind, message)] * len(queries_Q)

    def _wait_s(self, attempt: int) -> float:
        """Seconds before the attempt-th further attempt, see `ClientConfig`."""
        longest = self.config.backoff_s * 2 ** (attempt - 1)
        return self._random.uniform(0, min(self.config.max_backoff_s, longest))

    async def _attempt(
        self, body: bytes, queries_Q: Sequence[str], k: int
    ) -> tuple[list[Answer], str]:
        """One request's answers, and the identity of the index that gave them. Raises: _Fault."""
        async with self._places:
            self.counts["requests"] += 1
            started = time.perf_counter()
            try:
                response = await self._post(body)
            finally:
                self.counts["request_s"] += time.perf_counter() - started
        status = response.status_code
        if status != 200:
            kind = {4: "refused", 5: "server_error"}.get(status // 100, "bad_response")
            said = response.content[:300].decode("utf-8", "replace")
            raise _Fault(kind, f"status {status}: {said}", again=status in RETRIED)
        try:
            answers_Q = self._dialect.read(json.loads(response.content), queries_Q, k)
        except (ValueError, RecursionError) as error:
            raise _Fault("bad_response", str(error), again=False) from error
        return answers_Q, response.headers.get(IDENTITY_HEADER, self.url)

    async def _post(self, body: bytes) -> httpx2.Response:
        """The response of one request, whatever its status. Raises: _Fault."""
        try:
            async with asyncio.timeout(self.config.timeout_s):
                return await self._http.post(self.url, content=body, headers=_HEADERS)
        except (TimeoutError, httpx2.TimeoutException) as error:
            message = f"no answer in {self.config.timeout_s:g} s ({type(error).__name__})"
            raise _Fault("timeout", message, again=True) from error
        except (OSError, httpx2.TransportError) as error:
            message = f"{type(error).__name__}: {error}"
            raise _Fault("unreachable", message, again=True) from error
        except httpx2.HTTPError as error:
            message = f"{type(error).__name__}: {error}"
            raise _Fault("bad_response", message, again=False) from error

    def _keep(
        self, identity: str, queries_Q: Sequence[str], k: int, answers_Q: Sequence[Answer]
    ) -> None:
        """Remembers what was found, never a failure."""
        self._identity = identity
        for query, answer in zip(queries_Q, answers_Q, strict=True):
            if isinstance(answer, list):
                self._answers[identity, query, k] = answer
        while len(self._answers) > self.config.max_cached:
            self._answers.popitem(last=False)


def _check(url: str, dialect: str, config: ClientConfig) -> None:
    check_no_secret("the retrieval server's URL", url)
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise ValueError(f"retrieval server {url!r}: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"retrieval server {url!r}, wanted a URL such as http://127.0.0.1:8000")
    if dialect not in DIALECTS:
        raise ValueError(f"dialect={dialect!r}, wanted one of {sorted(DIALECTS)}")
    for name, value in vars(config).items():
        least = 0 if name in ("retries", "backoff_s", "max_backoff_s", "max_cached") else 1
        too_small = value <= 0 if name in ("timeout_s", "connect_timeout_s") else value < least
        if too_small:
            raise ValueError(f"ClientConfig.{name}={value} is too small")


def _refuse(text: str) -> SearchFailure | None:
    """Why a query is not worth sending, None if it is."""
    if not text:
        return SearchFailure("empty_query", "the query holds no words to search for")
    if not is_text(text):
        return SearchFailure("bad_query", "the query holds half of a surrogate pair")
    return None
