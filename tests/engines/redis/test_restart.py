"""Waiters survive a restart of a Redis server: how long they retry, and what they find afterwards."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import asynccontextmanager

import pytest

from harness.rigs.redis import AOF_ALWAYS, RedisRig
from harness.servers.redis import RedisServer
from harness.servers.redis_ha import RedisCluster, SentinelSetup
from leasehold import AsyncClient, Client, ConfigError, Lease, Unavailable, Unsupported
from leasehold.engines.redis import executor
from leasehold.engines.redis.topology import pause_before_retry
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support import probe
from tests.support.redis_servers import has_waiters, url
from tests.support.timing import check_elapsed

_JOIN_TIMEOUT = 20  # seconds: longer than the short waits below, shorter than _CALL_TIMEOUT


_CALL_TIMEOUT = 25


@pytest.fixture
def server():
    rig_or_skip(RedisRig)  # skips if Redis is not installed
    server = RedisServer(*AOF_ALWAYS).start()
    yield server
    server.kill()


@pytest.fixture
def server_without_persistence():
    """A restart loses all its data."""
    rig_or_skip(RedisRig)
    server = RedisServer().start()
    yield server
    server.kill()


@pytest.fixture(params=["sentinels", "cluster"])
def sentinels_or_cluster(request):
    rig_or_skip(RedisRig)
    servers = SentinelSetup(down_after=0.5) if request.param == "sentinels" else RedisCluster(node_timeout=1.0)
    yield servers
    servers.close()


class WaitingThread(threading.Thread):
    """Waits for a lock that another client holds, and records the lease or the error."""

    def __init__(self, client: Client, **options) -> None:
        super().__init__(daemon=True)
        self._lock, self.outcome = client.lock("job", **options), None
        self.start()

    def run(self) -> None:
        began = time.monotonic()
        try:
            self.outcome = self._lock.acquire()
        except Exception as error:
            self.outcome = error
        self.elapsed = time.monotonic() - began

    def wait_granted(self) -> Lease:
        self.join(30)
        assert isinstance(self.outcome, Lease), self.outcome
        return self.outcome


def recheck_waiters(client) -> None:
    """Make all waiters of this client attempt again now."""
    for id_hash in list(probe.registry(client).waiting):
        probe.registry(client).on_notification("recheck", id_hash, 0.0, None)


@pytest.fixture
def retries(monkeypatch) -> list[int]:
    """Gets an entry for each retry of a call to an unreachable server."""
    retry_numbers: list[int] = []

    async def pause(runtime, retry_number, deadline) -> bool:
        retry_numbers.append(retry_number)
        return await pause_before_retry(runtime, retry_number, deadline)

    monkeypatch.setattr(executor, "pause_before_retry", pause)
    return retry_numbers


@asynccontextmanager
async def waiter_without_server(server, call_timeout, wait):
    """A lease, and a task that waits for its name and attempts again, after their server was killed."""
    async with AsyncClient(url(server), call_timeout=call_timeout) as client, asyncio.timeout(60):
        lease = await client.lock("job", ttl=60).acquire()
        waiter = asyncio.create_task(client.lock("job").acquire(wait=wait))
        while not any(holding.state == "waiting" for holding in await client.inspect()):
            await asyncio.sleep(0.01)
        server.kill()
        recheck_waiters(client)
        yield lease, waiter


# --------------------------------------------------------------------- retries


def test_waiter_survives_server_restart(server_without_persistence, retries, wait_until) -> None:
    with (
        Client(url(server_without_persistence), call_timeout=20) as holder,
        Client(url(server_without_persistence), call_timeout=20) as other,
    ):
        lease = holder.lock("job", ttl=60).acquire()
        waiter = WaitingThread(other, wait=60)
        wait_until(lambda: has_waiters(holder))
        server_without_persistence.kill()
        recheck_waiters(other)
        wait_until(lambda: len(retries) >= 3)
        server_without_persistence.start()
        assert waiter.wait_granted().token > lease.token  # the restarted server has no grant


def test_asyncio_waiter_survives_server_restart(server_without_persistence, retries) -> None:
    async def scenario() -> None:
        async with waiter_without_server(server_without_persistence, 20, wait=60) as (lease, waiter):
            while len(retries) < 3:
                await asyncio.sleep(0.01)
            server_without_persistence.start()
            assert (await waiter).token > lease.token

    asyncio.run(scenario())


def test_waiter_keeps_its_position_while_server_loads_its_log(retries, wait_until) -> None:
    rig_or_skip(RedisRig)
    slow_loading_options = (
        "--key-load-delay",
        "30000",
        "--loading-process-events-interval-bytes",
        "1024",
    )  # 30 ms per key
    server = RedisServer("--appendonly", "yes", "--appendfsync", "always", *slow_loading_options).start()
    try:
        with Client(url(server), call_timeout=20) as holder, Client(url(server), call_timeout=20) as other:
            lease = holder.lock("job", ttl=60).acquire()
            waiter = WaitingThread(other, wait=60)
            wait_until(lambda: has_waiters(holder))
            for number in range(50):
                server.ask("SET", f"filler:{number}", "x" * 2000)
            server.ask("BGREWRITEAOF")  # into a format that the server can load while it answers
            wait_until(lambda: server.info("persistence")["aof_rewrite_in_progress"] == "0")
            server.kill()
            recheck_waiters(other)
            wait_until(lambda: len(retries) >= 3)
            retry_count = len(retries)
            server.start()  # returns when the server has loaded the log
            assert len(retries) > retry_count, "the waiter did not retry during the load"
            assert waiter.is_alive()
            assert lease.release()
            assert waiter.wait_granted().token > lease.token
    finally:
        server.kill()


def test_waiter_raises_unavailable_when_server_stays_down(server_without_persistence, retries) -> None:
    async def scenario() -> None:
        began = time.monotonic()
        async with waiter_without_server(server_without_persistence, 1, wait=60) as (lease, waiter):
            with pytest.raises(Unavailable, match="cannot be reached"):
                await waiter
            assert retries, "the waiter did not retry"
            check_elapsed(began, 10)
            assert lease.lost_reason in (None, "unreachable")

    asyncio.run(scenario())


def test_waiter_cancelled_while_retrying_leaves_the_queue(server, retries) -> None:
    async def scenario() -> None:
        async with waiter_without_server(server, 20, wait=60) as (lease, waiter):
            while len(retries) < 2:
                await asyncio.sleep(0.01)
            waiter.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiter
            server.start()  # the queue was persisted
            async with AsyncClient(url(server)) as other, asyncio.timeout(12):  # before it expires
                while [holding.token for holding in await other.inspect()] != [lease.token]:
                    await asyncio.sleep(0.01)
            assert await lease.release()

    asyncio.run(scenario())


def test_client_can_be_closed_while_a_waiter_retries(server_without_persistence, retries, wait_until) -> None:
    holder, other = (
        Client(url(server_without_persistence), call_timeout=20),
        Client(url(server_without_persistence), call_timeout=20),
    )
    lease, waiter = holder.lock("job", ttl=60).acquire(), WaitingThread(other, wait=60)
    wait_until(lambda: has_waiters(holder))
    server_without_persistence.kill()
    recheck_waiters(other)
    wait_until(lambda: retries)
    closing = threading.Thread(target=other.close, daemon=True)
    closing.start()
    waiter.join(_JOIN_TIMEOUT)
    assert isinstance(waiter.outcome, ConfigError | Unavailable), "the waiter retries although its client is closed"
    server_without_persistence.start()
    closing.join(_JOIN_TIMEOUT)
    assert not closing.is_alive(), "close() must return once the pending release is confirmed"
    assert lease.token
    holder.close()


# ------------------------------------------------------------------- deadlines


@pytest.mark.parametrize("options", ["", "?min_replicas=1"])
def test_waiter_gives_up_at_its_wait_when_server_is_down(server, wait_until, options) -> None:
    replica = RedisServer(primary=server).start()
    wait_until(lambda: "state=online" in server.info("replication").get("slave0", ""))
    holder, other = Client(url(server), call_timeout=1), Client(url(server) + options, call_timeout=_CALL_TIMEOUT)
    try:
        lease = holder.lock("job", ttl=60).acquire()
        waiter = WaitingThread(other, wait=4)
        wait_until(lambda: has_waiters(holder))
        server.kill()
        recheck_waiters(other)
        waiter.join(_JOIN_TIMEOUT)
        assert isinstance(waiter.outcome, Unavailable), "the waiter must give up when its wait is over"
        assert 0.5 < waiter.elapsed < _JOIN_TIMEOUT
        assert lease.token
        newcomer = WaitingThread(other, wait=0.3)  # the client knows of the queue and joins it at once
        newcomer.join(_JOIN_TIMEOUT)
        assert isinstance(newcomer.outcome, Unavailable)
    finally:
        server.start()
        holder.close()
        other.close()
        replica.kill()


def test_asyncio_waiter_gives_up_at_its_wait_when_server_is_down(server) -> None:
    async def scenario() -> None:
        async with waiter_without_server(server, _CALL_TIMEOUT, wait=4) as (lease, waiter):
            try:
                done, _ = await asyncio.wait([waiter], timeout=_JOIN_TIMEOUT)
                assert done, "the waiter must give up when its wait is over"
                with pytest.raises(Unavailable):
                    await waiter
            finally:
                server.start()
            assert lease.token

    asyncio.run(scenario())


def test_waiters_survive_restart_of_all_servers(sentinels_or_cluster, wait_until) -> None:
    with (
        Client(sentinels_or_cluster.url(), call_timeout=_CALL_TIMEOUT) as holder,
        Client(sentinels_or_cluster.url(), call_timeout=_CALL_TIMEOUT) as other,
    ):
        lease = holder.lock("job", ttl=60).acquire()
        waiters = [WaitingThread(other, wait=60) for _ in range(3)]
        wait_until(lambda: sum(holding.state == "waiting" for holding in holder.inspect()) == 3)
        for each in sentinels_or_cluster.all:
            each.kill()
        recheck_waiters(other)
        for each in waiters:
            each.join(0.3)
            assert each.is_alive(), each.outcome
        for each in sentinels_or_cluster.all:
            each.start()
        for _ in waiters:
            wait_until(lambda: any(each.outcome for each in waiters))
            granted_waiter = next(each for each in waiters if each.outcome)
            assert granted_waiter.outcome.token > lease.token
            granted_waiter.outcome.release()
            waiters.remove(granted_waiter)


# -------------------------------------- after the restart, and cost of retries


def test_required_durability_is_checked_again_after_restart(server, wait_until) -> None:
    with (
        Client(url(server), call_timeout=_CALL_TIMEOUT) as holder,
        Client(url(server), call_timeout=_CALL_TIMEOUT) as other,
    ):
        lease = holder.lock("job", ttl=60).acquire()
        waiter = WaitingThread(other, wait=60, require={"survives-restart"})
        wait_until(lambda: has_waiters(holder))
        server.kill()
        recheck_waiters(other)
        server.options = ["--appendonly", "no"]
        server.start()
        waiter.join(_JOIN_TIMEOUT)
        assert isinstance(waiter.outcome, Unsupported), "the restarted server lacks the required durability"
        assert lease.token
        wait_until(lambda: not holder.inspect())  # the grant made before the check is released
