"""A thousand waiters on one name: each is served once, in the order of their tickets."""

from __future__ import annotations

import asyncio
import threading

import pytest

from leasehold import AsyncClient, Client
from tests.support import probe, probe_lock_state


@pytest.fixture
def tickets(monkeypatch):
    """The tickets in the order in which they were served, and the waiters that were passed over."""
    served: list[int] = []
    passed_over: list[str] = []
    grant_entry, pass_over = getattr(*probe_lock_state.GRANT_ENTRY), getattr(*probe_lock_state.PASS_OVER)

    def note_served(self, context, entry, claim, notifications):
        if entry.id_hash not in passed_over and entry.state == 1:
            served.append(entry.ticket)
        return grant_entry(self, context, entry, claim, notifications)

    def note_passed_over(self, entry):
        passed_over.append(entry.id_hash)
        pass_over(self, entry)

    monkeypatch.setattr(*probe_lock_state.GRANT_ENTRY, note_served)
    monkeypatch.setattr(*probe_lock_state.PASS_OVER, note_passed_over)
    return served, passed_over


def test_thousand_tasks_are_served_once_in_ticket_order(tickets) -> None:
    served, passed_over = tickets
    granted_tokens: list[int] = []

    async def main() -> None:
        async with AsyncClient("memory://") as client:
            first = await client.lock("a").acquire()
            holder_count = [0]

            async def work(number: int) -> None:
                async with client.lock("a") as lease:
                    holder_count[0] += 1
                    assert holder_count[0] == 1
                    granted_tokens.append(lease.token)
                    await asyncio.sleep(0)
                    holder_count[0] -= 1

            tasks = [asyncio.create_task(work(number)) for number in range(1000)]
            while len(probe.waiters(client)) < 1000:
                await asyncio.sleep(0.001)
            await first.release()
            await asyncio.gather(*tasks)
            assert await client.inspect() == []

    asyncio.run(main())
    print(f"passed over: {len(passed_over)} of 1000 tasks")
    assert len(granted_tokens) == 1000
    assert granted_tokens == sorted(set(granted_tokens))
    assert served == sorted(served)


def test_two_hundred_threads_are_served_in_ticket_order(tickets) -> None:
    served, passed_over = tickets
    tokens: list[int] = []
    errors: list[BaseException] = []
    holder_count = [0]
    with Client("memory://") as client:
        lock = client.lock("a")

        def work() -> None:
            try:
                for _ in range(5):
                    with lock as lease:
                        holder_count[0] += 1
                        assert holder_count[0] == 1
                        tokens.append(lease.token)
                        holder_count[0] -= 1
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(200)]
        with lock:
            for thread in threads:
                thread.start()
        for thread in threads:
            thread.join(60)
        assert client.inspect() == []
    print(f"passed over: {len(passed_over)} of 1000 turns of 200 threads")
    assert not errors
    assert len(tokens) == 1000
    assert tokens == sorted(set(tokens))
    assert served == sorted(served)
