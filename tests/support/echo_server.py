"""A small application behind the protocol of the lock server, in a thread of the test."""

import asyncio
import contextlib
import json
import socket
import threading
import time

import uvicorn

from leasehold.server.auth import certificate_names
from leasehold.server.protocol import Rules, protocol_for
from leasehold.server.run import Server


class Echo:
    """Answers with the path, the headers and the body. `/slow` waits until `gate` is set or the caller is gone,
    `/large` has an answer of 8 MB, which no kernel takes at once, and that of `/endless` does not end."""

    def __init__(self):
        self.requests, self.gate, self.hung_up = [], threading.Event(), threading.Event()

    async def __call__(self, scope, receive, send):
        self.requests.append(scope["path"])
        if scope["path"] == "/endless":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})
                await asyncio.sleep(0)
        body, more = b"", scope["path"] != "/early"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.hung_up.set()
                return
            body += message["body"]
            more = message["more_body"]
        if scope["path"] == "/slow":
            gone = asyncio.ensure_future(receive())
            while not self.gate.is_set() and not gone.done():
                await asyncio.sleep(0.01)
            if gone.done():
                self.hung_up.set()
                return
            gone.cancel()
        answer = {
            "path": scope["path"],
            "headers": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in scope["headers"]],
            "body": len(body),
            "large": "x" * (8_000_000 if scope["path"] == "/large" else 0),
            "names": list(certificate_names(scope)),
        }
        sent = json.dumps(answer).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(sent))]})
        await send({"type": "http.response.body", "body": sent})


class ThreadServer(Server):
    """The lock server's own, without its signals: these are for the main thread."""

    @contextlib.contextmanager
    def capture_signals(self):
        yield


@contextlib.contextmanager
def serving(loop="uvloop", certificates=None, **rules):
    """Serve an `Echo` with these rules; with `certificates`, over TLS."""
    app = Echo()
    config = uvicorn.Config(
        app,
        http=protocol_for(Rules(**{"connections": 100, **rules})),
        loop=loop,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=1,
    )
    config.load()
    server = ThreadServer(config, app, certificates, lambda: None, lambda: None)
    sock = socket.create_server(("127.0.0.1", 0), backlog=2048)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)  # as that of a lock server
    app.port, app.server = sock.getsockname()[1], server
    thread = threading.Thread(target=server.run, args=([sock],))
    thread.start()
    try:
        poll(lambda: server.started)
        yield app
    finally:
        app.gate.set()
        server.should_exit = server.force_exit = True
        thread.join(timeout=60)
        assert not thread.is_alive()


def poll(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
