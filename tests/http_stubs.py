"""A scripted HTTP server, for tests of a client with servers that are not ours."""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HANG, DROP, DRIP = "hang", "drop", "drip"  # no answer; half of one; one that goes on for ever


@dataclass
class Stub:
    """Where the server is, and what it was asked: (path, JSON body) in order of arrival."""

    url: str
    asked: list[tuple[str, object]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    left: int = 0  # connections that the client gave up while it waited


@contextlib.asynccontextmanager
async def stub(reply: Callable[[str, object], object]) -> AsyncIterator[Stub]:
    """A server whose answers are `reply(path, body)`, which may be a coroutine.

    An answer is a JSON value, for status 200; (status, value) or (status, value, headers), where
    bytes are sent as they are; or HANG, DROP or DRIP.
    """
    state = Stub("")

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:-2])
                body = json.loads(await reader.readexactly(int(fields["content-length"])))
                path = head.split(" ")[1]
                state.asked.append((path, body))
                state.in_flight += 1
                state.most_in_flight = max(state.most_in_flight, state.in_flight)
                await asyncio.sleep(0.001)
                said = reply(path, body)
                if asyncio.iscoroutine(said):
                    said = await said
                if said == HANG:
                    await reader.read()
                    state.left += 1
                    break
                await _send(writer, said)
                state.in_flight -= 1
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    state.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield state
    finally:
        server.close()


@contextlib.contextmanager
def thread_stub(*answers: tuple[int, dict[str, str]]) -> Iterator[Stub]:
    """A server in a thread, for a client that blocks: (status, headers) of each GET in turn, the
    last one for all further ones."""
    state = Stub("")

    class _Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers = answers[min(len(state.asked), len(answers) - 1)]
            state.asked.append((self.path, None))
            self.send_response(status)
            for name, text in {"Content-Length": "0", **headers}.items():
                self.send_header(name, text)
            self.end_headers()

        def log_message(self, *args) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        state.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield state
        finally:
            server.shutdown()


async def _send(writer: asyncio.StreamWriter, said: object) -> None:
    if said == DROP:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
        raise ConnectionError
    if said == DRIP:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        while True:
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.01)
    status, value, headers = 200, said, {}
    if isinstance(said, tuple):
        status, value, headers = (*said, {})[:3]
    payload = value if isinstance(value, bytes) else json.dumps(value).encode()
    headers = {"Content-Length": len(payload), **headers}
    lines = [f"HTTP/1.1 {status} X", *(f"{name}: {text}" for name, text in headers.items())]
    writer.write("\r\n".join([*lines, "", ""]).encode() + payload)
    await writer.drain()
