"""Whoever stands in line outlasts a restart of a Redis server: for how long it asks on, what it meets when that is
back, and what it costs meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import asynccontextmanager

import pytest

from leasehold import AsyncClient, Client, ConfigError, Lease, Unavailable, Unsupported
from leasehold.engines.redis import asking
from leasehold.engines.redis.server import Server
from leasehold.engines.redis.topology import pause_before
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


@pytest.fixture
def forgetful():
    """It keeps no log: nothing is left after a restart."""
    made(RedisRig)
    server = RedisServer().start()
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

    def got(self) -> Lease:
        self.join(30)
        assert isinstance(self.end, Lease), self.end
        return self.end


def waiting(client) -> bool:
    return any(holding.state == "waiting" for holding in client.inspect())


def look(client) -> None:
    """Have all its waiters ask again now."""
    for mark in list(client._desk.book.waiting):
        client._desk.book.deliver("head", mark, 0.0, None)


@pytest.fixture
def asks(monkeypatch) -> list[int]:
    """An entry each time somebody goes on asking a server that cannot be reached."""
    counted: list[int] = []

    async def pause(runtime, turn, deadline) -> bool:
        counted.append(turn)
        return await pause_before(runtime, turn, deadline)

    monkeypatch.setattr(asking, "pause_before", pause)
    return counted


@asynccontextmanager
async def without_server(server, call_timeout, wait):
    """A lease, and a task that stands in line behind it and looks, with their server gone."""
    async with AsyncClient(url(server), call_timeout=call_timeout) as client, asyncio.timeout(60):
        lease = await client.lock("job", ttl=60).acquire()
        waiter = asyncio.create_task(client.lock("job").acquire(wait=wait))
        while not any(holding.state == "waiting" for holding in await client.inspect()):
            await asyncio.sleep(0.01)
        server.kill()
        look(client)
        yield lease, waiter


# ---------------------------------------------------------------- it asks on


def test_a_waiter_outlives_a_restart_of_the_server(forgetful, asks, until) -> None:
    with Client(url(forgetful), call_timeout=20) as holder, Client(url(forgetful), call_timeout=20) as other:
        lease = holder.lock("job", ttl=60).acquire()
        waiter = InLine(other, wait=60)
        until(lambda: waiting(holder))
        forgetful.kill()
        look(other)
        until(lambda: len(asks) >= 3)
        forgetful.start()
        assert waiter.got().token > lease.token  # nothing is left that could keep it from it


def test_a_waiter_of_a_loop_outlives_a_restart_of_the_server(forgetful, asks) -> None:
    async def story() -> None:
        async with without_server(forgetful, 20, wait=60) as (lease, waiter):
            while len(asks) < 3:
                await asyncio.sleep(0.01)
            forgetful.start()
            assert (await waiter).token > lease.token

    asyncio.run(story())


def test_a_waiter_keeps_its_place_while_the_server_reads_its_log(asks, until) -> None:
    made(RedisRig)
    slowly = ("--key-load-delay", "30000", "--loading-process-events-interval-bytes", "1024")  # 30 ms each
    server = RedisServer("--appendonly", "yes", "--appendfsync", "always", *slowly).start()
    try:
        with Client(url(server), call_timeout=20) as holder, Client(url(server), call_timeout=20) as other:
            lease = holder.lock("job", ttl=60).acquire()
            waiter = InLine(other, wait=60)
            until(lambda: waiting(holder))
            for number in range(50):
                server.ask("SET", f"filler:{number}", "x" * 2000)
            server.ask("BGREWRITEAOF")  # to a form during whose reading it answers
            until(lambda: server.info("persistence")["aof_rewrite_in_progress"] == "0")
            server.kill()
            look(other)
            until(lambda: len(asks) >= 3)
            asked = len(asks)
            server.start()  # once it has read all of it
            assert len(asks) > asked, "nobody asked while it read"
            assert waiter.is_alive()
            assert lease.release()
            assert waiter.got().token > lease.token
    finally:
        server.kill()


def test_a_waiter_is_told_in_time_that_its_server_does_not_come_back(forgetful, asks) -> None:
    async def story() -> None:
        began = time.monotonic()
        async with without_server(forgetful, 1, wait=60) as (lease, waiter):
            with pytest.raises(Unavailable, match="cannot be reached"):
                await waiter
            assert asks, "it went on asking"
            assert time.monotonic() - began < 10
            assert lease.lost_reason in (None, "unreachable")

    asyncio.run(story())


def test_one_cancelled_while_it_asks_on_leaves_no_place_in_line(server, asks) -> None:
    async def story() -> None:
        async with without_server(server, 20, wait=60) as (lease, waiter):
            while len(asks) < 2:
                await asyncio.sleep(0.01)
            waiter.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiter
            server.start()  # it kept the line
            async with AsyncClient(url(server)) as other, asyncio.timeout(_ANNOYED):  # a place lapses after 15 s
                while [holding.token for holding in await other.inspect()] != [lease.token]:
                    await asyncio.sleep(0.01)
            assert await lease.release()

    asyncio.run(story())


def test_a_client_can_be_closed_while_a_waiter_outlasts_a_restart(forgetful, asks, until) -> None:
    holder, other = Client(url(forgetful), call_timeout=20), Client(url(forgetful), call_timeout=20)
    lease, waiter = holder.lock("job", ttl=60).acquire(), InLine(other, wait=60)
    until(lambda: waiting(holder))
    forgetful.kill()
    look(other)
    until(lambda: asks)
    closing = threading.Thread(target=other.close, daemon=True)
    closing.start()
    waiter.join(_ANNOYED)
    assert isinstance(waiter.end, ConfigError | Unavailable), "it goes on asking for a client that is closed"
    forgetful.start()
    closing.join(_ANNOYED)
    assert not closing.is_alive(), "what it owed is settled"
    assert lease.token
    holder.close()


# ------------------------------------------------------------- for how long


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
        async with without_server(server, _CALL, wait=2) as (lease, waiter):
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


# --------------------------------------------- what it meets, and what it costs


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
