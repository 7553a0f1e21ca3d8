"""Waiters of the Redis engine: when they are woken, and when they re-check by themselves."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from harness.servers.process import poll
from leasehold import Client
from leasehold.core.timing import RESERVATION_PROBE, WAITER_TTL, WAKEUP_SLACK
from leasehold.engines.redis import pubsub
from leasehold.engines.redis.bounded_reader import BoundedReader
from leasehold.engines.redis.pubsub import PubSubListener
from leasehold.engines.redis.scripts import PubSubCommands
from leasehold.engines.registry import ClaimRegistry, RecheckTimer, Waiter
from leasehold.errors import Unavailable
from leasehold.model import Busy, Claim, Holder
from leasehold.runtime.base import run_sync
from leasehold.runtime.net.blocking import SocketStream
from leasehold.runtime.threads import Threads, boot_clock
from tests.support import probe, probe_redis
from tests.support.node_proxy import NodeProxy
from tests.support.redis_servers import url, wait_until_queued
from tests.support.timing import check_elapsed, check_seconds

ON_VALKEY_TOO = pytest.mark.parametrize(
    "start_redis", ["redis", pytest.param("valkey", marks=pytest.mark.extended)], indirect=True
)


def claim(number: int) -> Claim:
    return Claim("", "job", f"id-{number}", f"{number:032x}", Holder("me"), 30.0, queue=True)


def is_woken(waiter: Waiter) -> bool:
    return run_sync(waiter.signal.wait(0.0))


@pytest.fixture
def registry() -> ClaimRegistry:
    return ClaimRegistry(Threads(), "client")


@pytest.fixture
def recheck_timer() -> RecheckTimer:
    return RecheckTimer()


class SilentServer:
    """Accepts a subscription, notifies one waiter to re-check later, and then stays silent."""

    def __init__(self, id_hash: str, delay: float) -> None:
        self.client_side, self.server_side = socket.socketpair()
        message = b"recheck %d leasehold:{:0}:job " % (delay * 1e6) + bytes.fromhex(id_hash)
        self.server_side.sendall(b"*3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n")
        self.server_side.sendall(b"*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$%d\r\n%b\r\n" % (len(message), message))

    async def open(self, runtime, _deadline: float) -> SocketStream:
        return SocketStream(self.client_side, BoundedReader(), runtime.now)


class QueueScenario:
    """One client holds the lock, and two threads of another client wait for it."""

    def __init__(self, url: str, wait_until, **options) -> None:
        self.holder, self.client, self.errors = Client(url), Client(url, **options), []
        self.lease = self.holder.lock("job").acquire()
        self.finish = threading.Event()
        self.threads = []
        for number in (1, 2):
            self.threads.append(threading.Thread(target=self._work))
            self.threads[-1].start()
            wait_until(lambda n=number: len([h for h in self.holder.inspect("job") if h.state == "waiting"]) == n)

    def _work(self) -> None:
        try:
            with self.client.lock("job"):
                self.finish.wait(30)
        except Unavailable as error:
            self.errors.append((time.monotonic(), error))

    def wait_until_second_rechecked(self, wait_until) -> None:
        """Until then the second waiter is not notified when to re-check: it does so by itself."""
        second = probe.waiters(self.client)[1]
        wait_until(lambda: second.recheck_by is not None)
        wait_until(lambda: second.recheck_by is None)

    def second_recheck_at(self) -> float | None:
        """When the second waiter will re-check, once the first has left the queue and the second was notified."""
        waiters = probe.waiters(self.client)
        return waiters[0].recheck_at if len(waiters) == 1 else None


class RecordedSignal:
    """A signal that records when it is set."""

    def __init__(self, signal, now) -> None:
        self._signal, self._now, self.set_at = signal, now, []
        self.wait = signal.wait

    def set(self) -> None:
        self.set_at.append(self._now())
        self._signal.set()


# --------------------------------------------------------------- recheck times


def test_recheck_times_of_a_waiter_replace_each_other(registry, recheck_timer) -> None:
    """A hostile server may send any number of them."""
    registry.add_waiter(claim(1), Threads())
    for number in range(10_000):
        recheck_timer.schedule(registry, claim(1).id_hash, 10.0 + number % 2)
    assert probe_redis.planned_rechecks(recheck_timer) < 100


def test_waiter_is_woken_at_its_recheck_time_and_not_before(registry, recheck_timer) -> None:
    waiter = registry.add_waiter(claim(1), Threads())
    recheck_timer.schedule(registry, claim(1).id_hash, 10.0)
    assert recheck_timer.next_due() == waiter.recheck_at == 10.0
    recheck_timer.wake_due(registry, 9.9)
    assert not is_woken(waiter)
    recheck_timer.wake_due(registry, 10.0)
    assert is_woken(waiter)
    assert recheck_timer.next_due() == float("inf")


def test_earlier_of_two_recheck_times_wins(registry, recheck_timer) -> None:
    waiter = registry.add_waiter(claim(1), Threads())
    recheck_timer.schedule(registry, claim(1).id_hash, 10.0)
    recheck_timer.schedule(registry, claim(1).id_hash, 5.0)
    recheck_timer.wake_due(registry, 5.0)
    assert is_woken(waiter)


def test_new_attempt_cancels_the_scheduled_recheck(registry, recheck_timer) -> None:
    waiter = registry.add_waiter(claim(1), Threads())
    recheck_timer.schedule(registry, claim(1).id_hash, 10.0)
    registry.add_waiter(claim(1), Threads())
    recheck_timer.wake_due(registry, 10.0)
    assert not is_woken(waiter)


def test_recheck_timer_drops_waiters_that_left(registry, recheck_timer) -> None:
    for number in range(1000):
        registry.add_waiter(claim(number), Threads())
        recheck_timer.schedule(registry, claim(number).id_hash, 1e9 + number)
        registry.remove_waiter(claim(number).id_hash)
    assert probe_redis.planned_rechecks(recheck_timer) < 100
    recheck_timer.schedule(registry, claim(1).id_hash, 1.0)  # an unknown id hash is ignored
    assert recheck_timer.next_due() >= 1e9


@pytest.mark.extended
def test_waiter_rechecks_in_time_while_listener_awaits_a_reply(registry, wait_until, monkeypatch) -> None:
    # The connection is dead but not closed: the listener sends a PING and waits for the reply.
    monkeypatch.setattr(pubsub, "HEARTBEAT_INTERVAL", 0.1)
    waiter = registry.add_waiter(claim(1), Threads())
    server = SilentServer(claim(1).id_hash, delay=1.0)
    subscriber = PubSubListener(server, PubSubCommands(), Threads(), registry, call_timeout=4.0)
    subscriber.start()
    try:
        wait_until(lambda: waiter.recheck_at is not None and waiter.recheck_at > boot_clock() + 0.1)  # notified
        began = time.monotonic()
        assert run_sync(waiter.signal.wait(5.0))  # on connect every waiter re-checks once
        assert run_sync(waiter.signal.wait(5.0))
        check_elapsed(began, 3.0)
        assert b"PING" in server.server_side.recv(1000)
    finally:
        subscriber.close()
        server.server_side.close()


@ON_VALKEY_TOO
def test_second_waiter_sleeps_until_its_recheck_time(start_redis, wait_until) -> None:
    scenario = QueueScenario(f"redis://127.0.0.1:{start_redis().port}", wait_until)
    scenario.wait_until_second_rechecked(wait_until)
    now, recheck_times = probe.runtime(scenario.client).now, []
    waiters = probe.waiters(scenario.client)
    for waiter in waiters:
        waiter.signal = RecordedSignal(waiter.signal, now)
    scenario.lease.release()
    wait_until(lambda: recheck_times.append(scenario.second_recheck_at()) or recheck_times[-1])
    recheck_at = recheck_times[-1]
    assert recheck_at <= now() + RESERVATION_PROBE + 0.1
    wait_until(lambda: waiters[1].recheck_at is None)  # it has attempted again
    scenario.finish.set()
    for thread in scenario.threads:
        thread.join(30)
    notified_at = recheck_at - RESERVATION_PROBE - WAKEUP_SLACK  # before, the subscription may have woken all waiters
    assert not [at for at in waiters[1].signal.set_at if notified_at <= at < recheck_at]
    scenario.client.close()
    scenario.holder.close()


@ON_VALKEY_TOO
def test_second_waiter_rechecks_in_time_when_server_is_down(start_redis, wait_until) -> None:
    server = start_redis()
    scenario = QueueScenario(f"redis://127.0.0.1:{server.port}", wait_until, call_timeout=1.0)
    scenario.wait_until_second_rechecked(wait_until)
    scenario.lease.release()
    wait_until(scenario.second_recheck_at)
    began = time.monotonic()
    server.kill()
    scenario.threads[1].join(30)
    scenario.finish.set()
    scenario.threads[0].join(30)
    assert scenario.errors, "the second waiter re-checked and found the server down"
    check_seconds(min(at for at, _ in scenario.errors) - began, WAITER_TTL / 3)


@ON_VALKEY_TOO
@pytest.mark.parametrize("command", [("DEL",), ("ZPOPMIN",)], ids=["evicted", "half-refused"])
def test_waiter_that_was_taken_out_of_the_queue_joins_it_again(server, command) -> None:
    """By an eviction of the queue, or by a script of a user without +hdel. It waited on, although the name was free."""
    with Client(url(server)) as one, Client(url(server)) as other, Client(url(server)) as third:
        lease = one.lock("job", ttl=60).acquire()
        waiters = []
        for number, client in enumerate((other, third), 1):
            waiters.append(threading.Thread(target=lambda c=client: c.lock("job", wait=60).acquire().release()))
            waiters[-1].start()
            wait_until_queued(one, "job", number)
        (queue,) = server.ask("KEYS", "lh1:*:job:q")
        server.ask(*command, queue)
        lease.release()
        server.ask("CLIENT", "KILL", "TYPE", "pubsub")  # all waiters re-check once they have subscribed again
        for waiter in waiters:
            waiter.join(30)
            assert not waiter.is_alive()


class ElapsedSignal:
    """A signal that is never set: records how long it was waited for, and returns at once."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    async def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        return False


@ON_VALKEY_TOO
def test_waiter_behind_others_attempts_again_without_a_notification(server) -> None:
    with Client(url(server)) as client:
        client.lock("warm").acquire().release()
        engine = probe.engine(client)
        waiter = probe.core(client).registry.add_waiter(claim(1), Threads())
        waiter.signal, waiter.recheck_by = ElapsedSignal(), boot_clock() + RESERVATION_PROBE
        run_sync(engine.wait(claim(1), Busy(30.0, position=2), 12.0))
        probe.core(client).registry.remove_waiter(claim(1).id_hash)
    assert max(waiter.signal.waits) <= RESERVATION_PROBE + WAKEUP_SLACK


def test_repeated_attempt_of_waiter_discards_its_recheck(registry) -> None:
    waiter = registry.add_waiter(claim(1), Threads())
    waiter.recheck_by = 10.0
    assert registry.add_waiter(claim(1), Threads()).recheck_by is None


# --------------------------------------------------------------- subscriptions


@ON_VALKEY_TOO
def test_client_still_receives_wakeups_after_foreign_messages(server) -> None:
    with Client(url(server)) as one, Client(url(server)) as other:
        lease = one.lock("job", ttl=60).acquire()
        other.lock("warm").acquire().release()
        key = b"lh1:{:1}:job"
        for channel in server.ask("PUBSUB", "CHANNELS", "*"):
            for message in (
                b"",
                b"reserved",
                b"recheck %b %b x" % (b"9" * 400, key),
                b"reserved nan %b x" % key,
                b"reserved 1 lh1:{%%:1}:%% x",
            ):
                server.ask("PUBLISH", channel, message)
        waiter = threading.Thread(target=lambda: other.lock("job", wait=20).acquire().release())
        waiter.start()
        wait_until_queued(one, "job")
        began = time.monotonic()
        lease.release()
        waiter.join(60)
        check_elapsed(began, 1.0, "woken by push, not by its re-check")


@ON_VALKEY_TOO
def test_subscription_that_ends_at_once_is_repeated_ever_less_often(server, wait_until) -> None:
    """Through a proxy that cuts off subscriptions, a client connected fifty times a second."""
    proxy = NodeProxy(server.port)
    proxy.cuts_off = True
    with Client(f"redis://127.0.0.1:{proxy.port}") as client:
        client.lock("job").acquire().release()
        began = time.monotonic()
        wait_until(lambda: time.monotonic() > began + 3)
        assert 2 < proxy.subscribed < 30
    proxy.close()


def test_silent_subscription_is_detected_and_replaced(server, proxy, monkeypatch) -> None:
    monkeypatch.setattr(pubsub, "HEARTBEAT_INTERVAL", 0.3)  # seconds of silence before the listener sends a PING
    with Client(f"redis://127.0.0.1:{proxy.port}", call_timeout=0.3) as client:
        client.lock("job").acquire().release()
        subscription = probe_redis.subscriptions(client)
        assert subscription.active
        proxy.cut()
        poll(lambda: not subscription.active, 60, lambda: "the listener gets no reply to its PING")
        proxy.restore()
        poll(lambda: subscription.active, 60, lambda: "the listener is subscribed again")
