"""The reference state machine, verb by verb. By rules over random runs it is in test_admission_rules.py."""

from __future__ import annotations

import pytest

from leasehold import Mismatch
from leasehold.core.party import COOLING, HELD, PASSED, RESERVED, WAITING, Word
from leasehold.core.timing import BEAT, PROBE, RESERVATION
from leasehold.model import Alive, Busy, Gone, Grant, Holder


def test_a_free_name_is_granted_and_a_held_one_is_busy(bench) -> None:
    assert bench.attempt("a") == Grant(1, 10.0)
    assert bench.attempt("b") == Busy(10.0, 0, 1, Holder("a"))
    assert bench.attempt("c") == Busy(10.0, 1, 1, Holder("a"))


def test_an_attempt_that_does_not_queue_leaves_nothing(bench) -> None:
    bench.attempt("a")
    assert bench.attempt("b", queue=False) == Busy(10.0, None, 1, Holder("a"))
    assert set(bench.line.parties) == {"a"}


def test_a_repeated_attempt_gives_the_same_grant_or_place(bench) -> None:  # E2
    bench.attempt("a")
    bench.attempt("b")
    bench.pass_time(4)
    assert bench.attempt("a") == Grant(1, 10.0)
    assert bench.attempt("b") == Busy(10.0, 0, 1, Holder("a"))
    assert len(bench.line.waiters) == 1


def test_nothing_shortens_a_life_once_promised(bench) -> None:  # E8: requests may pass each other on the way
    bench.attempt("a")
    assert bench.renew("a", 1, ttl=60.0) == Alive(60.0)
    assert bench.attempt("a") == Grant(1, 60.0)
    assert bench.renew("a", 1, ttl=5.0) == Alive(60.0)


def test_a_release_reserves_for_the_head_and_tells_the_next_when_that_ends(bench) -> None:
    for who in "abc":
        bench.attempt(who)
    assert bench.release("a")
    assert bench.told() == [("go", "b", 0.0), ("head", "c", PROBE)]
    assert bench.state("b") == RESERVED
    assert bench.attempt("b") == Grant(2, 10.0)
    assert bench.attempt("d") == Busy(10.0, 1, 2, Holder("b"))


def test_a_reservation_not_claimed_passes_its_waiter_over_and_it_comes_back_at_its_place(bench) -> None:
    for who in "abcd":
        bench.attempt(who)
    bench.release("a")
    bench.pass_time(RESERVATION)
    assert bench.attempt("c") == Grant(3, 10.0)  # b's token 2 is burnt
    assert bench.state("b") == PASSED
    assert bench.attempt("b") == Busy(10.0, 0, 3, Holder("c"))  # before d
    assert [party.mark for _, party in bench.line.waiters] == ["b", "d"]


def test_a_waiter_that_cannot_be_told_is_passed_over_at_once(bench) -> None:
    for who in "abc":
        bench.attempt(who)
    bench.deaf.add("b")
    bench.release("a")
    assert bench.told() == [("go", "c", 0.0)]
    assert bench.state("b") == PASSED


def test_a_turn_that_could_not_be_told_passes_on_at_once(bench) -> None:
    for who in "abc":
        bench.attempt(who)
    bench.release("a")
    assert bench.line.unheard(bench.at, "b") == (False, [])  # somebody listens there by now
    bench.deaf.add("b")
    assert bench.line.unheard(bench.at, "b") == (True, [Word("c", "go", "c")])
    assert bench.state("b") == PASSED
    assert bench.line.unheard(bench.at, "b") == (False, [])


def test_one_that_dies_after_it_was_given_its_turn_is_passed_over_at_the_next_look(bench) -> None:
    for who in "abc":
        bench.attempt(who)
    bench.release("a")
    assert bench.state("b") == RESERVED
    bench.deaf.add("b")
    bench.pass_time(PROBE)
    assert bench.attempt("c") == Grant(3, 10.0)
    assert bench.state("b") == PASSED


def test_a_head_that_asks_meanwhile_still_looks_soon_whether_the_one_given_a_turn_is_there(bench) -> None:
    for who in "abc":
        bench.attempt(who)
    bench.release("a")
    bench.pass_time(0.2)  # a heart-beat, or its own look, has it ask while the one before it still lives
    busy = bench.attempt("c")
    assert isinstance(busy, Busy)
    assert (busy.place, busy.left) == (0, PROBE), "not the whole reservation"
    bench.deaf.add("b")
    bench.pass_time(PROBE)
    assert isinstance(bench.attempt("c"), Grant)


def test_a_deaf_client_that_asks_is_served_all_the_same(bench) -> None:
    bench.deaf |= {"b"}
    bench.attempt("a")
    bench.attempt("b")
    bench.pass_time(10)
    assert bench.attempt("b") == Grant(2, 10.0)


def test_a_deaf_client_that_asks_is_served_though_others_wait_behind_it(bench) -> None:
    # Seed 69 of the simulation: given its turn by its own attempt, it was passed over within that attempt as one that
    # cannot be reached, and answered with a grant that had no token.
    for who in "abc":
        bench.attempt(who)
    bench.deaf.add("b")
    bench.pass_time(10)
    assert bench.attempt("b") == Grant(2, 10.0)
    assert bench.state("b") == HELD


def test_the_head_that_leaves_hands_its_watch_to_the_next(bench) -> None:
    for who in "abc":
        bench.attempt(who)
    bench.pass_time(2)
    assert not bench.release("b")
    assert bench.told() == [("head", "c", 8.0)]


def test_a_claim_with_a_short_ttl_tells_the_head_to_look_earlier(bench) -> None:
    for who in "abc":
        bench.attempt(who)
    bench.release("a")
    bench.attempt("b", ttl=0.3)
    assert bench.told() == [("head", "c", 0.3)]


def test_a_queued_claim_lapses_when_not_heard_of(bench) -> None:  # E7
    bench.attempt("a", ttl=100.0)
    bench.attempt("b")
    bench.attempt("c")
    bench.pass_time(BEAT - 1)
    assert bench.renew("b", 0) == Alive(BEAT, 0)
    bench.pass_time(BEAT - 1)
    assert bench.renew("b", 0) == Alive(BEAT, 0)
    assert bench.renew("c", 0) == Gone("unknown")


def test_a_heart_beat_lengthens_no_reservation_and_puts_nobody_back(bench) -> None:
    for who in "ab":
        bench.attempt(who)
    bench.release("a")
    end = bench.line.parties["b"].until
    bench.pass_time(1)
    bench.renew("b", 0)
    assert bench.line.parties["b"].until == end
    bench.pass_time(RESERVATION)
    bench.renew("b", 0)
    assert bench.state("b") == PASSED


def test_renewal_is_by_mark_and_token_and_only_while_it_lives(bench) -> None:
    bench.attempt("a")
    assert bench.renew("a", 99) == Gone("unknown")
    assert bench.renew("x", 1) == Gone("unknown")
    bench.pass_time(10)
    assert bench.renew("a", 1) == Gone("lapsed")


def test_a_lapsed_claim_that_asks_again_gets_a_new_token(bench) -> None:  # E3
    bench.attempt("a")
    bench.pass_time(10)
    assert bench.attempt("a") == Grant(2, 10.0)


def test_a_release_by_another_mark_frees_nothing(bench) -> None:
    bench.attempt("a")
    assert not bench.release("b")
    assert bench.state("a") == HELD


def test_a_stray_release_gives_up_a_turn_but_never_a_grant(bench) -> None:
    bench.attempt("a")
    bench.attempt("b")
    assert bench.line.release(bench.at, "a", 0.0, held=False)[0] is False
    assert bench.state("a") == HELD
    bench.release("a")
    assert bench.state("b") == RESERVED
    assert bench.line.release(bench.at, "b", 0.0, held=False)[0] is True
    assert bench.line.idle


def test_min_hold_cools_and_a_break_ends_that(bench) -> None:
    bench.attempt("a")
    bench.pass_time(2)
    assert bench.release("a", min_hold=5.0)
    assert not bench.release("a", min_hold=5.0)  # repeated: harmless
    assert bench.attempt("b") == Busy(3.0, 0, 1, Holder("a"))
    assert bench.break_(1)
    assert bench.state("b") == RESERVED


def test_min_hold_keeps_no_longer_than_that_though_the_clock_went_back(bench) -> None:
    bench.attempt("a")
    bench.pass_time(-3600)
    assert bench.release("a", min_hold=5.0)
    assert isinstance(bench.attempt("b", queue=False), Busy)
    bench.pass_time(5)
    assert isinstance(bench.attempt("b", queue=False), Grant)


def test_delay_keeps_the_name_after_a_lapse_but_not_after_a_release(bench) -> None:
    bench.attempt("a", delay=5.0)
    bench.pass_time(10)
    assert bench.renew("a", 1) == Gone("lapsed")
    assert bench.attempt("b", queue=False) == Busy(5.0, None, 1, Holder("a"))
    bench.pass_time(5)
    assert bench.attempt("b", delay=5.0) == Grant(2, 10.0)
    bench.release("b")
    assert bench.attempt("c") == Grant(3, 10.0)


def test_a_break_cools_for_the_delay_and_a_second_break_does_not_cut_that_short(bench) -> None:
    bench.attempt("a", delay=5.0)
    assert bench.break_(1)
    assert bench.told() == [("lost", "a", 0.0)]
    assert not bench.break_(1)
    assert bench.line.occupiers[1].state == COOLING
    assert bench.renew("a", 1) == Gone("unknown")


def test_a_break_with_an_old_token_hits_nobody(bench) -> None:
    bench.attempt("a")
    bench.release("a")
    bench.attempt("b")
    assert not bench.break_(1)
    assert bench.state("b") == HELD


def test_a_reservation_cannot_be_broken(bench) -> None:
    for who in "ab":
        bench.attempt(who)
    bench.release("a")
    assert not bench.break_(2)
    assert bench.attempt("b") == Grant(2, 10.0)


def test_readers_share_and_a_writer_in_line_stops_new_ones(bench) -> None:
    assert isinstance(bench.attempt("r1", mode="shared"), Grant)
    assert isinstance(bench.attempt("r2", mode="shared"), Grant)
    assert isinstance(bench.attempt("w"), Busy)
    assert isinstance(bench.attempt("r3", mode="shared"), Busy)
    bench.release("r1")
    assert bench.state("w") == WAITING
    bench.release("r2")
    assert bench.told() == [("go", "w", 0.0), ("head", "r3", PROBE)]


def test_several_readers_go_at_once(bench) -> None:
    bench.attempt("w")
    for who in ("r1", "r2"):
        bench.attempt(who, mode="shared")
    bench.release("w")
    assert bench.told() == [("go", "r1", 0.0), ("go", "r2", 0.0)]


def test_a_semaphore_numbers_its_permits_and_uses_the_least_free(bench_of) -> None:
    bench = bench_of("semaphore", 2)
    assert bench.attempt("a") == Grant(1, 10.0, 0)
    assert bench.attempt("b") == Grant(2, 10.0, 1)
    assert isinstance(bench.attempt("c"), Busy)
    bench.release("a")
    assert bench.attempt("c") == Grant(3, 10.0, 0)


@pytest.mark.parametrize("fields", [{"kind": "semaphore", "limit": 1}, {"kind": "semaphore", "limit": 3}])
def test_another_kind_is_refused_while_the_name_lives(bench, fields) -> None:
    bench.attempt("a")
    with pytest.raises(Mismatch, match="in use as a lock"):
        bench.attempt("b", **fields)
    bench.release("a")
    assert isinstance(bench.attempt("b", **fields), Grant)


def test_the_dead_do_not_fix_a_kind(bench) -> None:
    bench.attempt("a")
    bench.attempt("b")
    bench.pass_time(BEAT + RESERVATION)
    assert isinstance(bench.attempt("c", kind="semaphore", limit=2), Grant)


def test_nothing_is_left_of_an_idle_name(bench) -> None:
    bench.attempt("a")
    bench.attempt("b")
    bench.release("a")
    bench.release("b")
    assert bench.line.idle
    assert not bench.line.waiters
