"""Processes that contend for one name, each event with the machine's time; a checker judges them together. And a
client that waits for a name until something has happened."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from harness.checkers.history import History
from harness.checkers.intervals import check
from leasehold import NotAcquired
from leasehold.blocking import Lock
from tests.support.paths import SUPPORT

SCRIPT = SUPPORT / "contending_child.py"

Event = tuple[Any, ...]


def wait_in_vain(lock: Lock, until: Callable[[], object]) -> None:
    """Wait for a name that another client holds, until the condition is true. On a busy machine one short wait may be
    over before the client joins the queue."""
    end = time.monotonic() + 60
    while True:
        with pytest.raises(NotAcquired):
            lock.acquire(wait=0.5)
        if until():
            return
        assert time.monotonic() < end, "the condition did not become true in time"


def start_children(child: Callable[..., Any], url: str, seconds: float, seed: int, processes: int) -> list[Any]:
    """Half of them use the blocking client, half the asyncio one."""
    kinds = ["blocking", "asyncio"]
    return [
        child(url, "hot", seconds, seed * 100 + number, kinds[number % 2], script=SCRIPT) for number in range(processes)
    ]


def read_events(children: list[Any]) -> list[Event]:
    """All events, in the order in which they happened. Returns when the children have ended."""
    events = [(at, number, *what) for number, child in enumerate(children) for at, *what in child.read_all_messages()]
    return sorted(events, key=lambda event: event[0])


def check_history(events: list[Event]) -> int:
    """No two holders at once, and rising tokens. Returns the number of grants."""
    clock = [0.0]
    history = History(lambda: clock[0])
    operations, tokens = {}, []
    for at, process_number, what, *details in events:
        clock[0] = at
        if what == "asks":
            operations[process_number] = history.invoke(str(process_number), "acquire", "hot")
        elif what == "fails":  # also a refusal: a split vote of Redlock may refuse claims that arrive together
            operations[process_number].unknown(details[0])
        elif what == "holds":
            operations[process_number].ok(token=details[0])
            tokens.append(details[0])
        elif what == "lost":
            history.lost(str(process_number), "hot", details[0], at=details[1])
        else:
            history.invoke(str(process_number), "release", "hot", token=details[0]).unknown("not waited for")
    verdict = check(history)
    assert verdict.result == "valid", verdict
    assert tokens == sorted(set(tokens)), "tokens rise in the order of the grants"
    return len(tokens)
