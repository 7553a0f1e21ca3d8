"""The short etcd leases of waiters: a dead waiter soon leaves the queue, a living one keeps its position."""

from __future__ import annotations

import time
from typing import Any

import pytest

from leasehold import Client
from leasehold.engines.etcd import messages
from leasehold.engines.etcd.leases import EtcdLease
from leasehold.engines.etcd.waiter_leases import WaiterLeases
from tests.support import probe
from tests.support.timing import check_elapsed


@pytest.fixture
def without_heartbeats(monkeypatch) -> None:
    """The watchdog sends none, so that the watch thread alone keeps waiters in the queue."""

    async def send_none(*_: object) -> None:
        return None

    monkeypatch.setattr(*probe.SEND_HEARTBEATS, send_none)


def test_killed_waiter_delays_the_queue_for_at_most_five_seconds(url, child, start_waiter, eventually) -> None:
    with Client(url) as holder, Client(url) as other:
        held = holder.lock("job").acquire()
        dead = child("wait", url, "job", 30)
        eventually(lambda: len(holder.inspect("job")) == 2)
        waiting = start_waiter(other)
        dead.kill()
        began = time.monotonic()
        held.release()
        waiting.wait_granted(60)
        check_elapsed(began, 5)


@pytest.mark.extended
@pytest.mark.parametrize("slow", [False, True])
def test_living_waiter_keeps_its_position(
    url, proxy, proxied_url, slow, claims, start_waiter, without_heartbeats
) -> None:
    """Also if the network delays every request by a second."""
    with Client(url) as holder, Client(proxied_url, call_timeout=20) as first, Client(url) as second:
        held = holder.lock("job").acquire()
        if slow:
            first.ping()
            proxy.delay = lambda: 1.0
        waiting = start_waiter(first)
        if slow:
            time.sleep(3)  # pause: it may still become a waiter: that takes three requests
        behind, before = start_waiter(second), claims()
        assert len(before) == 3
        # More than one life of its lease, but less than the 15 s after which a waiter without heartbeats ends.
        time.sleep(5 if slow else 8)  # pause: it is to outlive its lease's first ttl
        assert claims() == before, "the keys and their leases"
        held.release()
        assert waiting.wait_granted(60) < behind.wait_granted(60)


@pytest.mark.extended
def test_waiter_that_waits_out_a_delay_keeps_its_position(
    url, member, claims, start_waiter, without_heartbeats, eventually
) -> None:
    """It has nothing to watch meanwhile."""
    with Client(url) as holder, Client(url) as other:
        lost = holder.lock("job", ttl=60, delay=8).acquire()
        (held,) = claims().values()
        waiting = start_waiter(other)
        member.revoke(held)
        eventually(lambda: not lost.held)
        before, began = claims(), time.monotonic()
        while time.monotonic() < began + 7:
            assert claims().keys() == before.keys()
            time.sleep(0.1)
        waiting.wait_granted(60)


def test_lock_server_has_time_to_take_a_waiter_over(url, claims, start_waiter, member, eventually) -> None:
    with Client(url) as holder, Client(url) as server:
        probe.registry(server).undo_unanswered = False  # as lock servers do: their clients may use another one
        held = holder.lock("job").acquire()
        before = claims()
        waiting = start_waiter(server)

        def new_ttls() -> list[int]:
            return [member.granted_ttl(lease) for _, lease in claims().items() - before.items()]

        eventually(lambda: new_ttls() == [15])  # at first its key has the lease of the attempt, of 30 s
        held.release()
        waiting.wait_granted()


class SilentConnection:
    """Accepts every request and answers none."""

    def __init__(self) -> None:
        self.sent, self.failure = list[bytes](), ""
        self.stream: Any = None

    def start(self, stream: object, _path: str, _metadata: object, body: bytes, _end: bool) -> None:
        self.stream = stream
        self.sent.append(body)

    def send(self, _stream: object, body: bytes) -> None:
        self.sent.append(body)

    def fail(self, reason: str) -> None:
        self.failure = reason


@pytest.mark.parametrize(("answer_time", "renewed_at", "left_at"), [(0.0, [1.0], 2.0), (1.0, [1.0, 2.0, 3.0], 4.0)])
def test_member_that_answers_no_keep_alive_is_left(answer_time, renewed_at, left_at) -> None:
    """In a slow network it has more time, and gets three renewals in each life all the same."""
    now, connection, sent_at = 0.0, SilentConnection(), []
    kept = WaiterLeases(lambda: now, lambda: [EtcdLease(1, 4, 4, 0.0)], lambda: answer_time)
    kept.use(connection, [])
    while (pause := kept.send_due(can_switch=True)) is not None:
        sent_at += [now] * (len(connection.sent) - len(sent_at))
        now += pause
    assert "keep-alive" in connection.failure
    assert (sent_at, now) == (renewed_at, left_at)


def test_member_that_answers_hundreds_of_keep_alives_slowly_is_kept() -> None:
    """It answers one after the other, four a second, so the last answers come long after their requests."""
    now, connection = 100.0, SilentConnection()
    leases = [EtcdLease(number, 60, 60, 50.0) for number in range(1, 41)]
    kept = WaiterLeases(lambda: now, lambda: leases, lambda: 0.0)
    kept.use(connection, [])
    kept.send_due(can_switch=True)
    for lease in leases:
        now += 0.25
        connection.stream.on_message(messages.encode(messages.LeaseTtlResponse(id=lease.id, ttl=60)))
        kept.send_due(can_switch=True)
        assert not connection.failure
    assert len(connection.sent) == 40


def test_silent_member_is_kept_if_there_is_no_other() -> None:
    now, connection = 0.0, SilentConnection()
    kept = WaiterLeases(lambda: now, lambda: [EtcdLease(1, 4, 4, 0.0)], lambda: 0.0)
    kept.use(connection, [])
    while now < 10:
        now += kept.send_due(can_switch=False)
    assert not connection.failure
    assert len(connection.sent) >= 9
