"""Starlette: requests that hold a lock while they are processed, and background jobs that run in one worker of many.

    app = Starlette(routes, lifespan=lifespan("redis://localhost", jobs={"mailer": send_mails}))

    @locked("order:{order_id}", wait=2)
    async def pay(request): ...

The lifespan opens one client per worker process. A request that finds its lock busy gets 409 with Retry-After; if the
engine does not answer, it gets 503. Both are problem documents (RFC 9457), and the endpoint does not run.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from enum import Enum
from inspect import iscoroutinefunction
from random import random
from typing import Any, Final, TypeAlias, Unpack

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from leasehold.aio import AsyncClient, AsyncLease, AsyncLock
from leasehold.config import Duration, LockArguments, check_seconds
from leasehold.core.names import check_name
from leasehold.core.timing import backoff
from leasehold.errors import ConfigError, LeaseLost, NotAcquired, Unavailable
from leasehold.http.responses import PROBLEM_JSON, problem, problem_response

_log = logging.getLogger("leasehold.integrations.starlette")

Name: TypeAlias = str | Callable[[Request], str]
Job: TypeAlias = Callable[[AsyncLease], Coroutine[Any, Any, object]]
Lifespan: TypeAlias = Callable[[Any], AbstractAsyncContextManager[Mapping[str, Any]]]
OwnLifespan: TypeAlias = Lifespan | Callable[[Any], AbstractAsyncContextManager[None]]
Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]

_STATE: Final = "leasehold"  # the attribute of `request.state` that holds the client
_SHORTEST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # before a job that ended is started again
MAX_BODY: Final = 1_048_576  # bytes, as for `IdempotencyKey`


class RefusedRequest(HTTPException):
    """The request was not processed, or its lease was lost meanwhile."""

    def __init__(self, status: int, detail: str, retry_after: float | None = None) -> None:
        headers = {"Content-Type": PROBLEM_JSON}
        if retry_after is not None:
            headers["Retry-After"] = str(max(1, math.ceil(retry_after)))
        super().__init__(status, detail, headers)


# ---------------------------------------------------------------------- background jobs


def lifespan(
    client: AsyncClient | str | None = None, *, jobs: Mapping[str, Job] | None = None, inner: OwnLifespan | None = None
) -> Lifespan:
    """The lifespan of an application: has one client for `lock` and `locked`, by its URL (default: `$LEASEHOLD_URL`) or
    as you built it, and closes it when the application stops.

    jobs   background jobs by the name of their lock: see `leading`
    inner  a lifespan of your own, which runs inside
    """
    for name, job in (jobs or {}).items():
        _check_job(check_name(name), job)

    @asynccontextmanager
    async def run(app: Any) -> AsyncIterator[Mapping[str, Any]]:
        async with AsyncExitStack() as stack:
            opened = client if isinstance(client, AsyncClient) else AsyncClient(client)
            await stack.enter_async_context(opened)
            if opened._core.engine_name == "memory":
                _log.warning("memory:// excludes no other worker: with several, use an engine that all of them share")
            state = None if inner is None else await stack.enter_async_context(inner(app))
            for name, job in (jobs or {}).items():
                await stack.enter_async_context(leading(opened, name, job))
            yield {**(state or {}), _STATE: opened}

    return run


@asynccontextmanager
async def leading(client: AsyncClient, name: str, job: Job, **options: Unpack[LockArguments]) -> AsyncIterator[None]:
    """While its block runs, `job(lease)` runs in the background in one process of all that are in such a block.

    When the block ends, the job is cancelled and its lease released: the next process starts the job at once. If a
    process dies, the next one starts it after the ttl. If the lease is lost, the job is cancelled. A job that returns
    or raises is started again, perhaps in another process, after a pause of 1 second, doubled up to 60 seconds.
    """
    _check_job(name, job)
    election = client.election(name, **options)
    task = asyncio.create_task(_lead(election.lead, job), name=f"leasehold {name}")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def _check_job(name: str, job: object) -> None:
    if not iscoroutinefunction(job):
        raise ConfigError(f"the job {name} must be an async function of one argument, the lease, not {job!r}")


async def _lead(lead: Callable[[], AbstractAsyncContextManager[AsyncLease]], job: Job) -> None:
    """Campaign and run the job, term after term, until cancelled."""
    lock, tries = lead(), 0
    while True:
        began = asyncio.get_running_loop().time()
        try:
            async with lock as term:
                began = asyncio.get_running_loop().time()
                _log.info("%s: this process leads (token %d), starting its job", term.name, term.token)
                await job(term)
            _log.warning("%s: the job returned; it is started again, because it should run until cancelled", term.name)
        except (LeaseLost, Unavailable) as error:
            _log.warning("this process does not lead: %s", error)
        except Exception:
            _log.exception("a job failed")
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if own is None or own.cancelling():
                raise
            _log.exception("a job failed: it awaited what had been cancelled")
        lasted = asyncio.get_running_loop().time() - began
        tries = 1 if lasted > _LONGEST_PAUSE else tries + 1
        await asyncio.sleep(backoff(tries - 1, _SHORTEST_PAUSE, _LONGEST_PAUSE, 0.5 + random() / 2))  # noqa: S311  # a pause


# ------------------------------------------------------------------------------ requests


def locked(
    name: Name,
    *,
    client: AsyncClient | None = None,
    retry_after: Duration = 1.0,
    max_body: int = MAX_BODY,
    **options: Unpack[LockArguments],
) -> Callable[[Endpoint], Endpoint]:
    """A decorator for async endpoints: the lock is held while the endpoint runs. Its options are those of `hold`."""

    def decorate(endpoint: Endpoint) -> Endpoint:
        @functools.wraps(endpoint)
        async def run(request: Request) -> Response:
            try:
                async with hold(request, name, client=client, retry_after=retry_after, max_body=max_body, **options):
                    return await endpoint(request)
            except RefusedRequest as refused:
                document = problem(refused.status_code, refused.detail)
                _, body = problem_response(document, request.method)
                return Response(body, refused.status_code, refused.headers)

        return run

    return decorate


@asynccontextmanager
async def hold(
    request: Request,
    name: Name,
    *,
    client: AsyncClient | None = None,
    retry_after: Duration = 1.0,
    max_body: int = MAX_BODY,
    **options: Unpack[LockArguments],
) -> AsyncIterator[AsyncLease]:
    """Hold a lock while a request is processed.

    name         a template over the path's parameters, such as "order:{order_id}", or a function of the request; under
                 FastAPI, over their values as the endpoint gets them: an order_id of type int has one spelling
    client       default: that of the application's `lifespan`
    retry_after  seconds for the Retry-After header
    max_body     maximum bytes of a request body that is read here; FastAPI reads itself what its endpoint declares
    options      as for `AsyncClient.lock`; `wait` is 0 unless given, so that no worker fills up with waiting requests

    The body of the request is read before the lock is acquired: a slow upload does not hold the lock. It is kept in
    memory, also if the endpoint does not read it. If the sender disconnects while the request waits, the request leaves
    the queue. Raises an `HTTPException`: 409 if the lock is busy, 503 if the engine does not answer or the lease is
    lost, 400 if the path gives no valid name, 413 if the body is too large.
    """
    seconds = check_seconds("retry_after", retry_after)
    if isinstance(max_body, bool) or not isinstance(max_body, int) or max_body < 0:
        raise ConfigError(f"max_body must be a number of bytes, not {max_body!r}")
    options.setdefault("wait", 0)
    lock = _client(request, client).lock(_format_name(request, name), **options)
    await _read_body(request, max_body)
    try:
        async with AsyncExitStack() as stack:
            yield await _enter_unless_gone(request, lock, stack, seconds)
    except LeaseLost as lost:
        if lost.name != lock.name:  # of a lock that the endpoint takes itself
            raise
        detail = "the lock was lost while this request was processed: a part of it may have been carried out"
        raise RefusedRequest(503, detail) from lost


async def _read_body(request: Request, max_body: int) -> None:
    """Read the body for the endpoint, unless FastAPI has read it already. `Request.body` has no bound."""
    if hasattr(request, "_body"):
        return
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_body:
                raise RefusedRequest(413, f"the body of this request must not exceed {max_body} bytes")
    except ClientDisconnect:
        raise RefusedRequest(499, "the sender disconnected before the end of this request") from None
    except RuntimeError:  # it was read as a form
        return
    request._body = bytes(body)


async def _enter_unless_gone(
    request: Request, lock: AsyncLock, stack: AsyncExitStack, retry_after: float
) -> AsyncLease:
    """Enter the lock, or leave its queue as soon as the sender of the request has disconnected."""
    try:
        async with asyncio.timeout(None) as waiting:
            watcher = None if lock.options.wait == 0 else asyncio.create_task(_end_when_gone(request, waiting))
            try:
                return await stack.enter_async_context(lock)
            finally:
                if watcher is not None:
                    watcher.cancel()
    except NotAcquired as busy:
        raise RefusedRequest(409, "another request is in progress here; repeat this one later", retry_after) from busy
    except TimeoutError as gone:
        raise RefusedRequest(499, "the sender disconnected while this request was waiting") from gone
    except Unavailable as error:
        _log.warning("a request was refused: %s", error)
        detail = "the locks cannot be reached now, and nothing was carried out; repeat this request later"
        raise RefusedRequest(503, detail, max(retry_after, error.retry_in or 0.0)) from error


async def _end_when_gone(request: Request, waiting: asyncio.Timeout) -> None:
    """The body has been read, so the next message is that the sender disconnected."""
    await request.receive()
    waiting.reschedule(asyncio.get_running_loop().time())


def _client(request: Request, client: AsyncClient | None) -> AsyncClient:
    found = client or getattr(request.state, _STATE, None)
    if not isinstance(found, AsyncClient):
        raise ConfigError(
            "the application has no Leasehold client: create it with lifespan=leasehold.integrations.starlette."
            "lifespan(URL), or pass client="
        )
    return found


def _path_values(request: Request) -> dict[str, Any]:
    """The parameters of the path as the endpoint gets them. Starlette's are converted already. FastAPI converts them
    for its endpoints only: as texts, `/orders/7` and `/orders/07` would give two locks of one order."""
    values = dict(request.path_params)
    dependants = [getattr(request.scope.get("route"), "dependant", None)]  # of FastAPI: the endpoint, then what it uses
    pending = set(values)
    for dependant in filter(None, dependants):
        for field in dependant.path_params:
            if field.alias in pending:
                pending.remove(field.alias)
                value, errors = field.validate(values[field.alias], {}, loc=())
                if not errors:  # else FastAPI answers 422
                    values[field.alias] = value.value if isinstance(value, Enum) else value
        dependants += dependant.dependencies
    return values


def _format_name(request: Request, name: Name) -> str:
    if callable(name):
        formatted = name(request)
        if not isinstance(formatted, str):
            raise ConfigError(f"the function for the name of a lock must return a str, not {formatted!r}")
    else:
        try:
            formatted = name.format(**_path_values(request))
        except (KeyError, IndexError) as unknown:
            known = ", ".join(request.path_params) or "none"
            raise ConfigError(
                f"{name!r} uses {unknown}, which is not a parameter of this path (its parameters: {known})"
            ) from None
    try:
        return check_name(formatted)
    except ConfigError:
        raise RefusedRequest(400, "a parameter of this request is not valid in the name of a lock") from None
