"""What events carry: the fields that metrics, logs and traces are made of."""

from __future__ import annotations

import pickle
import threading

import pytest

from leasehold import ConfigError, Event, Mismatch, NotAcquired, Unavailable
from leasehold.errors import Reentered
from tests.support import probe


def only(events: list[Event], kind: str) -> Event:
    (event,) = [event for event in events if event.kind == kind]
    return event


def test_event_is_frozen_and_keeps_its_fields_when_pickled(bench) -> None:
    events: list[Event] = []
    bench.client(on_event=events.append).lock("a").acquire().release()
    for event in events:
        assert len(event) == len(Event._fields)  # emit builds the tuple by position
        assert event._asdict() == {field: getattr(event, field) for field in Event._fields}
        assert pickle.loads(pickle.dumps(event)) == event
        with pytest.raises(AttributeError):
            event.kind = "lost"


def test_event_can_be_built_by_keywords_with_the_first_five_fields() -> None:
    event = Event(kind="granted", engine="redis", namespace="", name="a", at=1.0)
    assert set(event[5:]) == {None}


def test_granted_event_says_ttl_left_queued_mode_slot_and_purpose(bench) -> None:
    events: list[Event] = []
    client = bench.client(on_event=events.append)
    lease = client.semaphore("a", 2, ttl=30, purpose="nightly").acquire()
    granted = only(events, "granted")
    assert (granted.queued, granted.ttl, granted.mode) == (False, 30, "exclusive")
    assert (granted.slot, granted.purpose) == (lease.slot, "nightly")
    assert granted.left == pytest.approx(lease.remaining)
    lease.release()
    released = only(events, "released")
    assert (released.slot, released.purpose, released.ttl) == (lease.slot, "nightly", None)


def test_events_of_a_read_lock_have_the_shared_mode(bench) -> None:
    events: list[Event] = []
    bench.client(on_event=events.append).rwlock("a").read().acquire().release()
    assert {event.mode for event in events} == {"shared"}


def test_busy_event_tells_a_refusal_from_a_wait_that_ended(bench, wait_until) -> None:
    events: list[Event] = []
    lease = bench.client(holder="web-3").lock("a").acquire()
    client = bench.client(on_event=events.append)
    assert client.lock("a").try_acquire() is None
    busy = only(events, "busy")
    assert (busy.queued, busy.reason, busy.token) == (False, "web-3", lease.token)

    def wait_in_vain() -> None:
        with pytest.raises(NotAcquired):
            client.lock("a", wait=5).acquire()

    events.clear()
    waiter = threading.Thread(target=wait_in_vain)
    waiter.start()
    wait_until(lambda: [holding.state for holding in client.inspect()] == ["held", "waiting"])
    bench.clock.advance(6)
    for _, waiting in list(probe.registry(client).waiting.items()):
        waiting.signal.set()
    waiter.join(60)
    busy = only(events, "busy")
    assert (busy.queued, busy.reason, busy.token) == (True, "web-3", lease.token)
    lease.release()


def test_failed_event_names_the_class_of_the_error(bench, monkeypatch) -> None:
    events: list[Event] = []
    client = bench.client(on_event=events.append)
    lease = client.lock("a").acquire()
    with pytest.raises(Mismatch):
        client.semaphore("a", 2).try_acquire()
    assert only(events, "failed").error == "Mismatch"
    lease.release()
    for error in (Unavailable("silence"), Reentered()):

        def fails(*_args: object, error: Exception = error) -> object:
            raise error

        events.clear()
        monkeypatch.setattr(bench.transport, "call", fails)
        with pytest.raises(Unavailable):
            client.lock("a").acquire()
        failed = only(events, "failed")
        assert (failed.error, failed.queued) == ("Unavailable", False)
        assert str(error) in failed.reason


def test_acquire_on_a_closed_client_emits_failed(bench) -> None:
    events: list[Event] = []
    client = bench.client(on_event=events.append)
    lock = client.lock("a")
    client.close()
    with pytest.raises(ConfigError):
        lock.acquire()
    assert [(event.kind, event.error) for event in events] == [("attempted", None), ("failed", "ConfigError")]


def test_renewal_events_say_how_much_trust_was_left(bench, wait_until) -> None:
    events: list[Event] = []
    # max_hold ends the lease soon, which is no sign of late renewals: `left` does not count it.
    lease = bench.client(on_event=events.append).lock("a", ttl=30, max_hold=25).acquire()
    bench.clock.advance(10)
    wait_until(lambda: [event for event in events if event.kind == "renewed"])
    renewed = only(events, "renewed")
    assert renewed.ttl == 30
    assert renewed.left == pytest.approx(20, abs=0.5)  # of the grant, before the renewal; less drift

    bench.transport.silent = True
    bench.clock.advance(12)
    wait_until(lambda: [event for event in events if event.kind == "at_risk"])
    for kind in ("renew_failed", "at_risk"):
        event = only(events, kind)
        assert (event.ttl, event.error) == (30, "Unavailable")
        assert event.left == pytest.approx(18, abs=0.5)
    bench.transport.silent = False
    lease.release()


def test_broken_event_says_who_broke_it_and_why(bench) -> None:
    events: list[Event] = []
    lease = bench.client().lock("a").acquire()
    operator = bench.client(holder="mira", on_event=events.append)
    assert operator.break_lock("a", token=lease.token, why="web-3 is suspended")
    broken = only(events, "broken")
    assert (broken.actor, broken.why, broken.token) == ("mira", "web-3 is suspended", lease.token)
    with pytest.raises(ConfigError, match="why must be the reason"):
        operator.break_lock("a", token=lease.token, why=7)


def test_dropped_lease_emits_released(bench, wait_until) -> None:
    events: list[Event] = []
    client = bench.client(on_event=events.append)
    lease = client.lock("a").acquire()
    token, fingerprint = lease.token, lease.fingerprint
    with pytest.warns(ResourceWarning, match="dropped without release"):
        del lease
    wait_until(lambda: [event for event in events if event.kind == "released"])
    released = only(events, "released")
    assert (released.token, released.fingerprint) == (token, fingerprint)
