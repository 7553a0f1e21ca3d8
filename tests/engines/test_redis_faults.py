"""The Redis engine hurt: killed and restarted, stopped, cut off, full, its clock stepped. On servers of its own.

What a redlock suffers as well is in test_redis_hurt.py; what those in line do meanwhile in test_redis_patience.py.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from leasehold import AsyncClient, Client, ConfigError, LeaseLost, Unavailable
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
