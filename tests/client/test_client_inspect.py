"""What a client shows: holders and waiters, events, and errors that can be pickled."""

from __future__ import annotations

import json
import pickle
import threading
from copy import copy

import pytest

import leasehold
from leasehold import ConfigError, Event, LeaseLost, NotAcquired, Unavailable
from leasehold.engines.redis.server_settings import Unreachable
from leasehold.errors import Reentered


def test_inspect_shows_holders(bench, wait_until) -> None:
    client = bench.client(holder="h")
    held = [client.lock("a/1", ttl=30, purpose="p").acquire(), client.semaphore("a/2", 3).acquire()]
    bench.clock.at += 2
    first, second = client.inspect("a/")
    assert (first.name, first.state, first.kind, first.holder.label, first.holder.purpose) == (
        "a/1",
        "held",
        "lock",
        "h",
        "p",
    )
    assert (first.age, first.left) == (2.0, 28.0)
    assert (second.kind, second.limit, second.slot) == ("semaphore", 3, 0)
    (same,) = client.inspect("a/1", exact=True)
    assert same._replace(acquired_at=first.acquired_at) == first  # computed from the wall clock of each call
    assert client.inspect("a", exact=True) == client.inspect("b") == []
    assert {lease.fingerprint for lease in held} == {first.fingerprint, second.fingerprint}
    with pytest.raises(ConfigError):
        client.inspect(3)
    for lease in held:
        lease.release()


@pytest.mark.parametrize("token", [None, "7", True, 1.0])
def test_break_lock_refuses_invalid_token(bench, token) -> None:
    with pytest.raises(ConfigError, match="the number that inspect"):
        bench.client().break_lock("a", token=token)


def test_events_cover_the_life_of_a_lease(bench, wait_until) -> None:
    events: list[Event] = []
    client = bench.client(on_event=events.append, holder="h")
    with client.lock("a", ttl=30) as lease:
        with pytest.raises(NotAcquired):
            bench.client(on_event=events.append).lock("a").acquire(wait=0)
        bench.clock.advance(10)
        wait_until(lambda: [event for event in events if event.kind == "renewed"])
        bench.transport.silent = True
        bench.clock.advance(10)
        wait_until(lambda: [event for event in events if event.kind == "at_risk"])
        bench.transport.silent = False
    other = client.lock("b").acquire()
    client.break_lock("b", token=other.token)
    wait_until(lambda: [event for event in events if event.kind == "lost"])
    kinds = [event.kind for event in events]
    assert kinds[:4] == ["attempted", "granted", "attempted", "busy"]
    assert {"renewed", "renew_failed", "at_risk", "released", "broken", "lost"} <= set(kinds)
    granted = events[1]
    assert (granted.engine, granted.name, granted.token, granted.holder) == ("own", "a", lease.token, "h")
    assert granted.fingerprint == lease.fingerprint
    assert granted.seconds is not None
    assert next(event.reason for event in events if event.kind == "lost") == "broken"


def test_waiting_emits_waited_event(bench, wait_until) -> None:
    events: list[Event] = []
    lease = bench.client().lock("a").acquire()
    client = bench.client(on_event=events.append)
    waiter = threading.Thread(target=lambda: client.lock("a").acquire().release())
    waiter.start()
    wait_until(lambda: [holding.state for holding in client.inspect()] == ["held", "waiting"])
    lease.release()
    waiter.join(60)
    assert [event.kind for event in events] == ["attempted", "waited", "granted", "released"]


def test_pending_release_emits_an_event(bench) -> None:
    events: list[Event] = []
    client = bench.client(on_event=events.append)
    lease = client.lock("a").acquire()
    bench.transport.silent = True
    lease.release()
    assert "release_pending" in [event.kind for event in events]


def test_failing_event_hook_does_not_affect_the_lock(bench, caplog) -> None:
    def fails(_event: Event) -> None:
        raise RuntimeError("hook")

    with bench.client(on_event=fails).lock("a") as lease:
        assert lease.held
    assert "the on_event hook failed on attempted of a" in caplog.text


def test_errors_survive_pickling_and_celerys_json(bench) -> None:
    held = bench.client(holder="h").lock("a").acquire()
    with pytest.raises(NotAcquired) as busy:
        bench.client().lock("a").acquire(wait=0)
    held.release()
    errors = [
        busy.value,
        LeaseLost("a", reason="broken", token=3),
        Unavailable("no answer", engine="redis", seconds=5.0),
        leasehold.Unsupported("cannot", engine="e", missing=("x",)),
        leasehold.Mismatch("a", wanted="lock", found="semaphore of 2"),
        leasehold.SelfDeadlock("a", token=3),
        leasehold.StaleToken("file", token=3, highest=4),
        leasehold.Conflict("a", attempts=3),
        leasehold.RunFailed("k", error="ValueError", token=3),
        leasehold.Deadlocked("a", cycle="a waits for b", names=("a", "b")),
        Reentered(),
        ConfigError("bad"),
    ]
    for error in errors:
        by_args = type(error)(*json.loads(json.dumps(error.args)))  # what Celery keeps of an error
        for again in (pickle.loads(pickle.dumps(error)), by_args):
            assert (type(again), str(again)) == (type(error), str(error))
            assert again.__dict__ == error.__dict__
            assert isinstance(again, leasehold.LeaseholdError)


def test_error_of_an_engine_keeps_its_class_when_copied_not_when_pickled() -> None:
    """Tasks that share a connection raise copies of one error, and its class decides what they do next."""
    error = Unreachable("no server", engine="redis", retry_in=2.0)
    copied = copy(error)
    assert (type(copied), str(copied), copied.__dict__) == (Unreachable, str(error), error.__dict__)
    assert type(pickle.loads(pickle.dumps(error))) is Unavailable


def test_error_with_a_note_and_further_attributes_survives_pickling() -> None:
    error = LeaseLost("a", reason="broken")
    error.add_note("in the nightly report")
    error.job = 7  # type: ignore[attr-defined]
    again = pickle.loads(pickle.dumps(error))
    assert again.__notes__ == ["in the nightly report"]
    assert again.job == 7
