"""The limit of a semaphore, changed in use."""

import pytest

from leasehold.core.queue_entry import HELD, RESERVED, WAITING
from leasehold.errors import Mismatch
from leasehold.model import Busy, Grant
from tests.core.conftest import Bench


@pytest.fixture
def bench() -> Bench:
    return Bench("semaphore", 3)


def test_smaller_limit_grants_nothing_until_drained(bench: Bench) -> None:
    for who in "abcd":
        bench.attempt(who)
    assert bench.set_limit(1)
    for holder in "ab":
        assert bench.release(holder)
        assert bench.state("d") == WAITING
    bench.release("c")
    assert bench.state("d") == RESERVED


def test_larger_limit_reserves_for_the_waiters_that_fit(bench: Bench) -> None:
    for who in "abcdef":
        bench.attempt(who)
    assert bench.set_limit(5)
    assert [note[:2] for note in bench.sent_notifications()] == [("reserved", "d"), ("reserved", "e"), ("recheck", "f")]
    assert bench.attempt("d") == Grant(4, 10.0, 3)


def test_smaller_limit_withdraws_reservations_but_keeps_positions(bench: Bench) -> None:
    for who in "abcdef":
        bench.attempt(who)
    bench.release("a")
    bench.release("b")
    assert [bench.state(who) for who in "cdef"] == [HELD, RESERVED, RESERVED, WAITING]
    assert bench.set_limit(2)
    assert [bench.state(who) for who in "cdef"] == [HELD, RESERVED, WAITING, WAITING]
    assert bench.sent_notifications() == [("recheck", "e", 1.0)]
    assert bench.attempt("e").position == 0
    assert isinstance(bench.attempt("d"), Grant)
    bench.release("c")
    assert bench.state("e") == RESERVED


def test_limit_that_was_set_counts_instead_of_that_of_the_claim(bench: Bench) -> None:
    bench.set_limit(2)
    for who, limit in (("a", 3), ("b", 7)):
        assert isinstance(bench.attempt(who, limit=limit), Grant)
    assert isinstance(bench.attempt("c", limit=7), Busy)
    with pytest.raises(Mismatch, match="semaphore of 2"):
        bench.attempt("d", kind="lock", limit=1)


def test_limit_that_was_set_outlasts_the_claims_until_it_is_removed(bench: Bench) -> None:
    bench.set_limit(2)
    with pytest.raises(Mismatch, match="stays a semaphore"):
        bench.attempt("a", kind="lock", limit=1)
    bench.attempt("a", limit=9)
    assert bench.set_limit(None)
    with pytest.raises(Mismatch):  # in force until the name is empty
        bench.attempt("b", limit=9)
    bench.release("a")
    assert isinstance(bench.attempt("b", kind="lock", limit=1), Grant)


def test_limit_of_a_lock_in_use_is_refused() -> None:
    bench = Bench()
    bench.attempt("a")
    assert not bench.set_limit(2)
    assert bench.set_limit(None)
    bench.pass_time(10)
    assert bench.set_limit(2), "the lease has expired"
