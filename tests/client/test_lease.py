"""The four states of a lease, and every way in which it ends."""

from __future__ import annotations

import gc
import pickle
import threading
import time
import warnings

import pytest

from leasehold import Client, ConfigError, Event, Lease, LeaseLost, LeaseState, NotAcquired, Unavailable
from leasehold.core import timing
from leasehold.model import Alive
from tests.support import probe

# Leases here are often still held when a test ends and its client is closed.
pytestmark = pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning")


def test_lease_exposes_its_attributes(bench) -> None:
    lease = bench.client(holder="web-3").lock("orders/42", ttl=30).acquire()
    assert (lease.name, lease.holder, lease.ttl, lease.slot) == ("orders/42", "web-3", 30, None)
    assert lease.state is LeaseState.HELD == "HELD"
    assert lease.held
    assert lease.remaining == pytest.approx(29.7)
    assert len(lease.fingerprint) == 16
    assert lease.lost_reason is None
    lease.check()


def test_claim_id_is_never_shown(bench) -> None:
    client = bench.client()
    lease = client.lock("a").acquire()
    secret = probe.claim(lease).id
    texts = [
        repr(lease),
        repr(probe.claim(lease)),
        str(probe.claim(lease)),
        repr(client.inspect()),
        repr(client),
        repr(client.lock("a")),
    ]
    with pytest.raises(NotAcquired) as busy:
        bench.client().lock("a").acquire(wait=0)
    texts.append(str(busy.value) + repr(busy.value.__dict__))
    assert not [text for text in texts if secret in text or probe.claim(lease).id_hash in text]


def test_watchdog_renewal_keeps_lease_held(bench, wait_until) -> None:
    lease = bench.client().lock("a", ttl=30).acquire()
    for _ in range(6):
        renewed_at = probe.renewed_at(lease)
        bench.clock.advance(10)
        wait_until(lambda renewed_at=renewed_at: probe.renewed_at(lease) > renewed_at)
    assert lease.state == "HELD"
    assert bench.clock.at == 1060


def test_lease_is_at_risk_after_failed_renewal_until_next_success(bench, wait_until) -> None:
    lease = bench.client().lock("a", ttl=30).acquire()
    bench.transport.silent = True
    bench.clock.advance(10)
    wait_until(lambda: lease.state == "AT_RISK")
    assert lease.held
    lease.check()
    bench.transport.silent = False
    bench.clock.advance(4)
    wait_until(lambda: lease.state == "HELD")


def test_lease_is_at_risk_when_engine_loses_its_connection(bench, wait_until) -> None:
    events = []
    client = bench.client(on_event=lambda event: events.append(event.kind))
    lease, released = client.lock("a", ttl=30).acquire(), client.lock("b", ttl=30).acquire()
    released.release()
    bench.transport.silent = True
    for _ in range(3):
        probe.registry(client).mark_all_at_risk("the connection broke")
    assert (lease.state, lease.held, released.state) == (LeaseState.AT_RISK, True, LeaseState.RELEASED)
    wait_until(lambda: "renew_failed" in events)  # the watchdog renews at once, not when the renewal is due
    assert events.count("at_risk") == 1
    bench.transport.silent = False
    probe.registry(client).mark_all_at_risk("again")
    bench.clock.advance(5)
    wait_until(lambda: lease.state is LeaseState.HELD)


def test_lease_is_at_risk_if_connection_broke_during_grant(bench, wait_until) -> None:
    client, call = bench.client(), bench.transport.call

    def granted_and_cut_off(verb, args, deadline):
        reply = call(verb, args, deadline)
        probe.registry(client).mark_all_at_risk("the connection broke")
        bench.transport.call, bench.transport.silent = call, True
        return reply

    bench.transport.call = granted_and_cut_off
    lease = client.lock("a", ttl=30).acquire()
    assert (lease.state, lease.held) == (LeaseState.AT_RISK, True)
    bench.transport.silent = False
    bench.clock.advance(5)
    wait_until(lambda: lease.state is LeaseState.HELD)  # renewed at once
    assert client.lock("b").acquire().state is LeaseState.HELD


def test_lease_is_lost_at_local_deadline_when_engine_is_down(bench, wait_until) -> None:
    lease = bench.client().lock("a", ttl=30).acquire()
    notified: list[str | None] = []
    lease.on_lost(lambda lease: notified.append(lease.lost_reason))
    bench.transport.silent = True
    bench.clock.advance(10)
    wait_until(lambda: lease.state == "AT_RISK")
    bench.clock.advance(19.6)
    assert lease.held
    bench.clock.advance(0.11)
    assert (lease.state, lease.remaining, lease.lost_reason) == ("LOST", 0.0, "unreachable")
    with pytest.raises(LeaseLost, match=r"a \(token \d+\) is lost: the engine did not answer"):
        lease.check()
    wait_until(lambda: notified == ["unreachable"])


def test_lost_reason_is_stalled_when_no_renewal_was_attempted(bench) -> None:
    lease = bench.client().lock("a", ttl=30).acquire()
    bench.clock.at += 31  # the whole process was paused: no thread was woken
    assert (lease.state, lease.lost_reason) == ("LOST", "stalled")


def test_break_notification_after_local_deadline_is_no_break(bench, wait_until) -> None:
    """etcd reports that a key is gone, not why: to a holder that was paused, expiry looks like a break."""
    events: list[Event] = []
    client = bench.client(on_event=events.append)
    lease = client.lock("a", ttl=30).acquire()
    bench.clock.at += 31  # the whole process was paused: no thread was woken
    probe.registry(client).on_notification("broken", probe.claim(lease).id_hash, 0.0, None)
    assert (lease.state, lease.lost_reason) == ("LOST", "stalled")
    wait_until(lambda: [event.reason for event in events if event.kind == "lost"] == ["stalled"])


def test_lease_is_at_risk_at_two_thirds_of_ttl(bench) -> None:
    lease = bench.client().lock("a", ttl=30).acquire()
    bench.clock.at += 19.9
    assert lease.state == "HELD"
    bench.clock.at += 0.2
    assert lease.state == "AT_RISK"


def test_max_hold_ends_lease_while_engine_still_renews(bench, wait_until) -> None:
    lease = bench.client().lock("a", ttl=30, max_hold=45).acquire()
    bench.clock.advance(20)
    wait_until(lambda: probe.renewed_at(lease) > 1000)
    bench.clock.advance(20)
    wait_until(lambda: probe.renewed_at(lease) > 1020)
    assert lease.remaining == pytest.approx(5)
    bench.clock.advance(5)
    wait_until(lambda: probe.has_final_state(lease))
    assert (lease.state, lease.lost_reason) == ("LOST", "max_hold")
    assert not lease.release()
    assert bench.client().lock("a").try_acquire()


def test_broken_lease_is_lost_at_once(bench) -> None:
    lease = bench.client().lock("a", delay=5).acquire()
    other = bench.client()
    assert other.break_lock("a", token=lease.token)
    assert (lease.state, lease.lost_reason) == ("LOST", "broken")
    assert not other.break_lock("a", token=lease.token)
    assert [holding.state for holding in other.inspect()] == ["cooling"]


def test_break_without_notification_is_noticed_at_next_renewal(bench, wait_until) -> None:
    lease = bench.client().lock("a").acquire()
    bench.server.notify_callbacks.clear()
    bench.client().break_lock("a", token=lease.token)
    assert lease.held
    bench.clock.advance(10)
    wait_until(lambda: lease.state == "LOST")
    assert lease.lost_reason == "unknown"


def test_release_returns_true_once_and_false_after_expiry(bench) -> None:
    client = bench.client()
    lease = client.lock("a").acquire()
    assert lease.release()
    assert not lease.release()
    assert (lease.state, lease.held, lease.remaining, lease.lost_reason) == ("RELEASED", False, 0.0, None)
    with pytest.raises(LeaseLost, match="it was released"):
        lease.check()
    late = client.lock("a", ttl=30).acquire()
    bench.clock.at += 31
    assert not late.release()
    assert late.state == "LOST"


def test_late_release_does_not_free_another_holders_lock(bench) -> None:
    late = bench.client().lock("a", ttl=30).acquire()
    bench.clock.at += 31
    new = bench.client().lock("a").acquire()
    assert new.token > late.token
    late.release()
    assert bench.client().lock("a").try_acquire() is None
    new.verify()


def test_renew_sets_ttl_and_remaining(bench) -> None:
    lease = bench.client().lock("a", ttl=30).acquire()
    lease.renew(ttl=100)
    assert (lease.ttl, lease.remaining) == (100, pytest.approx(99))
    lease.renew(10)
    assert (lease.ttl, lease.remaining) == (10, pytest.approx(9.9))
    lease.renew()
    assert lease.ttl == 10
    with pytest.raises(ConfigError, match="ttl must be more than 0"):
        lease.renew(0)


def test_explicit_renewals_leave_one_scheduled_watchdog_renewal(bench, wait_until) -> None:
    client = bench.client()
    lease = client.lock("a", ttl=30).acquire()
    for _ in range(200):
        lease.renew()
    bench.clock.advance(10)
    wait_until(lambda: probe.renewed_at(lease) == 1010)
    wait_until(lambda: probe.watchdog_sleeps(client))
    calls = bench.transport.calls
    bench.clock.advance(10)
    wait_until(lambda: probe.renewed_at(lease) == 1020)
    assert bench.transport.calls == calls + 1


def test_verify_asks_the_engine(bench) -> None:
    lease = bench.client().lock("a").acquire()
    lease.verify()
    bench.transport.silent = True
    with pytest.raises(Unavailable):
        lease.verify()
    assert lease.state == "AT_RISK"
    bench.transport.silent = False
    bench.server.notify_callbacks.clear()
    bench.client().break_lock("a", token=lease.token)
    with pytest.raises(LeaseLost, match="no longer knows it"):
        lease.verify()
    with pytest.raises(LeaseLost):
        lease.renew()


def test_outdated_renewal_reply_is_ignored(bench) -> None:

    lease = bench.client().lock("a", ttl=30).acquire()
    lease.renew(100)
    probe.answer_renewal(lease, 900.0, probe.renewal_claim(lease, 30), Alive(30.0))
    assert lease.ttl == 100


def test_renewal_reply_after_release_is_ignored(bench) -> None:
    from leasehold.model import Gone

    lease = bench.client().lock("a", ttl=30).acquire()
    lease.release()
    probe.answer_renewal(lease, 2000.0, probe.renewal_claim(lease), Alive(30.0))
    probe.answer_renewal(lease, 2000.0, probe.renewal_claim(lease), Gone())
    assert lease.state == "RELEASED"


def test_unconfirmed_release_is_pending_and_retried(bench, wait_until) -> None:
    client = bench.client()
    lease = client.lock("a").acquire()
    bench.transport.silent = True
    assert not lease.release()
    assert lease.state == "RELEASED"
    assert probe.pending_releases(client)
    bench.transport.silent = False
    bench.clock.advance(5)
    wait_until(lambda: not probe.pending_releases(client))
    assert not bench.server.lock_states


def test_pending_release_is_dropped_after_expiry(bench, wait_until) -> None:
    client = bench.client()
    lease = client.lock("a", ttl=20).acquire()
    bench.transport.silent = True
    lease.release()
    wait_until(lambda: probe.failed_releases(client) > 0)
    bench.clock.advance(21)
    wait_until(lambda: not probe.pending_releases(client))


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_uninitialised_lease_is_collected_without_error() -> None:
    partial_lease = Lease.__new__(Lease)
    del partial_lease
    gc.collect()


def test_dropped_lease_is_released_with_a_warning_and_a_log_line(bench, wait_until, caplog) -> None:
    # Python hides a ResourceWarning by default: `lock.acquire(); work(); lock.release()` would work unprotected.
    lock = bench.client().lock("a")
    with pytest.warns(ResourceWarning, match=r"a .* was dropped without release"):
        lock.acquire()
    wait_until(lambda: not bench.server.lock_states)
    wait_until(lambda: "lease = lock.acquire()" in caplog.text)
    advice = [record.levelname for record in caplog.records if "lease = lock.acquire()" in record.getMessage()]
    assert advice == ["WARNING"]
    lease = lock.try_acquire()
    assert lease is not None
    lease.release()


def test_released_lease_is_collected_without_warning(bench) -> None:
    lock = bench.client().lock("a", ttl=30)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lease = lock.acquire()
        lease.release()
        del lease
        gc.collect()


def test_wait_lost_returns_true_when_lease_is_broken(bench, wait_until) -> None:
    client = bench.client()
    lease = client.lock("a", ttl=30).acquire()
    assert not lease.wait_lost(0)
    seen: list[bool] = []
    waiter = threading.Thread(target=lambda: seen.append(lease.wait_lost(60)))
    waiter.start()
    wait_until(lambda: probe.callers_of_wait_lost(lease))
    bench.client().break_lock("a", token=lease.token)
    waiter.join(60)
    assert seen == [True]
    assert lease.wait_lost(60)


def test_wait_lost_returns_false_when_another_thread_releases(bench, wait_until, monkeypatch) -> None:
    monkeypatch.setattr(timing, "MAX_SLEEP", 600.0)  # like the ttl longer than this test waits: the release wakes it
    lease = bench.client().lock("a", ttl=600).acquire()
    seen: list[bool] = []
    waiter = threading.Thread(target=lambda: seen.append(lease.wait_lost()), daemon=True)
    waiter.start()
    wait_until(lambda: probe.callers_of_wait_lost(lease))
    lease.release()
    waiter.join(60)
    assert seen == [False]


def test_failing_on_lost_callback_does_not_stop_other_callbacks(bench, wait_until, caplog) -> None:
    client = bench.client()
    lease = client.lock("a").acquire()
    threads: list[str] = []

    def fails(_lease: object) -> None:
        raise RuntimeError("callback")

    lease.on_lost(fails)
    lease.on_lost(lambda _: threads.append(threading.current_thread().name))
    client.break_lock("a", token=lease.token)
    wait_until(lambda: threads == ["leasehold-callbacks"])
    lease.on_lost(lambda _: threads.append("late"))
    wait_until(lambda: threads[1:] == ["late"])
    assert "fails failed" in caplog.text


def test_slow_callback_does_not_delay_renewals(bench, wait_until) -> None:
    client = bench.client()
    broken, kept = client.lock("a").acquire(), client.lock("b", ttl=30).acquire()
    stuck = threading.Event()
    broken.on_lost(lambda _: stuck.wait(20))
    client.break_lock("a", token=broken.token)
    bench.clock.advance(10)
    wait_until(lambda: probe.renewed_at(kept) == 1010)
    stuck.set()


def test_on_lost_refuses_anything_but_a_plain_function(bench) -> None:
    lease = bench.client().lock("a").acquire()

    async def later(_lease: object) -> None: ...

    for wrong in (later, 7):
        with pytest.raises(ConfigError, match="plain function"):
            lease.on_lost(wrong)  # type: ignore[arg-type]
    lease.release()
    lease.on_lost(lambda _: pytest.fail("it was released, not lost"))


def test_lease_cannot_be_pickled(bench) -> None:
    with pytest.raises(TypeError, match=r"Send lease\.token"):
        pickle.dumps(bench.client().lock("a").acquire())


def test_lease_can_be_released_by_another_thread(bench) -> None:
    lease = bench.client().lock("a").acquire()
    thread = threading.Thread(target=lease.release)
    thread.start()
    thread.join(60)
    assert lease.state == "RELEASED"


@pytest.mark.extended
def test_lease_is_renewed_beyond_its_ttl_on_real_clock() -> None:
    with Client("memory://") as client:
        with client.lock("a", ttl=1.0) as lease:
            end = time.monotonic() + 2.0
            while time.monotonic() < end:
                lease.check()
                time.sleep(0.01)
        assert lease.state == "RELEASED"


@pytest.mark.parametrize("end", ["released", "lost"])
def test_renewal_answered_after_the_end_changes_nothing(end) -> None:
    with Client("memory://") as client:
        lease = client.lock("job").acquire()
        late = (probe.runtime(client).now(), probe.renewal_claim(lease), Alive(60.0))
        lease.release() if end == "released" else probe.end_lost(lease, "broken")
        before = lease.state, probe.validity(lease), probe.next_renewal(lease)
        probe.answer_renewal(lease, *late)
        assert (lease.state, probe.validity(lease), probe.next_renewal(lease)) == before
