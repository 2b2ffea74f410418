"""A chat-completions server, the other side of `api.py`: a policy of our own as an endpoint.

Routes: POST /v1/chat/completions; GET /v1/models and /health. A request that asks for what is not
served (streams, tools, several choices, stop strings) is refused by name, with the 4xx status and
the error object that OpenAI-compatible servers send. Must not know: policies, templates, jax.
"""

import itertools
import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from mas_jax.records import WorldError
from mas_jax.retrieval.http_service import TooLarge, json_response, parse_json, read_body
from mas_jax.sampling.api_request import Request, check_request

BODY_BYTES = 4 << 20
_TOKENS = ("max_tokens", "max_completion_tokens")
# what a body may hold: with the one value that is served, or None for what is read below
_FIELDS: Mapping[str, object] = dict.fromkeys(
    ("model", "messages", "temperature", "top_p", "seed", "user", *_TOKENS)
) | {"n": 1, "stream": False}  # fmt: skip


class _Refused(ValueError):
    """A request that is not served. status: HTTP's."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def make_app(complete: Callable[..., Awaitable], *, model: str, max_tokens: int) -> Starlette:
    """The ASGI application in which `complete` answers as `model`.

    complete(messages, temperature=, max_tokens=, top_p=, draw=) -> what has a `Completion`'s text,
    finish_reason, refusal and tokens. draw: equal requests with another number are answered
    independently; the seed, or a number of its own for every request without one.
    max_tokens: of a request that names none.
    """
    service = _Service(complete, model, max_tokens)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", service.answer, methods=["POST"]),
            Route("/v1/models", service.models),
            Route("/health", service.health),
        ],
        exception_handlers={HTTPException: _refuse_route},
    )


def _error(message: str, status: int, *, kind: str = "invalid_request_error") -> Response:
    body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    return json_response(body, status=status)


def _refuse_route(request: HttpRequest, error: HTTPException) -> Response:
    """What a wrong path or method gets."""
    wanted = "POST /v1/chat/completions, GET /v1/models or GET /health"
    message = f"{request.method} {request.url.path}: {error.detail}; wanted {wanted}"
    return _error(message, error.status_code)


class _Service:
    """What answers, and what was asked of it so far."""

    def __init__(self, complete: Callable[..., Awaitable], model: str, max_tokens: int) -> None:
        self._complete, self._model, self._max_tokens = complete, model, max_tokens
        self._started, self._draws = int(time.time()), itertools.count()
        self._counts: Counter[str] = Counter()

    async def answer(self, http: HttpRequest) -> Response:
        """POST /v1/chat/completions."""
        self._counts["requests"] += 1
        try:
            return await self._answer(http, f"chatcmpl-{self._counts['requests']}")
        except _Refused as refused:
            message, status, kind = str(refused), refused.status, "invalid_request_error"
        except TooLarge as error:
            message, status, kind = str(error), 413, "invalid_request_error"
        except ValueError as error:  # of the body, the request, or the order of its messages
            message, status, kind = str(error), 400, "invalid_request_error"
        except WorldError as error:
            logging.warning("a request got no answer: %s", error)
            message, status, kind = str(error), 500, "server_error"
        self._counts["failed"] += 1
        return _error(message, status, kind=kind)

    async def _answer(self, http: HttpRequest, name: str) -> Response:
        body = parse_json(await read_body(http, BODY_BYTES))
        request, top_p = self._read(body)
        greedy = request.temperature == 0
        draw = 0 if greedy else next(self._draws) if request.seed is None else request.seed
        said = await self._complete(
            request.messages, temperature=request.temperature, max_tokens=request.max_tokens,
            top_p=top_p, draw=draw,
        )  # fmt: skip
        self._counts["input_tokens"] += said.input_tokens
        self._counts["output_tokens"] += said.output_tokens
        message = {"role": "assistant", "content": said.text, "refusal": said.refusal}
        return json_response(
            {
                "id": name,
                "object": "chat.completion",
                "created": int(time.time()),
                "model": self._model,
                "choices": [{"index": 0, "message": message, "finish_reason": said.finish_reason}],
                "usage": {
                    "prompt_tokens": said.input_tokens,
                    "completion_tokens": said.output_tokens,
                    "total_tokens": said.input_tokens + said.output_tokens,
                },
            }
        )

    def _read(self, body: object) -> tuple[Request, float]:
        """What a body asks for, and its top_p. Raises: ValueError that names what is wrong."""
        if not isinstance(body, dict):
            raise _Refused(f"the body is {type(body).__name__}, wanted a JSON object")
        for name, value in body.items():
            if name not in _FIELDS:
                raise _Refused(f"{name!r} is not served; leave it out, or ask {sorted(_FIELDS)}")
            if _FIELDS[name] is not None and value not in (_FIELDS[name], None):
                shown = json.dumps(_FIELDS[name])
                raise _Refused(f"{name}={json.dumps(value)[:80]} is not served, only {shown}")
        if body.get("model") != self._model:
            raise _Refused(f"no model {body.get('model')!r} here, only {self._model!r}", 404)
        messages = body.get("messages")
        if not isinstance(messages, list):
            raise _Refused(f"messages is {type(messages).__name__}, wanted a list")
        tokens = next((body[name] for name in _TOKENS if body.get(name) is not None), None)
        seed, top_p = body.get("seed"), _number(body, "top_p", 1.0)
        if not 0 < top_p <= 1:
            raise _Refused(f"top_p={top_p}: want a number above 0, at most 1")
        for name, value in (("max_tokens", tokens), ("seed", seed)):
            if value is not None and type(value) is not int:
                raise _Refused(f"{name} is {type(value).__name__}, wanted a whole number")
        request = Request(
            tuple(messages), self._model, _number(body, "temperature", 1.0),
            self._max_tokens if tokens is None else tokens, seed,
        )  # fmt: skip
        check_request(request)
        return request, top_p

    async def models(self, http: HttpRequest) -> Response:
        """GET /v1/models."""
        own = {
            "id": self._model,
            "object": "model",
            "created": self._started,
            "owned_by": "mas_jax",
        }
        return json_response({"object": "list", "data": [own]})

    async def health(self, http: HttpRequest) -> Response:
        """GET /health: what is served, and counts since the start."""
        return json_response({"status": "ok", "model": self._model, **self._counts})


def _number(body: Mapping[str, object], name: str, default: float) -> float:
    """A number of the body, the default where it is absent or null."""
    value = body.get(name)
    if value is None:
        return default
    if type(value) not in (int, float):
        raise _Refused(f"{name} is {type(value).__name__}, wanted a number")
    try:
        return float(value)
    except OverflowError:  # a whole number of hundreds of digits
        raise _Refused(f"{name} is beyond every float") from None
