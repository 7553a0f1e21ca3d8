"""Leasehold over HTTP: idempotency keys and fencing tokens, for clients and services.

idempotency.py        ASGI middleware for `Idempotency-Key`
idempotency_wsgi.py   the same for WSGI
fence_client.py       sends a lease's token, raises `StaleToken` if the service refuses it
fence_middleware.py   WSGI and ASGI middleware that refuses stale tokens
headers.py            the headers of a request with a token, and of its refusal
responses.py          problem+json responses, and the parts of ASGI that the middlewares share
"""
