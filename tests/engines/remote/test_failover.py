"""Lock servers that die, drain, or lose their engine: leases stay held, waiters keep their positions."""

import asyncio
import os
import signal
import threading
import time
from uuid import uuid4

import pytest

from harness.rigs.remote import redis_behind
from harness.servers.proxy import Proxy
from leasehold import AsyncClient, Unavailable
from leasehold.model import Alive, Gone, Grant
from tests.engines.remote.conftest import make_client
from tests.support import probe, probe_remote
from tests.support.timing import check_elapsed


def server_of(client):
    return probe.engine_state(client)["remote"].servers.current.index


def waiting(client, name):
    return [holding for holding in client.inspect(name) if holding.state in ("waiting", "passed over")]


class Waiter:
    """A client that waits for a name on a thread, and notes when it got it. `attached`: its last attempt told the
    server with the index 1 whom to wake."""

    def __init__(self, client, name, order):
        self.lease = self.error = None
        self.attached = False
        self._note_attempts(probe.engine(client))
        self._thread = threading.Thread(target=self._run, args=(client, name, order), daemon=True)
        self._thread.start()

    def _note_attempts(self, engine):
        attempt = engine.attempt

        async def noting_attempt(claim, deadline):
            was_active = probe_remote.is_woken_by(engine, 1)
            reply = await attempt(claim, deadline)
            self.attached = was_active and claim.queue and claim.id_hash not in probe_remote.polling_waiters(engine)
            return reply

        engine.attempt = noting_attempt

    def _run(self, client, name, order):
        try:
            with client.lock(name, ttl=60, wait=120) as self.lease:
                order.append(self)
        except BaseException as error:
            self.error = error

    def finish(self):
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert self.error is None


def test_claim_belongs_to_no_server(driver, pair_of_servers):
    """E2, E5 and E6: the same id is the same claim at every server."""
    driver.open(*pair_of_servers)

    def at(index):
        probe_remote.use_server(driver.servers, index)
        return driver

    mine, theirs = driver.claim(uuid4().hex), None
    grant = at(0).attempt(mine)
    assert isinstance(grant, Grant)
    assert at(1).attempt(mine).token == grant.token
    held, theirs = mine._replace(token=grant.token), driver.claim(mine.name, queue=True)
    assert isinstance(at(1).renew(held)[0], Alive)
    assert [at(index).attempt(theirs).position for index in (0, 1)] == [0, 0]
    assert at(1).release(held) is True
    assert isinstance(at(0).renew(held)[0], Gone)
    assert isinstance(at(0).attempt(theirs), Grant)
    assert at(1).release(theirs) is True


def test_holder_keeps_its_lease_when_its_server_is_killed(client_at, pair_of_servers, wait_until):
    events = []
    client = client_at(pair_of_servers, ttl=18.0, on_event=events.append)
    with client.lock("job") as lease:
        before = probe.trusted_until(lease)
        pair_of_servers[0].kill()
        wait_until(lambda: probe.trusted_until(lease) > before)
        assert lease.held
        assert server_of(client) == 1
        lease.verify()
    assert "lost" not in {event.kind for event in events}


def test_waiters_keep_their_order_when_their_server_is_killed(client_at, pair_of_servers, wait_until):
    namespace, order = uuid4().hex, []
    holder = client_at(pair_of_servers, at=1, namespace=namespace)
    lease = holder.lock("queue", ttl=60).acquire()
    waiters = []
    for at in (0, 1, 0):
        waiters.append(Waiter(client_at(pair_of_servers, at=at, namespace=namespace), "queue", order))
        wait_until(lambda: len(waiting(holder, "queue")) == len(waiters))
    pair_of_servers[0].kill()
    wait_until(lambda: all(waiter.attached for waiter in waiters))
    assert [h.position for h in waiting(holder, "queue")] == [0, 1, 2]
    began = time.monotonic()
    lease.release()
    for waiter in waiters:
        waiter.finish()
    check_elapsed(began, 3.0, "each hand-off takes less than a second")
    assert order == waiters


def test_asyncio_waiter_and_holder_go_on_at_another_server(pair_of_servers):
    async def run():
        namespace = uuid4().hex
        holder = make_client(AsyncClient, pair_of_servers, 0, namespace=namespace, ttl=18.0)
        waiter = make_client(AsyncClient, pair_of_servers, 0, namespace=namespace, ttl=30.0)
        async with holder, waiter:
            lease = await holder.lock("job").acquire()
            task = asyncio.create_task(waiter.lock("job").acquire(wait=60))
            while not [h for h in await holder.inspect("job") if h.state == "waiting"]:
                await asyncio.sleep(0.01)
            before = probe.trusted_until(lease)
            pair_of_servers[0].kill()
            async with asyncio.timeout(60):
                while probe.trusted_until(lease) <= before:
                    await asyncio.sleep(0.01)
            assert lease.held
            await lease.release()
            async with asyncio.timeout(60):
                await (await task).release()

    asyncio.run(run())


@pytest.mark.parametrize("how", ["silent", "refused"])
def test_holder_goes_on_if_its_server_alone_loses_the_engine(client_at, start_lock_server, redis_url, wait_until, how):
    """Refused connections are answered 503 at once, and renewals pass the breaker: that must move the client too."""
    way = Proxy(redis_behind().port)
    servers = [start_lock_server(f"redis://127.0.0.1:{way.port}"), start_lock_server(redis_url)]
    events = []
    client = client_at(servers, ttl=18.0, call_timeout=9.0, on_event=events.append)
    lease = client.lock("apart").acquire()
    before = probe.trusted_until(lease)
    (way.cut if how == "silent" else way.close)()
    try:
        wait_until(lambda: probe.trusted_until(lease) > before)
        assert lease.held
        assert server_of(client) == 1
        lease.release()
        assert "lost" not in {event.kind for event in events}
    finally:
        way.close()


@pytest.mark.parametrize("how", ["silent", "refused"])
def test_new_lock_is_acquired_if_one_server_alone_loses_the_engine(client_at, start_lock_server, redis_url, how):
    way = Proxy(redis_behind().port)
    servers = [start_lock_server(f"redis://127.0.0.1:{way.port}"), start_lock_server(redis_url)]
    client = client_at(servers, call_timeout=20.0)
    client.connect()
    (way.cut if how == "silent" else way.close)()
    try:
        for name in ("one", "two"):
            client.lock(name, ttl=60).acquire(wait=0).release()
        assert server_of(client) == 1
    finally:
        way.close()


def test_drain_loses_no_lease_and_no_position(client_at, pair_of_servers, wait_until):
    events, namespace, order = [], uuid4().hex, []
    holder = client_at(pair_of_servers, namespace=namespace, ttl=18.0, on_event=events.append)
    lease = holder.lock("drain").acquire()
    waiters = []
    for at in (0, 1):
        waiters.append(Waiter(client_at(pair_of_servers, at=at, namespace=namespace), "drain", order))
        wait_until(lambda: len(waiting(holder, "drain")) == len(waiters))
    before = probe.trusted_until(lease)
    os.kill(pair_of_servers[0].pid, signal.SIGTERM)
    wait_until(lambda: not pair_of_servers[0].running and all(waiter.attached for waiter in waiters))
    assert [h.position for h in waiting(holder, "drain")] == [0, 1]
    wait_until(lambda: probe.trusted_until(lease) > before)
    lease.release()
    for waiter in waiters:
        waiter.finish()
    assert order == waiters
    assert "lost" not in {event.kind for event in events}


def test_only_server_restarts_under_holder_and_waiter(client_at, start_lock_server, redis_url, wait_until):
    server, namespace, order = start_lock_server(redis_url), uuid4().hex, []
    holder = client_at([server], namespace=namespace, ttl=60.0, call_timeout=60.0)
    lease = holder.lock("job").acquire()
    waiter = Waiter(client_at([server], namespace=namespace, call_timeout=60.0), "job", order)
    wait_until(lambda: len(waiting(holder, "job")) == 1)
    server.restart()
    lease.verify()
    lease.release()
    waiter.finish()


def test_no_server_left_is_unavailable_and_the_lease_is_lost_in_time(client_at, pair_of_servers, wait_until):
    client = client_at(pair_of_servers, ttl=10.0, call_timeout=8.0)
    lease = client.lock("job").acquire()
    for server in pair_of_servers:
        server.kill()
    with pytest.raises(Unavailable):
        client.lock("other").acquire(wait=0)
    wait_until(lambda: not lease.held)
    assert lease.lost_reason in ("unreachable", "stalled")
    client.close()  # while the lease is referenced: if the watchdog has not ended it yet, dropping it is a warning


def test_break_through_another_server_notifies_the_holder(client_at, pair_of_servers, wait_until):
    namespace = uuid4().hex
    holder, operator = (client_at(pair_of_servers, at=at, namespace=namespace) for at in (0, 1))
    lease = holder.lock("job", ttl=600).acquire()
    began = time.monotonic()
    assert operator.break_lock("job", token=lease.token)
    wait_until(lambda: not lease.held)
    check_elapsed(began, 1.0)
    assert lease.lost_reason == "broken"


class RoundRobin(Proxy):
    """A TCP balancer without affinity: each connection goes to the next server."""

    def __init__(self, servers):
        self._ports, self._count = [server.port for server in servers], 0
        super().__init__(self._ports[0])

    def next_target(self):
        self._count += 1
        return "127.0.0.1", self._ports[self._count % len(self._ports)]


def test_balancer_without_affinity_makes_waiters_slower_not_wrong(client_at, pair_of_servers, wait_until):
    """Calls and stream meet different servers: who cannot be woken polls (`heard: false`)."""
    balancer, namespace, order = RoundRobin(pair_of_servers), uuid4().hex, []
    try:
        holder = client_at([balancer], namespace=namespace)
        for number in range(4):
            lease = holder.lock("job", ttl=60).acquire()
            waiters = [Waiter(client_at([balancer], namespace=namespace), "job", order) for _ in range(3)]
            wait_until(lambda: len(waiting(holder, "job")) == 3)
            lease.release()
            for waiter in waiters:
                waiter.finish()
            assert len(order) == 3 * (number + 1)
    finally:
        balancer.close()


class BufferingProxy(Proxy):
    """Holds back the responses to `GET /v1/stream`, as a proxy that buffers whole responses does."""

    def __init__(self, port):
        super().__init__(port)
        self._streams = set()

    def _forward(self, connection, side):
        if side is connection.client_side:
            data = side.recv(65_536, 2)  # MSG_PEEK
            if data.startswith(b"GET"):
                self._streams.add(connection)
        elif connection in self._streams:
            if not side.recv(65_536):
                self._close_connection(connection, cleanly=True)
            return
        super()._forward(connection, side)


def test_proxy_that_buffers_streams_makes_waiters_poll(client_at, start_lock_server, redis_url, wait_until):
    proxy, namespace, order = BufferingProxy(start_lock_server(redis_url).port), uuid4().hex, []
    try:
        holder = client_at([proxy], namespace=namespace)
        lease = holder.lock("job", ttl=60).acquire()
        waiter = Waiter(client_at([proxy], namespace=namespace), "job", order)
        wait_until(lambda: len(waiting(holder, "job")) == 1)
        began = time.monotonic()
        lease.release()
        waiter.finish()
        check_elapsed(began, 5.0)
    finally:
        proxy.close()


def test_engine_down_for_all_servers_moves_clients_once_a_second(monkeypatch, client_at, start_lock_server, redis_url):
    """Streams must not move with every call: each move makes all waiters of the client attempt."""
    way = Proxy(redis_behind().port)
    servers = [start_lock_server(f"redis://127.0.0.1:{way.port}") for _ in range(2)]
    client, moves = client_at(servers, call_timeout=8.0), []
    client.connect()
    move = getattr(*probe_remote.MOVE_TO)
    monkeypatch.setattr(*probe_remote.MOVE_TO, lambda self, to: (moves.append(to), move(self, to)))
    way.close()
    began = time.monotonic()
    for number in range(20):
        with pytest.raises(Unavailable):
            client.lock(f"job-{number}").acquire(wait=0)
    assert len(moves) <= 2 * (2 + time.monotonic() - began)
