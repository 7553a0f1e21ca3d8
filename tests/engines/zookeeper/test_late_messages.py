"""Lost, late and invalid answers of ZooKeeper: no claim is granted twice, and no node stays behind."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import threading
import time

import pytest

from harness.rigs.zookeeper import ZookeeperRig
from harness.servers.process import free_ports, scratch
from harness.servers.proxy import Proxy
from harness.servers.zookeeper import Zookeeper
from leasehold import AsyncClient, Client, LeaseState, NotAcquired, Unavailable
from leasehold.core.timing import WAITER_TTL
from leasehold.engines.zookeeper import connection
from leasehold.model import Claim, Grant, Holder
from leasehold.runtime.base import run_sync
from leasehold.testing.conformance.suite import rig_or_skip


def test_claim_recovered_by_its_id_hash_is_the_same_grant(url, session_of) -> None:
    """The answer to the create was lost: the engine finds the node and does not create another (E2)."""
    with Client(url) as client:
        engine, session, deadline = client._core._engine, session_of(client), client._core.deadline()
        claim = Claim("", "a", "secret", os.urandom(16).hex(), Holder("h"), 60.0)
        first = run_sync(engine.attempt(claim, deadline))
        assert isinstance(first, Grant)
        own_node = session.own_nodes.pop(claim.id_hash)
        session.unconfirmed.add(claim.id_hash)
        again = run_sync(engine.attempt(claim, deadline))
        assert isinstance(again, Grant)
        assert again.token == first.token
        assert session.own_nodes[claim.id_hash].path == own_node.path
        session.own_nodes.clear()
        assert run_sync(engine.release(claim, deadline)), "not released by its id hash alone"
        assert client.inspect() == []


def expect_not_acquired(lock) -> None:
    with pytest.raises(NotAcquired):
        lock.acquire()


def test_release_without_id_ends_a_queued_claim_but_never_a_grant(url, wait_until, count_waiters, session_of) -> None:
    with Client(url) as one, Client(url) as two:
        lease = one.lock("a", ttl=60).acquire()
        claim_without_id = lease._claim._replace(id="")
        deadline = one._core.deadline()
        assert not run_sync(one._core._engine.release(claim_without_id, deadline))
        lease.renew()
        thread = threading.Thread(target=expect_not_acquired, args=(two.lock("a", wait=5),))
        thread.start()
        wait_until(lambda: count_waiters(one) == 1 and session_of(two).own_nodes)
        id_hash = next(iter(session_of(two).own_nodes))
        run_sync(one._core._engine.release(claim_without_id._replace(id_hash=id_hash), deadline))
        assert two.inspect("a")[0].state == "held"
        thread.join(10)
        lease.release()


def test_lost_answers_leave_no_node_and_no_second_grant(url_of, server, proxy, wait_until) -> None:
    with (
        Client(url_of(proxy, session=6), call_timeout=0.4) as lossy,
        Client(url_of(server, session=6)) as other,
    ):
        lossy.ping()
        for number in range(3):
            proxy.lose_answers()
            with pytest.raises(Unavailable):
                lossy.lock(f"n{number}", ttl=60).acquire(wait=5)
            proxy.restore()
            wait_until(lambda: not other.inspect(), 20)  # the create arrived; its release was pending
            with other.lock(f"n{number}", wait=5):
                pass
        lease = lossy.lock("kept", ttl=60).acquire(wait=10)
        proxy.lose_answers()
        with pytest.raises(Unavailable):
            lease.renew()
        assert lease.state is LeaseState.AT_RISK
        assert other.lock("kept").try_acquire() is None
        proxy.restore()
        wait_until(lambda: lease.state is LeaseState.HELD, 10)
        assert lease.release()


def test_answer_of_an_expired_session_grants_nothing(url, url_of, proxy, wait_until, session_of) -> None:
    """The event loop is blocked when the answer arrives, until the session has expired and another has begun."""

    async def main(other: Client) -> None:
        async with AsyncClient(url_of(proxy, session=2), call_timeout=30) as client:
            await client.lock("a").call(lambda: None)
            session = session_of(client)
            own_session_id = session.session_id
            acquiring = asyncio.create_task(client.lock("a", ttl=30).acquire(wait=0))
            while not session.unconfirmed:
                if acquiring.done():  # the answer was faster than this loop: catch another attempt in flight
                    await (await acquiring).release()
                    acquiring = asyncio.create_task(client.lock("a", ttl=30).acquire(wait=0))
                await asyncio.sleep(0)
            keeper = session._kazoo
            wait_until(lambda: other.inspect("a") and not keeper._pending and not keeper._queue)
            proxy.cut()
            wait_until(lambda: not other.inspect("a"))
            with other.lock("a", ttl=30, wait=0) as other_lease:
                proxy.restore()
                wait_until(lambda: session._connected and session.session_id not in (0, own_session_id))
                with pytest.raises(NotAcquired):
                    await acquiring
                other_lease.check()

    with Client(url) as other:
        asyncio.run(main(other))


def test_lease_lost_at_max_hold_leaves_no_node(url, wait_until) -> None:
    """New clients that try once each cannot see how long an unrenewed node has existed, so it must not stay."""
    with Client(url) as client:
        lease = client.lock("a", ttl=0.5, max_hold=0.5).acquire()
        assert lease.wait_lost(5)

        def is_free() -> bool:
            with Client(url) as newcomer:
                found = newcomer.lock("a").try_acquire()
                return found is not None and found.release()

        wait_until(is_free, 10, every=0.2)


def test_late_events_of_an_old_connection_leave_the_new_one_alone(url_of, proxy, wait_until, session_of) -> None:
    """The close of the first session is never answered; its thread ends while the client uses a second session."""
    client = AsyncClient(url_of(proxy), call_timeout=3)

    async def use() -> None:
        await client.lock("a").call(lambda: None)

    asyncio.run(use())
    session = session_of(client)
    old = session._kazoo
    proxy.cut()
    asyncio.run(session.close(client._core.runtime))
    proxy.restore()

    async def again() -> None:
        lease = await client.lock("a", ttl=60).acquire()
        old.close_session()
        old.shutdown_socket()
        await asyncio.sleep(0)
        wait_until(
            lambda: not old._connection._connection_routine or not old._connection._connection_routine.is_alive()
        )
        assert session.own_nodes
        await lease.renew()
        await lease.release()
        await client.close()

    asyncio.run(again())


def test_answer_with_an_unknown_error_keeps_the_session(url, monkeypatch, session_of) -> None:
    with Client(url) as client, client.lock("kept", ttl=60) as lease:
        own_session_id = session_of(client).session_id
        original = connection.ReplyHeader.deserialize
        first_only = iter([True])

        def deserialize(body, offset):
            header, end = original(body, offset)
            return (header._replace(err=-4711) if header.xid > 0 and next(first_only, False) else header), end

        monkeypatch.setattr(connection.ReplyHeader, "deserialize", deserialize)
        with pytest.raises(Unavailable):
            client.ping()
        client.ping()
        assert session_of(client).session_id == own_session_id
        lease.renew()


def test_reply_that_is_not_zookeeper_is_unavailable_by_the_deadline() -> None:
    """The engine never raises an exception of the driver (E9)."""
    for reply in (b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0\0\0\4junk", b"\xff" * 64, b"\0\0\0\x24" + b"\0" * 36):
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def answer(listener=listener, reply=reply) -> None:
                while True:
                    try:
                        accepted, _ = listener.accept()
                        with accepted:
                            accepted.recv(1000)
                            accepted.sendall(reply)
                    except OSError:
                        return

            thread = threading.Thread(target=answer, daemon=True)
            thread.start()
            client = Client(f"zookeeper://127.0.0.1:{listener.getsockname()[1]}", call_timeout=0.3)
            began = time.monotonic()
            with pytest.raises(Unavailable):
                client.lock("a").acquire(wait=0)
            assert time.monotonic() - began < 0.8 + 2
            client.close()
            listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


# ------------------------------------------------------------------------------------------------------- process limits


def test_exhausted_file_descriptors_are_unavailable_until_freed(url) -> None:
    client = Client(url, call_timeout=2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
        try:
            while True:
                descriptors.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass
        with pytest.raises(Unavailable):
            client.lock("a").acquire(wait=0)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with client.lock("a", wait=0):
        pass
    client.close()


def test_failure_to_start_a_thread_is_unavailable_until_it_passes(url, monkeypatch) -> None:
    client = Client(url, call_timeout=2)
    original = threading.Thread.start

    def start(self) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(Unavailable):
        client.lock("a").acquire(wait=0)
    monkeypatch.setattr(threading.Thread, "start", original)
    with client.lock("a", wait=0):
        pass
    client.close()


@pytest.mark.faults
def test_claim_given_up_during_a_long_outage_is_released_after_it(root, wait_until) -> None:
    """The create arrived, but neither it nor the release was answered. The outage is longer than the heartbeat ttl of
    waiters on other engines and shorter than the session."""
    rig_or_skip(ZookeeperRig)
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
            end = time.monotonic() + WAITER_TTL + 3
            wait_until(lambda: time.monotonic() > end, WAITER_TTL + 5)
            assert len(other.inspect()) == 1
            proxy.restore()
            wait_until(lambda: not other.inspect(), 10)
    finally:
        proxy.close()
        server.kill()
