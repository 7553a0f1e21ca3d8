"""Reads and writes records for `once`, schedules and statuses: deadlines, and answers that were lost."""

from __future__ import annotations

from typing import Any, Final, cast

from leasehold.client.base import BaseClient
from leasehold.client.core import ClientCore
from leasehold.client.lock import BaseLock, Shape
from leasehold.config import LockArguments
from leasehold.core import timing
from leasehold.core.names import MAX_NAME_BYTES, encode
from leasehold.errors import ConfigError, Unavailable
from leasehold.records import stores
from leasehold.records.store import MAX_DATA, Record, Store
from leasehold.runtime.base import maybe_await

_TRIES: Final = 3
_PAUSE: Final = 0.1
_MAX_PAUSE: Final = 1.0


class RecordAccess:
    """One store, as one client uses it."""

    def __init__(self, core: ClientCore, store: Store) -> None:
        self.core, self.store = core, store

    def key(self, kind: str, name: str) -> str:
        return f"{kind}:{encode(self.core.options.namespace)}:{encode(name)}"

    @property
    def in_caller_transaction(self) -> bool:
        """Whether the caller may still undo what is written here, by a rollback."""
        return bool(getattr(self.store, "in_caller_transaction", False))

    @property
    def may_read_before_lock(self) -> bool:
        """Whether the record may be read before the key's lock is held. Inside the caller's transaction it may not: the
        read would take the snapshot and lock the row, and the caller might then wait for a holder that needs the row.
        """
        return not self.in_caller_transaction

    async def read(self, key: str) -> Record | None:
        """Read the record. Retried once, because the connection may have been stale."""
        self.core.bind_loop()
        seconds = self.core.options.call_timeout
        began = self.core.runtime.now()
        try:
            return await maybe_await(self.store.read(key, seconds))
        except Unavailable:
            left = began + seconds - self.core.runtime.now()
            if left < seconds / 2:
                raise
            return await maybe_await(self.store.read(key, left))

    async def swap(
        self, key: str, data: bytes, expected: Record | None, keep: float | None, what: str = ""
    ) -> Record | None:
        """Replace the record `expected` and return the new one. None: another writer changed it (S1).

        After a lost answer the same write is sent again, within one `call_timeout` for all tries. It carries a new
        version, so it cannot be applied twice. If the second write is refused, the version in the store tells whether
        the first one was applied. If another writer replaced that version since, the outcome is unknown: raises
        `Unavailable` if `what` names the record, else returns None.
        """
        if len(data) > MAX_DATA:
            raise ConfigError(
                f"a record has at most {MAX_DATA:,} bytes, and this one has {len(data):,}: store a reference to the "
                "data instead"
            )
        self.core.bind_loop()
        runtime, failure = self.core.runtime, cast("Unavailable | None", None)
        deadline = runtime.now() + self.core.options.call_timeout
        new = Record(runtime.random_bytes(16).hex(), data)
        for tries in range(_TRIES):
            left = max(deadline - runtime.now(), 0.001)
            seconds = left if tries == _TRIES - 1 else left / 2  # the rest is for the next tries
            try:
                if await maybe_await(self.store.write(key, new, expected.version if expected else "", keep, seconds)):
                    return new
                if tries == 0:
                    return None
                found = await maybe_await(self.store.read(key, seconds))
                if found is not None and found.version == new.version:
                    return new
                break
            except Unavailable as error:
                failure = failure or error  # the first try had the most time, so its error says most
                pause = timing.backoff(tries, _PAUSE, _MAX_PAUSE, runtime.random())
                if tries == _TRIES - 1 or runtime.now() + pause >= deadline:
                    raise failure from failure.__cause__
                await runtime.sleep(pause)
        if what:
            raise Unavailable(
                f"{what}: the answer was lost and the record changed since; the write may have been applied"
            )
        return None


_CLIENT_URL: Final = ""  # the key of the store at the client's own URL


def open_records(client: BaseClient, store: Store | str | None) -> RecordAccess:
    """Access to a store: an object of the caller's, one named by a URL, or by default that of the client's own URL."""
    core = client._core
    if store is not None and not isinstance(store, str):
        if not callable(getattr(store, "read", None)) or not callable(getattr(store, "write", None)):
            raise ConfigError(f"store must be a URL or an object with read() and write(), not {store!r}")
        return RecordAccess(core, store)
    if store is not None and not store.strip():
        raise ConfigError("store is empty: pass a URL or a store, or leave it out to use the client's own")
    store_url = _CLIENT_URL if store is None else store
    open_store = client._open_stores.get(store_url)
    if open_store is None:
        opened = stores.open_store(client, store)
        open_store = client._open_stores.setdefault(store_url, opened)  # another thread may have been faster
    return RecordAccess(core, cast(Store, open_store))


def key_lock(client: BaseClient, kind: str, key: str, **options: Any) -> BaseLock[Any]:
    """The lock that belongs to the record `key` of this kind."""
    name = f"{kind}:{key}"
    if not isinstance(key, str) or not key or len(name.encode(errors="replace")) > MAX_NAME_BYTES:
        raise ConfigError(
            f"a key must be a string of 1 to {MAX_NAME_BYTES - len(kind) - 1} bytes, not {str(key)[:40]!r}"
        )
    arguments: LockArguments = {"purpose": kind, **options}  # type: ignore[typeddict-item]
    return BaseLock(client, client._lease_type, name, Shape(), client._lock_options(f"{kind}()", arguments))
