"""Connections to a Redis server: the pool, connections shared by tasks, closing."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress

import pytest

from harness.rigs import with_own_server
from harness.rigs.redis import RedisRig
from harness.servers.process import poll
from leasehold import AsyncClient, Client, ConfigError, Unavailable
from leasehold.engines.redis.connections import BlockingPool, TaskSemaphore
from leasehold.engines.redis.server import RedisEndpoint, encode_command
from leasehold.runtime.base import run_sync
from leasehold.runtime.loop import Loop
from leasehold.runtime.net.blocking import SocketAddress
from leasehold.runtime.threads import Threads
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support import probe_redis
from tests.support.redis_servers import remaining_keys, url

# ------------------------------------------------------------------------ pool


def test_pool_closes_connection_that_was_in_use_at_close(server) -> None:
    runtime = Threads()
    for compensation in (b"", encode_command("PING")):
        pool = BlockingPool(RedisEndpoint(SocketAddress("127.0.0.1", server.port)), runtime)
        assert run_sync(pool.calls(encode_command("PING"), 1, runtime.now() + 5, compensation))[0] == b"PONG"
        assert probe_redis.idle_connections(pool) == 1
        pool.close()
        run_sync(
            pool.calls(encode_command("PING"), 1, runtime.now() + 5, compensation)
        )  # as by a thread that began before the close
        assert not probe_redis.idle_connections(pool)
        assert not probe_redis.all_connections(pool)


def test_break_works_when_server_closed_idle_connections(server) -> None:
    with Client(url(server)) as client:
        lease = client.lock("job", ttl=600).acquire()
        server.ask("CLIENT", "KILL", "TYPE", "normal")
        assert client.break_lock("job", token=lease.token)
        assert lease.wait_lost(60)


def test_client_closed_while_threads_wait_leaves_no_keys(server) -> None:
    for _ in range(5):
        client = Client(url(server), call_timeout=2)

        def take(client=client) -> None:
            with suppress(ConfigError):  # the client was closed
                while True:
                    with client.lock("job", ttl=60, wait=20):
                        pass

        threads = [threading.Thread(target=take) for _ in range(8)]
        for thread in threads:
            thread.start()
        poll(lambda: server.ask("KEYS", "*:q"), 60, lambda: "some claims are queued")
        client.close()
        for thread in threads:
            thread.join(60)
        poll(lambda: not remaining_keys(server), 12, lambda: "no claim is left")
    poll(
        lambda: server.info("clients")["connected_clients"] == "1", 30, lambda: "only the test's own connection is left"
    )


# ------------------------------------------------------------- shared by tasks


def test_semaphore_limits_tasks_and_loses_no_permit() -> None:
    async def main() -> None:
        semaphore, inside, max_inside, entered = TaskSemaphore(Loop(), 3), 0, 0, []

        async def take(number: int, seconds: float) -> None:
            nonlocal inside, max_inside
            if not await semaphore.acquire(time.monotonic() + seconds):
                return
            inside, max_inside = inside + 1, max(max_inside, inside + 1)
            entered.append(number)
            await asyncio.sleep(0)
            inside -= 1
            semaphore.release()

        tasks = [asyncio.create_task(take(number, 0.0 if number % 7 == 5 else 10)) for number in range(200)]
        for number, task in enumerate(tasks):
            if number % 5 == 4:
                await asyncio.sleep(0)
                task.cancel()
        await asyncio.wait(tasks, timeout=60)
        assert all(task.done() for task in tasks)
        assert max_inside == 3
        assert probe_redis.free_permits(semaphore) == 3
        assert entered == sorted(entered)

    asyncio.run(main())


def test_concurrent_tasks_share_failed_connection_attempts(monkeypatch) -> None:
    opened = []

    async def fail(self, runtime, deadline):
        opened.append(self)
        await runtime.sleep(0.05)
        raise ConnectionRefusedError("nobody is there")

    monkeypatch.setattr(*probe_redis.OPEN, fail)

    async def scenario() -> None:
        async with AsyncClient("redis://127.0.0.1:1", call_timeout=5) as client:
            attempts = [client.lock("job").acquire(wait=0) for _ in range(100)]
            for error in await asyncio.gather(*attempts, return_exceptions=True):
                assert isinstance(error, Unavailable)
                assert "nobody is there" in str(error)

    asyncio.run(scenario())
    connect_count = len(opened)
    assert connect_count < 20, f"{connect_count} connection attempts for 100 tasks that failed together"


def test_task_with_later_deadline_connects_after_shared_failure(monkeypatch) -> None:
    opened, original_open = [], getattr(*probe_redis.OPEN)

    async def time_out_once(self, runtime, deadline):
        opened.append(deadline)
        if len(opened) == 1:
            await runtime.sleep(0.1)
            raise TimeoutError("no answer")
        return await original_open(self, runtime, deadline)

    monkeypatch.setattr(*probe_redis.OPEN, time_out_once)
    server = rig_or_skip(with_own_server(RedisRig)).server

    async def scenario() -> None:
        async with AsyncClient(url(server), namespace="more-time", call_timeout=5) as client:
            first = asyncio.create_task(client.ping())
            await asyncio.sleep(0)
            second = asyncio.create_task(client.ping())
            with pytest.raises(Unavailable):
                await first
            assert await second >= 0

    asyncio.run(scenario())
