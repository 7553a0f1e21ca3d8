"""A server that gives every request the same response."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any


@contextmanager
def serve_response(*, status: int = 200, body: bytes = b"", headers: dict[str, str] | None = None) -> Iterator[Any]:
    """Serve this response to every request, and record the requests in `.asked`."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            server.asked.append((self.command, self.path, dict(self.headers)))  # type: ignore[attr-defined]
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body if self.command != "HEAD" else b"")

        do_GET = do_PUT = do_POST = do_HEAD = answer

        def log_message(self, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.asked = []  # type: ignore[attr-defined]
        server.url = f"http://127.0.0.1:{server.server_port}"  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
