"""Every engine's listening thread survives an unexpected error: afterwards the client's waiters are notified again.
etcd's threads are tested in that engine's folder, step by step."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from leasehold import Client
from leasehold.engines.registry import ClaimRegistry
from leasehold.testing.conformance.rig import rig_type
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support import (
    probe_mysql,
    probe_postgresql,
    probe_redis,
    probe_redlock,
    probe_remote,
    probe_sqlite,
    probe_zookeeper,
)
from tests.support.probe import Place

STEPS = {  # per engine: functions that its listening thread calls
    "redis": probe_redis.LISTENER_STEPS,
    "redis-cluster": probe_redis.NODE_LISTENER_STEPS,
    "redis-sentinel": probe_redis.SENTINEL_LISTENER_STEPS,
    "redlock": probe_redlock.LISTENER_STEPS,
    "postgresql": probe_postgresql.LISTENER_STEPS,
    "mysql": probe_mysql.LISTENER_STEPS,
    "sqlite": [probe_sqlite.DISPATCH],
    "http-memory": probe_remote.LISTENER_STEPS,
    "zookeeper": probe_zookeeper.LISTENER_STEPS,
}


def is_listening_thread() -> bool:
    name = threading.current_thread().name
    return (name.startswith("leasehold-") and "watchdog" not in name) or "zk_loop" in name


def fail_once(monkeypatch: pytest.MonkeyPatch, step: Place) -> threading.Event:
    """Make this function raise an unexpected error once, on a listening thread. The event says that it has."""
    original, failed = getattr(*step), threading.Event()

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if is_listening_thread() and not failed.is_set():
            failed.set()
            raise LookupError("injected")
        return original(*args, **kwargs)

    monkeypatch.setattr(*step, wrapper)
    return failed


@pytest.fixture
def notifications(monkeypatch) -> list[str]:
    """The kinds of all notifications that listening threads receive."""
    received: list[str] = []
    original = ClaimRegistry.on_notification

    def record(registry: ClaimRegistry, kind: Any, *args: Any) -> None:
        if is_listening_thread():
            received.append(kind)
        original(registry, kind, *args)

    monkeypatch.setattr(ClaimRegistry, "on_notification", record)
    return received


def hand_over(holder: Client, client: Client) -> None:
    """Let one client wait until the other releases."""
    lease = holder.lock("job", ttl=60).acquire(wait=30)
    granted = threading.Event()

    def wait() -> None:
        with client.lock("job", ttl=60, wait=60):
            granted.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    end = time.monotonic() + 30
    while len(client.inspect("job")) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    lease.release()
    assert granted.wait(60)
    waiter.join(30)


def eventually(condition: Callable[[], object], text: str, act: Callable[[], None]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, text
        act()


@pytest.mark.parametrize(
    ("engine", "step"),
    [pytest.param(engine, step, id=f"{engine}-{step.name}") for engine, steps in STEPS.items() for step in steps],
)
def test_waiters_are_notified_after_the_listening_thread_fails(
    engine, step, monkeypatch, notifications, caplog
) -> None:
    rig = rig_or_skip(rig_type(engine))
    caplog.set_level(logging.ERROR)
    failed = fail_once(monkeypatch, step)
    namespace = f"test-{os.urandom(6).hex()}"
    try:
        with rig.client(namespace=namespace) as holder, rig.client(namespace=namespace) as client:
            if step == probe_redis.ON_DISCONNECT:  # called only after another failure
                fail_once(monkeypatch, probe_redis.ON_NOTIFICATION)
            eventually(failed.is_set, "the thread never called it", lambda: hand_over(holder, client))
            hand_over(holder, client)
            notifications.clear()
            eventually(
                lambda: "reserved" in notifications,
                "no notification arrives any more",
                lambda: hand_over(holder, client),
            )
    finally:
        rig.close()
    assert "LookupError: injected" in caplog.text
