"""Reads and writes of records: deadlines, and answers that were lost."""

from __future__ import annotations

import time

import pytest

from leasehold import Client, Unavailable
from leasehold.records.access import RecordAccess
from leasehold.records.store import Record
from leasehold.runtime.base import run_sync
from tests.support import probe


class SilentStore:
    """Does not answer: each call takes all the time that it is given."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def read(self, key: str, seconds: float) -> Record | None:
        return self._fail(seconds)

    def write(self, key: str, record: Record, expected: str, keep: float | None, seconds: float) -> bool:
        return bool(self._fail(seconds))

    def _fail(self, seconds: float) -> None:
        self.seconds.append(seconds)
        time.sleep(seconds)  # pause: a silent store takes all the time it is given
        raise Unavailable("no answer")


def test_tries_of_one_write_share_one_call_timeout() -> None:
    """Each try had a `call_timeout` of its own, so that a write at a silent store took three of them."""
    store = SilentStore()
    with Client("memory://", call_timeout=0.4) as client:
        with pytest.raises(Unavailable):
            run_sync(RecordAccess(probe.core(client), store).swap("key", b"new", None, None))
        assert len(store.seconds) > 1
        assert sum(store.seconds) <= 0.4
