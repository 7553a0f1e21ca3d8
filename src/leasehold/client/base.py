"""What `Client` and `AsyncClient` share: one engine, one runtime, one watchdog."""

from __future__ import annotations

import atexit
import os
import signal
import time
import weakref
from collections.abc import Awaitable, Callable
from typing import ClassVar, Protocol

from leasehold.client.core import ClientCore
from leasehold.client.lease import BaseLease
from leasehold.client.lock import Shape
from leasehold.config import (
    DAY,
    ClientOptions,
    Duration,
    LockArguments,
    LockOptions,
    check_limit,
    check_seconds,
    lock_options,
)
from leasehold.core import timing
from leasehold.core.deadlocks import Deadlock, deadlocks, seen_in_both
from leasehold.core.names import check_name, check_prefix
from leasehold.credentials import PasswordArgument
from leasehold.engines.base import Opener
from leasehold.errors import ConfigError, Unsupported
from leasehold.events import Hook
from leasehold.model import Claim, Holding, Traits
from leasehold.runtime.base import Runtime, maybe_await

_CORES: dict[int, weakref.ref[ClientCore]] = {}  # every client core of this process, for the hooks at fork and exit
_EXIT_SECONDS = 0.5  # at most this long the interpreter's exit waits for engines
_EXIT_POLL_INTERVAL = 0.002
_MAX_TIME = 6e10  # Unix time that every calendar has: an engine may have an age that another program wrote


class Engines(Protocol):
    def opener(self, scheme: str) -> Opener: ...


class Closable(Protocol):
    def close(self) -> Awaitable[None] | None: ...


class BaseClient:
    _runtime_type: ClassVar[Callable[[], Runtime]]
    _lease_type: ClassVar[type[BaseLease]]
    _engines: ClassVar[Engines]  # set by blocking and aio: this package must not import the engines

    def __init__(
        self,
        url: str | object | None = None,
        *,
        namespace: str = "",
        holder: str | None = None,
        ttl: Duration = 30.0,
        call_timeout: Duration = 5.0,
        on_event: Hook | None = None,
        max_ttl: Duration = DAY,
        breaker: bool = False,
        password: PasswordArgument | None = None,
        drift: float = timing.DRIFT,
        engine: Opener | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        ttl, call_timeout = check_seconds("ttl", ttl), check_seconds("call_timeout", call_timeout)
        max_ttl = check_seconds("max_ttl", max_ttl)
        if url is not None and not isinstance(url, str):
            from leasehold.pools import settings_of  # only here: it would slow `import leasehold` down

            url, found = settings_of(url)
            password = found if password is None else password
        options = ClientOptions(url, namespace, holder, ttl, call_timeout, on_event, max_ttl, breaker, password, drift)
        options.checked()
        config = (
            options.engine_config()
            if engine is None or url is not None
            else options.replace(url="own://").engine_config()
        )
        self._options = options.replace(url=config.url)
        self._picklable = engine is None and runtime is None
        opener = self._engines.opener(config.scheme) if engine is None else engine
        self._core = ClientCore(self._options, config, opener, runtime or type(self)._runtime_type())
        self._open_stores: dict[str, Closable] = {}
        _register_for_hooks(self._core, at_exit=runtime is None)  # another runtime may have no threads to wait for

    __init__.__qualname__ = "Client"  # in the text of a TypeError

    def __repr__(self) -> str:
        # The URL may hold a password.
        return f"<{type(self).__name__} {self._core.engine_name}:// namespace={self._options.namespace!r}>"

    def __reduce__(self) -> tuple[object, ...]:
        if not self._picklable:
            raise TypeError(
                "a client built with engine= or runtime= cannot be pickled: build another one where you need it"
            )
        return _rebuild, (type(self), self._options)

    def __del__(self) -> None:
        if core := getattr(self, "_core", None):
            core.stop_when_idle()

    def _new_client(self, url: str) -> BaseClient:
        """A client of the same kind for another URL, even if a subclass has other arguments."""
        client = BaseClient.__new__(type(self))
        BaseClient.__init__(client, url, call_timeout=self._options.call_timeout, drift=self._options.drift)
        return client

    @property
    def traits(self) -> Traits:
        """What this engine, as configured, promises."""
        return self._core.traits

    def _lock_options(self, where: str, arguments: LockArguments) -> LockOptions:
        return lock_options(where, self._options.ttl, self._options.max_ttl, arguments)

    async def _inspect(self, prefix: str, exact: bool) -> list[Holding]:
        check_prefix(prefix)
        engine = self._core.engine()
        holdings = await engine.inspect(self._options.namespace, prefix, exact, self._core.deadline())
        now = self._core.runtime.wall()
        return [
            holding._replace(acquired_at=now - holding.age)
            if holding.state == "held" and holding.since_grant and abs(now - holding.age) < _MAX_TIME
            else holding
            for holding in holdings
        ]

    async def _deadlocks(self) -> list[Deadlock]:
        """Inspects twice: a cycle in both results existed at one moment, even if the engine reads name by name."""
        core = self._core
        if not core.traits.fair:
            raise Unsupported(
                f"{core.engine_name} keeps no queue of waiters, so deadlocks cannot be found: use another engine",
                engine=core.engine_name,
                missing=("fair",),
            )
        first = deadlocks(await self._inspect("", False))
        return seen_in_both(first, deadlocks(await self._inspect("", False))) if first else []

    async def _break(self, name: str, token: int, why: str | None) -> bool:
        check_name(name)
        if why is not None and not isinstance(why, str):
            raise ConfigError(f"why must be the reason of the break, as text for the event, not {why!r}")
        if isinstance(token, bool) or not isinstance(token, int):
            raise ConfigError(f"token must be the number that inspect() shows, not {token!r}")
        core = self._core
        broken = await core.engine().break_(self._options.namespace, name, token, core.deadline())
        if broken:
            claim = Claim(self._options.namespace, name, "", "", core.holder(None, None), 0.0)
            core.emit("broken", claim, token=token, actor=claim.holder.label, why=why)
        return broken

    async def _set_limit(self, name: str, limit: int | None, why: str | None) -> None:
        check_name(name)
        if limit is not None:
            check_limit(limit)
        if why is not None and not isinstance(why, str):
            raise ConfigError(f"why must be the reason of the new limit, as text for the event, not {why!r}")
        core = self._core
        await core.engine().set_limit(self._options.namespace, name, limit, core.deadline())
        claim = Claim(self._options.namespace, name, "", "", core.holder(None, None), 0.0)
        core.emit("resized", claim, actor=claim.holder.label, why=why, limit=limit)

    async def _rebase(self, floor: int) -> int:
        """Make new tokens exceed `floor` and what the engine's clock gave so far. Returns the number they follow."""
        core = self._core
        rebase = getattr(core.engine(), "rebase", None)
        if rebase is None:
            raise Unsupported(
                f"{core.engine_name} needs no rebase: its tokens do not decrease when its data is restored",
                engine=core.engine_name,
            )
        base: int = await rebase(floor, core.deadline())
        return base

    async def _ping(self) -> float:
        core = self._core
        began = core.runtime.now()
        await core.engine().ping(core.deadline())
        return core.runtime.now() - began

    def _release_on_signal(self, numbers: tuple[int, ...], at_exit: Callable[[], object]) -> None:
        for number in numbers or (signal.SIGTERM,):
            self._core.runtime.exit_on_signal(number, at_exit)

    async def _close(self) -> None:
        await self._core.close()
        for store in self._open_stores.values():
            await maybe_await(store.close())


def semaphore_shape(limit: int) -> Shape:
    return Shape(kind="semaphore", limit=check_limit(limit))


def _rebuild(kind: type[BaseClient], options: ClientOptions) -> BaseClient:
    return kind(**vars(options))


def _register_for_hooks(core: ClientCore, at_exit: bool) -> None:
    key = id(core)
    _CORES[key] = weakref.ref(core, lambda _: _CORES.pop(key, None))
    core.withdraws_at_exit = at_exit


def _cores() -> list[ClientCore]:
    return [core for core_ref in list(_CORES.values()) if (core := core_ref()) is not None]


def _after_fork_in_child() -> None:
    for core in _cores():
        core.after_fork()


def _withdraw_claims_at_exit() -> None:
    """A program that is interrupted while it waits, and exits, must not leave its queue entries: they would hold up all
    waiters behind them. Background threads still run when `atexit` handlers are called, so each client's watchdog sends
    what is to be released."""
    until = time.monotonic() + _EXIT_SECONDS
    cores = [core for core in _cores() if core.withdraws_at_exit]
    for core in cores:
        core.withdraw_claims()
    while unfinished := [core for core in cores if not core.has_withdrawn()]:
        if time.monotonic() >= until:
            for core in unfinished:
                core.end_withdrawal()
            return
        time.sleep(_EXIT_POLL_INTERVAL)


atexit.register(_withdraw_claims_at_exit)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
