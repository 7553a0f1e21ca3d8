"""The Redis engine hurt: killed and restarted, stopped, cut off, full, its clock stepped. On servers of its own.

What a redlock suffers as well is in test_redis_hurt.py.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import asynccontextmanager

import pytest

from leasehold import AsyncClient, Client, ConfigError, LeaseLost, Unavailable
from leasehold.engines.redis import asking
from leasehold.engines.redis.topology import pause_before
from leasehold.testing.redis_rig import RedisRig
from leasehold.testing.servers.process import poll
from leasehold.testing.servers.proxy import Proxy
from leasehold.testing.servers.redis import CLOCKS, RedisServer
from leasehold.testing.suite import made


@pytest.fixture
def server():
    made(RedisRig)  # a skip where there is no Redis
    server = RedisServer().start()
    yield server
    server.kill()


@pytest.fixture
def clocked():
    made(RedisRig)
    if not CLOCKS:
        pytest.skip("no false clocks: apt-get install faketime")
    server = RedisServer(false_clock=True).start()
    yield server
    server.kill()


@pytest.fixture
def proxy(server):
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()


def url(server) -> str:
    return f"redis://127.0.0.1:{server.port}"


def waiting(client, count=1) -> bool:
    return sum(holding.state == "waiting" for holding in client.inspect()) == count


# ------------------------------------------------- killed, stopped, emptied


def test_a_killed_server_without_data_frees_everything_and_tokens_rise(server, until) -> None:
    with Client(url(server), call_timeout=1) as holder, Client(url(server), call_timeout=1) as other:
        lease = holder.lock("job", ttl=60).acquire()
        server.restart()  # it keeps nothing
        until(lambda: other.ping() >= 0 if answers(other) else False)
        theirs = other.lock("job").acquire()
        assert theirs.token > lease.token, "the fence still knows the elder"
        with pytest.raises(LeaseLost):
            lease.renew()
        assert lease.lost_reason == "unknown"
        assert theirs.held


def answers(client) -> bool:
    try:
        client.ping()
    except Unavailable:
        return False
    return True


def await_rest(server, holder) -> None:
    """Until somebody stands in line and asks for nothing: in the midst of a call it would be told what happens next."""

    def rests() -> bool:
        before = server.calls().get("evalsha")
        time.sleep(0.2)  # it looks once more when its subscription has begun
        return server.calls().get("evalsha") == before

    poll(lambda: waiting(holder), 10, lambda: "it stands in line")
    poll(rests, 10, lambda: "it waits to be woken")


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


def test_a_waiter_outlives_a_restart_of_the_server(server, beside, asks, until) -> None:
    with Client(url(server), call_timeout=20) as holder, Client(url(server), call_timeout=20) as other:
        lease = holder.lock("job", ttl=60).acquire()
        waiter = beside("others").Waiter(other)
        until(lambda: waiting(holder))
        server.kill()
        look(other)
        until(lambda: len(asks) >= 3)
        server.start()
        assert waiter.got().token > lease.token  # nothing is left that could keep it from it


@asynccontextmanager
async def without_server(server, call_timeout):
    """A lease, and a task that stands in line behind it and looks, with their server gone."""
    async with AsyncClient(url(server), call_timeout=call_timeout) as client, asyncio.timeout(30):
        lease = await client.lock("job", ttl=60).acquire()
        waiter = asyncio.create_task(client.lock("job").acquire(wait=60))
        while not any(holding.state == "waiting" for holding in await client.inspect()):
            await asyncio.sleep(0.01)
        server.kill()
        look(client)
        yield lease, waiter


def test_a_waiter_of_a_loop_outlives_a_restart_of_the_server(server, asks) -> None:
    async def story() -> None:
        async with without_server(server, 20) as (lease, waiter):
            while len(asks) < 3:
                await asyncio.sleep(0.01)
            server.start()
            assert (await waiter).token > lease.token

    asyncio.run(story())


def test_a_waiter_keeps_its_place_while_the_server_reads_its_log(beside, asks, until) -> None:
    made(RedisRig)
    slowly = ("--key-load-delay", "30000", "--loading-process-events-interval-bytes", "1024")  # 30 ms each
    server = RedisServer("--appendonly", "yes", "--appendfsync", "always", *slowly).start()
    try:
        with Client(url(server), call_timeout=20) as holder, Client(url(server), call_timeout=20) as other:
            lease = holder.lock("job", ttl=60).acquire()
            waiter = beside("others").Waiter(other)
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


def test_a_waiter_is_told_in_time_that_its_server_does_not_come_back(server, asks) -> None:
    async def story() -> None:
        began = time.monotonic()
        async with without_server(server, 1) as (lease, waiter):
            with pytest.raises(Unavailable, match="cannot be reached"):
                await waiter
            assert asks, "it went on asking"
            assert time.monotonic() - began < 10
            assert lease.lost_reason in (None, "unreachable")

    asyncio.run(story())


def test_a_client_can_be_closed_while_a_waiter_outlasts_a_restart(server, asks, until) -> None:
    holder, other = Client(url(server), call_timeout=20), Client(url(server), call_timeout=20)
    lease, ended = holder.lock("job", ttl=60).acquire(), []

    def wait_in_line() -> None:
        with pytest.raises((ConfigError, Unavailable)) as told:
            other.lock("job").acquire(wait=60)
        ended.append(told.value)

    thread = threading.Thread(target=wait_in_line, daemon=True)
    thread.start()
    until(lambda: waiting(holder))
    server.kill()
    look(other)
    until(lambda: asks)
    closing = threading.Thread(target=other.close, daemon=True)
    closing.start()
    thread.join(10)
    assert ended, "it goes on asking for a client that is closed"
    server.start()
    closing.join(10)
    assert not closing.is_alive(), "what it owed is settled"
    assert lease.token
    holder.close()


def test_stopped_past_the_ttl_a_holder_is_lost_by_its_own_clock(server) -> None:
    with Client(url(server), call_timeout=0.3) as client:
        lease = client.lock("job", ttl=1).acquire()
        server.pause()
        assert lease.wait_lost(5)
        assert lease.lost_reason == "unreachable"
        server.resume()


def test_a_full_server_takes_no_new_locks_and_loses_no_old_ones(server, beside) -> None:
    with Client(url(server), call_timeout=1) as client, Client(url(server), call_timeout=1) as other:
        lease, freed = client.lock("kept", ttl=3).acquire(), client.lock("freed").acquire()
        next_one = beside("others").Waiter(other, "kept")
        await_rest(server, client)
        server.ask("CONFIG", "SET", "maxmemory", 1)
        with pytest.raises(Unavailable, match="OOM"):
            other.lock("new").acquire(wait=0)
        lease.renew()
        assert client.lock("new").locked() is False, "looking is allowed"
        assert freed.release()
        assert waiting(client), "its place is kept"
        server.ask("CONFIG", "SET", "maxmemory", 0)
        assert lease.release()
        assert next_one.got().held


# --------------------------------------------------------------- the network


def test_a_subscription_that_fell_silent_is_noticed(server, proxy, monkeypatch) -> None:
    from leasehold.engines.redis import listener

    monkeypatch.setattr(listener, "BEAT_EVERY", 0.3)  # how long it hears nothing before it asks
    with Client(f"redis://127.0.0.1:{proxy.port}", call_timeout=0.3) as client:
        client.lock("job").acquire().release()
        ear = client._desk.book.shelf["redis"].listener
        assert ear.on
        proxy.cut()
        poll(lambda: not ear.on, 10, lambda: "it asked, and nobody answered")
        proxy.mend()
        poll(lambda: ear.on, 10, lambda: "it listens again")


@pytest.mark.parametrize("says", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"+OK\r\n", b"*-1\r\n" * 9, b"", b"$-5\r\n"])
def test_what_is_not_redis_is_unavailable(says, beside) -> None:
    with beside("others").stranger(says) as port:
        client = Client(f"redis://127.0.0.1:{port}", call_timeout=0.3)
        with client, pytest.raises((Unavailable, ConfigError)):
            client.lock("job").acquire()

        async def main() -> None:
            async with AsyncClient(f"redis://127.0.0.1:{port}", call_timeout=0.3) as client:
                with pytest.raises((Unavailable, ConfigError)):
                    await client.lock("job").acquire()

        asyncio.run(main())


# ------------------------------------------------------------ the clock


def test_a_clock_that_jumps_ahead_ends_leases_early_and_says_so(clocked) -> None:
    with Client(url(clocked)) as holder, Client(url(clocked)) as other:
        lease = holder.lock("job", ttl=30).acquire()
        clocked.set_clock(60)
        theirs = other.lock("job").acquire(wait=5)
        assert theirs.token > lease.token, "two may believe they hold it: the fence must tell"
        with pytest.raises(LeaseLost):
            lease.renew()


def test_a_clock_that_goes_back_lengthens_what_is_not_released_and_tokens_rise(clocked) -> None:
    with Client(url(clocked)) as client, Client(url(clocked)) as other:
        first = client.lock("job", ttl=30).acquire()
        clocked.set_clock(-3600)
        assert other.lock("job").try_acquire() is None
        second = client.lock("another", ttl=30).acquire()  # of whatever bucket
        assert first.release()
        third = other.lock("job", ttl=0.5).acquire(wait=5)
        assert third.token > first.token
        assert second.held
        third.renew()
        third.release()
        fourth = client.lock("job").acquire()
        assert fourth.token > third.token
