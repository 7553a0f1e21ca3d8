"""Celery: tasks of which one runs at a time, whatever the number of workers.

    app.conf.leasehold = "redis://localhost"  # a URL, or a dict with the arguments of leasehold.Client

    @app.task
    @singleton("import:{account_id}", on_busy="skip")
    def import_account(account_id): ...

The worker that runs a task acquires its lock by a claim of its own, also if the task was sent under one. So a message
that the broker delivers twice does not run twice at once, and no task releases the lock of another.

beat.py  a scheduler with a stand-by
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime
from random import uniform
from typing import Any, Final, Literal, TypeAlias, TypeVar, Unpack, get_args

import celery
from celery import states
from celery.exceptions import Retry
from celery.result import AsyncResult, EagerResult
from celery.signals import task_revoked
from celery.utils import uuid
from celery.utils.time import maybe_iso8601, maybe_make_aware

from leasehold.blocking import Client, Lease
from leasehold.client import lease_document
from leasehold.client.decorator import LockedFunction, accepted_parameters, call_filled, refuse_coroutine
from leasehold.config import Duration, LockArguments, check_seconds, lock_options
from leasehold.core.timing import NEVER
from leasehold.errors import ConfigError, LeaseholdError, NotAcquired, Unavailable, for_other_processes
from leasehold.runtime.base import run_sync

__all__ = ["SingletonTask", "client", "singleton"]

_log = logging.getLogger("leasehold.integrations.celery")

F = TypeVar("F", bound=Callable[..., Any])
OnBusy: TypeAlias = Literal["skip", "retry", "wait", "coalesce"]
At: TypeAlias = Literal["start", "send"]

_POLICY: Final = "leasehold_singleton"  # the attribute of a decorated function
_HEADER: Final = "leasehold_queued"  # of a message: the lease under which it was sent
_QUEUED: Final = "#queued"  # behind a name: the lock of the one task that may be in the queue, or wait, for it
_PURPOSE: Final = "task "  # and the id of the task


def client(app: celery.Celery | None = None) -> Client:
    """The client of an app (default: the current one), as its setting `leasehold` describes it: a URL, or a dict with
    the arguments of `leasehold.Client`. Without the setting: `$LEASEHOLD_URL`."""
    return _client(app or celery.current_app._get_current_object())


@functools.cache
def _client(app: celery.Celery) -> Client:
    given = app.conf.get("leasehold") or {}
    client = Client(given) if isinstance(given, str) else Client(**given)
    if client._core.engine_name == "memory" and not app.conf.task_always_eager:
        _log.warning("memory:// excludes no other worker: set app.conf.leasehold to an engine that all workers share")
    return client


def singleton(
    name: str,
    *,
    on_busy: OnBusy = "skip",
    at: At = "start",
    retry_in: Duration = 5.0,
    queued_ttl: Duration = 3600.0,
    client: Client | None = None,
    **options: Unpack[LockArguments],
) -> Callable[[F], F]:
    """A decorator for the function of a task, below `@app.task` or `@shared_task`: the task holds a lock while it runs.
    The name is a template over its arguments, such as "import:{account_id}".

    on_busy     if the lock is busy: "skip" returns None and does not run the function; "retry" sends the task again,
                to start in about `retry_in` seconds, and does so too if the engine does not answer; "wait" waits in the
                worker as the option `wait` says, and then raises `NotAcquired`; "coalesce" waits if no other task waits
                for the name, else returns None: the waiting one starts later than this one was sent
    at          "send": skip and coalesce also act when the task is sent, while another one is in the broker's queue.
                Needs `@app.task(base=SingletonTask)`
    queued_ttl  seconds after which a message that no worker has taken no longer keeps others from being sent
    client      default: the one that the app's setting `leasehold` describes
    options     as for `Client.lock`; `purpose` is the id of the task

    A parameter `lease` gets the lease; so do `self.request.lease` of a bound task, and `leasehold.current_lease()`. If
    the lease is lost, `lease.check()` raises `LeaseLost`, and so does the end of the function: the task has failed. If
    the engine does not answer, the task fails with `Unavailable` before it begins.

    If the name is held by an earlier delivery of the same message, whose worker may have been killed, "skip" and
    "coalesce" wait until the lease of a dead worker must have expired: a message that the broker delivers again is not
    lost.
    """
    retry_seconds = check_seconds("retry_in", retry_in)
    queued_seconds = check_seconds("queued_ttl", queued_ttl, allow_zero=False)
    if on_busy not in get_args(OnBusy):
        raise ConfigError(f"on_busy must be one of {', '.join(get_args(OnBusy))}, not {on_busy!r}")
    if at not in get_args(At) or (at == "send" and on_busy not in ("skip", "coalesce")):
        raise ConfigError(
            f'at must be "start", or "send" with on_busy "skip" or "coalesce", not {at!r} with {on_busy!r}'
        )
    lock_options("singleton()", 30.0, NEVER, options)  # the client, which knows its longest ttl, may be made later
    options.setdefault("wait", 0 if on_busy in ("skip", "retry") else None)

    def decorate(fn: F) -> F:
        policy = _Policy(fn, name, on_busy, at, retry_seconds, queued_seconds, client, options)

        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return policy.run(args, kwargs)
            except LeaseholdError as error:
                known = for_other_processes(error)  # Celery's JSON has the class and `args`: the sender must know both
                if known is error:
                    raise
                raise known from error

        policy.function.wrap(run)
        run.__dict__.setdefault("__signature__", inspect.signature(fn))  # Celery checks arguments by it
        setattr(run, _POLICY, policy)
        return run  # type: ignore[return-value]

    return decorate


class SingletonTask(celery.Task):  # type: ignore[misc]  # Celery has no types
    """The base of tasks with `@singleton(..., at="send")`. If such a task is not sent, because another one is in the
    queue (with "skip": or runs), `delay` and `apply_async` return the result of that one.

    Always sent: tasks of a chain, group or chord, tasks with `link` or `link_error`, and retries. If the engine does
    not answer, the task is sent: its lock is acquired when it starts.
    """

    abstract = True

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        **options: Any,
    ) -> Any:
        send = functools.partial(
            super().apply_async, args, kwargs, producer=producer, link=link, link_error=link_error, shadow=shadow
        )
        policy: _Policy | None = getattr(self.run, _POLICY, None)
        if policy is None or policy.at != "send" or self.app.conf.task_always_eager:
            return send(task_id=task_id, **options)
        task_id = task_id or uuid()
        bound_args = (self, *(args or ())) if _is_bound(self) else tuple(args or ())
        name = policy.format_name(bound_args, kwargs or {})
        queued = policy.reserve(self.app, name, task_id, _seconds_until_start(self.app, options))
        parts = link, link_error, options.get("chain"), options.get("chord"), options.get("group_id")
        if isinstance(queued, NotAcquired) and not any(parts) and self.request.id != task_id:  # the last: a retry
            _log.info("%s was not sent: %s", self.name, queued)
            purpose = queued.purpose or ""
            if purpose.startswith(_PURPOSE):
                return AsyncResult(purpose.removeprefix(_PURPOSE), app=self.app)
            return EagerResult(task_id, None, states.IGNORED)
        if isinstance(queued, str):
            options["headers"] = {**(options.get("headers") or {}), _HEADER: queued}
        try:
            return send(task_id=task_id, **options)
        except BaseException:
            if isinstance(queued, str):
                policy.release_queued(self.app, queued)
            raise


class _Policy:
    """What `singleton` was told about one function."""

    def __init__(
        self,
        fn: Callable[..., Any],
        template: str,
        on_busy: OnBusy,
        at: At,
        retry_in: float,
        queued_ttl: float,
        client: Client | None,
        options: LockArguments,
    ) -> None:
        self.function = LockedFunction(fn, template, "wait", blocking=True)
        self.at = at
        self._fn, self._filled = fn, accepted_parameters(fn, True, "lease")
        self._on_busy, self._retry_in, self._queued_ttl = on_busy, retry_in, queued_ttl
        self._client, self._options = client, options

    def client(self, app: celery.Celery | None) -> Client:
        return self._client or client(app)

    def format_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Raises `ConfigError` for a name that is the place in the queue of another: an argument may come from a user,
        who could keep the tasks of others from being sent."""
        name = self.function.format_name(args, kwargs)
        if name.endswith(_QUEUED):
            raise ConfigError(f"the name of a singleton cannot end in {_QUEUED}, as {name!r} does")
        return name

    # ------------------------------------------------------------------- in the worker

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        task = self._running_task()
        if task is not None and self.at == "send" and not isinstance(task, SingletonTask):
            raise ConfigError(
                f'{task.name} is a singleton with at="send": declare it with @app.task(base=SingletonTask), from '
                "leasehold.integrations.celery"
            )
        name = self.format_name(args, kwargs)
        with ExitStack() as stack:
            try:
                lease = self._enter(stack, task, name)
            except NotAcquired as busy:
                if self._on_busy == "retry":
                    raise self._retry(task, busy) from busy
                if self._on_busy == "skip" or busy.name != name:  # the other name: of the one task that may wait
                    _log.info("skipped: %s", busy)
                    return None
                raise
            except Unavailable as error:
                if self._on_busy == "retry":
                    raise self._retry(task, error) from error
                raise
            if task is not None:
                task.request.lease = lease
            result = call_filled(self._fn, args, kwargs, self._filled, {"lease": lease})
            return refuse_coroutine(result, self._fn)

    def _running_task(self) -> Any:
        """The task of this function that runs now. None: the function was called without its task."""
        task = celery.current_task
        return task if task and getattr(task.run, _POLICY, None) is self else None

    def _enter(self, stack: ExitStack, task: Any, name: str) -> Lease:
        """Acquire the lock. Raises `NotAcquired` if the task must not run now."""
        app, request = (None, None) if task is None else (task.app, task.request)
        queued = request.get(_HEADER) if request else None
        options: LockArguments = {**self._options, "purpose": _PURPOSE + request.id if request and request.id else None}
        try:
            if self._on_busy != "coalesce" or queued:
                return self._enter_lock(stack, app, name, options)
            try:
                return self._enter_lock(stack, app, name, {**options, "wait": 0})
            except NotAcquired:
                with ExitStack() as place:  # until this task holds the name, and before it runs
                    of_place: LockArguments = {"ttl": options.get("ttl"), "wait": 0, "purpose": options["purpose"]}
                    self._enter_lock(place, app, name + _QUEUED, of_place)
                    return self._enter_lock(stack, app, name, options)
        finally:
            if queued:  # the task runs, or was skipped
                self.release_queued(app, queued)

    def _enter_lock(self, stack: ExitStack, app: celery.Celery | None, name: str, options: LockArguments) -> Lease:
        lock, purpose = self.client(app).lock(name, **options), options["purpose"]
        try:
            return stack.enter_context(lock)
        except NotAcquired as busy:
            if self._on_busy not in ("skip", "coalesce") or purpose is None or busy.purpose != purpose:
                raise
            # An earlier delivery of this very message. If its worker was killed, the name is free after its ttl.
            longer: LockArguments = {**options, "wait": (busy.left or 0.0) + lock.options.ttl}
            return stack.enter_context(self.client(app).lock(name, **longer))

    def _retry(self, task: Any, error: Exception) -> Exception:
        """Send the task again, without counting that as one of the retries it may make itself."""
        if task is None or task.request.called_directly or task.request.is_eager:
            return error
        pause = self._retry_in * uniform(0.8, 1.2)  # noqa: S311  # not all at once
        again = task.signature_from_request(task.request, countdown=pause, retries=task.request.retries)
        again.apply_async()
        return Retry(exc=error, when=pause, sig=again)  # type: ignore[no-any-return]

    # ------------------------------------------------------------------- when it is sent

    def reserve(self, app: celery.Celery, name: str, task_id: str, seconds: float) -> str | NotAcquired | None:
        """The lease under which a task is sent, or why not to send it. None: the engine did not answer."""
        client = self.client(app)
        ttl = min(seconds + self._queued_ttl, client._core.options.max_ttl)
        lock = client.lock(name + _QUEUED, ttl=ttl, wait=0, purpose=_PURPOSE + task_id, require={"outlives"})
        try:
            lease = lock.acquire()
            try:
                running = self._running(client, name) if self._on_busy == "skip" else None
                if running is not None:
                    return running
                document = json.dumps(lease_document.dump(lease))
                lease_document.detach(lease)  # the release below then does nothing
                return document
            finally:
                lease.release()
        except NotAcquired as busy:
            return busy
        except Unavailable as error:
            _log.warning("%s is sent without a check for duplicates in the queue: %s", name, error)
            return None

    @staticmethod
    def _running(client: Client, name: str) -> NotAcquired | None:
        """A running task has acquired its own lock before it gave up its place in the queue."""
        for holding in client.inspect(name, exact=True):
            if holding.state == "held":
                return NotAcquired(name, holder=holding.holder, token=holding.token, left=holding.left)
        return None

    def release_queued(self, app: celery.Celery | None, document: str) -> None:
        try:
            run_sync(lease_document.release(self.client(app)._core, lease_document.load(document)))
        except (ConfigError, Unavailable) as error:
            _log.warning("could not free a task's place in the queue, so it stays taken until it expires: %s", error)


def _is_bound(task: Any) -> bool:
    return inspect.ismethod(getattr(task, "_orig_run", task.run))  # `_orig_run`: of a task with autoretry_for


def _seconds_until_start(app: celery.Celery, options: dict[str, Any]) -> float:
    eta = options.get("eta")
    if eta is None:
        return float(options.get("countdown") or 0.0)
    at: datetime = maybe_make_aware(maybe_iso8601(eta))
    seconds: float = (at - app.now()).total_seconds()
    return max(0.0, seconds)


@task_revoked.connect  # type: ignore[untyped-decorator]
def _release_revoked(sender: Any = None, request: Any = None, **_: object) -> None:
    """A task that was revoked, or expired, while it was in the queue."""
    policy: _Policy | None = getattr(getattr(sender, "run", None), _POLICY, None)
    if policy is not None and (queued := request.get(_HEADER)):
        policy.release_queued(sender.app, queued)
