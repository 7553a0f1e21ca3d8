"""The public WSGI middleware: `leasehold.wsgi.IdempotencyKey(app, client)`. The code is in `leasehold.http`."""

from leasehold.http.idempotency_wsgi import WSGIIdempotencyKey as IdempotencyKey

__all__ = ["IdempotencyKey"]
