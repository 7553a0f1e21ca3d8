"""One value with a version, as a record in a store: read, decide, write if it is unchanged.

No lock is held. `write` is one compare-and-set of the record (S1); a lost answer is resolved by the record's version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Final, NamedTuple

from leasehold.client.base import BaseClient
from leasehold.client.decorator import accepted_parameters, refuse_coroutine
from leasehold.core.names import check_name
from leasehold.errors import ConfigError, Conflict
from leasehold.records.access import open_records
from leasehold.records.optimistic import RetryPolicy
from leasehold.records.store import Record, Store, is_version
from leasehold.runtime.base import maybe_await

KIND: Final = "value"


class Versioned(NamedTuple):
    """A value and its version; None and the empty string if there is no value yet."""

    value: bytes | None
    version: str


class BaseValue:
    """What `Value` and `AsyncValue` share."""

    _blocking: ClassVar[bool]  # whether it is part of the blocking API

    def __init__(self, client: BaseClient, name: str, *, store: Store | str | None = None) -> None:
        """`store`: a URL or a store object (default: next to the client's locks)."""
        if not isinstance(client, BaseClient) or client._core.runtime.blocking is not self._blocking:
            expected = "a leasehold.Client" if self._blocking else "a leasehold.AsyncClient"
            raise ConfigError(f"{type(self).__name__} needs {expected}, not {type(client).__name__}")
        self.name = check_name(name)
        self._records = open_records(client, store)
        self._record_key = self._records.key(KIND, name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    async def _read(self) -> Versioned:
        found = await self._records.read(self._record_key)
        return Versioned(None, "") if found is None else Versioned(found.data, found.version)

    async def _write(self, value: bytes | str, version: str) -> Versioned:
        if not isinstance(version, str):
            raise ConfigError(f"version must be that of a value you read ('': there was none), not {version!r}")
        data, expected = _to_bytes(value), Record(version, b"") if version else None
        if expected and not is_version(version):  # from a request, perhaps; a database may not take such a text
            raise Conflict(self.name)
        written = await self._records.swap(self._record_key, data, expected, None, self.name)
        if written is None:
            raise Conflict(self.name)
        return Versioned(data, written.version)

    async def _update(self, fn: Callable[..., Any], args: tuple[Any, ...], policy: RetryPolicy) -> Versioned:
        """Write the result of `fn` if no other writer changed the value meanwhile, else read and call `fn` again."""
        runtime = self._records.core.runtime
        accepted_parameters(fn, runtime.blocking)

        async def attempt() -> Versioned:
            found = await self._read()
            new_value = fn(found.value, *args)
            new_value = refuse_coroutine(new_value, fn) if runtime.blocking else await maybe_await(new_value)
            return found if new_value is None else await self._write(new_value, found.version)

        return await policy.repeat(runtime, attempt)


def _to_bytes(value: bytes | str) -> bytes:
    if not isinstance(value, bytes | str):
        raise ConfigError(f"a value must be bytes or str (written as UTF-8), not {type(value).__name__}")
    return value.encode() if isinstance(value, str) else value
