"""Redis hurt, alone and as a majority of a redlock: stopped, made forgetful, cut off. On servers of its own.

What only one server, or only several, can suffer is in test_redis_faults.py and test_redlock_faults.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from leasehold import AsyncClient, Client, Unavailable
from leasehold.testing.redis_rig import RedisRig
from leasehold.testing.servers.proxy import Proxy
from leasehold.testing.servers.redis import RedisServer
from leasehold.testing.servers.redlock import Nodes
from leasehold.testing.suite import made


class Place:
    """One server, or five."""

    def __init__(self, scheme: str, count: int) -> None:
        self.scheme, self.nodes = scheme, Nodes(count=count)
        self.url = self._to([node.port for node in self.nodes.all])
        self.proxies: list[Proxy] = []

    def _to(self, ports: Sequence[int]) -> str:
        return f"{self.scheme}://" + ",".join(f"127.0.0.1:{port}" for port in ports)

    @property
    def majority(self) -> int:
        return len(self.nodes.all) // 2 + 1

    def proxied(self) -> str:
        """A way to them that can be hurt."""
        self.proxies = [Proxy(node.port) for node in self.nodes.all]
        return self._to([proxy.port for proxy in self.proxies])

    def lose_answers(self) -> None:
        for proxy in self.proxies[: self.majority]:
            proxy.lose_answers()

    def mend(self) -> None:
        for proxy in self.proxies:
            proxy.mend()

    def all_do(self, *command: str) -> None:
        do(self.nodes.all, *command)

    def close(self) -> None:
        for proxy in self.proxies:
            proxy.close()
        self.nodes.close()


def do(nodes: Sequence[RedisServer], *command: str) -> None:
    for node in nodes:
        node.ask(*command)


@pytest.fixture(params=[("redis", 1), ("redlock", 5)], ids=["redis", "redlock"])
def place(request):
    made(RedisRig)  # a skip where there is no Redis
    place = Place(*request.param)
    yield place
    place.close()


def test_stopped_past_the_ttl_no_grant_is_handed_out_and_none_stays(place, until) -> None:
    with Client(place.url, call_timeout=0.4) as client:
        client.ping()
        place.nodes.pause(*range(place.majority))
        began = time.monotonic()
        with pytest.raises(Unavailable):
            client.lock("job", ttl=30).acquire()
        assert time.monotonic() - began < 0.4 + 0.5
        place.nodes.resume()
        until(lambda: place.nodes.left() == [], 8)  # the attempts are carried out now, and the releases behind them
        with client.lock("job", wait=5):
            pass


def test_scripts_that_servers_forgot_are_sent_again(place) -> None:
    nodes = place.nodes.all
    with Client(place.url) as client:
        for turn in range(5):
            some = [nodes[turn % len(nodes)], nodes[-1]]
            with client.lock("job") as lease:
                do(some, "SCRIPT", "FLUSH")
                lease.renew()
                place.all_do("SCRIPT", "FLUSH")
                assert client.inspect()
                do(some, "SCRIPT", "FLUSH")
        leases = [client.lock(f"name-{number}").acquire() for number in range(10)]
        place.all_do("SCRIPT", "FLUSH")
        assert len(client.inspect("name-")) == 10, "a batch, of which none was known"
        for lease in leases:
            lease.release()


def test_killed_connections_are_replaced(place) -> None:
    def kill(kind: str) -> None:
        place.all_do("CLIENT", "KILL", "TYPE", kind)

    with Client(place.url) as client:
        for kind in ("normal", "pubsub", "normal"):
            with client.lock("job") as lease:
                kill(kind)
                lease.renew()
                kill(kind)

    async def main() -> None:
        async with AsyncClient(place.url) as client:
            for _ in range(3):
                async with client.lock("job") as lease:
                    kill("normal")
                    await lease.renew()
                    kill("normal")

    asyncio.run(main())


def test_a_waiter_whose_subscriptions_are_killed_is_still_woken(place, until, beside) -> None:
    with Client(place.url) as holder, Client(place.url) as other:
        for _ in range(3):
            lease = holder.lock("job", ttl=60).acquire()
            waiter = beside("others").Waiter(other)
            until(lambda: [holding.state for holding in holder.inspect()] == ["held", "waiting"])
            place.all_do("CLIENT", "KILL", "TYPE", "pubsub")
            began = time.monotonic()
            lease.release()
            waiter.got().release()
            assert waiter.at - began < 2.5, "by its new subscriptions, not by the look around after 5 s"


def test_every_answer_is_lost(place, until) -> None:
    with Client(place.proxied(), call_timeout=0.3) as client, Client(place.url) as other:
        client.ping()
        place.lose_answers()
        for _ in range(3):
            began = time.monotonic()
            with pytest.raises(Unavailable):
                client.lock("job", ttl=60).acquire(wait=0)
            assert time.monotonic() - began < 0.3 + 0.5
        place.mend()
        until(lambda: not other.inspect(), 10)
        until(lambda: place.nodes.left() == [], 10)


def test_every_answer_is_lost_to_a_loop(place) -> None:
    async def main() -> None:
        async with AsyncClient(place.proxied(), call_timeout=0.3) as client:
            await client.ping()
            place.lose_answers()
            began = time.monotonic()
            tasks = [client.lock(f"name-{n}", ttl=60).acquire(wait=0) for n in range(30)]
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(outcome, Unavailable)
            assert time.monotonic() - began < 0.3 + 0.5
            place.mend()
            while place.nodes.left():
                assert time.monotonic() - began < 15, "what was granted unheard is given back"
                await asyncio.sleep(0.01)
            async with client.lock("name-1", wait=5):
                pass

    asyncio.run(main())
