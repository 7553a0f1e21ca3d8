"""The watchdog: many leases, batches, deadlines, misbehaving engines."""

from __future__ import annotations

import threading
from collections import deque

import pytest

from leasehold import Unavailable
from leasehold.engines.memory import MemoryEngine
from leasehold.model import Alive, Claim, Gone, Holder
from tests.support import probe, probe_lock_state

pytestmark = pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning")


@pytest.mark.usefixtures("untraced")
def test_watchdog_renews_ten_thousand_leases_in_batches(bench, wait_until) -> None:
    earlier_threads, client = set(threading.enumerate()), bench.client()
    leases = [client.lock(f"n{number}", ttl=30).acquire() for number in range(10_000)]
    wait_until(lambda: probe.planned_expiries(client) == 10_000)
    for now in (1010, 1020, 1030, 1040):
        calls = bench.transport.calls
        bench.clock.advance(10)
        wait_until(lambda now=now: all(probe.renewed_at(lease) == now for lease in leases), 120)
        assert bench.transport.calls - calls < 100
    assert all(lease.state == "HELD" for lease in leases)
    own_threads = set(threading.enumerate()) - earlier_threads
    assert [thread.name for thread in own_threads].count("leasehold-watchdog") == 1
    assert all(lease.release() for lease in leases)


def test_renewals_of_leases_acquired_together_are_spread(bench) -> None:
    client = bench.client()
    due = sorted(probe.next_renewal(client.lock(f"n{number}", ttl=30).acquire()) for number in range(200))
    assert due[0] >= 1008
    assert due[-1] <= 1010
    assert due[-1] - due[0] > 1


def test_leases_nearly_due_are_renewed_with_due_leases(bench, wait_until) -> None:
    client = bench.client()
    leases = [client.lock(f"n{number}", ttl=30).acquire() for number in range(200)]
    wait_until(lambda: probe.planned_renewals(client) == 200)
    first = min(probe.next_renewal(lease) for lease in leases) - bench.clock.at
    nearly_due = [lease for lease in leases if probe.next_renewal(lease) - bench.clock.at <= first / 0.9]
    others = [lease for lease in leases if lease not in nearly_due]
    before = bench.transport.calls
    bench.clock.advance(first)
    wait_until(lambda: all(probe.renewed_at(lease) == bench.clock.at for lease in nearly_due))
    assert len(nearly_due) > 20
    assert bench.transport.calls - before == 1
    assert others
    assert all(probe.renewed_at(lease) == 1000 for lease in others)


def test_lease_with_failed_renewal_is_not_renewed_early(bench, wait_until) -> None:
    client = bench.client()
    missed, other = client.lock("missed", ttl=30).acquire(), client.lock("other", ttl=30).acquire()
    probe.plan_renewal(missed, 1009.5, failed=True)
    probe.plan_renewal(other, 1009.0)
    for lease in (missed, other):
        probe.watchdog(client).watch(lease)
    bench.clock.advance(9.0)
    wait_until(lambda: probe.renewed_at(other) == 1009)
    assert probe.renewed_at(missed) == 1000
    bench.clock.advance(0.5)
    wait_until(lambda: probe.renewed_at(missed) == 1009.5)


def test_lease_renewed_meanwhile_is_rescheduled_without_a_call(bench, wait_until) -> None:
    client = bench.client()
    lease = client.lock("a", ttl=30).acquire()
    wait_until(lambda: probe.planned_renewals(client))
    before = bench.transport.calls
    probe.plan_renewal(lease, 1019.0, renewed=1009.0)  # as an explicit renewal that the watchdog does not know of
    bench.clock.advance(10)
    wait_until(lambda: probe.next_planned_renewal(client) == 1019.0)
    assert bench.transport.calls == before
    assert probe.renewed_at(lease) == 1009.0


def test_start_releases_tolerates_concurrent_pop(bench) -> None:
    class RacingDeque(deque):
        """Claims to be non-empty, as if another thread had just popped the last item."""

        def __bool__(self) -> bool:
            return True

    client = bench.client()
    probe.replace_releases(client, RacingDeque())
    probe.watchdog(client).start_releases()


def test_renewal_deadline_is_a_part_of_shortest_remaining_ttl(bench, wait_until) -> None:
    client = bench.client(call_timeout=60)
    short, long = client.lock("short", ttl=3).acquire(), client.lock("long", ttl=300).acquire()
    deadlines: list[float] = []
    call = bench.transport.call
    bench.transport.call = lambda verb, args, deadline: deadlines.append(deadline) or call(verb, args, deadline)
    bench.clock.advance(1)
    wait_until(lambda: probe.renewed_at(short) == 1001)
    assert 1001 + 2 / 2 < deadlines[0] <= 1001 + 2 * 2 / 3, "the first call opens a connection"
    deadlines.clear()
    bench.clock.advance(0.2)
    probe.plan_renewal(long, 0.0)
    probe.watchdog(client).watch(long)
    wait_until(lambda: probe.renewed_at(long) > 1000)
    assert deadlines[-1] <= 1001.2 + 1
    deadlines.clear()
    wait_until(lambda: probe.watchdog_sleeps(client))
    probe.pretend_last_call_took(client, 0.5)
    probe.plan_renewal(long, 0.0)
    probe.watchdog(client).watch(long)
    wait_until(lambda: deadlines)
    assert 1001.2 + 1 < deadlines[-1] <= 1001.2 + 2, "the network is slow"


@pytest.mark.parametrize(("took", "renewed_at"), [(1.0, 1000.0), (5.0, 1005.0)])
def test_slow_grant_is_renewed_at_once_only_the_first_time(bench, wait_until, took, renewed_at) -> None:
    client = bench.client()
    call = bench.transport.call

    def slow(verb, args, deadline):
        if verb == "attempt":
            bench.clock.advance(took)
        return call(verb, args, deadline)

    bench.transport.call = slow
    lease = client.lock("a", ttl=30).acquire()
    wait_until(lambda: probe.watchdog_sleeps(client))
    assert probe.renewed_at(lease) == renewed_at
    at = bench.clock.at
    other = client.lock("b", ttl=30).acquire()
    wait_until(lambda: not probe.new_leases(client) and probe.watchdog_sleeps(client))
    assert probe.renewed_at(other) == at


def test_slow_grant_is_renewed_at_once_if_watchdog_wakes_soon(bench, wait_until) -> None:
    """A watchdog that was to wake for something else before the renewal was due renewed a slow grant only then."""
    client, call = bench.client(), bench.transport.call
    other = client.lock("a", ttl=30).acquire()
    wait_until(lambda: probe.watchdog_sleeps(client))

    def slow(verb, args, deadline):
        if verb == "attempt":
            bench.clock.at += 5  # without waking the watchdog
        return call(verb, args, deadline)

    bench.transport.call = slow
    lease = client.lock("b", ttl=60).acquire()
    wait_until(lambda: probe.renewed_at(lease) == 1005)
    assert probe.renewed_at(other) == 1000


def test_failed_renewal_is_retried_at_shrinking_intervals(bench, wait_until) -> None:
    client = bench.client()
    lease = client.lock("a", ttl=30).acquire()
    bench.transport.silent = True
    bench.clock.advance(10)
    wait_until(lambda: probe.renewal_failed(lease))
    tries = bench.transport.calls
    while lease.held:
        bench.clock.advance(1)
        wait_until(lambda: bench.clock.at < probe.watchdog_wakes_at(client) < float("inf") or not lease.held)
    assert bench.transport.calls - tries >= 6
    assert lease.lost_reason == "unreachable"


def test_unmapped_engine_error_puts_lease_at_risk(bench, wait_until, monkeypatch, caplog) -> None:
    async def renew(*_: object) -> None:
        raise OSError("driver's own")

    lease = bench.client().lock("a", ttl=30).acquire()
    monkeypatch.setattr(MemoryEngine, "renew", renew)
    bench.clock.advance(10)
    wait_until(lambda: lease.state == "AT_RISK")
    wait_until(lambda: "should have mapped" in caplog.text)  # logged in the callback thread


def test_watchdog_continues_after_unexpected_error(bench, wait_until, caplog) -> None:
    client = bench.client()
    watchdog = probe.watchdog(client)
    lease = client.lock("a", ttl=30).acquire()
    failures: list[int] = []
    run_once = getattr(*probe.RUN_ONCE.of(watchdog))

    async def fail_once(runtime):
        if not failures:
            failures.append(1)
            raise RuntimeError("stumbled")
        return await run_once(runtime)

    setattr(*probe.RUN_ONCE.of(watchdog), fail_once)
    bench.clock.advance(10)
    wait_until(lambda: probe.renewed_at(lease) > 1000 or bench.clock.advance(0.2))
    wait_until(lambda: "unexpected error in the watchdog" in caplog.text)  # logged in the callback thread


def test_gone_reply_loses_lease_with_its_reason(bench, wait_until, monkeypatch) -> None:
    async def renew(_self, claims, _deadline):
        return [Gone("expired")] * len(claims)

    lease = bench.client().lock("a", ttl=30).acquire()
    monkeypatch.setattr(MemoryEngine, "renew", renew)
    bench.clock.advance(10)
    wait_until(lambda: lease.state == "LOST")
    assert lease.lost_reason == "expired"


def test_shorter_ttl_from_renewal_reply_is_used(bench, wait_until, monkeypatch) -> None:
    async def renew(_self, claims, _deadline):
        return [Alive(12.0)] * len(claims)

    lease = bench.client().lock("a", ttl=30).acquire()
    monkeypatch.setattr(MemoryEngine, "renew", renew)
    bench.clock.advance(10)
    wait_until(lambda: probe.renewed_at(lease) == 1010)
    assert lease.ttl == 12.0
    assert lease.remaining == pytest.approx(12 * 0.99)


def test_heartbeats_of_all_waiters_are_sent_in_one_batch(bench, wait_until) -> None:
    held = bench.client().lock("a", ttl=100).acquire()
    client = bench.client()
    threads = [threading.Thread(target=lambda: client.lock("a").acquire().release()) for _ in range(10)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(probe.registry(held).client_id and bench.server.lock_states["", "a"].waiters) == 10)
    heartbeats: list[int] = []
    call = bench.transport.call

    def count(verb, args, deadline):
        if verb == "renew":
            heartbeats.append(len(args[0]))
        return call(verb, args, deadline)

    bench.transport.call = count
    for _ in range(3):
        bench.clock.advance(5)
        expected = len(heartbeats) + 1
        wait_until(lambda expected=expected: heartbeats.count(10) >= expected or heartbeats.count(10) >= 3)
    assert len(bench.server.lock_states["", "a"].waiters) == 10
    held.release()
    for thread in threads:
        thread.join(60)


def test_first_waiter_after_idle_time_sends_no_heartbeat_at_once(bench, wait_until) -> None:
    held = bench.client().lock("a", ttl=100).acquire()
    client = bench.client()
    watched = client.lock("b", ttl=100).acquire()  # the watchdog runs, and has no waiters
    wait_until(lambda: probe.planned_renewals(client))
    verbs: list[str] = []
    call = bench.transport.call

    def note(verb, args, deadline):
        verbs.append(verb)
        return call(verb, args, deadline)

    bench.transport.call = note
    thread = threading.Thread(target=lambda: client.lock("a").acquire().release())
    thread.start()
    wait_until(lambda: probe.next_heartbeat(client) is not None)
    assert probe.next_heartbeat(client) == bench.clock.at + 5
    assert "renew" not in verbs
    bench.clock.advance(5)
    wait_until(lambda: "renew" in verbs)
    held.release()
    thread.join(60)
    watched.release()


def test_waiter_that_joined_after_another_left_sends_no_heartbeat_at_once(bench, monkeypatch) -> None:
    client = bench.client()
    registry, watchdog, sent = probe.registry(client), probe.watchdog(client), list[str]()
    registry.wake_watchdog = lambda _at: None  # keeps the watchdog's thread asleep

    async def send_renewals(_runtime, claims):
        sent.extend(claim.name for claim in claims)
        return [Alive(15, 4)] * len(claims)

    monkeypatch.setattr(*probe.SEND_RENEWALS.of(watchdog), send_renewals)
    for name in ("first", "second"):
        registry.add_waiter(Claim("", name, name, name, Holder("-"), 30), probe.watchdog_runtime(client))
        probe.send_due_heartbeats(client)
        bench.clock.advance(4)
        registry.remove_waiter("first")
    probe.send_due_heartbeats(client)  # the heartbeat of the first would have been due
    assert sent == []
    bench.clock.advance(1)
    probe.send_due_heartbeats(client)
    assert sent == ["second"]


def test_waiter_unknown_to_engine_queues_again(bench, wait_until) -> None:
    held = bench.client().lock("a", ttl=100).acquire()
    client = bench.client()
    thread = threading.Thread(target=lambda: client.lock("a").acquire().release())
    thread.start()
    wait_until(lambda: bench.server.lock_states["", "a"].waiters)
    lock_state = bench.server.lock_states["", "a"]
    (waiter,) = probe.registry(client).waiting.values()
    wait_until(lambda: waiter.answered)
    probe_lock_state.remove(lock_state, lock_state.waiters[0][1])  # as after a restart that lost the queue
    bench.clock.advance(5)
    wait_until(lambda: lock_state.waiters)
    held.release()
    thread.join(60)


def test_heartbeat_wakes_only_waiters_that_must_attempt(bench, monkeypatch) -> None:
    client = bench.client()
    registry, watchdog = probe.registry(client), probe.watchdog(client)
    registry.wake_watchdog = lambda _at: None  # keeps the watchdog's thread asleep
    replies = {
        "deep": Alive(15, 4),
        "head": Alive(15, 0),
        "turn": Alive(15),
        "gone": Gone(),
        "silent": Unavailable("-"),
    }
    replies["joining"] = Gone()  # its first attempt has no answer yet
    waiters = [
        registry.add_waiter(Claim("", name, name, name, Holder("-"), 30), probe.watchdog_runtime(client))
        for name in replies
    ]
    for waiter in waiters:
        waiter.answered = waiter.claim.name != "joining"

    async def send_renewals(*_):
        return list(replies.values())

    monkeypatch.setattr(*probe.SEND_RENEWALS.of(watchdog), send_renewals)
    bench.clock.advance(5)
    probe.send_due_heartbeats(client)
    assert [waiter.claim.name for waiter in waiters if waiter.woken] == ["head", "turn", "gone"]


def test_wakeup_for_unknown_claim_releases_it(bench, wait_until) -> None:
    from leasehold.model import Claim, Holder

    held = bench.client().lock("a", ttl=100).acquire()
    client = bench.client()
    client.lock("other").acquire().release()  # registers this client for wake-ups
    late_claim = Claim("", "a", "", "f" * 32, Holder("late"), 10.0, queue=True)
    bench.server.attempt(late_claim, probe.registry(client).client_id)  # an abandoned attempt arrives late and queues
    held.release()
    wait_until(lambda: not bench.server.lock_states)


def test_many_pending_releases_do_not_delay_renewals(bench, wait_until) -> None:
    """A server that woke a thousand claims that the client did not know cost it its leases: all releases were sent
    before the next renewal."""
    client, call = bench.client(), bench.transport.call
    lease = client.lock("a", ttl=30).acquire()

    def release_slowly(verb: str, *args: object) -> object:
        bench.clock.at += verb == "release"
        return call(verb, *args)

    bench.transport.call = release_slowly
    for number in range(100):
        id_hash = f"{number:032x}"
        stray = Claim("", "b", "", id_hash, Holder("stray"), 1000.0)
        probe.registry(client).on_notification("reserved", id_hash, 0.0, stray)
    bench.clock.advance(1)
    wait_until(lambda: not probe.pending_releases(client))
    assert lease.state == "HELD"


def test_lease_granted_while_releases_are_retried_is_renewed(bench, wait_until) -> None:
    """The watchdog took new leases only once all pending releases were sent: a lease granted meanwhile was lost."""
    client, call = bench.client(), bench.transport.call
    lock, leases = client.lock("a", ttl=30), []

    def release_slowly(verb: str, *args: object) -> object:
        if verb == "release":
            if not leases:
                leases.append(None)
                leases[0] = lock.acquire()
            bench.clock.at += 1
        return call(verb, *args)

    bench.transport.call = release_slowly
    for number in range(100):
        id_hash = f"{number:032x}"
        probe.registry(client).on_notification(
            "reserved", id_hash, 0.0, Claim("", "b", "", id_hash, Holder("stray"), 1000.0)
        )
    bench.clock.advance(1)
    wait_until(lambda: not probe.pending_releases(client))
    assert leases[0].state == "HELD"


def test_call_of_watchdog_ends_before_lease_granted_during_call_before(bench, wait_until) -> None:
    client, call = bench.client(), bench.transport.call
    lock, leases, deadlines = client.lock("b", ttl=30, max_hold=1), [], []

    def grant_during_renewal(verb: str, args: tuple[object, ...], deadline: float) -> object:
        if verb == "renew" and not leases:
            leases.append(None)
            leases[0] = lock.acquire()
            probe.registry(client).retry_release(Claim("", "c", "", "f" * 32, Holder("stray"), 1000.0))
        elif verb == "release":
            deadlines.append(deadline)
        return call(verb, args, deadline)

    first = client.lock("a", ttl=30).acquire()
    wait_until(lambda: probe.planned_renewals(client))
    bench.transport.call = grant_during_renewal
    bench.clock.advance(probe.next_renewal(first) - bench.clock.at)
    wait_until(lambda: deadlines)
    assert deadlines[0] < probe.trusted_until(leases[0])


def test_late_wakeup_does_not_release_detached_lease(bench, wait_until) -> None:
    from leasehold.client import lease_document
    from leasehold.model import Claim, Holder

    client = bench.client()
    lease = client.lock("a", ttl=60).acquire()
    id_hash = probe.claim(lease).id_hash
    lease_document.detach(lease)  # the document is for another process: this client forgets the claim
    probe.registry(client).on_notification("reserved", id_hash, 0.0, Claim("", "a", "", id_hash, Holder("stray"), 15.0))
    wait_until(lambda: not probe.pending_releases(client))
    assert [holding.state for holding in client.inspect()] == ["held"]


def test_late_wakeup_does_not_release_held_lease(bench) -> None:
    client = bench.client()
    lease = client.lock("a").acquire()
    probe.registry(client).on_notification("reserved", probe.claim(lease).id_hash, 0.0, probe.claim(lease))
    probe.registry(client).on_notification("recheck", "nobody", 1.0, None)
    assert not probe.pending_releases(client)
    lease.verify()


def test_lease_is_at_risk_when_watchdog_cannot_open_engine(bench, wait_until) -> None:
    client = bench.client()
    lease = client.lock("a", ttl=30).acquire()

    def refuse(_runtime):
        raise Unavailable("no connection to spare")

    probe.replace_engine_opener(client, refuse)
    bench.clock.advance(10)
    wait_until(lambda: lease.state == "AT_RISK")


def test_max_hold_expiry_wakes_sleeping_watchdog(bench, wait_until) -> None:
    client = bench.client()
    keep = client.lock("long", ttl=300).acquire()
    wait_until(lambda: probe.watchdog_sleeps(client))
    lease = client.lock("short", ttl=300, max_hold=1).acquire()
    wait_until(lambda: probe.watchdog_wakes_at(client) <= 1001)
    bench.clock.advance(1)
    wait_until(lambda: probe.has_final_state(lease))
    assert keep.held
