"""The moment of a fail-over, seen from a client: who is believed, who is asked, and what is said when nobody knows."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from leasehold import AsyncClient, Client, Unavailable
from leasehold.engines.redis.doors import Door
from leasehold.engines.redis.sentinel import Known, Sentinel, Sentinels
from leasehold.engines.redis.server import Server
from leasehold.runtime.base import Runtime
from leasehold.runtime.streams import Address
from leasehold.runtime.threads import Threads
from leasehold.testing.redis_rig import RedisRig
from leasehold.testing.servers.process import poll
from leasehold.testing.servers.redis_several import SERVICE, Watched
from leasehold.testing.suite import made


@pytest.fixture
def watched() -> Iterator[Watched]:
    made(RedisRig)  # a skip where there is no Redis
    found = Watched(down_after=30)
    yield found
    found.close()


def primary(client: Client | AsyncClient) -> int:
    """The port this client believes in."""
    server = client._desk.book.shelf["redis"].listener._sentinels.server
    return 0 if server is None else server.address.port


class Late:
    """Holds up one new connection to a server, until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.let_go = threading.Event(), threading.Event()
        self.port = 0
        opened = Server._open

        async def open_late(server: Server, runtime: Runtime, deadline: float):
            stream = await opened(server, runtime, deadline)
            if server.address.port == self.port:
                self.port = 0
                self.begun.set()
                if runtime.blocking:
                    self.let_go.wait(30)
                else:
                    await asyncio.to_thread(self.let_go.wait, 30)
            return stream

        monkeypatch.setattr(Server, "_open", open_late)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_server_known_to_be_replaced_grants_nothing(watched, monkeypatch, kind) -> None:
    """It is still a primary by its own account, and the call had chosen it before."""
    late = Late(monkeypatch)
    asking: list[Client | AsyncClient] = []
    answers: list[object] = []

    def hold_up(client: Client | AsyncClient) -> None:
        """The next connection to the primary, which is that of a call."""
        listener = client._desk.book.shelf["redis"].listener
        listener.start()
        poll(lambda: listener.on, 10, lambda: "it listens")
        client._desk._engine._topology._wire.hang_up()
        late.port = watched.primary.port
        asking.append(client)

    def threads() -> None:
        with Client(watched.url(), call_timeout=15) as client:
            client.ping()
            hold_up(client)
            answers.append(client.lock("job", ttl=60).try_acquire())

    async def tasks() -> None:
        async with AsyncClient(watched.url(), call_timeout=15) as client:
            await client.ping()
            hold_up(client)
            answers.append(await client.lock("job", ttl=60).try_acquire())

    thread = threading.Thread(target=threads if kind is Client else lambda: asyncio.run(tasks()))
    thread.start()
    assert late.begun.wait(20)
    watched.sentinels[0].ask("SENTINEL", "FAILOVER", SERVICE)
    poll(lambda: primary(asking[0]) == watched.replica.port, 20, lambda: "it knows of the fail-over")
    with Client(watched.url(), call_timeout=15) as other:
        other.ping()
        assert primary(other) == watched.replica.port
        with other.lock("job", ttl=60) as lease:
            assert watched.primary.info("replication")["role"] == "master", "the old one was not told yet"
            late.let_go.set()
            thread.join(30)
            assert lease.held
    assert answers == [None], "asked again at the new primary, where the name is taken"


@pytest.mark.parametrize("where", ["redis+cluster://{}", "redis+sentinel://{}/locks"])
def test_one_that_waits_for_anothers_answer_takes_no_silence_for_emptiness(where) -> None:
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        url = where.format(",".join(f"127.0.0.1:{door.getsockname()[1]}" for door in silent))
        client = stack.enter_context(Client(url, call_timeout=0.6))
        answers: list[object] = []

        def ask(verb) -> None:
            began = time.monotonic()
            try:
                answers.append(verb())
            except Unavailable:
                answers.append(time.monotonic() - began < 1.1)

        threads = [threading.Thread(target=ask, args=(verb,)) for verb in (client.inspect, client.ping) * 3]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert answers == [True] * 6


def test_all_sentinels_out_of_sight_and_a_connection_breaks(watched) -> None:
    """The primary is well, and says so; whether it was replaced only a sentinel could say."""
    with Client(watched.url(), call_timeout=1) as client:
        lease = client.lock("job", ttl=60).acquire()
        for sentinel in watched.sentinels:
            sentinel.pause()
        lease.renew()
        watched.primary.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        began = time.monotonic()
        with pytest.raises(Unavailable, match="the sentinel at"):
            client.lock("another").acquire()
        assert time.monotonic() - began < 1.5
        watched.sentinels[0].resume()
        with client.lock("another"):
            lease.renew()


def test_threads_that_follow_a_fail_over_share_one_way() -> None:
    runtime = Threads()
    sentinels = Sentinels([Door(Address("127.0.0.1", 1), None, title="sentinel")], "locks", Server, runtime)
    topology = Sentinel(sentinels, runtime)
    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for epoch in range(100):
            sentinels._learn(Known(epoch, Address("127.0.0.1", 7000 + epoch)))
            found, together = [], threading.Barrier(8)

            def look(found=found, together=together) -> None:
                together.wait(10)
                found.append(topology.wire(""))

            threads = [threading.Thread(target=look) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(10)
            assert len(set(map(id, found))) == 1
    finally:
        sys.setswitchinterval(switching)


@pytest.mark.faults
def test_a_sentinel_that_is_behind_and_alone_is_asked_now_and_then(watched) -> None:
    behind, *others = watched.sentinels
    with Client(watched.url(), call_timeout=5) as client:
        lease = client.lock("job", ttl=60).acquire()
        behind.kill()
        others[0].ask("SENTINEL", "FAILOVER", SERVICE)
        poll(lambda: primary(client) == watched.replica.port, 20, lambda: "it knows of the fail-over")
        for sentinel in others:
            sentinel.kill()
        behind.start()
        assert behind.primary() == watched.primary.port

        def connections() -> int:
            return int(behind.info("stats")["total_connections_received"])

        poll(lambda: connections() > 5, 20, lambda: "this client asks it")
        before, until = connections(), time.monotonic() + 3
        poll(lambda: time.monotonic() > until, 10, lambda: "a while")
        assert connections() - before < 20, "not a storm"
        lease.verify()
        assert primary(client) == watched.replica.port
