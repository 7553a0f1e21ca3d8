"""An object store over HTTP with conditional writes. Below /hash an ETag is the MD5 of the content, as in S3. Below
/version every write gets a new ETag."""

from __future__ import annotations

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar


class Handler(BaseHTTPRequestHandler):
    objects: ClassVar[dict[str, tuple[bytes, str, dict[str, str]]]] = {}
    mutex: ClassVar[threading.Lock] = threading.Lock()
    writes: ClassVar[int] = 0
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None: ...

    def answer(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        found = self.objects.get(self.path)
        if found is None:
            self.answer(404)
        else:
            self.answer(200, found[0], ETag=found[1], **found[2])

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with self.mutex:
            found = self.objects.get(self.path)
            if_match, absent = self.headers.get("If-Match"), self.headers.get("If-None-Match") == "*"
            if (absent and found) or (if_match is not None and (found is None or found[1] != if_match)):
                self.answer(412)
                return
            Handler.writes += 1
            by_hash = self.path.startswith("/hash/")
            etag = hashlib.md5(body).hexdigest() if by_hash else str(Handler.writes)
            metadata = {name: value for name, value in self.headers.items() if name.lower().startswith("x-amz-meta-")}
            self.objects[self.path] = body, f'"{etag}"', metadata
            self.answer(200, ETag=f'"{etag}"')


class Store(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None: ...


def serve() -> Store:
    store = Store(("127.0.0.1", 0), Handler)
    threading.Thread(target=store.serve_forever, daemon=True).start()
    return store
