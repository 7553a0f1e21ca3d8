"""Attacks on the threads that look after leases: one that could not start, that was stopped, or held up."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from leasehold import Client
from leasehold.core.timing import NEVER
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


def test_no_thread_to_tell_from_costs_no_lease_its_renewals(bench, monkeypatch, wait_until) -> None:
    # The first lease at risk wants the teller's thread. That cannot start: what was raised ended the turn, so the rest
    # of the batch was never planned again, and was raised once more where the watchdog tells of that: it was no more.
    client = bench.client()
    leases = [client.lock(f"n{number}", ttl=30).acquire() for number in range(3)]
    bench.clock.turn(0)
    wait_until(lambda: len(client._desk.dog._ends) == 3)

    def refuse(_self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    bench.link.silent = True
    bench.clock.turn(10)
    wait_until(lambda: any(lease._missed for lease in leases))
    bench.link.silent = False
    for _ in range(30):
        bench.clock.turn(0.5)
        time.sleep(0.01)
    assert all(lease._asked > 1000 for lease in leases)


def test_what_one_answer_raises_costs_the_others_of_its_batch_nothing(bench, monkeypatch, wait_until) -> None:
    client = bench.client()
    leases = [client.lock(f"n{number}", ttl=30).acquire() for number in range(3)]
    bench.clock.turn(0)
    wait_until(lambda: len(client._desk.dog._ends) == 3)
    answered, torn = type(leases[0])._answered, list[object]()

    def stumble(lease, *args):
        if len(torn) < 1:
            torn.append(lease)
            raise MemoryError
        answered(lease, *args)

    monkeypatch.setattr(type(leases[0]), "_answered", stumble)
    for _ in range(30):
        bench.clock.turn(0.5)
        time.sleep(0.01)
    wait_until(lambda: torn and all(lease._asked > 1000 for lease in leases))


@pytest.mark.usefixtures("untraced")
def test_a_short_life_does_not_wait_for_all_that_are_nearly_due(bench, wait_until) -> None:
    # What is nearly due goes along with what is due: thousands of long leases, batch after batch, while the short one
    # that took them along came to its end.
    client = bench.client()
    client._desk.runtime.fraction = lambda: 0.0
    long = [client.lock(f"n{number}", ttl=3000).acquire() for number in range(3000)]
    bench.clock.turn(950)  # they are due after 1000
    wait_until(lambda: len(client._desk.dog._ends) == 3000)
    short = client.lock("short", ttl=1).acquire()
    wait_until(lambda: len(client._desk.dog._ends) == 3001)

    def slowly(verb: str, args: tuple[object, ...], deadline: float) -> object:
        answer = type(bench.link).call(bench.link, verb, args, deadline)
        if verb == "renew":
            bench.clock.at += 0.2
        return answer

    bench.link.call = slowly
    while any(lease._asked == 1000 for lease in long):
        bench.clock.turn(max(short._due - bench.clock.at, 0.0) + 0.01)
        wait_until(lambda: short._due > bench.clock.at or not short.held)
        assert short.held


@pytest.mark.parametrize("first", ["hand", "watchdog"])
def test_a_renewal_under_way_does_not_undo_the_ttl_asked_for_by_hand(bench, wait_until, first) -> None:
    # The watchdog asks, with the ttl of before, while renew(ttl=300) is not answered yet. Whichever answer came last:
    # the lease lived 30 s again, by all later renewals too, where renew() had promised 300.
    client = bench.client()
    lease = client.lock("a", ttl=30).acquire()
    wait_until(lambda: client._desk.dog._ends)
    asked, answered = threading.Event(), threading.Event()

    def call(verb: str, args: tuple[object, ...], deadline: float) -> object:
        answer = type(bench.link).call(bench.link, verb, args, deadline)
        if verb != "renew":
            return answer
        if threading.current_thread() is threading.main_thread():
            bench.clock.turn(10)
            asked.wait(10)
            if first == "watchdog":
                answered.set()
                wait_until(lambda: lease._asked == 1010)
        else:
            asked.set()
            answered.wait(10)
        return answer

    bench.link.call = call
    try:
        lease.renew(ttl=300)
        assert lease.ttl == 300
    finally:
        answered.set()
    wait_until(lambda: client._desk.dog._wakes_at < NEVER)  # it sleeps again
    del bench.link.call
    assert (lease.ttl, lease._claim.ttl, round(lease.remaining)) == (300, 300, 287)


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
