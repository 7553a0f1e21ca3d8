"""How waiters and holders are notified: the watch stream, its thread, and what happens when they fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from leasehold import Client, LeaseLost
from leasehold.config import EngineConfig
from leasehold.engines.etcd.client_state import EtcdClientState
from leasehold.engines.etcd.grpc import connect
from leasehold.engines.etcd.grpc.connection import GrpcConnection
from leasehold.engines.etcd.rpc import ClusterMemory, RpcClient
from leasehold.engines.etcd.url import parse_url
from leasehold.engines.etcd.watch import Watcher
from leasehold.runtime.threads import Threads
from tests.support import probe_etcd
from tests.support.client_fixtures import run_interrupted
from tests.support.timing import check_elapsed, check_seconds

WATCH_THREAD, CALL_THREAD = "leasehold-etcd-watch", "leasehold-etcd"


STEPS: dict[str, tuple[Any, str, int]] = {  # what fails on the thread, and at which call
    "resolve": (RpcClient, "connect_unshared", 1),
    "connect": (connect, "open_socket", 1),
    "preface": (*probe_etcd.WRITE, 1),
    "headers": (GrpcConnection, "start", 1),
    "first request": (GrpcConnection, "send", 1),
    "start of the reader": (GrpcConnection, "make_reader", 1),
    "first read": (GrpcConnection, "receive", 1),
    "later read": (GrpcConnection, "receive", 3),
    "first frame": (*probe_etcd.ON_FRAME, 1),
    "first message": (Watcher, "handle_message", 1),
    "event": (EtcdClientState, "on_watch_event", 1),
    "timeout": (GrpcConnection, "poll_timeout", 1),
    "due watches": (*probe_etcd.SEND_DUE, 1),
    "loop": (*probe_etcd.SECONDS_UNTIL_NEEDED, 1),
}


def fail_once(
    monkeypatch: pytest.MonkeyPatch, thread: str, step: tuple[Any, str, int], failure: Callable[..., object]
) -> threading.Event:
    """On threads of this name, call `failure` instead of the function of this step, once. Returns what that sets."""
    (place, function, at_call), failed, calls = step, threading.Event(), 0
    original = getattr(place, function)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if threading.current_thread().name == thread:
            calls += 1
            if calls == at_call:
                failed.set()
                failure(*args)
        return original(*args, **kwargs)

    monkeypatch.setattr(place, function, wrapper)
    return failed


def raising(error: Exception) -> Callable[..., object]:
    def fail(*_: object) -> None:
        raise error

    return fail


@pytest.fixture
def assert_notified_after(url, monkeypatch, start_waiter) -> Callable[[threading.Event], None]:
    """Lets clients wait for each other until etcd's notification of a release arrives after the failure."""
    events: list[bool] = []  # for each watch event: whether it came after the failure

    def check(failed: threading.Event) -> None:
        original = EtcdClientState.on_watch_event

        def record(state: EtcdClientState, key_watch: Any, event: Any, seconds: float) -> None:
            original(state, key_watch, event, seconds)
            if event is not None and key_watch.reason == "ahead" and failed.is_set():
                events.append(True)

        monkeypatch.setattr(EtcdClientState, "on_watch_event", record)
        end = time.monotonic() + 40
        with Client(url) as holder, Client(url) as client:
            while not events:
                assert time.monotonic() < end, "the failed thread never received another notification"
                lease = holder.lock("job", ttl=60).acquire(wait=30)
                waiter = start_waiter(client)
                time.sleep(0.1)  # usually enough for a watch to start; if not, the next round has one
                lease.release()
                waiter.wait_granted()

    return check


@pytest.mark.parametrize("error", [OSError("injected"), ValueError("injected")], ids=["OSError", "ValueError"])
@pytest.mark.parametrize("step", STEPS)
def test_waiters_are_notified_after_the_watch_thread_fails(step, error, monkeypatch, assert_notified_after) -> None:
    failed = fail_once(monkeypatch, WATCH_THREAD, STEPS[step], raising(error))
    assert_notified_after(failed)


def test_waiters_are_notified_after_a_failure_before_the_first_read(monkeypatch, assert_notified_after) -> None:
    """The connection fails while its first watches are requested, and its socket is closed when the reader starts."""

    def fail(connection: GrpcConnection, *_: object) -> None:
        connection.fail("injected")

    assert_notified_after(fail_once(monkeypatch, WATCH_THREAD, (GrpcConnection, "make_reader", 1), fail))


def test_waiters_are_notified_after_the_watch_socket_is_closed(monkeypatch, assert_notified_after) -> None:
    def close(connection: GrpcConnection, *_: object) -> None:
        probe_etcd.socket_of(connection).close()

    assert_notified_after(fail_once(monkeypatch, WATCH_THREAD, (GrpcConnection, "poll_timeout", 2), close))


def test_unexpected_error_of_the_watch_thread_is_logged(monkeypatch, assert_notified_after, caplog) -> None:
    step = (Watcher, "handle_message", 1)
    assert_notified_after(fail_once(monkeypatch, WATCH_THREAD, step, raising(ValueError("injected"))))
    assert "unexpected error" in caplog.text
    assert "ValueError: injected" in caplog.text


@pytest.mark.parametrize("function", ["receive", probe_etcd.ON_FRAME.name, "poll_timeout"])
def test_calls_fail_at_once_when_their_reader_fails(function, url, monkeypatch, caplog) -> None:
    """A call whose reader failed is repeated on a new connection, and does not wait for its timeout."""
    step = (GrpcConnection, function, 2)
    failed = fail_once(monkeypatch, CALL_THREAD, step, raising(ValueError("injected")))
    with Client(url, call_timeout=300) as client:
        for _ in range(5):
            with client.lock("job", ttl=600, wait=60):
                pass
    assert failed.is_set()
    assert "unexpected error" in caplog.text
    assert "ValueError: injected" in caplog.text


@pytest.mark.parametrize("how", ["revoke", "delete", "break"])
def test_holder_is_notified_of_revoke_delete_or_break_within_a_second(url, member, how, claims) -> None:
    with Client(url) as client, Client(url) as operator:
        lease = client.lock("job", ttl=60).acquire()
        lost_event = threading.Event()
        lease.on_lost(lambda _: lost_event.set())
        (key,) = claims()
        began = time.monotonic()
        if how == "break":
            assert operator.break_lock("job", token=lease.token)
        elif how == "delete":
            member.delete(key)
        else:
            member.revoke(claims()[key])
        assert lost_event.wait(60)
        check_elapsed(began, 1.0)
        assert lease.lost_reason == "broken"
        with pytest.raises(LeaseLost):
            lease.check()
        operator.lock("job").acquire(wait=60).release()


def test_waiter_survives_a_lost_watch_stream(url, proxied_url, proxy, start_waiter) -> None:
    with Client(url) as holder, Client(proxied_url) as client:
        lease = holder.lock("job").acquire()
        waiting = start_waiter(client)
        for _ in range(3):
            proxy.reset()
            time.sleep(0.05)  # pause: the client may reconnect, or not yet
        began = time.monotonic()
        lease.release()
        check_seconds(waiting.wait_granted() - began, 3, "woken before its next re-check")


def test_waiter_survives_a_compaction(url, proxied_url, proxy, member, prefix, start_waiter, eventually) -> None:
    """The new watch starts at a revision that was compacted, so the waiter has to re-check."""
    with Client(url) as holder, Client(proxied_url) as client:
        lease = holder.lock("job").acquire()
        waiting = start_waiter(client)
        mine = client.lock("mine").acquire()
        eventually(lambda: probe_etcd.watch_stream(client))
        proxy.cut()
        lease.release()
        for number in range(5):
            member.put(f"{prefix}noise", str(number))
        member.compact()
        began = time.monotonic()
        proxy.restore()
        check_seconds(waiting.wait_granted() - began, 4)
        assert holder.break_lock("mine", token=mine.token)
        eventually(lambda: not mine.held)


def test_watch_stream_is_opened_only_for_long_holds(proxied_url, proxy, url, eventually, monkeypatch) -> None:
    with monkeypatch.context() as patch, Client(proxied_url) as client:
        patch.setattr(*probe_etcd.OWN_WATCH_DELAY, 600.0)  # more than a busy machine needs for a short hold
        for _ in range(3):
            with client.lock("short"):
                pass
        time.sleep(0.2)  # pause: long enough to open a watch stream
        assert proxy.accepted == 1, "a second connection was opened for a watch"
    with Client(proxied_url) as client, Client(url) as operator:
        lease = client.lock("job", ttl=60).acquire()
        eventually(lambda: proxy.accepted == 3)
        began = time.monotonic()
        assert operator.break_lock("job", token=lease.token)
        eventually(lambda: not lease.held)
        check_elapsed(began, 2, "notified, not found at the next renewal")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_while_watches_are_removed_breaks_no_later_step() -> None:
    """A step that failed would end the connection of the watch thread, or a release of the claim."""
    claim_key = ("namespace", "name", "id hash")
    number, interrupted = 0, True
    while interrupted:
        watcher = Watcher(
            parse_url(EngineConfig.parse("etcd://host", 5.0)), Threads(), ClusterMemory(), lambda *_: None, list
        )
        probe_etcd.pretend_running(watcher)  # no thread: this test takes its steps
        watcher.watch_own(claim_key, b"own", 1)
        watcher.watch_conflict(claim_key, b"ahead", b"", 1, include_puts=False, is_next=True)
        probe_etcd.make_watches_due(watcher)
        interrupted = run_interrupted(number := number + 1, partial(watcher.unwatch, claim_key), "etcd/watch.py")
        probe_etcd.send_due_watches(watcher)
        watcher.unwatch(claim_key)
        assert not probe_etcd.deferred_watches(watcher)
        assert not probe_etcd.watches(watcher)
    assert number > 10
