"""One value with a version, somewhere that compares and sets in one step: read it, decide, write it if nobody else did.

The place has two verbs and decides; what is here is the same for all of them, in both faces. No lock is held. What
nobody answered for is `Unavailable`, and is not tried again: it may have been done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

from leasehold.client.decorator import accepted_parameters
from leasehold.errors import ConfigError
from leasehold.records.optimistic import RetryPolicy
from leasehold.runtime.base import Runtime, maybe_await


class Versioned(NamedTuple):
    """A value and the version it was read with: None and 0 where there is nothing yet."""

    value: bytes | None
    version: int


class ValueBackend(Protocol):
    """Where one value is. Both calls block, and end in time."""

    name: str

    def read(self) -> Versioned:
        """The newest. Raises `Unavailable`."""

    def write(self, value: bytes, version: int) -> Versioned:
        """Set it if `version` is still the newest, else `Conflict`. Raises `Unavailable`: it may have been done."""


class BaseValue:
    """The value of both faces."""

    _runtime_type: ClassVar[type[Runtime]]  # of the face

    def __init__(self, backend: ValueBackend) -> None:
        self._backend, self._runtime = backend, self._runtime_type()

    @property
    def name(self) -> str:
        """Where it is."""
        return self._backend.name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    async def _read(self) -> Versioned:
        return await self._runtime.call(self._backend.read)

    async def _write(self, value: bytes | str, version: int) -> Versioned:
        if isinstance(version, bool) or not isinstance(version, int) or version < 0:
            raise ConfigError(f"version is that of a value that was read, 0 for none; not {version!r}")
        return await self._runtime.call(self._backend.write, _to_bytes(value), version)

    async def _update(self, fn: Callable[..., Any], args: tuple[Any, ...], policy: RetryPolicy) -> Versioned:
        """What `fn` makes of the value is written if nobody else wrote meanwhile, else it is asked again."""
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
        raise ConfigError(f"a value is bytes, or a text that is written as UTF-8, not {type(value).__name__}")
    return value.encode() if isinstance(value, str) else value
