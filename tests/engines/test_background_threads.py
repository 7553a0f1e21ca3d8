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
from leasehold.engines.mysql import listener as mysql_listener
from leasehold.engines.postgresql import listener as postgresql_listener
from leasehold.engines.postgresql.session import PgSession
from leasehold.engines.redis.cluster_pubsub import NodeListener
from leasehold.engines.redis.pubsub import PubSubListener
from leasehold.engines.redis.sentinel import SentinelSet, SwitchWatcher
from leasehold.engines.redlock.pubsub import NodeSubscriptions
from leasehold.engines.registry import ClaimRegistry
from leasehold.engines.remote.listener import Listener
from leasehold.engines.sqlite import wakeup_socket
from leasehold.engines.zookeeper.connection import KazooConnection
from leasehold.testing.conformance.rig import rig_type
from leasehold.testing.conformance.suite import rig_or_skip

STEPS: dict[str, list[tuple[Any, str]]] = {  # per engine: functions that its listening thread calls
    "redis": [
        (PubSubListener, "_open"),
        (PubSubListener, "_subscribe_commands"),
        (PubSubListener, "_on_subscribed"),
        (PubSubListener, "_on_notification"),
        (PubSubListener, "_on_disconnect"),
    ],
    "redis-cluster": [
        (NodeListener, "_open"),
        (NodeListener, "_subscribe_commands"),
        (NodeListener, "_on_subscribed"),
        (NodeListener, "_on_notification"),
    ],
    "redis-sentinel": [
        (SentinelSet, "open"),
        (PubSubListener, "_on_notification"),
        (SwitchWatcher, "_open"),
        (SwitchWatcher, "_on_push"),
    ],
    "redlock": [
        (NodeSubscriptions, "_maintain_node"),
        (NodeSubscriptions, "_on_node_reply"),
        (NodeSubscriptions, "_on_node_notification"),
        (NodeSubscriptions, "_update_majority"),
    ],
    "postgresql": [(PgSession, "_take_notifications"), (postgresql_listener, "_deliver_payload")],
    "mysql": [(mysql_listener, "_listen_once")],
    "sqlite": [(wakeup_socket, "_dispatch")],
    "http-memory": [(Listener, "_listen"), (Listener, "_on_notification"), (Listener, "_wake_waiters")],
    "zookeeper": [(KazooConnection, "_connect"), (KazooConnection, "_read_header"), (KazooConnection, "_send_request")],
}


def is_listening_thread() -> bool:
    name = threading.current_thread().name
    return (name.startswith("leasehold-") and "watchdog" not in name) or "zk_loop" in name


def fail_once(monkeypatch: pytest.MonkeyPatch, place: Any, function: str) -> threading.Event:
    """Make this function raise an unexpected error once, on a listening thread. The event says that it has."""
    original, failed = getattr(place, function), threading.Event()

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if is_listening_thread() and not failed.is_set():
            failed.set()
            raise LookupError("injected")
        return original(*args, **kwargs)

    monkeypatch.setattr(place, function, wrapper)
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
    ("engine", "place", "function"),
    [pytest.param(engine, *step, id=f"{engine}-{step[1]}") for engine, steps in STEPS.items() for step in steps],
)
def test_waiters_are_notified_after_the_listening_thread_fails(
    engine, place, function, monkeypatch, notifications, caplog
) -> None:
    rig = rig_or_skip(rig_type(engine))
    caplog.set_level(logging.ERROR)
    failed = fail_once(monkeypatch, place, function)
    namespace = f"test-{os.urandom(6).hex()}"
    try:
        with rig.client(namespace=namespace) as holder, rig.client(namespace=namespace) as client:
            if function == "_on_disconnect":  # called only after another failure
                fail_once(monkeypatch, PubSubListener, "_on_notification")
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
