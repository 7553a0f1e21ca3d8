"""The reference state machine, verb by verb. For random runs see test_lock_state_properties.py."""

from __future__ import annotations

import pytest

from leasehold import Mismatch
from leasehold.core.queue_entry import COOLING, HELD, PASSED, RESERVED, WAITING, Notification
from leasehold.core.timing import RESERVATION_PROBE, RESERVATION_TTL, WAITER_TTL
from leasehold.model import Alive, Busy, Gone, Grant, Holder


def test_attempt_on_free_name_is_granted_and_on_held_name_is_busy(bench) -> None:
    assert bench.attempt("a") == Grant(1, 10.0)
    assert bench.attempt("b") == Busy(10.0, 0, 1, Holder("a"))
    assert bench.attempt("c") == Busy(10.0, 1, 1, Holder("a"))


def test_attempt_without_queue_leaves_no_entry(bench) -> None:
    bench.attempt("a")
    assert bench.attempt("b", queue=False) == Busy(10.0, None, 1, Holder("a"))
    assert set(bench.lock_state.entries) == {"a"}


def test_repeated_attempt_returns_same_grant_or_position(bench) -> None:  # E2
    bench.attempt("a")
    bench.attempt("b")
    bench.pass_time(4)
    assert bench.attempt("a") == Grant(1, 10.0)
    assert bench.attempt("b") == Busy(10.0, 0, 1, Holder("a"))
    assert len(bench.lock_state.waiters) == 1


def test_repeated_attempt_or_renewal_never_shortens_the_ttl(
    bench,
) -> None:  # E8: requests may overtake each other
    bench.attempt("a")
    assert bench.renew("a", 1, ttl=60.0) == Alive(60.0)
    assert bench.attempt("a") == Grant(1, 60.0)
    assert bench.renew("a", 1, ttl=5.0) == Alive(60.0)


def test_release_reserves_for_head_and_notifies_next_waiter(bench) -> None:
    for who in "abc":
        bench.attempt(who)
    assert bench.release("a")
    assert bench.sent_notifications() == [("reserved", "b", 0.0), ("recheck", "c", RESERVATION_PROBE)]
    assert bench.state("b") == RESERVED
    assert bench.attempt("b") == Grant(2, 10.0)
    assert bench.attempt("d") == Busy(10.0, 1, 2, Holder("b"))


def test_waiter_passed_over_after_reservation_keeps_its_position(bench) -> None:
    for who in "abcd":
        bench.attempt(who)
    bench.release("a")
    bench.pass_time(RESERVATION_TTL)
    assert bench.attempt("c") == Grant(3, 10.0)  # token 2 was used for b's reservation
    assert bench.state("b") == PASSED
    assert bench.attempt("b") == Busy(10.0, 0, 3, Holder("c"))  # ahead of d
    assert [party.id_hash for _, party in bench.lock_state.waiters] == ["b", "d"]


def test_unreachable_waiter_is_passed_over_on_release(bench) -> None:
    for who in "abc":
        bench.attempt(who)
    bench.unreachable.add("b")
    bench.release("a")
    assert bench.sent_notifications() == [("reserved", "c", 0.0)]
    assert bench.state("b") == PASSED


def test_declined_reservation_goes_to_the_next_waiter(bench) -> None:
    for who in "abc":
        bench.attempt(who)
    bench.release("a")
    assert bench.lock_state.decline(bench.context, "b", "elsewhere") == (False, [])  # another client serves it now
    bench.unreachable.add("b")
    assert bench.lock_state.decline(bench.context, "b", "b") == (True, [Notification("c", "reserved", "c")])
    assert bench.state("b") == PASSED
    assert bench.lock_state.decline(bench.context, "b", "b") == (False, [])


def test_waiter_that_dies_with_reservation_is_passed_over_at_probe(bench) -> None:
    for who in "abc":
        bench.attempt(who)
    bench.release("a")
    assert bench.state("b") == RESERVED
    bench.unreachable.add("b")
    bench.pass_time(RESERVATION_PROBE)
    assert bench.attempt("c") == Grant(3, 10.0)
    assert bench.state("b") == PASSED


def test_head_attempting_during_reservation_is_told_to_probe_soon(bench) -> None:
    for who in "abc":
        bench.attempt(who)
    bench.release("a")
    bench.pass_time(0.2)  # a heartbeat or re-check makes c attempt while b is still reachable
    busy = bench.attempt("c")
    assert isinstance(busy, Busy)
    assert (busy.position, busy.left) == (0, RESERVATION_PROBE), "c must not wait for the whole reservation"
    bench.unreachable.add("b")
    bench.pass_time(RESERVATION_PROBE)
    assert isinstance(bench.attempt("c"), Grant)


def test_unreachable_client_that_attempts_is_granted(bench) -> None:
    bench.unreachable |= {"b"}
    bench.attempt("a")
    bench.attempt("b")
    bench.pass_time(10)
    assert bench.attempt("b") == Grant(2, 10.0)


def test_unreachable_head_that_attempts_is_granted_before_others(bench) -> None:
    # Seed 69 of the simulation: the waiter's own attempt gave it a reservation, passed it over in the same call because
    # its client was unreachable, and returned a grant without a token.
    for who in "abc":
        bench.attempt(who)
    bench.unreachable.add("b")
    bench.pass_time(10)
    assert bench.attempt("b") == Grant(2, 10.0)
    assert bench.state("b") == HELD


def test_head_that_leaves_notifies_the_next_waiter(bench) -> None:
    for who in "abc":
        bench.attempt(who)
    bench.pass_time(2)
    assert not bench.release("b")
    assert bench.sent_notifications() == [("recheck", "c", 8.0)]


def test_grant_with_short_ttl_notifies_head_to_recheck_earlier(bench) -> None:
    for who in "abc":
        bench.attempt(who)
    bench.release("a")
    bench.attempt("b", ttl=0.3)
    assert bench.sent_notifications() == [("recheck", "c", 0.3)]


def test_queued_claim_without_heartbeat_expires(bench) -> None:  # E7
    bench.attempt("a", ttl=100.0)
    bench.attempt("b")
    bench.attempt("c")
    bench.pass_time(WAITER_TTL - 1)
    assert bench.renew("b", 0) == Alive(WAITER_TTL, 0)
    bench.pass_time(WAITER_TTL - 1)
    assert bench.renew("b", 0) == Alive(WAITER_TTL, 0)
    assert bench.renew("c", 0) == Gone("unknown")


def test_heartbeat_neither_extends_reservation_nor_requeues_waiter(bench) -> None:
    for who in "ab":
        bench.attempt(who)
    bench.release("a")
    end = bench.lock_state.entries["b"].expires_at
    bench.pass_time(1)
    bench.renew("b", 0)
    assert bench.lock_state.entries["b"].expires_at == end
    bench.pass_time(RESERVATION_TTL)
    bench.renew("b", 0)
    assert bench.state("b") == PASSED


def test_renew_needs_matching_id_hash_and_token_and_live_grant(bench) -> None:
    bench.attempt("a")
    assert bench.renew("a", 99) == Gone("unknown")
    assert bench.renew("x", 1) == Gone("unknown")
    bench.pass_time(10)
    assert bench.renew("a", 1) == Gone("expired")


def test_expired_claim_that_attempts_again_gets_new_token(bench) -> None:  # E3
    bench.attempt("a")
    bench.pass_time(10)
    assert bench.attempt("a") == Grant(2, 10.0)


def test_release_with_other_id_hash_frees_nothing(bench) -> None:
    bench.attempt("a")
    assert not bench.release("b")
    assert bench.state("a") == HELD


def test_release_of_unknown_claim_ends_reservation_but_never_grant(bench) -> None:
    bench.attempt("a")
    bench.attempt("b")
    assert bench.lock_state.release(bench.context, "a", release_held=False)[0] is False
    assert bench.state("a") == HELD
    bench.release("a")
    assert bench.state("b") == RESERVED
    assert bench.lock_state.release(bench.context, "b", release_held=False)[0] is True
    assert bench.lock_state.empty


def test_min_hold_cools_until_break(bench) -> None:
    bench.attempt("a", min_hold=5.0)
    bench.pass_time(2)
    assert bench.release("a")
    assert not bench.release("a")  # repeated: harmless
    assert bench.attempt("b") == Busy(3.0, 0, 1, Holder("a"))
    assert bench.break_(1)
    assert bench.state("b") == RESERVED


def test_min_hold_is_bounded_when_clock_goes_back(bench) -> None:
    bench.attempt("a", min_hold=5.0)
    bench.pass_time(-3600)
    assert bench.release("a")
    assert isinstance(bench.attempt("b", queue=False), Busy)
    bench.pass_time(5)
    assert isinstance(bench.attempt("b", queue=False), Grant)


def test_min_hold_is_that_of_the_last_attempt_unless_it_does_not_apply(bench) -> None:
    bench.attempt("a")
    bench.attempt("b", min_hold=5.0)
    bench.release("a")
    bench.attempt("b", min_hold=5.0)
    assert bench.release("b", keep_min_hold=False), "no work was done under it"
    assert bench.lock_state.empty


def test_delay_keeps_name_after_expiry_but_not_after_release(bench) -> None:
    bench.attempt("a", delay=5.0)
    bench.pass_time(10)
    assert bench.renew("a", 1) == Gone("expired")
    assert bench.attempt("b", queue=False) == Busy(5.0, None, 1, Holder("a"))
    bench.pass_time(5)
    assert bench.attempt("b", delay=5.0) == Grant(2, 10.0)
    bench.release("b")
    assert bench.attempt("c") == Grant(3, 10.0)


def test_break_cools_for_delay_and_second_break_has_no_effect(bench) -> None:
    bench.attempt("a", delay=5.0)
    assert bench.break_(1)
    assert bench.sent_notifications() == [("broken", "a", 0.0)]
    assert not bench.break_(1)
    assert bench.lock_state.holders[1].state == COOLING
    assert bench.renew("a", 1) == Gone("unknown")


def test_break_with_old_token_has_no_effect(bench) -> None:
    bench.attempt("a")
    bench.release("a")
    bench.attempt("b")
    assert not bench.break_(1)
    assert bench.state("b") == HELD


def test_reservation_cannot_be_broken(bench) -> None:
    for who in "ab":
        bench.attempt(who)
    bench.release("a")
    assert not bench.break_(2)
    assert bench.attempt("b") == Grant(2, 10.0)


def test_readers_share_and_queued_writer_stops_new_readers(bench) -> None:
    assert isinstance(bench.attempt("r1", mode="shared"), Grant)
    assert isinstance(bench.attempt("r2", mode="shared"), Grant)
    assert isinstance(bench.attempt("w"), Busy)
    assert isinstance(bench.attempt("r3", mode="shared"), Busy)
    bench.release("r1")
    assert bench.state("w") == WAITING
    bench.release("r2")
    assert bench.sent_notifications() == [("reserved", "w", 0.0), ("recheck", "r3", RESERVATION_PROBE)]


def test_release_notifies_all_readers_at_the_head(bench) -> None:
    bench.attempt("w")
    for who in ("r1", "r2"):
        bench.attempt(who, mode="shared")
    bench.release("w")
    assert bench.sent_notifications() == [("reserved", "r1", 0.0), ("reserved", "r2", 0.0)]


def test_semaphore_grants_the_lowest_free_slot(bench_type) -> None:
    bench = bench_type("semaphore", 2)
    assert bench.attempt("a") == Grant(1, 10.0, 0)
    assert bench.attempt("b") == Grant(2, 10.0, 1)
    assert isinstance(bench.attempt("c"), Busy)
    bench.release("a")
    assert bench.attempt("c") == Grant(3, 10.0, 0)


@pytest.mark.parametrize("fields", [{"kind": "semaphore", "limit": 1}, {"kind": "semaphore", "limit": 3}])
def test_other_kind_is_refused_while_name_is_in_use(bench, fields) -> None:
    bench.attempt("a")
    with pytest.raises(Mismatch, match="in use as a lock"):
        bench.attempt("b", **fields)
    bench.release("a")
    assert isinstance(bench.attempt("b", **fields), Grant)


def test_expired_claims_do_not_fix_the_kind(bench) -> None:
    bench.attempt("a")
    bench.attempt("b")
    bench.pass_time(WAITER_TTL + RESERVATION_TTL)
    assert isinstance(bench.attempt("c", kind="semaphore", limit=2), Grant)


def test_idle_name_leaves_no_state(bench) -> None:
    bench.attempt("a")
    bench.attempt("b")
    bench.release("a")
    bench.release("b")
    assert bench.lock_state.empty
    assert not bench.lock_state.waiters
