"""Late at the Redis engine: requests that arrive after they were given up, deadlines among signals, a clock set back.

Each of these did harm once. On servers of its own.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from contextlib import suppress

import pytest

from leasehold import AsyncClient, Client, Unavailable
from leasehold.engines.redis.requests import keys
from leasehold.testing.servers.process import poll
from leasehold.testing.servers.proxy import Proxy
from leasehold.testing.servers.redis import CLOCKS


@pytest.fixture
def server(start_redis):
    return start_redis()


def url(server, options: str = "") -> str:
    return f"redis://127.0.0.1:{server.port}{options}"


# -------------------------------------------------------------- the clock


@pytest.mark.parametrize("min_hold", [0.0, 0.3])
def test_what_is_released_is_free_though_the_clock_went_back(start_redis, min_hold) -> None:
    if not CLOCKS:
        pytest.skip("no false clocks: apt-get install faketime")
    server = start_redis(false_clock=True)
    with Client(url(server)) as one, Client(url(server)) as other:
        lease = one.lock("job", ttl=60, min_hold=min_hold).acquire()
        waiter = threading.Thread(target=lambda: other.lock("job", wait=20).acquire().release())
        waiter.start()
        poll(lambda: len(one.inspect()) == 2, 10, lambda: "it stands in line")
        server.set_clock(-3600)
        lease.release()
        waiter.join(10)
        assert not waiter.is_alive(), one.inspect()
        assert not server.ask("EXISTS", *keys("", "job")[1:]), "for an hour"


# ---------------------------------------------------------- late requests


class Late:
    """Passes everything on; told to hold, keeps requests back on the connections there are, and delivers them later."""

    def __init__(self, port: int) -> None:
        self._port, self._gates, self._sockets = port, [], []
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._door.getsockname()[1]
        self._thread(self._run)

    def _thread(self, target, *args) -> None:
        threading.Thread(target=target, args=args, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._door.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                gate = threading.Event()
                gate.set()
                self._gates.append(gate)
                self._sockets += [near, far]
                self._thread(self._pass, near, far, gate)
                self._thread(self._pass, far, near, None)

    def _pass(self, source, target, gate) -> None:
        data = b"?"
        while data:
            try:
                data = source.recv(65_536)
            except OSError:
                data = b""
            if gate is not None:
                gate.wait()
            with suppress(OSError):
                target.sendall(data) if data else target.shutdown(socket.SHUT_WR)

    def hold(self) -> None:
        for gate in self._gates:
            gate.clear()

    def deliver(self) -> None:
        for gate in self._gates:
            gate.set()

    def close(self) -> None:
        self.deliver()
        self._door.shutdown(socket.SHUT_RDWR)
        for each in (self._door, *self._sockets):
            each.close()


@pytest.fixture(params=["", "?min_replicas=1"], ids=["plain", "min_replicas"])
def late(request, start_redis):
    """A server, a proxy that can hold back requests, and the URL that leads through it."""
    server = start_redis()
    if request.param:
        start_redis(primary=server)
        poll(lambda: "state=online" in server.info("replication").get("slave0", ""), 30, lambda: "the replica is there")
        Client(url(server, request.param), call_timeout=10).lock("warm").acquire().release()  # it confirms
    proxy = Late(server.port)
    yield server, proxy, f"redis://127.0.0.1:{proxy.port}{request.param}"
    proxy.close()


def given_back(server, proxy) -> None:
    counter = keys("", "job")[0]
    assert not server.ask("EXISTS", counter), "the attempt has not arrived yet"
    proxy.deliver()
    with Client(url(server)) as other:
        poll(lambda: server.ask("EXISTS", counter), 10, lambda: "now it has")
        poll(lambda: not other.inspect(), 5, lambda: "nobody has it, long before its ttl is over")


def test_an_attempt_that_comes_too_late_has_its_release_behind_it(late) -> None:
    server, proxy, through = late
    with Client(through, call_timeout=0.3) as client:
        client.lock("warm").acquire().release()
        proxy.hold()
        with pytest.raises(Unavailable):
            client.lock("job", ttl=30).acquire(wait=0)
        poll(lambda: not client._desk.book.owed, 10, lambda: "the release is answered, on another connection")
        given_back(server, proxy)


@pytest.mark.parametrize("cancelled", [False, True], ids=["timed out", "cancelled"])
def test_so_it_has_under_asyncio(late, cancelled) -> None:
    server, proxy, through = late

    async def main() -> None:
        async with AsyncClient(through, call_timeout=0.3) as client:
            await (await client.lock("warm").acquire()).release()
            proxy.hold()
            with pytest.raises((Unavailable, TimeoutError)):
                async with asyncio.timeout(0.1 if cancelled else 10):
                    await client.lock("job", ttl=30).acquire(wait=0)
            end = time.monotonic() + 10
            while client._desk.book.owed:
                assert time.monotonic() < end
                await asyncio.sleep(0.01)
            await asyncio.to_thread(given_back, server, proxy)

    asyncio.run(main())


def test_a_signal_now_and_then_does_not_lengthen_a_deadline(server) -> None:
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
            assert time.monotonic() - began < 0.5 + 0.5
            stop.cancel()
            proxy.mend()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        proxy.close()
