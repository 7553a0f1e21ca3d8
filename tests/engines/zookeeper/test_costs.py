"""Requests and pipelines of an acquire-release pair and of a hand-off, by the server's own count."""

from __future__ import annotations

import asyncio
import time

import pytest

from leasehold import AsyncClient, Client
from leasehold.core import timing
from leasehold.engines.zookeeper import engine as engine_module
from leasehold.engines.zookeeper.session import ZookeeperSession
from tests.support import probe_zookeeper


@pytest.fixture
def pipelines(monkeypatch) -> list[int]:
    """The number of requests in every pipeline that this process sends from now on."""
    found: list[int] = []
    original = ZookeeperSession.pipeline

    async def counted(self, runtime, requests, deadline, **options):
        found.append(len(requests))
        return await original(self, runtime, requests, deadline, **options)

    monkeypatch.setattr(ZookeeperSession, "pipeline", counted)
    return found


def heartbeats(server, began: float) -> float:
    """As many as all sessions may have sent since: more than any on a quiet machine, where this takes no time."""
    return server.counter("global_sessions") * (time.monotonic() - began)


def test_acquire_release_pair_costs_four_requests_in_two_pipelines(url, root, kazoo, server, pipelines) -> None:
    with Client(url) as client:
        lock = client.lock("a", wait=0)
        with lock:
            kazoo.create(f"{root}/lh1/:a/kept")  # the test server may remove an empty queue at any moment
        pipelines.clear()
        before, began = server.counter("packets_received"), time.monotonic()
        for _ in range(200):
            with lock:
                pass
        request_count = server.counter("packets_received") - before - heartbeats(server, began)
        assert pipelines == [3, 1] * 200
        print(f"a pair: {request_count / 200:.2f} requests by the server's count")
        assert request_count / 200 < 4.1


@pytest.mark.extended  # on a busy machine, renewals of the waiters come on top
def test_handoff_cost_is_independent_of_queue_length(url, server, pipelines, monkeypatch, session_of) -> None:
    """Without the cost of heartbeats: no waiter re-checks by itself during the measurement."""
    monkeypatch.setattr(engine_module, "HEARTBEAT_INTERVAL", 60.0)
    monkeypatch.setattr(timing, "HEARTBEAT_INTERVAL", 60.0)

    async def measure(size: int) -> tuple[float, float]:
        async with AsyncClient(url) as holder, AsyncClient(url) as one, AsyncClient(url) as two:
            held = await holder.lock(f"of-{size}", ttl=60).acquire()

            async def wait(client: AsyncClient) -> None:
                async with client.lock(f"of-{size}", ttl=60):
                    pass

            tasks = [asyncio.create_task(wait((one, two)[n % 2])) for n in range(size)]
            end = time.monotonic() + 60
            while sum(len(session_of(each).own_nodes) for each in (one, two)) < size or not all(
                map(is_settled, (one, two))
            ):
                assert time.monotonic() < end
                await asyncio.sleep(0.01)
            pipelines.clear()
            before, began = server.counter("packets_received"), time.monotonic()
            await held.release()
            await asyncio.gather(*tasks)
            requests = server.counter("packets_received") - before - heartbeats(server, began)
            return requests / size, len(pipelines) / size

    def is_settled(client) -> bool:
        """All claims have written that they wait, and no request is pending, so the last watch is set."""
        session = session_of(client)
        is_idle = probe_zookeeper.is_idle(probe_zookeeper.adapter(session))
        return is_idle and all(mine.waits for mine in session.own_nodes.values())

    for size in (2, 20, 200):
        requests, count = asyncio.run(measure(size))
        print(f"{size} waiters: {requests:.2f} requests and {count:.2f} flights for each hand-off")
        assert count <= 4
        assert requests <= 4 + 12 / size + 0.5, "the cost grew with the queue, beyond heartbeats and the first release"
