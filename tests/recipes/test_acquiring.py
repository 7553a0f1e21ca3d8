"""The one loop: late grants, unknown outcomes, and what is left behind when it gives up."""

from __future__ import annotations

import pytest

from leasehold import NotAcquired, Unavailable
from leasehold.model import Grant

pytestmark = pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning")


def slow(bench, seconds: float, times: int):
    """Let the next attempts answer late by the caller's clock."""
    call, left = bench.link.call, [times]

    def late(verb, args, deadline):
        reply = call(verb, args, deadline)
        if verb == "attempt" and left[0]:
            left[0] -= 1
            bench.clock.at += seconds
        return reply

    bench.link.call = late
    return left


def test_a_grant_that_arrives_out_of_trust_is_released_and_not_handed_out(bench) -> None:
    ids: list[str] = []
    post = bench.link.post
    bench.link.post = lambda verb, args: ids.append(args[0].id) or post(verb, args)
    slow(bench, 11, times=2)
    lease = bench.client().lock("a", ttl=10).acquire()
    assert lease.state == "HELD"
    assert len(set(ids)) == 2
    assert lease._claim.id not in ids  # each late grant was given back under a name of its own


def test_an_engine_slower_than_the_ttl_is_given_up(bench) -> None:
    left = slow(bench, 11, times=10)
    with pytest.raises(Unavailable, match="choose a longer ttl"):
        bench.client().lock("a", ttl=10).acquire()
    assert left == [7]
    assert not bench.store.lines


def test_a_late_grant_at_the_end_of_the_wait_is_no_grant(bench) -> None:
    slow(bench, 11, times=1)
    with pytest.raises(Unavailable):
        bench.client().lock("a", ttl=10).acquire(wait=0)
    assert not bench.store.lines


def test_an_unknown_outcome_is_forgotten_and_owed(bench, wait_until) -> None:
    client = bench.client()
    call = bench.link.call

    def lose_the_answer(verb, args, deadline):
        if verb == "attempt":
            call(verb, args, deadline)
        raise Unavailable("the answer was lost")

    bench.link.call, bench.link.post = lose_the_answer, lambda *_: False
    with pytest.raises(Unavailable):
        client.lock("a").acquire()
    assert bench.store.lines  # granted, though nobody heard
    assert client._desk.book.owed
    bench.link.call = call
    bench.clock.turn(5)
    wait_until(lambda: not bench.store.lines)


def test_min_hold_keeps_nothing_for_somebody_who_never_worked(bench) -> None:
    call = bench.link.call

    def lose_the_answer(verb, args, deadline):
        reply = call(verb, args, deadline)
        if isinstance(reply, Grant):
            raise Unavailable("the answer was lost")
        return reply

    bench.link.call = lose_the_answer
    with pytest.raises(Unavailable):
        bench.client().lock("a", min_hold=1000).acquire()
    assert not bench.store.lines


def test_nothing_is_owed_by_one_who_never_queued(bench) -> None:
    held = bench.client().lock("a").acquire()
    posts: list[str] = []
    post = bench.link.post
    bench.link.post = lambda verb, args: posts.append(verb) or post(verb, args)
    with pytest.raises(NotAcquired):
        bench.client().lock("a").acquire(wait=0)
    assert not posts
    assert held.held


def test_no_call_has_more_patience_than_the_lease_would_live(bench) -> None:
    deadlines: dict[str, float] = {}
    call = bench.link.call
    bench.link.call = lambda verb, args, deadline: deadlines.update({verb: deadline}) or call(verb, args, deadline)
    bench.client(call_timeout=5).lock("a", ttl=2).acquire().release()
    assert deadlines == {"attempt": 1002.0, "release": 1002.0}
    bench.client(call_timeout=5).lock("a", ttl=20).acquire().release()
    assert deadlines == {"attempt": 1005.0, "release": 1005.0}
