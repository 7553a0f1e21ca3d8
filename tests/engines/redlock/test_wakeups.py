"""Waiters of the Redlock engine: reservations of a majority, a minority, or different nodes for different claims."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from harness.servers.redlock import lock_keys
from leasehold import Client
from leasehold.model import Busy
from tests.support import probe, probe_redlock
from tests.support.timing import check_seconds


def test_minority_reservation_makes_waiter_attempt_again_soon(nodes, wait_until) -> None:
    """If waiters arrive together, the nodes may reserve the name for different waiters. None of them has a majority,
    and all would wait."""
    with Client(nodes.url) as holder, Client(nodes.url) as other:
        lease = holder.lock("job", ttl=60).acquire()
        waiter_thread = threading.Thread(target=lambda: other.lock("job", wait=60).acquire().release())
        waiter_thread.start()
        wait_until(lambda: sum(h.state == "waiting" for h in holder.inspect()) == 1)
        registry = probe.registry(other)
        (waiter_id_hash,) = registry.waiting
        (key,) = [kept_key for kept_key in lock_keys(nodes.all[1]) if kept_key.endswith(b":job")]
        engine, attempted_at = probe.engine(other), []
        attempt = engine.attempt

        def recorded_attempt(claim, deadline):
            attempted_at.append(time.monotonic())
            return attempt(claim, deadline)

        engine.attempt = recorded_attempt
        wait_until(lambda: attempted_at, 60)  # its re-check; the next one is due in 5 s
        nodes.all[0].ask(
            "PUBLISH", f"lh1:c:{registry.client_id}", b"reserved 0 " + key + b" " + bytes.fromhex(waiter_id_hash)
        )
        wait_until(lambda: len(attempted_at) > 1, 60)
        check_seconds(attempted_at[1] - attempted_at[0], 3)
        lease.release()
        waiter_thread.join(60)


def test_free_minority_does_not_make_waiters_poll(nodes, wait_until) -> None:
    """A node that lost its data offers reservations that are useless while the lock is held on the others."""
    with Client(nodes.url) as holder, Client(nodes.url) as other:
        lease = holder.lock("job", ttl=600).acquire()  # so long that no renewal happens meanwhile
        waiter_thread = threading.Thread(target=lambda: other.lock("job", wait=60).acquire().release())
        waiter_thread.start()
        wait_until(lambda: sum(h.state == "waiting" for h in holder.inspect()) == 1)
        nodes.all[0].ask("FLUSHALL")
        before, began = nodes.all[1].calls()["evalsha"], time.monotonic()
        (waiter_id_hash,) = probe.registry(other).waiting
        probe.registry(other).on_notification(
            "recheck", waiter_id_hash, 0.0, None
        )  # it re-checks now and finds this node free
        wait_until(lambda: time.monotonic() > began + 3)
        assert nodes.all[1].calls()["evalsha"] - before < 12
        lease.release()
        waiter_thread.join(60)
        assert not waiter_thread.is_alive()
    wait_until(lambda: nodes.remaining_keys() == [])


def test_majority_reservation_is_not_delayed_by_recheck_times(nodes, make_driver) -> None:
    """A majority reserved the name for the waiter. Later re-check times of other nodes must not delay its attempt."""
    driver, other = make_driver(nodes.url), make_driver(nodes.url)
    other.acquire(other.claim())
    claim = driver.claim(queue=True)
    assert isinstance(driver.attempt(claim), Busy)
    subscriptions, waiter = probe_redlock.subscriptions(driver.engine), driver.registry.waiting[claim.id_hash]
    now = driver.runtime.now()
    for number in range(3):
        probe_redlock.schedule_majority_recheck(driver.engine, driver.registry, claim.id_hash, number, now + 20, now)
    for number in range(3):
        subscriptions.on_node_reservation(claim.id_hash, number)
    probe_redlock.schedule_majority_recheck(driver.engine, driver.registry, claim.id_hash, 3, now + 20, now)
    assert waiter.recheck_at is not None
    assert waiter.recheck_at < now + 20


def test_node_without_new_connections_delays_no_notification(nodes, proxied_node, wait_until) -> None:
    """The thread that listens to all nodes waited, for `call_timeout`, for a connection on which to send the releases
    that this node had missed. With one such node of three, each hand-off took more than four seconds."""
    url, proxy = proxied_node
    with Client(nodes.url) as operator, Client(url, call_timeout=600) as client:
        lease = client.lock("job", ttl=600).acquire()
        wait_until(lambda: proxy.subscribed)
        before, proxy.answer = proxy.accepted, lambda _: iter(())
        client.lock("other").acquire().release()
        wait_until(lambda: proxy.accepted > before)
        assert probe_redlock.nodes(client)[0].missed_releases
        assert operator.break_lock("job", token=lease.token)
        wait_until(lambda: lease.state == "LOST", 60)


def test_missed_release_arrives_after_a_connection_that_stayed_silent(nodes, proxied_node, wait_until) -> None:
    url, proxy = proxied_node
    with Client(url, call_timeout=3) as client:
        client.lock("job").acquire().release()
        wait_until(lambda: proxy.subscribed)
        before, proxy.answer = proxy.accepted, lambda _: iter(())
        client.lock("job").acquire().release()
        wait_until(lambda: proxy.accepted > before)
        proxy.answer = None
        wait_until(lambda: not probe_redlock.nodes(client)[0].missed_releases)


def test_messages_of_a_node_that_takes_no_releases_open_few_connections(nodes, proxied_node, wait_until) -> None:
    """After each message, the client tried to send the releases that the node had missed."""

    def hang_up(_: bytes) -> Iterator[bytes]:
        raise ConnectionError

    url, proxy = proxied_node
    with Client(url) as client:
        client.lock("job").acquire().release()
        wait_until(lambda: proxy.subscribed)
        proxy.answer = hang_up
        client.lock("job").acquire().release()
        assert probe_redlock.nodes(client)[0].missed_releases
        before, began = proxy.accepted, time.monotonic()
        while time.monotonic() < began + 3:
            nodes.all[0].ask("PUBLISH", f"lh1:c:{probe.registry(client).client_id}", "not for a claim")
        assert proxy.accepted - before < 10


def test_subscription_that_ends_at_once_is_repeated_ever_less_often(proxied_node, wait_until) -> None:
    url, proxy = proxied_node
    proxy.cuts_off = True
    with Client(url) as client:
        client.lock("job").acquire().release()
        began = time.monotonic()
        wait_until(lambda: time.monotonic() > began + 3)
        assert 2 < proxy.subscribed < 30
