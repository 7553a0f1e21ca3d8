"""The bare ASGI application that the lock server is compared with: `server_echo.py PORT`."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final

import uvicorn

_ANSWER: Final = b"x" * 150  # as long as a lock server's answer to an acquire or a release, on average
_HEAD: Final = [
    (b"content-type", b"application/json"),
    (b"content-length", b"%d" % len(_ANSWER)),
    (b"cache-control", b"no-store"),
    (b"x-request-id", b"0123456789abcdef"),
]


async def app(
    _scope: dict[str, Any],
    receive: Callable[[], Awaitable[dict[str, Any]]],
    send: Callable[[dict[str, Any]], Awaitable[None]],
) -> None:
    while (await receive()).get("more_body"):
        continue
    await send({"type": "http.response.start", "status": 200, "headers": _HEAD})
    await send({"type": "http.response.body", "body": _ANSWER})


class _Server(uvicorn.Server):
    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        print(f"listening on http://127.0.0.1:{self.config.port}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    _Server(
        uvicorn.Config(
            app,
            port=int(sys.argv[1]),
            loop="uvloop",
            http="httptools",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=75,
            server_header=False,
            date_header=False,
        )
    ).run()
