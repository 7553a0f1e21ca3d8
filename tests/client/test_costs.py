"""What an acquire and a release cost without contention. Counted, not timed: the count is the same on every machine."""

from __future__ import annotations

import sys
from types import FrameType

from leasehold import Client
from leasehold.client.lock import BaseLock

_MAX_CALLS = 58  # of Python functions, per acquire and release on the memory engine; 53 when this was written


def test_uncontended_acquire_and_release_make_few_function_calls() -> None:
    calls = 0

    def count_call(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    with Client("memory://") as client:
        lock = client.lock("a")
        lock.acquire().release()  # starts the watchdog
        previous = sys.getprofile()
        sys.setprofile(count_call)
        try:
            for _ in range(20):
                lock.acquire().release()
        finally:
            sys.setprofile(previous)
    assert calls / 20 <= _MAX_CALLS


def test_lock_class_has_no_getattr_hook() -> None:
    # With a `__getattr__`, the interpreter reads every attribute of a lock the slow way: 6 % of an acquire and release.
    assert not hasattr(BaseLock, "__getattr__")
