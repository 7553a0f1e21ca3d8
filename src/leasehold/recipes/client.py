"""What both faces of a client are: one engine, one runtime, one watchdog."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Protocol

from leasehold.config import ClientOptions, LockArguments, LockOptions, check_limit, lock_options
from leasehold.core.deadlocks import Deadlock, deadlocks, still_there
from leasehold.core.names import check_name, check_prefix
from leasehold.engine import Opener
from leasehold.errors import ConfigError, Unsupported
from leasehold.events import Hook
from leasehold.model import Claim, Holding, Traits
from leasehold.recipes.desk import Desk
from leasehold.recipes.lock import Shape
from leasehold.runtime.base import Runtime
from leasehold.store import Store

_DESKS: dict[int, weakref.ref[Desk]] = {}  # every desk of this process, for the fork hook


class Engines(Protocol):
    def opener(self, scheme: str) -> Opener: ...


class OpenStore(Store, Protocol):
    def close(self) -> None: ...


class BaseClient:
    _runtime_type: ClassVar[Callable[[], Runtime]]
    _engines: ClassVar[Engines]  # the two sides of the seam meet in the faces

    def __init__(
        self,
        url: str | None = None,
        *,
        namespace: str = "",
        holder: str | None = None,
        ttl: float = 30.0,
        call_timeout: float = 5.0,
        on_event: Hook | None = None,
        engine: Opener | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        options = ClientOptions(url, namespace, holder, ttl, call_timeout, on_event)
        config = options.engine() if engine is None or url is not None else replace(options, url="own://").engine()
        self._options = replace(options, url=config.url)
        self._plain = engine is None and runtime is None
        chosen = self._engines.opener(config.scheme) if engine is None else engine
        self._desk = Desk(self._options, config, chosen, runtime or type(self)._runtime_type())
        self._stores_open: dict[str, OpenStore] = {}
        _remember(self._desk)

    def __repr__(self) -> str:
        # The URL may hold a password.
        return f"<{type(self).__name__} {self._desk.name}:// namespace={self._options.namespace!r}>"

    def __reduce__(self) -> tuple[object, ...]:
        if not self._plain:
            raise TypeError("a client with an engine or runtime of its own cannot be pickled")
        return _rebuild, (type(self), self._options)

    def __del__(self) -> None:
        if desk := getattr(self, "_desk", None):
            desk.retire()

    @property
    def traits(self) -> Traits:
        """What this engine, as configured, promises."""
        return self._desk.traits

    def _options_of(self, where: str, arguments: LockArguments) -> LockOptions:
        return lock_options(where, self._options.ttl, arguments)

    async def _inspect(self, prefix: str, exact: bool) -> list[Holding]:
        check_prefix(prefix)
        engine = self._desk.engine()
        return list(await engine.inspect(self._options.namespace, prefix, exact, self._desk.deadline()))

    async def _deadlocks(self) -> list[Deadlock]:
        """Two looks: what both of them show was there at one moment, also on engines that look name by name."""
        desk = self._desk
        if not desk.traits.fair:
            raise Unsupported(
                f"{desk.name} keeps no line of waiters, so nobody can see who waits for whom: use another engine",
                engine=desk.name,
                missing=("fair",),
            )
        first = deadlocks(await self._inspect("", False))
        return still_there(first, deadlocks(await self._inspect("", False))) if first else []

    async def _break(self, name: str, token: int) -> bool:
        check_name(name)
        if isinstance(token, bool) or not isinstance(token, int):
            raise ConfigError(f"token is the number inspect() shows, not {token!r}")
        desk = self._desk
        broken = await desk.engine().break_(self._options.namespace, name, token, desk.deadline())
        if broken:
            desk.emit("broken", Claim(self._options.namespace, name, "", "", desk.holder(None, None), 0.0), token=token)
        return broken

    async def _rebase(self, above: int) -> int:
        """Have new tokens exceed `above` and what the engine's clock gave so far; the number they begin after."""
        desk = self._desk
        rebase = getattr(desk.engine(), "rebase", None)
        if rebase is None:
            raise Unsupported(
                f"{desk.name} needs no rebase: its tokens do not fall when data are restored", engine=desk.name
            )
        base: int = await rebase(above, desk.deadline())
        return base

    async def _ping(self) -> float:
        desk = self._desk
        began = desk.runtime.now()
        await desk.engine().ping(desk.deadline())
        return desk.runtime.now() - began

    async def _close(self) -> None:
        await self._desk.close()
        for store in self._stores_open.values():
            store.close()


def semaphore_shape(limit: int) -> Shape:
    return Shape(kind="semaphore", limit=check_limit(limit))


def _rebuild(kind: type[BaseClient], options: ClientOptions) -> BaseClient:
    return kind(
        options.url,
        namespace=options.namespace,
        holder=options.holder,
        ttl=options.ttl,
        call_timeout=options.call_timeout,
        on_event=options.on_event,
    )


def _remember(desk: Desk) -> None:
    key = id(desk)
    _DESKS[key] = weakref.ref(desk, lambda _: _DESKS.pop(key, None))


def _after_fork_in_child() -> None:
    for known in list(_DESKS.values()):
        if desk := known():
            desk.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
