"""Clients that are cut off, killed or stopped, and lost or late answers: no claim is granted twice, and none stays."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import threading
import time
from contextlib import suppress

import pytest

from harness.rigs.zookeeper import ZookeeperRig
from harness.servers.folders import scratch
from harness.servers.process import free_ports
from harness.servers.proxy import Proxy
from harness.servers.zookeeper import Zookeeper
from leasehold import AsyncClient, Client, Lease, LeaseLost, LeaseState, NotAcquired, Unavailable
from leasehold.core.timing import WAITER_TTL
from leasehold.engines.zookeeper.connection import SilenceTimer
from leasehold.model import Claim, Grant, Holder
from leasehold.runtime.base import run_sync
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support import probe, probe_zookeeper
from tests.support.timing import check_elapsed, check_seconds


@pytest.mark.parametrize(("session", "ttl"), [(2.0, 30.0), (6.0, 1.5)], ids=["session-ends-it", "ttl-ends-it"])
def test_client_cut_off_stops_trusting_before_the_next_grant(
    session, ttl, url_of, server, proxy, client_pair, count_waiters, wait_until
) -> None:
    with Client(url_of(proxy, session=session), call_timeout=1) as one, Client(url_of(server, session=session)) as two:
        pair = client_pair(one, two, ttl=ttl)
        waiter_thread = pair.start_second()
        wait_until(lambda: count_waiters(two) == 1)
        proxy.cut()
        cut = time.monotonic()
        wait_until(lambda: pair.first_lease.state is LeaseState.AT_RISK or not pair.first_lease.held)
        waiter_thread.join(30)
        check_seconds(pair.granted_at - cut, min(session, ttl) * 1.1 + 4, "as session or ttl allow")
        assert pair.first_lease.lost_reason == "unreachable"
        pair.close()
        proxy.restore()
        with pytest.raises(LeaseLost):
            pair.first_lease.renew()


def test_client_leaves_a_silent_server_even_under_constant_calls(url_of, server, session_of, wait_until) -> None:
    """Two proxies lead to one server. A driver that counts silence from its last request would never detect it."""
    proxies, stop = [Proxy(server.port), Proxy(server.port)], threading.Event()
    with Client(url_of(*proxies, session=10), call_timeout=0.2) as client:
        leases: list[Lease] = []

        def acquire() -> bool:
            with suppress(Unavailable):  # the machine may be too busy for so short a `call_timeout`
                leases.append(client.lock("a", ttl=60).acquire(wait=30))
            return bool(leases)

        def ask() -> None:
            while not stop.is_set():
                with suppress(Unavailable):
                    client.ping()

        wait_until(acquire, 60)
        (lease,) = leases

        threads = [threading.Thread(target=ask) for _ in range(20)]
        for thread in threads:
            thread.start()
        session = session_of(client)
        used = probe_zookeeper.member_port(session)
        next(proxy for proxy in proxies if proxy.port == used).cut()
        cut = time.monotonic()
        wait_until(
            lambda: (
                not lease.held
                or (probe_zookeeper.is_connected(session) and probe_zookeeper.member_port(session) != used)
            )
        )
        print(f"left after {time.monotonic() - cut:.2f} s")
        stop.set()
        for thread in threads:
            thread.join(30)
        wait_until(lambda: lease.state is not LeaseState.AT_RISK)
        assert lease.held
        assert lease.release()
    for proxy in proxies:
        proxy.close()


def test_broken_connection_puts_a_lease_at_risk_until_reconnected(url_of, proxy, wait_until) -> None:
    """kazoo's SUSPENDED: the lease is at risk as soon as the connection breaks, not after a failed renewal."""
    events: list[str] = []
    with Client(url_of(proxy), on_event=lambda event: events.append(event.kind)) as client:
        lease = client.lock("a", ttl=600).acquire()
        proxy.reset()
        wait_until(lambda: "at_risk" in events)
        assert lease.held
        wait_until(lambda: lease.state is LeaseState.HELD)
        assert lease.release()


# ------------------------------------------------------------------------------------------------------------ processes
def test_lock_of_a_killed_holder_is_granted_within_its_session_timeout(url_of, server, child) -> None:
    url = url_of(server, session=2)
    holder = child("hold", url, "a", 30)
    holder.read_message()
    waiter = child("wait", url, "a", 30)
    assert waiter.read_message() == "waiting"
    holder.kill()
    killed = time.clock_gettime(time.CLOCK_BOOTTIME)
    check_seconds(waiter.read_message()["at"] - killed, 2 + 4)


def test_killed_waiter_blocks_the_queue_for_at_most_its_session(url_of, server, child) -> None:
    url = url_of(server, session=2)
    with Client(url) as client:
        lease = client.lock("a", ttl=60).acquire()
        dead = child("wait", url, "a", 60)
        assert dead.read_message() == "waiting"
        next_waiter = child("wait", url, "a", 60)
        assert next_waiter.read_message() == "waiting"
        dead.kill()
        lease.release()
        released = time.clock_gettime(time.CLOCK_BOOTTIME)
        check_seconds(next_waiter.read_message()["at"] - released, 2 + 4)


def test_stopped_holder_loses_its_lease_and_detects_it(url_of, server, child) -> None:
    url = url_of(server, session=2)
    holder = child("hold", url, "a", 30)
    first = holder.read_message()
    holder.signal(signal.SIGSTOP)
    with Client(url) as client, client.lock("a", wait=30) as lease:
        assert lease.token > first["token"]
        holder.signal(signal.SIGCONT)
        holder.send_newline()
        reply = holder.read_message()
        assert not reply["held"]
        assert not reply["released"]
        lease.renew()


def test_repeated_release_does_not_take_its_first_try_for_a_break(url, url_of, proxy, make_driver, wait_until) -> None:
    """The first request ends the grant, but its answer is lost; the second one finds no grant."""
    driver, other = make_driver(url_of(proxy)), make_driver(url)
    held = driver.acquire(driver.claim())
    answers: list[bool | None] = []
    proxy.lose_answers()
    thread = threading.Thread(target=lambda: answers.append(driver.release(held, 60)))
    thread.start()
    wait_until(lambda: isinstance(other.attempt(other.claim()), Grant), 30)
    wait_until(lambda: proxy.has_lost_bytes, 30)  # the answer may still be on its way
    proxy.restore()
    thread.join(60)
    assert answers == [None], "False would mean that the lease was broken"


def test_refused_connection_fails_after_one_round_of_all_servers() -> None:
    """Far sooner than `call_timeout`, and with every address in the error."""
    ports = free_ports(2)
    with Client(f"zookeeper://127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}", call_timeout=120) as client:
        for _ in range(3):
            began = time.monotonic()
            with pytest.raises(Unavailable, match=f"127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}.*refused"):
                client.ping()
            check_elapsed(began, 60)


def test_server_that_starts_after_a_refusal_is_used_by_the_next_call(server, proxy, root) -> None:
    port = proxy.port
    proxy.close()
    with Client(f"zookeeper://127.0.0.1:{port}{root}", call_timeout=60) as client:
        with pytest.raises(Unavailable, match="refused"):
            client.ping()
        revived = Proxy(server.port, listen_port=port)
        client.ping()
        client.close()
        revived.close()


def test_restarting_server_that_refuses_is_waited_for(server, url_of) -> None:
    """A client that was connected before waits until `call_timeout`."""
    proxy = Proxy(server.port)
    with Client(url_of(proxy), call_timeout=60) as client:
        client.ping()
        port = proxy.port
        proxy.close()
        thread = threading.Thread(target=client.ping)
        thread.start()
        thread.join(1.0)
        assert thread.is_alive(), "the call did not wait for the server"
        revived = Proxy(server.port, listen_port=port)
        thread.join(60)
        assert not thread.is_alive()
        client.lock("a").acquire(wait=20).release()
        client.close()
        revived.close()


def test_silence_is_measured_from_the_first_unanswered_request():
    now = [0.0]
    silence = SilenceTimer(lambda: now[0])
    silence.max_silence = 2.0
    now[0] = 100.0
    assert not silence.is_set(), "no request was sent"
    for _ in range(5):
        silence.set()
        now[0] += 0.5
    assert silence.is_set(), "later requests restarted the timer"
    silence.on_reply(pending=True)
    assert not silence.is_set(), "an answer came, although requests are pending"
    now[0] += 2.1
    assert silence.is_set()
    silence.on_reply(pending=False)
    now[0] += 100.0
    assert not silence.is_set()


def test_claim_recovered_by_its_id_hash_is_the_same_grant(url, session_of) -> None:
    """The answer to the create was lost: the engine finds the node and does not create another (E2)."""
    with Client(url) as client:
        engine, session, deadline = probe.engine(client), session_of(client), probe.core(client).deadline()
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
        wait_until(lambda: lease.state is LeaseState.HELD)
        assert lease.release()


def test_answer_of_an_expired_session_grants_nothing(url, url_of, proxy, wait_until, session_of) -> None:
    """The event loop is blocked when the answer arrives, until the session has expired and another has begun."""

    async def main(other: Client) -> None:
        async with AsyncClient(url_of(proxy, session=2), call_timeout=30) as client:
            await client.lock("a").call(lambda: None)
            session = session_of(client)
            own_session_id, keeper = session.session_id, probe_zookeeper.adapter(session)
            while True:
                acquiring = asyncio.create_task(client.lock("a", ttl=30).acquire(wait=0))
                while not session.unconfirmed and not acquiring.done():
                    await asyncio.sleep(0)
                wait_until(lambda: probe_zookeeper.is_idle(keeper))
                if not acquiring.done() and other.inspect("a"):
                    break
                # The answer was faster than this loop, or a refusal: the server had just removed the name's empty node.
                await (await acquiring).release()
            proxy.cut()
            wait_until(lambda: not other.inspect("a"))
            with other.lock("a", ttl=30, wait=0) as other_lease:
                proxy.restore()
                wait_until(
                    lambda: probe_zookeeper.is_connected(session) and session.session_id not in (0, own_session_id)
                )
                with pytest.raises(NotAcquired):
                    await acquiring
                other_lease.check()

    with Client(url) as other:
        asyncio.run(main(other))


def test_late_events_of_an_old_connection_leave_the_new_one_alone(url_of, proxy, wait_until, session_of) -> None:
    """The close of the first session is never answered; its thread ends while the client uses a second session."""
    client = AsyncClient(url_of(proxy), call_timeout=10)

    async def use() -> None:
        await client.lock("a").call(lambda: None)

    asyncio.run(use())
    session = session_of(client)
    old = probe_zookeeper.adapter(session)
    proxy.cut()
    asyncio.run(session.close(probe.runtime(client)))
    proxy.restore()

    async def again() -> None:
        lease = await client.lock("a", ttl=60).acquire()
        old.close_session()
        old.shutdown_socket()
        await asyncio.sleep(0)
        wait_until(lambda: not (thread := probe_zookeeper.connection_thread(old)) or not thread.is_alive())
        assert session.own_nodes
        await lease.renew()
        await lease.release()
        await client.close()

    asyncio.run(again())


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
