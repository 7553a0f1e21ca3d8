"""The second seam: where records are kept, by which `once`, `status` and `schedule` decide.

A lock saves work and tells waiters; whether something was done is decided by a record. A store has two verbs, and all
that is decided by records is decided in the recipes, once for every store. Anything with these two methods is a store;
they may be plain or async.

The contract. Code, tests and docs cite these numbers.

S1  `write` compares and replaces in one step: it changes the record only if the edition there is `expected_version` (""
for no
    record), and says whether it did.
S2  After `write` said True, every later `read` gives that record, until another write replaces it or its time is over.
S3  A record written with `keep` is there for so many seconds by the store's clock, and then as if it had never been.
    None: for ever.
S4  An answer means that the store answered. If it cannot tell, `Unavailable`: the write may or may not have happened.

Every write brings a new random edition. So a record that lapsed and was written anew is never taken for the old one,
and after an unknown outcome the edition tells whether the write was carried out.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import NamedTuple, Protocol


class Record(NamedTuple):
    """What stands under a key. `version` is new with every write: 32 hex digits."""

    version: str
    data: bytes


class Store(Protocol):
    """Keys are short printable ASCII without blanks, at most 1600 characters; data is at most a few megabytes."""

    def read(self, key: str, seconds: float) -> Record | Awaitable[Record | None] | None:
        """The record, or None (S2, S3). Raises `Unavailable` after `seconds` without an answer."""

    def write(
        self, key: str, record: Record, expected_version: str, keep: float | None, seconds: float
    ) -> bool | Awaitable[bool]:
        """Put `record` in the place of the one with the edition `expected_version` (S1). Raises `Unavailable` (S4)."""
