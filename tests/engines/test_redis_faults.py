"""The Redis engine hurt: killed and restarted, stopped, cut off, full, its clock stepped. On servers of its own."""

from __future__ import annotations

import asyncio
import threading
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


class Waiter(threading.Thread):
    """Acquires in a thread, and says when it got it."""

    def __init__(self, client: Client, name: str = "job", **options) -> None:
        super().__init__(daemon=True)
        self._lock = client.lock(name, wait=60, **options)
        self.lease, self.at = None, 0.0
        self.start()

    def run(self) -> None:
        self.lease = self._lock.acquire()
        self.at = time.monotonic()

    def got(self, seconds: float = 30.0):
        self.join(seconds)
        assert self.lease is not None, "still waiting"
        return self.lease


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


def test_a_waiter_outlives_a_restart_of_the_server(server) -> None:
    with Client(url(server), call_timeout=10) as holder, Client(url(server), call_timeout=10) as other:
        lease = holder.lock("job", ttl=60).acquire()
        waiter = Waiter(other)
        poll(lambda: waiting(holder), 10, lambda: "it stands in line")
        server.restart()
        assert waiter.got().token > lease.token  # nothing is left that could keep it from it


def test_stopped_past_the_ttl_no_grant_is_handed_out_and_none_stays(server) -> None:
    with Client(url(server), call_timeout=0.4) as client, Client(url(server)) as other:
        client.ping()
        server.pause()
        began = time.monotonic()
        with pytest.raises(Unavailable):
            client.lock("job", ttl=2).acquire()
        assert time.monotonic() - began < 0.4 + 0.5
        server.resume()
        # The attempt is carried out now, and the release that was sent behind it.
        poll(lambda: not other.inspect(), 1.5, lambda: "no ghost, long before its ttl")
        with other.lock("job", wait=5):
            pass


def test_stopped_past_the_ttl_a_holder_is_lost_by_its_own_clock(server) -> None:
    with Client(url(server), call_timeout=0.3) as client:
        lease = client.lock("job", ttl=1).acquire()
        server.pause()
        assert lease.wait_lost(5)
        assert lease.lost_reason == "unreachable"
        server.resume()


def test_scripts_the_server_forgot_are_sent_again(server) -> None:
    with Client(url(server)) as client:
        for _ in range(3):
            with client.lock("job") as lease:
                server.ask("SCRIPT", "FLUSH")
                lease.renew()
                server.ask("SCRIPT", "FLUSH")
                assert client.inspect()
                server.ask("SCRIPT", "FLUSH")
        leases = [client.lock(f"name-{number}").acquire() for number in range(10)]
        server.ask("SCRIPT", "FLUSH")
        assert len(client.inspect("name-")) == 10, "a batch, of which none was known"
        for lease in leases:
            lease.release()


def test_killed_connections_are_replaced(server) -> None:
    with Client(url(server)) as client:
        for kind in ("normal", "pubsub", "normal"):
            with client.lock("job") as lease:
                server.ask("CLIENT", "KILL", "TYPE", kind)
                lease.renew()
                server.ask("CLIENT", "KILL", "TYPE", kind)

    async def main() -> None:
        async with AsyncClient(url(server)) as client:
            for _ in range(3):
                async with client.lock("job") as lease:
                    server.ask("CLIENT", "KILL", "TYPE", "normal")
                    await lease.renew()
                    server.ask("CLIENT", "KILL", "TYPE", "normal")

    asyncio.run(main())


def test_a_waiter_whose_subscription_is_killed_is_still_woken(server) -> None:
    with Client(url(server)) as holder, Client(url(server)) as other:
        for _ in range(3):
            lease = holder.lock("job", ttl=60).acquire()
            waiter = Waiter(other)
            poll(lambda: waiting(holder), 10, lambda: "it stands in line")
            server.ask("CLIENT", "KILL", "TYPE", "pubsub")
            began = time.monotonic()
            lease.release()
            waiter.got().release()
            assert waiter.at - began < 2, "by its new subscription, not by the look around after 5 s"


def test_a_full_server_takes_no_new_locks_and_loses_no_old_ones(server) -> None:
    with Client(url(server), call_timeout=1) as client, Client(url(server), call_timeout=1) as other:
        lease, freed = client.lock("kept", ttl=3).acquire(), client.lock("freed").acquire()
        next_one = Waiter(other, "kept")
        poll(lambda: waiting(client), 10, lambda: "it stands in line")
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


def test_every_answer_is_lost(server, proxy) -> None:
    with Client(f"redis://127.0.0.1:{proxy.port}", call_timeout=0.3) as client, Client(url(server)) as other:
        client.ping()
        proxy.lose_answers()
        for _ in range(3):
            with pytest.raises(Unavailable):
                client.lock("job", ttl=60).acquire(wait=0)
        proxy.mend()
        poll(lambda: not other.inspect(), 10, lambda: "what was granted unheard is given back")


def test_every_answer_is_lost_to_a_loop(server, proxy) -> None:
    async def main() -> None:
        async with AsyncClient(f"redis://127.0.0.1:{proxy.port}", call_timeout=0.3) as client:
            await client.ping()
            proxy.lose_answers()
            began = time.monotonic()
            tasks = [client.lock(f"name-{n}", ttl=60).acquire(wait=0) for n in range(50)]
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(outcome, Unavailable)
            assert time.monotonic() - began < 0.3 + 0.5
            proxy.mend()
            with Client(url(server)) as other:
                while other.inspect():
                    assert time.monotonic() - began < 10, "what was granted unheard is given back"
                    await asyncio.sleep(0.01)
            async with client.lock("name-1"):
                pass

    asyncio.run(main())


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
def test_what_is_not_redis_is_unavailable(says) -> None:
    import socket

    door = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                near, _ = door.accept()
                with near:
                    near.recv(1000)
                    near.sendall(says)
                    near.settimeout(0.2)
                    near.recv(1000)
            except TimeoutError:
                continue
            except OSError:
                return

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        client = Client(f"redis://127.0.0.1:{door.getsockname()[1]}", call_timeout=0.3)
        with client, pytest.raises((Unavailable, ConfigError)):
            client.lock("job").acquire()

        async def main() -> None:
            async with AsyncClient(f"redis://127.0.0.1:{door.getsockname()[1]}", call_timeout=0.3) as client:
                with pytest.raises((Unavailable, ConfigError)):
                    await client.lock("job").acquire()

        asyncio.run(main())
    finally:
        door.shutdown(socket.SHUT_RDWR)
        door.close()
        thread.join(5)


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
