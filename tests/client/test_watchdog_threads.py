"""Regressions: a watchdog or callback thread that could not start, was stopped, or was blocked."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from leasehold import Client
from leasehold.runtime.base import run_sync
from leasehold.runtime.threads import Threads, boot_clock
from tests.support import probe

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]


def test_watchdog_start_is_retried_by_next_lease_after_failure(bench, monkeypatch, wait_until) -> None:
    # `_running` was set before `start_thread`. If the thread could not start (process limit, Ctrl-C), no lease of this
    # client was ever renewed or reported lost, and close() waited `call_timeout` for a thread that did not exist. The
    # same held for the callback thread.
    client = bench.client()

    def refuse(_self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            client.lock("a").acquire()
    lease = client.lock("b", ttl=30).acquire()
    bench.clock.advance(10.1)
    wait_until(lambda: probe.renewed_at(lease) > 1000)


def test_callback_that_calls_sys_exit_does_not_stop_other_callbacks(bench, wait_until) -> None:
    # The callback thread caught only Exception: sys.exit() in a callback (or CancelledError) ended it, and `_running`
    # stayed set.
    client = bench.client()
    notified: list[str] = []
    first, second = client.lock("a").acquire(), client.lock("b").acquire()
    first.on_lost(lambda lease: notified.append(lease.name) or sys.exit(3))
    second.on_lost(lambda lease: notified.append(lease.name))
    client.break_lock("a", token=first.token)
    wait_until(lambda: notified == ["a"])
    client.break_lock("b", token=second.token)
    wait_until(lambda: notified == ["a", "b"])


@pytest.fixture
def on_at_risk_log() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Adds a log handler that calls a function when a lease is reported at risk."""
    log, added = logging.getLogger("leasehold"), list[logging.Handler]()

    def add_handler(action: Callable[[], object]) -> None:
        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                if "at risk" in record.getMessage():
                    action()

        added.append(Handler())
        log.addHandler(added[-1])

    yield add_handler
    for handler in added:
        log.removeHandler(handler)


def renew_soon(bench, wait_until, leases) -> None:
    """Wait until the watchdog has renewed these leases, while their clock runs for at most half their ttl."""
    steps = iter(range(30))

    def renewed() -> bool:
        for _ in steps:
            bench.clock.advance(0.5)
            break
        return all(probe.renewed_at(lease) > 1000 for lease in leases)

    wait_until(renewed)


def check_renewal_after_outage(bench, wait_until) -> None:
    client = bench.client()
    lease = client.lock("a", ttl=30).acquire()
    wait_until(lambda: probe.planned_expiries(client))
    bench.transport.silent = True
    bench.clock.advance(10)
    wait_until(lambda: probe.renewal_failed(lease))
    bench.transport.silent = False
    renew_soon(bench, wait_until, [lease])


def test_log_handler_that_raises_does_not_stop_renewals(bench, wait_until, on_at_risk_log) -> None:
    # Due leases are off the heap while the watchdog renews them. An error in `_on_renewal` (from a log handler or
    # filter, or a callback thread that cannot start) ended the run, so the whole batch was never rescheduled.
    def raise_disk_full() -> None:
        raise OSError("disk full")

    on_at_risk_log(raise_disk_full)
    check_renewal_after_outage(bench, wait_until)


def test_log_handler_that_raises_does_not_stop_other_callbacks(bench, wait_until) -> None:
    # The callback thread logs a failed callback. If that raised, too, the thread ended, and `_running` stayed set.
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("disk full")

    def fail(_: object) -> None:
        raise ValueError

    log, handler, notified = logging.getLogger("leasehold.callbacks"), Handler(), list[str]()
    log.addHandler(handler)
    try:
        client = bench.client()
        first, second = client.lock("a").acquire(), client.lock("b").acquire()
        first.on_lost(fail)
        second.on_lost(lambda lease: notified.append(lease.name))
        for lease in (first, second):
            client.break_lock(lease.name, token=lease.token)
        wait_until(lambda: notified == ["b"])
    finally:
        log.removeHandler(handler)


def test_close_does_not_wait_when_the_watchdogs_engine_fails_to_close(bench, monkeypatch, wait_until, caplog) -> None:
    client = bench.client()
    lease = client.lock("a", ttl=30).acquire()
    watchdog = probe.watchdog(client)
    wait_until(lambda: probe.planned_expiries(client))
    bench.clock.advance(10.1)
    wait_until(lambda: probe.watchdog_engine(client) is not None)
    lease.release()

    async def fail() -> None:
        raise ValueError("injected")

    monkeypatch.setattr(probe.watchdog_engine(client), "close", fail)
    run_sync(watchdog.stop(0.0))
    wait_until(lambda: probe.watchdog_has_ended(client))
    wait_until(lambda: "could not close the watchdog's connections" in caplog.text)  # and the thread did not die of it


def test_log_handler_that_blocks_does_not_stop_renewals(bench, wait_until, on_at_risk_log) -> None:
    # Leases at risk or lost, and pending releases, were logged in the watchdog's own thread: log handlers were the one
    # kind of user code that it still ran.
    unblock = threading.Event()
    on_at_risk_log(lambda: unblock.wait(5))
    try:
        check_renewal_after_outage(bench, wait_until)
    finally:
        unblock.set()


def test_renewals_continue_when_callback_thread_cannot_start(bench, monkeypatch, wait_until) -> None:
    # The first lease at risk starts the callback thread. If that failed, the error ended the run, so the rest of the
    # batch was never rescheduled. It was raised again when the watchdog reported it, and that ended the watchdog.
    client = bench.client()
    leases = [client.lock(f"n{number}", ttl=30).acquire() for number in range(3)]
    bench.clock.advance(0)
    wait_until(lambda: probe.planned_expiries(client) == 3)

    def refuse(_self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    bench.transport.silent = True
    bench.clock.advance(10)
    wait_until(lambda: any(probe.renewal_failed(lease) for lease in leases))
    bench.transport.silent = False
    renew_soon(bench, wait_until, leases)


def test_error_in_one_renewal_reply_does_not_affect_its_batch(bench, monkeypatch, wait_until) -> None:
    client = bench.client()
    leases = [client.lock(f"n{number}", ttl=30).acquire() for number in range(3)]
    bench.clock.advance(0)
    wait_until(lambda: probe.planned_expiries(client) == 3)
    on_renewal, failed = getattr(*probe.ON_RENEWAL), list[object]()

    def fail_once(lease, *args):
        if len(failed) < 1:
            failed.append(lease)
            raise MemoryError
        on_renewal(lease, *args)

    monkeypatch.setattr(*probe.ON_RENEWAL, fail_once)
    renew_soon(bench, wait_until, leases)
    assert failed


@pytest.mark.usefixtures("untraced")
def test_short_lease_is_renewed_before_leases_that_are_nearly_due(bench, wait_until) -> None:
    # The watchdog renews leases that are nearly due together with due ones. It renewed thousands of long leases, batch
    # after batch, while the short lease expired.
    client = bench.client()
    probe.runtime(client).random = lambda: 0.0
    long_leases = [client.lock(f"n{number}", ttl=3000).acquire() for number in range(3000)]
    bench.clock.advance(950)  # due after 1000 s
    wait_until(lambda: probe.planned_expiries(client) == 3000)
    short_lease = client.lock("short", ttl=1).acquire()
    wait_until(lambda: probe.planned_expiries(client) == 3001)

    def slow_call(verb: str, args: tuple[object, ...], deadline: float) -> object:
        answer = type(bench.transport).call(bench.transport, verb, args, deadline)
        if verb == "renew":
            bench.clock.at += 0.2
        return answer

    bench.transport.call = slow_call
    while any(probe.renewed_at(lease) == 1000 for lease in long_leases):
        bench.clock.advance(max(probe.next_renewal(short_lease) - bench.clock.at, 0.0) + 0.01)
        wait_until(lambda: probe.next_renewal(short_lease) > bench.clock.at or not short_lease.held)
        assert short_lease.held


@pytest.mark.parametrize("first", ["hand", "watchdog"])
def test_watchdog_renewal_in_flight_does_not_undo_explicit_ttl(bench, wait_until, first) -> None:
    # The watchdog renewed with the old ttl while renew(ttl=300) was in flight. Whichever reply came last, the lease had
    # 30 s again, also after all later renewals, although renew() had promised 300.
    client = bench.client()
    lease = client.lock("a", ttl=30).acquire()
    wait_until(lambda: probe.planned_expiries(client))
    watchdog_called, watchdog_may_return = threading.Event(), threading.Event()

    def call(verb: str, args: tuple[object, ...], deadline: float) -> object:
        answer = type(bench.transport).call(bench.transport, verb, args, deadline)
        if verb != "renew":
            return answer
        if threading.current_thread() is threading.main_thread():
            bench.clock.advance(10)
            watchdog_called.wait(60)
            if first == "watchdog":
                watchdog_may_return.set()
                wait_until(lambda: probe.renewed_at(lease) == 1010)
        else:
            watchdog_called.set()
            watchdog_may_return.wait(60)
        return answer

    bench.transport.call = call
    try:
        lease.renew(ttl=300)
        assert lease.ttl == 300
    finally:
        watchdog_may_return.set()
    wait_until(lambda: probe.watchdog_sleeps(client))  # the watchdog sleeps again
    del bench.transport.call
    assert (lease.ttl, probe.claim(lease).ttl, round(lease.remaining)) == (300, 300, 287)


def test_on_lost_runs_soon_after_system_suspend(wait_until) -> None:
    # The clock counts suspended time; the watchdog's sleep (a lock's timeout, CLOCK_MONOTONIC) does not. After a resume
    # the watchdog slept for up to a third of the ttl: state and check() reported the loss at once, but callbacks,
    # events and tasks did not.
    suspended_seconds = [0.0]
    client = Client("memory://", runtime=Threads(lambda: boot_clock() + suspended_seconds[0]))
    lease, notified = client.lock("a", ttl=600).acquire(), []
    lease.on_lost(notified.append)
    wait_until(lambda: probe.watchdog_sleeps(client))
    suspended_seconds[0] = 3600.0
    assert lease.state == "LOST"
    end = time.monotonic() + 60  # the next scheduled renewal is after 200 s
    while not notified and time.monotonic() < end:
        time.sleep(0.05)
    try:
        assert notified
    finally:
        client.close()
