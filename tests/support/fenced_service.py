"""Fenced services in child processes, with one number per path: fenced_service.py wsgi|asgi PORT [FOLDER]"""

from __future__ import annotations

import sys
from collections import defaultdict
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from leasehold import fences

numbers: defaultdict[str, bytes] = defaultdict(lambda: b"0")


def wsgi_app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    path = environ["PATH_INFO"]
    if environ["REQUEST_METHOD"] == "PUT":
        numbers[path] = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [numbers[path]]


async def asgi_app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    if scope["method"] == "PUT":
        numbers[scope["path"]] = body
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": numbers[scope["path"]]})


class ThreadedServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 64


class QuietHandler(WSGIRequestHandler):
    def log_message(self, *args: object) -> None: ...


def main(side: str, port: str, folder: str = "") -> None:
    tokens = fences.FileTokens(folder) if folder else None
    if side == "wsgi":
        with make_server(
            "127.0.0.1", int(port), fences.WSGIFence(wsgi_app, tokens), ThreadedServer, QuietHandler
        ) as server:
            server.serve_forever()
    else:
        import uvicorn

        uvicorn.run(fences.ASGIFence(asgi_app, tokens), host="127.0.0.1", port=int(port), log_level="error")


if __name__ == "__main__":
    main(*sys.argv[1:])
