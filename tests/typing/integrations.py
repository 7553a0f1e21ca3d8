"""Real usage of the integrations, for `mypy --strict`; never run."""

from typing import Annotated, assert_type

from alembic import context
from fastapi import Depends, FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from leasehold import AsyncClient, AsyncLease, Client, Lease
from leasehold.asgi import IdempotencyKey
from leasehold.integrations import alembic, celery, django, fastapi, starlette
from leasehold.wsgi import IdempotencyKey as WSGIIdempotencyKey


async def send_mails(lease: AsyncLease) -> None:
    lease.check()


def plain_job(lease: AsyncLease) -> None: ...


app = FastAPI(lifespan=fastapi.lifespan("memory://", jobs={"mailer": send_mails}))
fastapi.lifespan("memory://", jobs={"mailer": plain_job})  # type: ignore[dict-item]
OrderLock = Annotated[AsyncLease, Depends(fastapi.lock("order:{order_id}", wait=2, ttl="30s"))]
fastapi.lock("order", timeout=2)  # type: ignore[call-arg]


@app.post("/orders/{order_id}")
async def pay(order_id: int, lease: OrderLock) -> int:
    return lease.token + order_id


@starlette.locked(lambda request: request.url.path, retry_after=2)
async def show(request: Request) -> Response:
    return PlainTextResponse(request.method)


def migrate() -> None:
    with alembic.locked(context, wait=60) as lease:
        assert_type(lease, Lease | None)


@django.locked("user:{user_id}", wait=0)
def rename(user_id: int) -> str:
    with django.lock("stock", ttl=10) as lease:
        assert_type(lease, Lease)
    return str(user_id)


assert_type(rename(7), str)


def wrap(asgi_client: AsyncClient, client: Client, wsgi_app: object) -> None:
    IdempotencyKey(app, asgi_client, keep=60)
    IdempotencyKey(app, client)  # type: ignore[arg-type]
    WSGIIdempotencyKey(lambda environ, start_response: [], client, required=True)
    WSGIIdempotencyKey(lambda environ, start_response: [], client, limit=1)  # type: ignore[call-arg]


@celery.singleton("import:{account_id}", on_busy="coalesce", at="send", ttl="1m")
def import_account(account_id: int) -> str:
    return str(account_id)


assert_type(import_account(7), str)
assert_type(celery.client(), Client)
celery.singleton("report", on_busy="drop")  # type: ignore[arg-type]
celery.singleton("report", timeout=2)  # type: ignore[call-arg]
