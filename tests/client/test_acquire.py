"""The acquire loop: late grants, unknown outcomes, and what remains when it gives up."""

from __future__ import annotations

import pytest

from leasehold import NotAcquired, Unavailable
from leasehold.model import NO_MIN_HOLD, Busy, Claim, Grant
from leasehold.runtime.base import run_sync
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


def record_attempts(bench) -> list[Claim]:
    """The claims of all attempts from now on."""
    call, claims = bench.transport.call, []

    def recording_call(verb, args, deadline):
        if verb == "attempt":
            claims.append(args[0])
        return call(verb, args, deadline)

    bench.transport.call = recording_call
    return claims


@pytest.mark.parametrize(("wait", "queues"), [(None, True), (0, False)], ids=["waits", "does not wait"])
def test_client_that_met_contention_queues_at_once_if_it_waits(bench, wait, queues) -> None:
    client = bench.client()
    probe.engine_state(client)["contended"] = True
    claims = record_attempts(bench)
    client.lock("a", wait=wait).acquire()
    assert [claim.queue for claim in claims] == [queues]


def test_claim_beside_an_own_read_lock_never_queues(bench) -> None:
    # A writer may be queued in between, and wait for the first read lock.
    client = bench.client()
    probe.engine_state(client)["contended"] = True
    claims, lock = record_attempts(bench), client.rwlock("a")
    with lock.read(), lock.read():
        pass
    assert [claim.queue for claim in claims] == [True, False]


def record_deadlines(bench) -> dict[str, float]:
    """The last deadline of each verb from now on."""
    deadlines: dict[str, float] = {}
    call = bench.transport.call
    bench.transport.call = lambda verb, args, deadline: deadlines.update({verb: deadline}) or call(verb, args, deadline)
    return deadlines


@pytest.mark.parametrize(
    ("options", "deadline"),
    [
        ({"wait": 0, "on_unavailable": "wait"}, 1005.0),
        ({"wait": 1, "on_unavailable": "raise"}, 1005.0),
        ({"wait": 1, "on_unavailable": "wait"}, 1001.0),
    ],
    ids=["does not wait", "raises", "waits"],
)
def test_only_attempts_that_are_repeated_end_at_the_wait(bench, options, deadline) -> None:
    deadlines = record_deadlines(bench)
    bench.client(call_timeout=5).lock("a", require={"fencing"}, **options).acquire()
    assert deadlines == {"inspect": deadline, "attempt": deadline}


def test_call_deadline_never_exceeds_the_ttl(bench) -> None:
    deadlines = record_deadlines(bench)
    bench.client(call_timeout=5).lock("a", ttl=2).acquire().release()
    assert deadlines == {"attempt": 1002.0, "release": 1002.0}
    bench.client(call_timeout=5).lock("a", ttl=20).acquire().release()
    assert deadlines == {"attempt": 1005.0, "release": 1005.0}


@pytest.mark.parametrize(
    ("options", "until"),
    [
        ({"wait": 0, "on_unavailable": "raise"}, 1005.0),
        ({"wait": 1, "on_unavailable": "raise"}, 1005.0),
        ({"wait": 9, "on_unavailable": "raise"}, 1009.0),
        ({"wait": 1, "on_unavailable": "wait"}, 1001.0),
    ],
    ids=["does not wait", "short wait", "long wait", "repeats"],
)
def test_caller_waits_to_be_sent_as_long_as_for_an_answer_or_its_wait(bench, options, until) -> None:
    client = bench.client(call_timeout=5)
    probe.engine_state(client)["contended"] = True
    request, asked = probe.acquire_request(client.lock("a", **options), options["wait"]), []

    async def enter(_id_hash: str, until: float) -> float:
        asked.append(until)
        return bench.clock.at

    probe.core(client).attempts.enter = enter
    assert run_sync(request.wait_to_send()) == 1005.0
    assert asked == [until]
    assert request.claim.queue is (options["wait"] > 0)


@pytest.mark.parametrize(("wait", "deadline"), [(0, 1005.0), (9, 1007.0)], ids=["does not wait", "waits"])
def test_time_until_it_is_sent_counts_into_call_timeout_only_without_wait(bench, wait, deadline) -> None:
    client = bench.client(call_timeout=5)
    deadlines, attempts = record_deadlines(bench), probe.core(client).attempts

    async def enter(_id_hash: str, _until: float) -> float:
        bench.clock.at += 2.0
        return bench.clock.at

    attempts.try_enter, attempts.enter = lambda _id_hash: False, enter
    client.lock("a", wait=wait).acquire().release()
    assert deadlines["attempt"] == deadline


@pytest.mark.parametrize("why", ["woken", "recheck_at", "head", None])
def test_claim_is_next_if_it_was_notified_or_heads_the_queue(bench, why) -> None:
    request = probe.acquire_request(bench.client().lock("a"))
    waiter, request.busy = request.add_waiter(request.claim), Busy(position=0 if why == "head" else 3)
    if why in ("woken", "recheck_at"):
        setattr(waiter, why, 1000.0)
    assert bool(request.is_next()) is (why is not None)


def test_grant_without_a_token_is_refused(bench) -> None:
    request = probe.acquire_request(bench.client().lock("a"))
    with pytest.raises(Unavailable, match="has no token"):
        request.register(Grant(0, 10.0))


def test_late_grant_is_an_answer_and_is_released_without_min_hold(bench) -> None:
    request, released = probe.acquire_request(bench.client().lock("a", min_hold=1000), wait=9), []
    bench.transport.post = lambda _verb, args: released.append(args[0]) or True
    request.join_queue()
    late = request.claim
    request.after_late_grant()
    assert [claim.id for claim in released] == [late.id]
    assert released[0].min_hold == NO_MIN_HOLD
    assert request.answered
    assert request.claim.id != late.id
    assert request.claim._replace(id=late.id, id_hash=late.id_hash) == late  # it queues at once, until `wait` is over


def test_claim_with_a_new_id_is_not_next(bench) -> None:
    # Its old id was. So its next attempt waits to be sent, as those of all claims that are not in the queue.
    request = probe.acquire_request(bench.client().lock("a"))
    request.busy = Busy(position=0)
    request.release_claim()
    request.add_waiter(request.claim)
    assert not request.is_next()


def test_waiter_that_the_engine_has_forgotten_is_woken_by_its_heartbeat(bench, wait_until) -> None:
    request = probe.acquire_request((client := bench.client()).lock("a"))
    request.join_queue()
    waiter = request.add_waiter(request.claim)
    waiter.woken = True  # so that its wait ends at once
    run_sync(request.after_busy(Busy(position=3)))
    waiter.woken = False

    def woken_by_heartbeat() -> bool:
        probe.make_heartbeat_due(client)  # again and again: the watchdog may be about to plan it for later
        probe.wake_watchdog(client)
        return waiter.woken

    wait_until(woken_by_heartbeat, 30)
