"""The retrieval server: a `Retriever` behind the HTTP dialects of `dialects.py`, on one port.

Routes: POST /retrieve and POST /search; GET /health says what is served, GET /metrics what was. A
request that is malformed or too large gets a 4xx status and {"error": what, got, wanted}. The
retriever runs on the server's own event loop, so requests that come together are searched together.
Must not know: how the retriever searches, agents, jax.
"""

import hashlib
import json
import reprlib
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from mas_jax.records import Passage, SearchFailure
from mas_jax.retrieval import dialects
from mas_jax.retrieval.dialects import IDENTITY_HEADER, Answer, Ask
from mas_jax.retrieval.http_service import TooLarge, json_response, parse_json, read_body
from mas_jax.retrieval.index import IndexConfig, Retriever, hash_corpus

WINDOW = 10_000  # newest requests that the latencies of /metrics are taken over
_LEFT = 499  # status that counts a client which went before its body had come


@dataclass(frozen=True)
class ServerLimits:
    """What one request may ask for: bytes of its body, queries, and passages of a query."""

    body_bytes: int = 16 << 20
    queries: int = 4096
    topk: int = 100


def identify(passages: Sequence[Passage], fingerprint: str, config: IndexConfig) -> str:
    """Digest of all that an index's manifest states: corpus, encoder, settings and backend.

    fingerprint: the encoder's. Equal identities give equal answers.
    """
    stated = [hash_corpus(passages), fingerprint, asdict(config), config.resolve_backend()]
    stated[2].pop("backend")  # "auto" is what it resolves to
    return hashlib.blake2b(json.dumps(stated).encode(), digest_size=16).hexdigest()


def make_app(retriever: Retriever, identity: str, limits: ServerLimits | None = None) -> Starlette:
    """The ASGI application that serves a retriever; identity: of its index, see `identify`."""
    service = _Service(retriever, identity, ServerLimits() if limits is None else limits)
    return Starlette(
        routes=[
            Route("/retrieve", service.retrieve, methods=["POST"]),
            Route("/search", service.search, methods=["POST"]),
            Route("/health", service.health),
            Route("/metrics", service.metrics),
        ],
        exception_handlers={HTTPException: _refuse, Exception: _fail},
    )


def _refuse(request: Request, error: HTTPException) -> Response:
    """What a wrong path or method gets."""
    wanted = "POST /retrieve, POST /search, GET /health or GET /metrics"
    message = f"{request.method} {request.url.path}: {error.detail}; wanted {wanted}"
    return json_response({"error": message}, status=error.status_code, headers=error.headers)


def _fail(request: Request, error: Exception) -> Response:
    """What a client gets when a search raised; the server's log gets the traceback."""
    return json_response(
        {"error": f"the search failed: {type(error).__name__}: {error}"}, status=500
    )


class _Service:
    """A retriever, its limits, and what was asked of it so far."""

    def __init__(self, retriever: Retriever, identity: str, limits: ServerLimits) -> None:
        self._retriever, self._identity, self._limits = retriever, identity, limits
        self._headers = {IDENTITY_HEADER: identity}
        self._started = time.monotonic()
        self._statuses: Counter[str] = Counter()
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._queries = self._failed_queries = self._in_flight = 0

    async def retrieve(self, request: Request) -> Response:
        """POST /retrieve."""
        return await self._counted(request, dialects.read_retrieve, dialects.write_retrieve)

    async def search(self, request: Request) -> Response:
        """POST /search."""
        return await self._counted(request, dialects.read_search, dialects.write_search)

    async def health(self, request: Request) -> Response:
        """GET /health."""
        state = {"status": "ok", "passages": len(self._retriever.passages)}
        return json_response(state | {"index": self._identity}, headers=self._headers)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics: counts since the start; latency of the newest `WINDOW` requests."""
        latency = {"requests": len(self._seconds)}
        if self._seconds:
            percentiles = np.percentile(self._seconds, (50, 90, 99))
            latency |= dict(zip(("p50_s", "p90_s", "p99_s"), percentiles.tolist(), strict=True))
        return json_response(
            {
                "uptime_s": time.monotonic() - self._started,
                "requests": dict(self._statuses),
                "in_flight": self._in_flight,
                "queries": self._queries,
                "failed_queries": self._failed_queries,
                "latency": latency,
                "retriever": self._retriever.counts,
            }
        )

    async def _counted(self, request: Request, read: Callable, write: Callable) -> Response:
        """The answer to a request, counted by path and status even if the search raises."""
        started, status = time.perf_counter(), 500
        self._in_flight += 1
        try:
            response = await self._respond(request, read, write)
            status = response.status_code
            return response
        finally:
            self._in_flight -= 1
            self._statuses[f"{request.url.path} {status}"] += 1
            self._seconds.append(time.perf_counter() - started)

    async def _respond(
        self, request: Request, read: Callable[[object], Ask], write: Callable[[Ask, list], object]
    ) -> Response:
        try:
            ask = read(parse_json(await read_body(request, self._limits.body_bytes)))
            self._check(ask)
        except ClientDisconnect:
            return json_response({"error": "the client left"}, status=_LEFT)
        except TooLarge as error:
            return json_response({"error": str(error)}, status=413)
        except ValueError as error:
            return json_response({"error": str(error)}, status=400)
        answers_Q: list[Answer] = await self._retriever.search(ask.queries_Q, ask.k)
        self._queries += len(answers_Q)
        self._failed_queries += sum(isinstance(answer, SearchFailure) for answer in answers_Q)
        return json_response(write(ask, answers_Q), headers=self._headers)

    def _check(self, ask: Ask) -> None:
        if len(ask.queries_Q) > self._limits.queries:
            raise TooLarge(
                f"{len(ask.queries_Q)} queries, wanted at most {self._limits.queries} a request"
            )
        if ask.k > self._limits.topk:
            raise ValueError(
                f"{reprlib.repr(ask.k)} passages a query, wanted at most {self._limits.topk}"
            )
