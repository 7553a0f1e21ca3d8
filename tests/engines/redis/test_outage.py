"""The Redis engine while its server is killed, paused, cut off or full. Restarts are in test_restart.py.

Each test starts its own server. Tests that use `deployment` also run with a majority of Redlock nodes.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Sequence

import pytest

from harness.rigs.redis import RedisRig
from harness.servers.process import poll
from harness.servers.proxy import Proxy
from harness.servers.redis import RedisServer
from harness.servers.redlock import RedlockNodes
from leasehold import AsyncClient, Client, Event, LeaseLost, Unavailable
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support.foreign_clients import Waiter
from tests.support.redis_servers import has_waiters, url
from tests.support.timing import check_elapsed, check_seconds


def is_reachable(client) -> bool:
    try:
        client.ping()
    except Unavailable:
        return False
    return True


def wait_until_waiter_is_idle(server, holder) -> None:
    """Until a claim waits and its client makes no call: the answer to a call could replace the wake-up under test."""

    def is_idle() -> bool:
        before = server.calls().get("evalsha")
        time.sleep(0.2)  # pause: a waiter re-checks once after it has subscribed
        return server.calls().get("evalsha") == before

    poll(lambda: has_waiters(holder), 60, lambda: "the claim is queued")
    poll(is_idle, 60, lambda: "the waiter makes no more calls")


class Deployment:
    """One Redis server, or five Redlock nodes."""

    def __init__(self, scheme: str, count: int) -> None:
        self.scheme, self.nodes = scheme, RedlockNodes(count=count)
        self.url = self._url_for([node.port for node in self.nodes.all])
        self.proxies: list[Proxy] = []

    def _url_for(self, ports: Sequence[int]) -> str:
        return f"{self.scheme}://" + ",".join(f"127.0.0.1:{port}" for port in ports)

    @property
    def majority(self) -> int:
        return len(self.nodes.all) // 2 + 1

    def proxied(self) -> str:
        """A URL that leads through proxies, which can inject faults."""
        self.proxies = [Proxy(node.port) for node in self.nodes.all]
        return self._url_for([proxy.port for proxy in self.proxies])

    def lose_answers(self) -> None:
        for proxy in self.proxies[: self.majority]:
            proxy.lose_answers()

    def restore(self) -> None:
        for proxy in self.proxies:
            proxy.restore()

    def send_to_all(self, *command: str) -> None:
        send_to(self.nodes.all, *command)

    def close(self) -> None:
        for proxy in self.proxies:
            proxy.close()
        self.nodes.close()


def send_to(nodes: Sequence[RedisServer], *command: str) -> None:
    for node in nodes:
        node.ask(*command)


@pytest.fixture(params=[("redis", 1), ("redlock", 5)], ids=["redis", "redlock"])
def deployment(request):
    rig_or_skip(RedisRig)  # skips if Redis is not installed
    deployment = Deployment(*request.param)
    yield deployment
    deployment.close()


# --------------------------------------------------- killed, paused, restarted


def test_server_restarted_empty_frees_locks_and_tokens_rise(server, wait_until) -> None:
    with Client(url(server), call_timeout=1) as holder, Client(url(server), call_timeout=1) as other:
        lease = holder.lock("job", ttl=60).acquire()
        server.restart()  # without persistence
        wait_until(lambda: other.ping() >= 0 if is_reachable(other) else False)
        theirs = other.lock("job").acquire()
        assert theirs.token > lease.token, "a fence still remembers the older token"
        with pytest.raises(LeaseLost):
            lease.renew()
        assert lease.lost_reason == "unknown"
        assert theirs.held


def test_lease_is_lost_by_client_clock_when_server_is_paused(server) -> None:
    with Client(url(server), call_timeout=0.3) as client:
        lease = client.lock("job", ttl=1).acquire()
        server.pause()
        assert lease.wait_lost(5)
        assert lease.lost_reason == "unreachable"
        server.resume()


def test_breaker_opens_while_server_is_paused_and_closes_after(server) -> None:
    events: list[Event] = []
    with Client(url(server), call_timeout=0.3, breaker=True, on_event=events.append) as client:
        lease = client.lock("held", ttl=120).acquire()
        server.pause()
        for _ in range(5):
            with pytest.raises(Unavailable):
                client.lock("job").acquire(wait=0)
        with pytest.raises(Unavailable) as refused:
            client.lock("job").acquire(wait=0)
        assert 0 < refused.value.retry_in <= 1
        server.resume()
        with client.lock("job", wait=30, on_unavailable="wait"):
            lease.verify()
        poll(lambda: "breaker_closed" in {event.kind for event in events}, 60, lambda: str(events))
        assert [event.kind for event in events if "breaker" in event.kind] == ["breaker_opened", "breaker_closed"]


def test_full_server_refuses_new_locks_and_keeps_held_ones(server) -> None:
    with Client(url(server), call_timeout=1) as client, Client(url(server), call_timeout=1) as other:
        lease, other_lease = client.lock("kept", ttl=3).acquire(), client.lock("freed").acquire()
        waiter = Waiter(other, "kept")
        wait_until_waiter_is_idle(server, client)
        server.ask("CONFIG", "SET", "maxmemory", 1)
        with pytest.raises(Unavailable, match="OOM"):
            other.lock("new").acquire(wait=0)
        lease.renew()
        assert client.lock("new").locked() is False, "reads are allowed"
        assert other_lease.release()
        assert has_waiters(client), "the waiter keeps its position"
        server.ask("CONFIG", "SET", "maxmemory", 0)
        assert lease.release()
        assert waiter.wait_granted().held


def test_signals_do_not_extend_the_call_deadline(server) -> None:
    proxy = Proxy(server.port)
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        with Client(f"redis://127.0.0.1:{proxy.port}", call_timeout=0.5) as client:
            client.ping()
            proxy.cut()
            signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
            began = time.monotonic()
            stop = threading.Timer(5, signal.setitimer, (signal.ITIMER_REAL, 0))
            stop.start()
            with pytest.raises(Unavailable):
                client.lock("job").acquire(wait=0)
            check_elapsed(began, 0.5 + 0.5)
            stop.cancel()
            proxy.restore()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        proxy.close()


# ---------------------------------- one server, or a majority of Redlock nodes


def test_paused_servers_grant_nothing_and_keep_no_late_grant(deployment, wait_until) -> None:
    with Client(deployment.url, call_timeout=0.4) as client:
        client.ping()
        deployment.nodes.pause(*range(deployment.majority))
        began = time.monotonic()
        with pytest.raises(Unavailable):
            client.lock("job", ttl=30).acquire()
        check_elapsed(began, 0.4 + 0.5)
        deployment.nodes.resume()
        wait_until(
            lambda: deployment.nodes.remaining_keys() == [], 8
        )  # the servers now run the late attempts and the releases behind them
        with client.lock("job", wait=5):
            pass


def test_flushed_scripts_are_sent_again(deployment) -> None:
    nodes = deployment.nodes.all
    with Client(deployment.url) as client:
        for round_number in range(5):
            flushed_nodes = [nodes[round_number % len(nodes)], nodes[-1]]
            with client.lock("job") as lease:
                send_to(flushed_nodes, "SCRIPT", "FLUSH")
                lease.renew()
                deployment.send_to_all("SCRIPT", "FLUSH")
                assert client.inspect()
                send_to(flushed_nodes, "SCRIPT", "FLUSH")
        leases = [client.lock(f"name-{number}").acquire() for number in range(10)]
        deployment.send_to_all("SCRIPT", "FLUSH")
        assert len(client.inspect("name-")) == 10, "the server knew none of the scripts in this batch"
        for lease in leases:
            lease.release()


def test_killed_connections_are_replaced(deployment) -> None:
    def kill(kind: str) -> None:
        deployment.send_to_all("CLIENT", "KILL", "TYPE", kind)

    with Client(deployment.url) as client:
        for kind in ("normal", "pubsub", "normal"):
            with client.lock("job") as lease:
                kill(kind)
                lease.renew()
                kill(kind)

    async def main() -> None:
        async with AsyncClient(deployment.url) as client:
            for _ in range(3):
                async with client.lock("job") as lease:
                    kill("normal")
                    await lease.renew()
                    kill("normal")

    asyncio.run(main())


def test_waiter_is_woken_after_its_subscriptions_are_killed(deployment, wait_until) -> None:
    with Client(deployment.url) as holder, Client(deployment.url) as other:
        for _ in range(3):
            lease = holder.lock("job", ttl=60).acquire()
            waiter = Waiter(other)
            wait_until(lambda: [holding.state for holding in holder.inspect()] == ["held", "waiting"])
            deployment.send_to_all("CLIENT", "KILL", "TYPE", "pubsub")
            began = time.monotonic()
            lease.release()
            waiter.wait_granted().release()
            check_seconds(
                waiter.granted_at - began, 2.5, "woken by its new subscriptions, not by its re-check after 5 s"
            )


def test_lost_answers_raise_unavailable_and_leave_no_grant(deployment, wait_until) -> None:
    with Client(deployment.proxied(), call_timeout=0.3) as client, Client(deployment.url) as other:
        client.ping()
        deployment.lose_answers()
        for _ in range(3):
            began = time.monotonic()
            with pytest.raises(Unavailable):
                client.lock("job", ttl=60).acquire(wait=0)
            check_elapsed(began, 0.3 + 0.5)
        deployment.restore()
        wait_until(lambda: not other.inspect(), 10)
        wait_until(lambda: deployment.nodes.remaining_keys() == [], 10)


def test_lost_answers_under_asyncio_leave_no_grant(deployment) -> None:
    async def main() -> None:
        async with AsyncClient(deployment.proxied(), call_timeout=0.3) as client:
            await client.ping()
            deployment.lose_answers()
            began = time.monotonic()
            tasks = [client.lock(f"name-{n}", ttl=60).acquire(wait=0) for n in range(30)]
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(outcome, Unavailable)
            check_elapsed(began, 0.3 + 0.5)
            deployment.restore()
            while deployment.nodes.remaining_keys():
                check_elapsed(began, 15, "grants whose answers were lost are released")
                await asyncio.sleep(0.01)
            async with client.lock("name-1", wait=20):
                pass

    asyncio.run(main())
