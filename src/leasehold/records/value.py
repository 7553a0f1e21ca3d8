"""One value with a version, in a backend that compares and sets in one step: read, decide, write if it is unchanged.

The backend has two methods, and decides; this module is the same for all backends, blocking and asyncio. No lock is
held. If the backend does not answer, `Unavailable` is raised and nothing is retried: the write may have been applied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

from leasehold.client.decorator import accepted_parameters
from leasehold.errors import ConfigError
from leasehold.records.optimistic import RetryPolicy
from leasehold.runtime.base import Runtime, maybe_await


class Versioned(NamedTuple):
    """A value and its version; None and 0 if there is no value yet."""

    value: bytes | None
    version: int


class ValueBackend(Protocol):
    """Where one value is kept. Both calls block, with a time limit."""

    name: str

    def read(self) -> Versioned:
        """The newest value. Raises `Unavailable`."""

    def write(self, value: bytes, version: int) -> Versioned:
        """Set it if `version` is still the newest, else raise `Conflict`. `Unavailable`: it may have been set."""


class BaseValue:
    """What `Value` and `AsyncValue` share."""

    _runtime_type: ClassVar[type[Runtime]]  # theirs

    def __init__(self, backend: ValueBackend) -> None:
        self._backend, self._runtime = backend, self._runtime_type()

    @property
    def name(self) -> str:
        """The key or path."""
        return self._backend.name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    async def _read(self) -> Versioned:
        return await self._runtime.call(self._backend.read)

    async def _write(self, value: bytes | str, version: int) -> Versioned:
        if isinstance(version, bool) or not isinstance(version, int) or version < 0:
            raise ConfigError(f"version must be that of a value you read (0: there was none), not {version!r}")
        return await self._runtime.call(self._backend.write, _to_bytes(value), version)

    async def _update(self, fn: Callable[..., Any], args: tuple[Any, ...], policy: RetryPolicy) -> Versioned:
        """Write the result of `fn` if no other writer changed the value meanwhile, else read and call `fn` again."""
        accepted_parameters(fn, self._runtime.blocking)

        async def attempt() -> Versioned:
            found = await self._read()
            new_value = fn(found.value, *args)
            if not self._runtime.blocking:
                new_value = await maybe_await(new_value)
            return found if new_value is None else await self._write(new_value, found.version)

        return await policy.repeat(self._runtime, attempt)


def _to_bytes(value: bytes | str) -> bytes:
    if not isinstance(value, bytes | str):
        raise ConfigError(f"a value must be bytes or str (written as UTF-8), not {type(value).__name__}")
    return value.encode() if isinstance(value, str) else value
