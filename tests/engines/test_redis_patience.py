"""How long whoever stands in line asks on of a Redis server that is gone, what it meets when that is back, and what it
costs meanwhile. That it outlasts a restart at all is in test_redis_faults.py."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from leasehold import AsyncClient, Client, Unavailable, Unsupported
from leasehold.engines.redis.server import Server
from leasehold.testing.redis_rig import ALWAYS, RedisRig
from leasehold.testing.servers.redis import RedisServer
from leasehold.testing.servers.redis_several import RedisCluster, Watched
from leasehold.testing.suite import made

_ANNOYED = 10  # seconds: far more than anybody here wants to wait, far less than a call may take
_CALL = 25


@pytest.fixture
def server():
    made(RedisRig)  # a skip where there is no Redis
    server = RedisServer(*ALWAYS).start()
    yield server
    server.kill()


@pytest.fixture(params=["sentinels", "cluster"])
def several(request):
    made(RedisRig)
    found = Watched(down_after=0.5) if request.param == "sentinels" else RedisCluster(node_timeout=1.0)
    yield found
    found.close()


def url(server) -> str:
    return f"redis://127.0.0.1:{server.port}"


class InLine(threading.Thread):
    """Stands in line behind the lease of another client, and keeps what becomes of that."""

    def __init__(self, client: Client, **options) -> None:
        super().__init__(daemon=True)
        self._lock, self.end = client.lock("job", **options), None
        self.start()

    def run(self) -> None:
        began = time.monotonic()
        try:
            self.end = self._lock.acquire()
        except Exception as error:
            self.end = error
        self.took = time.monotonic() - began


def waiting(client) -> bool:
    return any(holding.state == "waiting" for holding in client.inspect())


def look(client) -> None:
    """Have all its waiters ask again now."""
    for mark in list(client._desk.book.waiting):
        client._desk.book.deliver("head", mark, 0.0, None)


@pytest.mark.parametrize("options", ["", "?min_replicas=1"])
def test_nobody_asks_on_for_longer_than_it_wants_to_wait(server, until, options) -> None:
    replica = RedisServer(primary=server).start()
    until(lambda: "state=online" in server.info("replication").get("slave0", ""))
    holder, other = Client(url(server), call_timeout=1), Client(url(server) + options, call_timeout=_CALL)
    try:
        lease = holder.lock("job", ttl=60).acquire()
        waiter = InLine(other, wait=2)
        until(lambda: waiting(holder))
        server.kill()
        look(other)
        waiter.join(_ANNOYED)
        assert isinstance(waiter.end, Unavailable), "its wait is over"
        assert 0.5 < waiter.took < _ANNOYED
        assert lease.token
        newcomer = InLine(other, wait=0.3)  # the client knows that there is a line, and would join it at once
        newcomer.join(_ANNOYED)
        assert isinstance(newcomer.end, Unavailable)
    finally:
        server.start()
        holder.close()
        other.close()
        replica.kill()


def test_nor_does_a_task(server) -> None:
    async def story() -> None:
        async with AsyncClient(url(server), call_timeout=_CALL) as client:
            lease = await client.lock("job", ttl=60).acquire()
            waiter = asyncio.create_task(client.lock("job").acquire(wait=2))
            while not any(holding.state == "waiting" for holding in await client.inspect()):
                await asyncio.sleep(0.01)
            server.kill()
            look(client)
            try:
                done, _ = await asyncio.wait([waiter], timeout=_ANNOYED)
                assert done, "its wait is over"
                with pytest.raises(Unavailable):
                    await waiter
            finally:
                server.start()
            assert lease.token

    asyncio.run(story())


def test_a_line_outlasts_that_all_servers_are_gone(several, until) -> None:
    with Client(several.url(), call_timeout=_CALL) as holder, Client(several.url(), call_timeout=_CALL) as other:
        lease = holder.lock("job", ttl=60).acquire()
        crowd = [InLine(other, wait=60) for _ in range(3)]
        until(lambda: sum(holding.state == "waiting" for holding in holder.inspect()) == 3)
        for each in several.all:
            each.kill()
        look(other)
        for each in crowd:
            each.join(0.3)
            assert each.is_alive(), each.end
        for each in several.all:
            each.start()
        for _ in crowd:
            until(lambda: any(each.end for each in crowd))
            mine = next(each for each in crowd if each.end)
            assert mine.end.token > lease.token
            mine.end.release()
            crowd.remove(mine)


def test_a_server_that_comes_back_without_its_log_grants_nothing_that_has_to_survive(server, until) -> None:
    with Client(url(server), call_timeout=_CALL) as holder, Client(url(server), call_timeout=_CALL) as other:
        lease = holder.lock("job", ttl=60).acquire()
        waiter = InLine(other, wait=60, require={"survives-restart"})
        until(lambda: waiting(holder))
        server.kill()
        look(other)
        server._options = ["--appendonly", "no"]
        server.start()
        waiter.join(_ANNOYED)
        assert isinstance(waiter.end, Unsupported), "the settings it required are gone"
        assert lease.token
        until(lambda: not holder.inspect())  # and what it was granted is given back


def test_a_crowd_of_tasks_does_not_try_to_connect_one_after_the_other(monkeypatch) -> None:
    opened = []

    async def fail(self, runtime, deadline):
        opened.append(self)
        await runtime.sleep(0.05)
        raise ConnectionRefusedError("nobody is there")

    monkeypatch.setattr(Server, "_open", fail)

    async def story() -> None:
        async with AsyncClient("redis://127.0.0.1:1", call_timeout=5) as client:
            tries = [client.lock("job").acquire(wait=0) for _ in range(100)]
            for each in await asyncio.gather(*tries, return_exceptions=True):
                assert isinstance(each, Unavailable)
                assert "nobody is there" in str(each)

    asyncio.run(story())
    mine = len(opened)
    assert mine < 20, f"{mine} for a hundred who all failed at the same moment"


def test_who_has_more_time_than_the_one_that_connects_for_it_tries_for_itself(monkeypatch) -> None:
    opened, silent = [], Server._open

    async def fall_silent(self, runtime, deadline):
        opened.append(deadline)
        if len(opened) == 1:
            await runtime.sleep(0.1)
            raise TimeoutError("no answer")
        return await silent(self, runtime, deadline)

    monkeypatch.setattr(Server, "_open", fall_silent)
    server = made(RedisRig).server

    async def story() -> None:
        async with AsyncClient(url(server), namespace="more-time", call_timeout=5) as client:
            first = asyncio.create_task(client.ping())
            await asyncio.sleep(0)
            second = asyncio.create_task(client.ping())
            with pytest.raises(Unavailable):
                await first
            assert await second >= 0

    asyncio.run(story())
