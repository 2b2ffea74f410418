"""What the HTTP servers share: a place to listen, bodies within a limit, JSON in and out.

Must not know: routes, what is served.
"""

import json
import socket
from collections.abc import Mapping

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response


class TooLarge(ValueError):
    """A request beyond the limits."""


def json_response(
    value: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """ASCII JSON, which carries every string that a Python program can hold."""
    return Response(json.dumps(value), status, headers, media_type="application/json")


async def read_body(request: Request, limit: int) -> bytes:
    """The body, read no further than `limit` bytes. Raises: TooLarge; ClientDisconnect."""
    parts, num_bytes = [], 0
    async for part in request.stream():
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > limit:
            raise TooLarge(f"the body has more than {limit} bytes; send less in a request")
    return b"".join(parts)


def parse_json(body: bytes) -> object:
    """The JSON value of a body. Raises: ValueError."""
    try:
        return json.loads(body)
    except RecursionError:
        raise ValueError("the body is nested too deep, wanted a flat JSON object") from None
    except ValueError as error:
        raise ValueError(f"the body is no JSON: {error}") from None


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, to be taken before anything is loaded. Raises: OSError that names both."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise OSError(f"cannot listen on {host} port {port}: {error}") from error
    return listener


def make_server(app: Starlette) -> uvicorn.Server:
    """A server of the application, which answers what is in progress before it ends."""
    return uvicorn.Server(
        uvicorn.Config(
            app, log_level="warning", timeout_keep_alive=60, timeout_graceful_shutdown=10
        )
    )
