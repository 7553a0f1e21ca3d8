"""`once`, whose runner died or comes late: it is followed, and its result is refused once another has run."""

from __future__ import annotations

import threading

import pytest

from leasehold import LeaseLost, StaleToken
from leasehold.runtime.threads import Threads
from leasehold.stores.memory import MemoryStore


@pytest.fixture
def pair(bench):
    """Two clients on one engine, one clock and one store."""
    return bench.client(), bench.client(), MemoryStore(Threads(bench.clock))


def test_a_dead_runner_is_taken_over_and_its_late_result_is_refused(pair, bench, counted):
    first, second, store = pair
    seen = {}

    def paused(lease):
        seen["first"] = lease.token
        bench.link.silent = True  # the runner cannot renew, and its clock goes on
        bench.clock.turn(31)
        bench.link.silent = False
        assert second.outcome("a", store=store).state == "lapsed"
        seen["second"] = second.once("a", lambda lease: lease.token, store=store)
        return "late"

    with pytest.raises(StaleToken) as late:
        first.once("a", paused, store=store)
    assert (late.value.token, late.value.highest) == (seen["first"], seen["second"])
    assert seen["first"] < seen["second"]
    assert first.once("a", counted("never"), store=store) == seen["second"]


def test_a_lost_lease_is_no_loss_if_nobody_took_over(pair, bench, counted):
    first, second, store = pair

    def paused():
        bench.link.silent = True
        bench.clock.turn(31)
        bench.link.silent = False
        return "late but first"

    assert first.once("a", paused, store=store) == "late but first"
    assert second.once("a", counted("never"), store=store) == "late but first"


def test_a_runner_that_checks_its_lease_stops_and_is_followed(pair, bench, counted):
    first, second, store = pair

    def paused(lease):
        bench.link.silent = True
        bench.clock.turn(31)
        bench.link.silent = False
        lease.check()

    with pytest.raises(LeaseLost):
        first.once("a", paused, store=store)
    assert second.outcome("a", store=store).state == "lapsed"
    assert second.once("a", counted("second"), store=store) == "second"


def test_a_late_runner_meets_a_record_that_lapsed_and_was_made_anew(pair, bench, counted):
    """A number that counts writes would be the same for both: editions are not."""
    first, second, store = pair

    def paused():
        bench.link.silent = True
        bench.clock.turn(31 * 86_400)  # even the record of the run itself is gone
        bench.link.silent = False
        assert second.once("a", counted("anew"), store=store) == "anew"
        return "late"

    with pytest.raises(StaleToken):
        first.once("a", paused, store=store)
    assert second.once("a", counted("never"), store=store) == "anew"


def test_a_late_runner_whose_successor_has_not_yet_ended_is_refused(pair, bench, counted):
    first, second, store = pair
    entered, leave, got = threading.Event(), threading.Event(), []

    def successor():
        entered.set()
        assert leave.wait(30)
        return "second"

    def paused():
        bench.link.silent = True
        bench.clock.turn(31)
        bench.link.silent = False
        thread.start()
        assert entered.wait(30)
        return "late"

    thread = threading.Thread(target=lambda: got.append(second.once("a", successor, store=store)))
    with pytest.raises(StaleToken):
        first.once("a", paused, store=store)
    leave.set()
    thread.join(30)
    assert got == ["second"]
    assert first.once("a", counted("never"), store=store) == "second"
