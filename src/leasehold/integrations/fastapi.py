"""FastAPI: a lock as a dependency, and the lifespan of `leasehold.integrations.starlette`.

app = FastAPI(lifespan=lifespan("redis://localhost"))

@app.post("/orders/{order_id}/pay")
async def pay(order_id: int, lease: Annotated[AsyncLease, Depends(lock("order:{order_id}", wait=2))]): ...
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Unpack

from starlette.requests import Request

from leasehold.aio import AsyncClient, AsyncLease
from leasehold.config import Duration, LockArguments
from leasehold.integrations.starlette import MAX_BODY, Name, hold, leading, lifespan

__all__ = ["leading", "lifespan", "lock"]


def lock(
    name: Name,
    *,
    client: AsyncClient | None = None,
    retry_after: Duration = 1.0,
    max_body: int = MAX_BODY,
    **options: Unpack[LockArguments],
) -> Callable[[Request], AsyncIterator[AsyncLease]]:
    """For `Depends`: holds a lock while the endpoint runs, and gives it the lease. Options and answers are those of
    `leasehold.integrations.starlette.hold`.

    FastAPI keeps the lock until the response is sent. With `Depends(lock(...), scope="function")` the lock is released
    before that, and a lost lease becomes the answer 503.
    """

    async def held(request: Request) -> AsyncIterator[AsyncLease]:
        async with hold(request, name, client=client, retry_after=retry_after, max_body=max_body, **options) as lease:
            yield lease

    # FastAPI reads the annotations of dependencies, and could not find the names of this module.
    held.__annotations__ = {"request": Request}
    return held
