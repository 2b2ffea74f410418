"""A loopback server that speaks the hub's routes for small files of dataset repositories."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serve(files: Mapping[str, bytes], *, token: str | None = None) -> Iterator[tuple[str, list]]:
    """Serves {"owner/name/path": content}; yields the endpoint and the list of requests seen.

    token: what a request's authorization must hold, if given.
    """
    seen: list[tuple[str, str, dict]] = []

    class Handler(BaseHTTPRequestHandler):
        def _answer(self, with_body: bool) -> None:
            seen.append((self.command, self.path, dict(self.headers)))
            if token is not None and self.headers.get("authorization") != f"Bearer {token}":
                return self._send(401, b'{"error": "Unauthorized"}', {}, with_body)
            prefix, _, rest = self.path.partition("/datasets/")
            name, _, file = rest.partition("/resolve/")
            revision, _, file = file.partition("/")
            content = files.get(f"{name}/{file}")
            if prefix or content is None or revision not in ("main", COMMIT, "v1"):
                code = "RevisionNotFound" if content is not None else "EntryNotFound"
                return self._send(404, b"", {"X-Error-Code": code}, with_body)
            etag = hashlib.sha256(content).hexdigest()
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'}
            return self._send(200, content, headers, with_body)

        def _send(self, status: int, body: bytes, headers: dict, with_body: bool) -> None:
            self.send_response(status)
            for key, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(key, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def do_GET(self) -> None:
            self._answer(True)

        def do_HEAD(self) -> None:
            self._answer(False)

        def log_message(self, *_) -> None:
            """Nothing on stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        server.server_close()


def jsonl(rows: list[dict]) -> bytes:
    """Lines of a file of questions."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode()
