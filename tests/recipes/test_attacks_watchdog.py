"""Attacks on the threads that look after leases: one that could not start, that was stopped, or held up."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from leasehold import Client
from leasehold.runtime.threads import Threads, boot_clock

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]


def test_a_watchdog_that_could_not_start_is_started_by_the_next_lease(bench, monkeypatch, wait_until) -> None:
    # `_running = True` before `aside`: when the thread cannot start (limit of processes, Ctrl-C just there) no lease of
    # this client is ever renewed or told lost again, and close() waits `call_timeout` for nobody. The teller likewise.
    client = bench.client()

    def refuse(_self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            client.lock("a").acquire()
    lease = client.lock("b", ttl=30).acquire()
    bench.clock.turn(10.1)
    wait_until(lambda: lease._asked > 1000)


def test_a_callback_that_exits_silences_no_other(bench, wait_until) -> None:
    # The teller catches Exception: sys.exit() in a callback (or CancelledError) ends its thread, `_running` stays.
    client = bench.client()
    told: list[str] = []
    one, two = client.lock("a").acquire(), client.lock("b").acquire()
    one.on_lost(lambda _: sys.exit(3))
    two.on_lost(lambda lease: told.append(lease.name))
    client.break_lock("a", token=one.token)
    time.sleep(0.1)
    client.break_lock("b", token=two.token)
    wait_until(lambda: told)


@pytest.fixture
def at_risk() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Has a handler of the log do this when a lease is at risk."""
    log, added = logging.getLogger("leasehold"), list[logging.Handler]()

    def do(what: Callable[[], object]) -> None:
        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                if "at risk" in record.getMessage():
                    what()

        added.append(Handler())
        log.addHandler(added[-1])

    yield do
    for handler in added:
        log.removeHandler(handler)


def renewed_after_a_silence(bench, wait_until) -> bool:
    client = bench.client()
    lease = client.lock("a", ttl=30).acquire()
    wait_until(lambda: client._desk.dog._ends)
    bench.link.silent = True
    bench.clock.turn(10)
    wait_until(lambda: lease._missed)
    bench.link.silent = False
    for _ in range(30):
        bench.clock.turn(0.5)
        time.sleep(0.01)
    return lease._asked > 1000


def test_a_log_handler_that_raises_costs_no_renewal(bench, wait_until, at_risk) -> None:
    # Due leases are off the heap while they are renewed. Anything raised in `answered` (a log handler or filter, the
    # teller's thread that cannot start) ends the turn: the whole batch is never planned, so never renewed, again.
    def full() -> None:
        raise OSError("disk full")

    at_risk(full)
    assert renewed_after_a_silence(bench, wait_until)


def test_a_log_handler_that_blocks_costs_no_renewal(bench, wait_until, at_risk) -> None:
    # `at_risk`, `lost` and `owed` are logged on the watchdog's own thread: the one kind of user code it still runs.
    free = threading.Event()
    at_risk(lambda: free.wait(5))
    try:
        assert renewed_after_a_silence(bench, wait_until)
    finally:
        free.set()


def test_after_a_suspend_the_loss_is_told_soon() -> None:
    # The clock counts suspend, the watchdog's sleep (a lock's timeout, CLOCK_MONOTONIC) does not: it sleeps on for
    # up to a third of the ttl after the machine woke. state and check() know at once; callbacks, events, tasks do not.
    slept = [0.0]
    client = Client("memory://", runtime=Threads(lambda: boot_clock() + slept[0]))
    lease, told = client.lock("a", ttl=60).acquire(), []
    lease.on_lost(told.append)
    time.sleep(0.1)
    slept[0] = 3600.0
    assert lease.state == "LOST"
    end = time.monotonic() + 15  # by itself it would wake after 20
    while not told and time.monotonic() < end:
        time.sleep(0.05)
    try:
        assert told
    finally:
        client.close()
