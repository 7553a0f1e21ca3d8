"""`once` with a runner that died or is late: another caller takes over, and the late result is refused."""

from __future__ import annotations

import threading

import pytest

from leasehold import LeaseLost, StaleToken
from leasehold.records.stores.memory import MemoryStore
from leasehold.runtime.threads import Threads


@pytest.fixture
def clients_and_store(bench):
    """Two clients on one engine, one clock and one store."""
    return bench.client(), bench.client(), MemoryStore(Threads(bench.clock))


def test_late_result_of_expired_runner_raises_stale_token(clients_and_store, bench, counting_function):
    first, second, store = clients_and_store
    seen = {}

    def paused(lease):
        seen["first"] = lease.token
        bench.transport.silent = True  # the runner cannot renew, and time passes
        bench.clock.advance(31)
        bench.transport.silent = False
        assert second.outcome("a", store=store).state == "expired"
        seen["second"] = second.once("a", lambda lease: lease.token, store=store)
        return "late"

    with pytest.raises(StaleToken) as late:
        first.once("a", paused, store=store)
    assert (late.value.token, late.value.highest) == (seen["first"], seen["second"])
    assert seen["first"] < seen["second"]
    assert first.once("a", counting_function("never"), store=store) == seen["second"]


def test_late_result_emits_stale_token_with_both_tokens(clients_and_store, bench):
    events = []
    first, (_, second, store) = bench.client(on_event=events.append), clients_and_store

    def paused():
        bench.transport.silent = True
        bench.clock.advance(31)
        bench.transport.silent = False
        second.once("a", lambda: "taken over", store=store)

    with pytest.raises(StaleToken) as late:
        first.once("a", paused, store=store)
    (event,) = [event for event in events if event.kind == "stale_token"]
    assert (event.fence, event.token, event.seen) == ("once", late.value.token, late.value.highest)
    assert event.reason == str(late.value)


def test_late_result_is_kept_if_no_other_runner_took_over(clients_and_store, bench, counting_function):
    first, second, store = clients_and_store

    def paused():
        bench.transport.silent = True
        bench.clock.advance(31)
        bench.transport.silent = False
        return "late but first"

    assert first.once("a", paused, store=store) == "late but first"
    assert second.once("a", counting_function("never"), store=store) == "late but first"


def test_runner_that_checks_its_lost_lease_stops_and_is_replaced(clients_and_store, bench, counting_function):
    first, second, store = clients_and_store

    def paused(lease):
        bench.transport.silent = True
        bench.clock.advance(31)
        bench.transport.silent = False
        lease.check()

    with pytest.raises(LeaseLost):
        first.once("a", paused, store=store)
    assert second.outcome("a", store=store).state == "expired"
    assert second.once("a", counting_function("second"), store=store) == "second"


def test_late_runner_is_refused_by_recreated_record(clients_and_store, bench, counting_function):
    """A counter of writes would be the same for both records. The random versions differ."""
    first, second, store = clients_and_store

    def paused():
        bench.transport.silent = True
        bench.clock.advance(31 * 86_400)  # even the record of the run itself has expired
        bench.transport.silent = False
        assert second.once("a", counting_function("anew"), store=store) == "anew"
        return "late"

    with pytest.raises(StaleToken):
        first.once("a", paused, store=store)
    assert second.once("a", counting_function("never"), store=store) == "anew"


def test_late_runner_is_refused_while_successor_is_running(clients_and_store, bench, counting_function):
    first, second, store = clients_and_store
    entered, leave, got = threading.Event(), threading.Event(), []

    def successor():
        entered.set()
        assert leave.wait(30)
        return "second"

    def paused():
        bench.transport.silent = True
        bench.clock.advance(31)
        bench.transport.silent = False
        thread.start()
        assert entered.wait(30)
        return "late"

    thread = threading.Thread(target=lambda: got.append(second.once("a", successor, store=store)))
    with pytest.raises(StaleToken):
        first.once("a", paused, store=store)
    leave.set()
    thread.join(30)
    assert got == ["second"]
    assert first.once("a", counting_function("never"), store=store) == "second"
