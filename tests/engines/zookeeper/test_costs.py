"""What ZooKeeper is asked for: requests and flights of a pair, and of a hand-off, by the server's own count."""

from __future__ import annotations

import asyncio
import time

import pytest

from leasehold import AsyncClient, Client
from leasehold.core import timing
from leasehold.engines.zookeeper import engine as engine_module
from leasehold.engines.zookeeper.session import Session


@pytest.fixture
def flights(monkeypatch) -> list[int]:
    """Every flight of this process from now on, by how many requests it carried."""
    found: list[int] = []
    true = Session.flight

    async def counted(self, runtime, requests, deadline, **more):
        found.append(len(requests))
        return await true(self, runtime, requests, deadline, **more)

    monkeypatch.setattr(Session, "flight", counted)
    return found


def test_a_pair_costs_four_requests_in_two_flights(url, root, raw, server, flights) -> None:
    with Client(url) as client:
        lock = client.lock("a", wait=0)
        with lock:
            raw.create(f"{root}/lh1/:a/kept")  # the server of these tests sweeps an empty line at any moment
        flights.clear()
        before = server.counted("packets_received")
        for _ in range(200):
            with lock:
                pass
        spent = server.counted("packets_received") - before
        assert flights == [3, 1] * 200
        print(f"a pair: {spent / 200:.2f} requests by the server's count, heart-beats among them")
        assert spent / 200 < 4.1


def test_a_hand_off_costs_the_same_for_two_waiters_and_for_two_hundred(
    url, server, flights, monkeypatch, session_of
) -> None:
    """Heart-beats apart: nobody looks unprompted while this is measured."""
    monkeypatch.setattr(engine_module, "BEAT_EVERY", 60.0)
    monkeypatch.setattr(timing, "BEAT_EVERY", 60.0)

    async def measure(size: int) -> tuple[float, float]:
        async with AsyncClient(url) as holder, AsyncClient(url) as one, AsyncClient(url) as two:
            held = await holder.lock(f"of-{size}", ttl=60).acquire()

            async def wait(client: AsyncClient) -> None:
                async with client.lock(f"of-{size}", ttl=60):
                    pass

            tasks = [asyncio.create_task(wait((one, two)[n % 2])) for n in range(size)]
            end = time.monotonic() + 60
            while sum(len(session_of(each).mine) for each in (one, two)) < size or not all(map(settled, (one, two))):
                assert time.monotonic() < end
                await asyncio.sleep(0.01)
            flights.clear()
            before = server.counted("packets_received")
            await held.release()
            await asyncio.gather(*tasks)
            return (server.counted("packets_received") - before) / size, len(flights) / size

    def settled(client) -> bool:
        """All its claims say that they wait, and nothing is on its way: the last watch is set."""
        session = session_of(client)
        quiet = not session._keeper._queue and not session._keeper._pending
        return quiet and all(mine.waits for mine in session.mine.values())

    for size in (2, 20, 200):
        requests, count = asyncio.run(measure(size))
        print(f"{size} waiters: {requests:.2f} requests and {count:.2f} flights for each hand-off")
        assert count <= 4
        assert requests <= 4 + 12 / size + 0.5, "flat, but for the heart-beats and the first release"
