"""Django: locks by the settings of a project, released after the transaction they protect.

    INSTALLED_APPS = [..., "leasehold.integrations.django"]
    LEASEHOLD = {"URL": "redis://localhost", "NAMESPACE": "shop"}

    with lock("stock:7", wait=5):
        ...

`LEASEHOLD` has the arguments of `leasehold.Client`, in capitals. `manage.py leasehold ls`, `break`, `migrate` and all
other commands use the same engine; `manage.py check` checks the settings.

apps.py      the application for INSTALLED_APPS, and the checks of `manage.py check`
management/  the commands of manage.py
"""

from __future__ import annotations

import functools
import logging
import math
from asyncio import AbstractEventLoop, get_running_loop
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from typing import Any, TypeVar, Unpack

from asgiref.sync import iscoroutinefunction  # knows the async views of classes on Python 3.11, too
from django.conf import settings
from django.core.signals import setting_changed
from django.db import transaction
from django.http import HttpRequest, HttpResponse

from leasehold.aio import AsyncClient, AsyncLock
from leasehold.blocking import Client, Lease
from leasehold.client.decorator import LockedFunction, OnBusy, accepted_parameters, call_filled, refuse_coroutine
from leasehold.config import Duration, LockArguments, check_seconds
from leasehold.core.names import check_name
from leasehold.errors import ConfigError, LeaseLost, NotAcquired, Unavailable
from leasehold.http.responses import problem, problem_response

__all__ = ["alock", "client", "lock", "locked", "locked_view"]

_log = logging.getLogger("leasehold.integrations.django")

F = TypeVar("F", bound=Callable[..., Any])

# ------------------------------------------------------------------------------- clients

_async_clients: dict[AbstractEventLoop, AsyncClient] = {}


@functools.cache
def client() -> Client:
    """The client of this process, as `settings.LEASEHOLD` describes it. Raises `ConfigError` for bad settings."""
    return Client(**client_arguments())


def async_client() -> AsyncClient:
    """The client of the running event loop. An ASGI server has one loop. A WSGI server has a new one for each request
    to an async view: it takes over the client of a loop that is closed."""
    running = get_running_loop()
    if running not in _async_clients:
        closed = next((loop for loop in list(_async_clients) if loop.is_closed()), None)
        found = None if closed is None else _async_clients.pop(closed, None)  # None: another thread was faster
        _async_clients[running] = found or AsyncClient(**client_arguments())
    return _async_clients[running]


def client_arguments() -> dict[str, Any]:
    given = getattr(settings, "LEASEHOLD", {})
    known = ("URL", "NAMESPACE", "HOLDER", "TTL", "MAX_TTL", "CALL_TIMEOUT", "BREAKER", "DRIFT", "PASSWORD", "ON_EVENT")
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ConfigError(f"settings.LEASEHOLD has an unknown key {unknown[0]!r}: its keys are {', '.join(known)}")
    return {name.lower(): value for name, value in given.items()}


def _forget_clients(*, setting: str, **_: object) -> None:
    if setting == "LEASEHOLD":
        client.cache_clear()
        _async_clients.clear()


setting_changed.connect(_forget_clients)

# --------------------------------------------------------------------------------- locks


@contextmanager
def lock(name: str, *, using: str | None = None, **options: Unpack[LockArguments]) -> Iterator[Lease]:
    """Hold a lock while the block runs. Inside a transaction (`atomic`, `ATOMIC_REQUESTS`) the lock is held until the
    transaction is committed or rolled back: the next holder sees what this one wrote. The block can be entered again in
    the same transaction, and gets the same lease.

    using    the database whose transaction counts (default: the default database)
    options  as for `Client.lock`

    Raises as `with client.lock(name)` does. If the lease is lost, the end of the block raises `LeaseLost`, before the
    transaction is committed.
    """
    connection = transaction.get_connection(using)
    if not connection.in_atomic_block:
        with client().lock(name, **options) as released_at_once:
            yield released_at_once
        return
    in_transaction = [entry for _, entry, *_ in connection.run_on_commit if isinstance(entry, _HeldInTransaction)]
    lease = next((entry.lease for entry in in_transaction if entry.lease.name == name), None)
    if lease is None:
        stack = ExitStack()
        lease = stack.enter_context(client().lock(name, **options))
        transaction.on_commit(_HeldInTransaction(lease, stack), using=using)  # no other reference: see there
        connection.run_on_commit.insert(0, connection.run_on_commit.pop())  # ahead of hooks that may fail or take long
    lease.check()
    yield lease
    lease.check()


class _HeldInTransaction:
    """Releases a lock when the transaction is over. Django calls it after a commit. After a rollback, also one to a
    savepoint, Django calls nothing, but drops it."""

    def __init__(self, lease: Lease, stack: ExitStack) -> None:
        self.lease, self._stack = lease, stack

    def __call__(self) -> None:
        try:
            self._stack.close()
        except LeaseLost as lost:  # after the block's own check; it is too late to undo the transaction
            _log.warning("lost after the last check, before the transaction was over: %s", lost)

    def __del__(self) -> None:
        self()


def alock(name: str, **options: Unpack[LockArguments]) -> AsyncLock:
    """For `async with`, in async views under an ASGI server. Knows nothing of transactions: Django runs those in other
    threads."""
    return async_client().lock(name, **options)


def locked(
    name: str, *, on_busy: OnBusy = "wait", using: str | None = None, **options: Unpack[LockArguments]
) -> Callable[[F], F]:
    """A decorator for functions, async functions, and the method `handle` of commands: runs them under `lock`. The name
    is a template over the arguments, such as "user:{user_id}". A parameter `lease` gets the lease.

    on_busy  if the lock is busy: "wait" waits as the option `wait` says, "raise" raises `NotAcquired` at once, "skip"
             returns None without running the function
    """

    def decorate(fn: F) -> F:
        template, filled = LockedFunction(fn, name, on_busy, blocking=False), accepted_parameters(fn, False, "lease")

        if iscoroutinefunction(fn):

            async def run_async(*args: Any, **kwargs: Any) -> Any:
                async with AsyncExitStack() as stack:
                    formatted = template.format_name(args, kwargs)
                    try:
                        lease = await stack.enter_async_context(alock(formatted, **template.options(options)))
                    except NotAcquired:
                        if on_busy == "skip":
                            return None
                        raise
                    return await call_filled(fn, args, kwargs, filled, {"lease": lease})

            return template.wrap(run_async)  # type: ignore[return-value]

        def run(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                formatted = template.format_name(args, kwargs)
                try:
                    lease = stack.enter_context(lock(formatted, using=using, **template.options(options)))
                except NotAcquired:
                    if on_busy == "skip":
                        return None
                    raise
                return refuse_coroutine(call_filled(fn, args, kwargs, filled, {"lease": lease}), fn)

        return template.wrap(run)  # type: ignore[return-value]

    return decorate


def locked_view(
    name: str, *, retry_after: Duration = 1.0, using: str | None = None, **options: Unpack[LockArguments]
) -> Callable[[F], F]:
    """A decorator for views, plain or async: runs the view under the lock. The name is a template over the view's
    arguments, such as "order:{order_id}". `wait` is 0 unless given. If the lock is busy, the answer is 409; if the
    engine does not answer, or the lease is lost, 503: problem documents with Retry-After. If the arguments give no
    valid name, because one is too long, the answer is 400."""
    seconds = check_seconds("retry_after", retry_after)
    options.setdefault("wait", 0)

    def decorate(view: F) -> F:
        under_lock, template = (
            locked(name, using=using, **options)(view),
            LockedFunction(view, name, "wait", blocking=False),
        )

        def check_arguments(*args: Any, **kwargs: Any) -> None:
            try:
                check_name(template.format_name(args, kwargs))
            except ConfigError as invalid:
                raise _InvalidName from invalid

        if iscoroutinefunction(view):

            @functools.wraps(view)
            async def run_async(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
                try:
                    check_arguments(request, *args, **kwargs)
                    return await under_lock(request, *args, **kwargs)
                except (_InvalidName, LeaseLost, NotAcquired, Unavailable) as error:
                    return _refuse(request, error, seconds)

            return run_async  # type: ignore[return-value]

        @functools.wraps(view)
        def run(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
            try:
                check_arguments(request, *args, **kwargs)
                return under_lock(request, *args, **kwargs)
            except (_InvalidName, LeaseLost, NotAcquired, Unavailable) as error:
                if transaction.get_connection(using).in_atomic_block:
                    transaction.set_rollback(True, using=using)  # Django commits whenever a view answers
                return _refuse(request, error, seconds)

        return run  # type: ignore[return-value]

    return decorate


class _InvalidName(Exception):
    """The arguments of a view, which its caller chose, give no valid name of a lock."""


def _refuse(request: HttpRequest, error: Exception, retry_after: float) -> HttpResponse:
    if isinstance(error, _InvalidName):
        headers, body = problem_response(
            problem(400, "a parameter of this request is not valid"), request.method or "GET"
        )
        return HttpResponse(body, status=400, headers=dict(headers))
    _log.warning("a request was refused: %s", error)
    if isinstance(error, NotAcquired):
        document = problem(409, "another request is in progress here; repeat this one later")
    elif isinstance(error, LeaseLost):
        document = problem(503, "the lock was lost while this request was processed: parts may have been carried out")
    else:
        document = problem(503, "the locks cannot be reached now; repeat this request later")
    headers, body = problem_response(document, request.method or "GET")
    headers.append(("Retry-After", str(max(1, math.ceil(retry_after)))))
    return HttpResponse(body, status=document["status"], headers=dict(headers))
