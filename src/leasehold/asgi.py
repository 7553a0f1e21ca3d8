"""The public ASGI middleware: `leasehold.asgi.IdempotencyKey(app, client)`. The code is in `leasehold.http`."""

from leasehold.http.idempotency import IdempotencyKey

__all__ = ["IdempotencyKey"]
