"""The Store protocol: where the records are kept by which `once`, `status` and `schedule` decide.

A lock saves work and wakes waiters; a record decides whether something was done. A store only reads and writes. All
decisions are in this package, once for every store. Any object with these two methods is a store; they may be plain or
async.

The contract. Code, tests and docs cite these numbers.

S1  `write` compares and replaces in one atomic step: it changes the record only if its current version is
    `expected_version` ("" for no record), and returns whether it did.
S2  After `write` returned True, every later `read` returns that record, until another write replaces it or it expires.
S3  A record written with `keep` exists for that many seconds by the store's clock. After that it is as if it had never
    existed. None: for ever.
S4  An answer means that the store answered. If the store cannot tell, it raises `Unavailable`: the write may or may not
    have happened.

Every write brings a new random version. So a record that expired and was written again is never mistaken for the old
one, and after a lost answer the version tells whether the write was applied.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable
from typing import Final, NamedTuple, Protocol

from leasehold.errors import ConfigError

VERSION_LENGTH: Final = 32
MAX_DATA: Final = 8_000_000  # bytes: engines accept replies of 8 MiB

_VERSION: Final = re.compile(f"[0-9a-f]{{{VERSION_LENGTH}}}")


class Record(NamedTuple):
    """The record of a key. `version` is new with every write: 32 hex digits."""

    version: str
    data: bytes


def is_version(text: str) -> bool:
    """Whether a record can have this version."""
    return _VERSION.fullmatch(text) is not None


def check_record(version: object, data: object) -> Record:
    """What a store found, as a record. Raises ConfigError if Leasehold cannot have written it: then no call may act on
    it, nor replace it."""
    if (
        isinstance(version, str)
        and is_version(version)
        and isinstance(data, bytes | bytearray | memoryview)
        and len(data) <= MAX_DATA
    ):
        return Record(version, bytes(data))
    raise ConfigError(
        "what is stored under this key is not a record of Leasehold: did another program write it? Use another key or "
        "namespace, or remove it"
    )


class Store(Protocol):
    """Keys are short printable ASCII without blanks, at most 1600 characters; data is at most `MAX_DATA` bytes."""

    def read(self, key: str, seconds: float) -> Record | Awaitable[Record | None] | None:
        """The record, or None if there is none (S2, S3). Raises `Unavailable` after `seconds` without an answer."""

    def write(
        self, key: str, record: Record, expected_version: str, keep: float | None, seconds: float
    ) -> bool | Awaitable[bool]:
        """Write `record` if the current version is `expected_version`, and return whether it was written (S1). Raises
        `Unavailable` (S4)."""
