"""Answers of ZooKeeper that were lost, came late, or were none: nobody is granted twice, and nothing stays."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import threading
import time

import pytest

from leasehold import AsyncClient, Client, LeaseState, NotAcquired, Unavailable
from leasehold.core.timing import BEAT
from leasehold.engines.zookeeper import connection
from leasehold.model import Claim, Grant, Holder
from leasehold.runtime.base import step
from leasehold.testing.servers.process import free_ports, scratch
from leasehold.testing.servers.proxy import Proxy
from leasehold.testing.servers.zookeeper import Zookeeper
from leasehold.testing.suite import made
from leasehold.testing.zookeeper_rig import ZookeeperRig


def test_a_claim_recovered_by_its_mark_is_the_same_grant(url, session_of) -> None:
    """The answer to its create never came: the node is found again, not made again (E2)."""
    with Client(url) as client:
        engine, session, deadline = client._desk._engine, session_of(client), client._desk.deadline()
        claim = Claim("", "a", "secret", os.urandom(16).hex(), Holder("h"), 60.0)
        first = step(engine.attempt(claim, deadline))
        assert isinstance(first, Grant)
        mine = session.mine.pop(claim.mark)
        session.doubts.add(claim.mark)
        again = step(engine.attempt(claim, deadline))
        assert isinstance(again, Grant)
        assert again.token == first.token
        assert session.mine[claim.mark].path == mine.path
        session.mine.clear()
        assert step(engine.release(claim, deadline)), "also by its mark alone"
        assert client.inspect() == []


def gives_up(lock) -> None:
    with pytest.raises(NotAcquired):
        lock.acquire()


def test_a_stray_gives_up_a_place_and_never_a_grant(url, until, in_line, session_of) -> None:
    with Client(url) as one, Client(url) as two:
        lease = one.lock("a", ttl=60).acquire()
        stray = lease._claim._replace(id="")
        deadline = one._desk.deadline()
        assert not step(one._desk._engine.release(stray, deadline))
        lease.renew()
        thread = threading.Thread(target=gives_up, args=(two.lock("a", wait=5),))
        thread.start()
        until(lambda: in_line(one) == 1 and session_of(two).mine)
        mark = next(iter(session_of(two).mine))
        step(one._desk._engine.release(stray._replace(mark=mark), deadline))
        assert two.inspect("a")[0].state == "held"
        thread.join(10)
        lease.release()


def test_every_answer_lost_leaves_nothing_and_grants_nobody_twice(url_of, server, proxy, until) -> None:
    with (
        Client(url_of(proxy, session=6), call_timeout=0.4) as lossy,
        Client(url_of(server, session=6)) as other,
    ):
        lossy.ping()
        for number in range(3):
            proxy.lose_answers()
            with pytest.raises(Unavailable):
                lossy.lock(f"n{number}", ttl=60).acquire(wait=5)
            proxy.mend()
            until(lambda: not other.inspect(), 20)  # the create landed; its release was owed
            with other.lock(f"n{number}", wait=5):
                pass
        lease = lossy.lock("kept", ttl=60).acquire(wait=10)
        proxy.lose_answers()
        with pytest.raises(Unavailable):
            lease.renew()
        assert lease.state is LeaseState.AT_RISK
        assert other.lock("kept").try_acquire() is None
        proxy.mend()
        until(lambda: lease.state is LeaseState.HELD, 10)
        assert lease.release()


def test_an_answer_of_a_session_that_is_over_grants_nothing(url, url_of, proxy, until, session_of) -> None:
    """The loop is blocked when the answer comes, and for so long that the session ends and another begins."""

    async def main(other: Client) -> None:
        async with AsyncClient(url_of(proxy, session=2), call_timeout=30) as client:
            await client.lock("a").call(lambda: None)
            session = session_of(client)
            mine = session.owner
            asked = asyncio.create_task(client.lock("a", ttl=30).acquire(wait=0))
            while not session.doubts:
                await asyncio.sleep(0)
            keeper = session._keeper
            until(lambda: other.inspect("a") and not keeper._pending and not keeper._queue)
            proxy.cut()
            until(lambda: not other.inspect("a"))
            with other.lock("a", ttl=30, wait=0) as theirs:
                proxy.mend()
                until(lambda: session._connected and session.owner not in (0, mine))
                with pytest.raises(NotAcquired):
                    await asked
                theirs.check()

    with Client(url) as other:
        asyncio.run(main(other))


def test_a_lease_nobody_gives_back_leaves_no_node(url, until) -> None:
    """Whoever asks but once, from a process of its own each time, cannot see for how long it has stood there."""
    with Client(url) as client:
        lease = client.lock("a", ttl=0.5, max_hold=0.5).acquire()
        assert lease.wait_lost(5)

        def free() -> bool:
            with Client(url) as passer_by:
                found = passer_by.lock("a").try_acquire()
                return found is not None and found.release()

        until(free, 10, every=0.2)


def test_what_an_old_connection_says_does_not_touch_the_new_one(url_of, proxy, until, session_of) -> None:
    """The goodbye of one client's first session is never answered; its thread ends when there is a second."""
    client = AsyncClient(url_of(proxy), call_timeout=3)

    async def use() -> None:
        await client.lock("a").call(lambda: None)

    asyncio.run(use())
    session = session_of(client)
    old = session._keeper
    proxy.cut()
    asyncio.run(session.close(client._desk.runtime))
    proxy.mend()

    async def again() -> None:
        lease = await client.lock("a", ttl=60).acquire()
        old.leave()
        old.sever()
        await asyncio.sleep(0)
        until(lambda: not old._connection._connection_routine or not old._connection._connection_routine.is_alive())
        assert session.mine
        await lease.renew()
        await lease.release()
        await client.close()

    asyncio.run(again())


def test_an_answer_with_an_unknown_error_costs_no_session(url, monkeypatch, session_of) -> None:
    with Client(url) as client, client.lock("kept", ttl=60) as lease:
        mine = session_of(client).owner
        true = connection.ReplyHeader.deserialize
        odd = iter([True])

        def deserialize(body, offset):
            header, end = true(body, offset)
            return (header._replace(err=-4711) if header.xid > 0 and next(odd, False) else header), end

        monkeypatch.setattr(connection.ReplyHeader, "deserialize", deserialize)
        with pytest.raises(Unavailable):
            client.ping()
        client.ping()
        assert session_of(client).owner == mine
        lease.renew()


def test_what_the_server_sends_instead_of_an_answer() -> None:
    """Not ZooKeeper at all: Unavailable by the deadline, never an exception of the driver (E9)."""
    for said in (b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0\0\0\4junk", b"\xff" * 64, b"\0\0\0\x24" + b"\0" * 36):
        with socket.create_server(("127.0.0.1", 0)) as door:

            def answer(door=door, said=said) -> None:
                while True:
                    try:
                        near, _ = door.accept()
                        with near:
                            near.recv(1000)
                            near.sendall(said)
                    except OSError:
                        return

            thread = threading.Thread(target=answer, daemon=True)
            thread.start()
            client = Client(f"zookeeper://127.0.0.1:{door.getsockname()[1]}", call_timeout=0.3)
            began = time.monotonic()
            with pytest.raises(Unavailable):
                client.lock("a").acquire(wait=0)
            assert time.monotonic() - began < 0.8 + 2
            client.close()
            door.shutdown(socket.SHUT_RDWR)
        thread.join(5)


# ----------------------------------------------------------------------------------------------- limits of this process


def test_no_descriptor_left_is_unavailable_and_passes(url) -> None:
    client = Client(url, call_timeout=2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
        try:
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass
        with pytest.raises(Unavailable):
            client.lock("a").acquire(wait=0)
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with client.lock("a", wait=0):
        pass
    client.close()


def test_no_thread_left_is_unavailable_and_passes(url, monkeypatch) -> None:
    client = Client(url, call_timeout=2)
    true = threading.Thread.start

    def start(self) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(Unavailable):
        client.lock("a").acquire(wait=0)
    monkeypatch.setattr(threading.Thread, "start", true)
    with client.lock("a", wait=0):
        pass
    client.close()


@pytest.mark.faults
def test_what_was_given_up_in_a_long_silence_is_ended_after_it(root, until) -> None:
    """For longer than a claim stays in line anywhere else, and shorter than the session: its create landed, and neither
    that nor its release was answered."""
    made(ZookeeperRig)
    server = Zookeeper(scratch(), free_ports(1)[0], {"tickTime": 2000}).start()
    proxy = Proxy(server.port)
    try:
        with (
            Client(f"zookeeper://127.0.0.1:{proxy.port}{root}", call_timeout=1) as client,
            Client(f"zookeeper://127.0.0.1:{server.port}{root}") as other,
        ):
            client.lock("a").call(lambda: None)
            proxy.lose_answers()
            with pytest.raises(Unavailable):
                client.lock("a", ttl=1).acquire(wait=0)
            end = time.monotonic() + BEAT + 3
            until(lambda: time.monotonic() > end, BEAT + 5)
            assert len(other.inspect()) == 1
            proxy.mend()
            until(lambda: not other.inspect(), 10)
    finally:
        proxy.close()
        server.kill()
