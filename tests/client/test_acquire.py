"""The acquire loop: late grants, unknown outcomes, and what remains when it gives up."""

from __future__ import annotations

import pytest

from leasehold import NotAcquired, Unavailable
from leasehold.model import Grant
from tests.support import probe

pytestmark = pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning")


def delay_attempts(bench, seconds: float, times: int):
    """Delay the replies to the next attempts by the caller's clock."""
    call, remaining = bench.transport.call, [times]

    def delayed_call(verb, args, deadline):
        reply = call(verb, args, deadline)
        if verb == "attempt" and remaining[0]:
            remaining[0] -= 1
            bench.clock.at += seconds
        return reply

    bench.transport.call = delayed_call
    return remaining


def test_grant_that_expired_on_arrival_is_released_not_returned(bench) -> None:
    ids: list[str] = []
    post = bench.transport.post
    bench.transport.post = lambda verb, args: ids.append(args[0].id) or post(verb, args)
    delay_attempts(bench, 11, times=2)
    lease = bench.client().lock("a", ttl=10).acquire()
    assert lease.state == "HELD"
    assert len(set(ids)) == 2
    assert probe.claim(lease).id not in ids  # each late grant had a claim id of its own and was released


def test_acquire_raises_unavailable_when_engine_is_slower_than_ttl(bench) -> None:
    remaining = delay_attempts(bench, 11, times=10)
    with pytest.raises(Unavailable, match="choose a longer ttl"):
        bench.client().lock("a", ttl=10).acquire()
    assert remaining == [7]
    assert not bench.server.lock_states


def test_late_grant_at_wait_deadline_raises_unavailable(bench) -> None:
    delay_attempts(bench, 11, times=1)
    with pytest.raises(Unavailable):
        bench.client().lock("a", ttl=10).acquire(wait=0)
    assert not bench.server.lock_states


def test_attempt_with_unknown_outcome_becomes_pending_release(bench, wait_until) -> None:
    client = bench.client()
    call = bench.transport.call

    def lose_the_answer(verb, args, deadline):
        if verb == "attempt":
            call(verb, args, deadline)
        raise Unavailable("the answer was lost")

    bench.transport.call, bench.transport.post = lose_the_answer, lambda *_: False
    with pytest.raises(Unavailable):
        client.lock("a").acquire()
    assert bench.server.lock_states  # granted, though the client got no reply
    assert probe.pending_releases(client)
    bench.transport.call = call
    bench.clock.advance(5)
    wait_until(lambda: not bench.server.lock_states)


def test_min_hold_does_not_apply_to_grant_never_returned(bench) -> None:
    call = bench.transport.call

    def lose_the_answer(verb, args, deadline):
        reply = call(verb, args, deadline)
        if isinstance(reply, Grant):
            raise Unavailable("the answer was lost")
        return reply

    bench.transport.call = lose_the_answer
    with pytest.raises(Unavailable):
        bench.client().lock("a", min_hold=1000).acquire()
    assert not bench.server.lock_states


def test_busy_attempt_without_queue_sends_no_release(bench) -> None:
    held = bench.client().lock("a").acquire()
    posts: list[str] = []
    post = bench.transport.post
    bench.transport.post = lambda verb, args: posts.append(verb) or post(verb, args)
    with pytest.raises(NotAcquired):
        bench.client().lock("a").acquire(wait=0)
    assert not posts
    assert held.held


def test_call_deadline_never_exceeds_the_ttl(bench) -> None:
    deadlines: dict[str, float] = {}
    call = bench.transport.call
    bench.transport.call = lambda verb, args, deadline: deadlines.update({verb: deadline}) or call(verb, args, deadline)
    bench.client(call_timeout=5).lock("a", ttl=2).acquire().release()
    assert deadlines == {"attempt": 1002.0, "release": 1002.0}
    bench.client(call_timeout=5).lock("a", ttl=20).acquire().release()
    assert deadlines == {"attempt": 1005.0, "release": 1005.0}
