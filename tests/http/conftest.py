"""An application that takes orders, and hand-written requests to it."""

import asyncio
from types import SimpleNamespace

import pytest

import leasehold
from leasehold.http.idempotency import IdempotencyKey


class Shop:
    """An application that counts the orders it takes."""

    def __init__(self, status: int = 201, body: bytes = b"", gate: asyncio.Event | None = None) -> None:
        self.status, self.body, self.gate, self.orders = status, body, gate, []

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        message = await receive()
        assert not message.get("more_body", False)
        self.orders.append(message["body"])
        if self.gate:
            await self.gate.wait()
        body = self.body or f"order {len(self.orders)}".encode()
        await send({"type": "http.response.start", "status": self.status, "headers": [(b"x-order", b"yes")]})
        await send({"type": "http.response.body", "body": body[:3], "more_body": True})
        await send({"type": "http.response.body", "body": body[3:]})


async def post(
    app, body=b"{}", key=b"k1", *, method="POST", path="/orders", query=b"", more=(), chunks=None, scope=None
):
    """Send one request and return status, headers and body. If `chunks` ends with None, the sender hangs up there."""
    headers = [(b"Idempotency-Key", key)] if key is not None else []
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query,
        "headers": [*headers, *more],
        **(scope or {}),
    }
    parts = [body] if chunks is None else list(chunks)
    messages = []

    async def receive():
        if not parts or (part := parts.pop(0)) is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def send(message):
        messages.append(message)

    await app(scope, receive, send)
    if not messages:
        return None
    return (
        messages[0]["status"],
        dict(messages[0]["headers"]),
        b"".join(message.get("body", b"") for message in messages[1:]),
    )


def served(work, shop=None, **options):
    """Run `work(app, shop)` with a new client."""

    async def main():
        async with leasehold.AsyncClient("memory://") as client:
            inner_app = shop or Shop()
            return await work(IdempotencyKey(inner_app, client, **options), inner_app)

    return asyncio.run(main())


@pytest.fixture
def http():
    return SimpleNamespace(Shop=Shop, post=post, served=served)
