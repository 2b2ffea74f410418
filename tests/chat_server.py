"""A loopback server that plays an OpenAI-compatible endpoint from a script, misbehaviour included.

with ChatServer([failure(429), answer("yes")]) as server: ...   # one reply a request, in turn
with ChatServer(lambda body: answer(body["model"])) as server: ...   # a reply by request
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Reply:
    """What the server does with one request.

    gate: awaited before anything is sent. is_cut: half of the body is sent, then the connection
    ends. is_dripping: a byte of the body now and then, never all. is_dropped: the connection ends
    without a word.
    """

    body: bytes = b""
    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] | None = None
    gate: threading.Event | None = None
    is_cut: bool = False
    is_dripping: bool = False
    is_dropped: bool = False


@dataclass(frozen=True)
class Received:
    """One request as it came; names of headers in lower case."""

    path: str
    headers: Mapping[str, str]
    body: Mapping


def completion(
    text: str | None = "yes",
    *,
    refusal: str | None = None,
    finish_reason: str = "stop",
    usage: Mapping | None = None,
    model: str = "served-model",
) -> dict:
    """The JSON of a chat completion. usage: 10 tokens in and 2 out where not given."""
    message = {"role": "assistant", "content": text, "refusal": refusal}
    tokens = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
        "usage": tokens if usage is None else dict(usage),
    }


def answer(text: str | None = "yes", **fields) -> Reply:
    """A good reply; fields as `completion` takes them."""
    return Reply(json.dumps(completion(text, **fields)).encode())


def failure(status: int, message: str = "no", headers: Mapping[str, str] | None = None) -> Reply:
    """An error as endpoints send it."""
    body = {"error": {"message": message, "type": "some_error", "code": None}}
    return Reply(json.dumps(body).encode(), status, headers=headers)


def silence() -> Reply:
    """No reply while the server lives."""
    return Reply(gate=threading.Event())


Script = Sequence[Reply] | Callable[[Mapping], Reply]


class ChatServer:
    """Serves a script on a free port of 127.0.0.1 between `with` and its end.

    url: what a client takes as base_url. received: the requests so far. open, most_open: requests
    without a full reply, now and at most. A script that is used up answers 418.
    """

    def __init__(self, script: Script) -> None:
        self.received: list[Received] = []
        self.open = self.most_open = 0
        self.ended = threading.Event()
        self._script = script
        self._lock = threading.Lock()
        owner = self

        class Handler(_Handler):
            server_owner = owner

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> "ChatServer":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.ended.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def bodies(self) -> list[Mapping]:
        """What was asked so far."""
        return [request.body for request in self.received]

    def take(self, request: Received) -> Reply:
        """Notes a request and picks its reply."""
        with self._lock:
            self.received.append(request)
            self.open += 1
            self.most_open = max(self.most_open, self.open)
            number = len(self.received) - 1
            if callable(self._script):
                return self._script(request.body)
            if number < len(self._script):
                return self._script[number]
            return failure(418, f"the script has {len(self._script)} replies")

    def finish(self) -> None:
        """Notes that a reply is over."""
        with self._lock:
            self.open -= 1


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # connections that come at once and wait to be accepted


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or a body waits 40 ms for its headers' receipt
    server_owner: ChatServer

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        owner = self.server_owner
        reply = owner.take(Received(self.path, headers, json.loads(raw)))
        try:
            self._send(reply, owner)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client gave up
        finally:
            owner.finish()

    def _send(self, reply: Reply, owner: ChatServer) -> None:
        while reply.gate is not None and not reply.gate.wait(0.02):
            if owner.ended.is_set():
                reply = Reply(is_dropped=True)
        if reply.is_dropped:
            self.close_connection = True
            return
        self.send_response(reply.status)
        if reply.content_type:
            self.send_header("Content-Type", reply.content_type)
        self.send_header("Content-Length", str(len(reply.body)))
        for name, value in (reply.headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if reply.is_dripping:
            for byte in reply.body:
                self.wfile.write(bytes([byte]))
                if owner.ended.wait(0.02):
                    break
            self.close_connection = True
        elif reply.is_cut:
            self.wfile.write(reply.body[: len(reply.body) // 2])
            self.close_connection = True
        else:
            self.wfile.write(reply.body)

    def log_message(self, *_) -> None:
        """Nothing: the tests read `received`."""
