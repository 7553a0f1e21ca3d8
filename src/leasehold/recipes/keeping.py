"""What a client has for the recipes that decide by records: its stores, and the locks that go with the keys."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from leasehold.config import EngineConfig, LockArguments
from leasehold.core.names import LONGEST
from leasehold.errors import ConfigError
from leasehold.recipes.client import BaseClient, OpenStore
from leasehold.recipes.lease import BaseLease
from leasehold.recipes.lock import BaseLock, Shape
from leasehold.recipes.once import KIND, Once, OnceOptions
from leasehold.recipes.records import Records
from leasehold.runtime.base import Runtime
from leasehold.store import Store

_BESIDE = ""  # the store of the client's own URL, among those opened by theirs


class Stores(Protocol):
    def opened(self, config: EngineConfig, runtime: Runtime, *, beside: bool) -> OpenStore: ...


class KeepingClient(BaseClient):
    _stores: ClassVar[Stores]  # recipes and stores meet in the faces, as recipes and engines do
    _lease_type: ClassVar[type[BaseLease]]

    def _records(self, store: Store | str | None) -> Records:
        """The store that is meant: the caller's own, one named by a URL, or the one that goes with the client's URL."""
        if store is not None and not isinstance(store, str):
            if not callable(getattr(store, "read", None)) or not callable(getattr(store, "write", None)):
                raise ConfigError(f"a store is a URL, or something with read() and write(), not {store!r}")
            return Records(self._desk, store)
        place = _BESIDE if store is None else store
        found = self._stores_open.get(place)
        if found is None:
            desk = self._desk
            config = desk.config if store is None else EngineConfig.parse(store, desk.options.call_timeout)
            made = self._stores.opened(config, desk.runtime, beside=store is None)
            found = self._stores_open.setdefault(place, made)  # another thread may have been faster
        return Records(self._desk, found)

    def _key_lock(self, kind: str, key: str, **options: Any) -> BaseLock[Any]:
        name = f"{kind}:{key}"
        if not isinstance(key, str) or not key or len(name.encode(errors="replace")) > LONGEST:
            raise ConfigError(f"a key is a text of 1 to {LONGEST - len(kind) - 1} bytes, not {str(key)[:40]!r}")
        arguments: LockArguments = {"purpose": kind, **options}  # type: ignore[typeddict-item]
        return BaseLock(self, self._lease_type, name, Shape(), self._options_of(f"{kind}()", arguments))

    def _once(
        self, key: str, wait: float | None, ttl: float | None, store: Store | str | None, options: OnceOptions
    ) -> Once:
        return Once(self._key_lock(KIND, key, wait=wait, ttl=ttl), self._records(store), key, options)
