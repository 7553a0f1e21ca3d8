"""A thousand waiters on one name: each served once, by ticket, whoever waits beside it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from leasehold import AsyncClient, Client
from leasehold.core.admission import Line


@pytest.fixture
def tickets(monkeypatch):
    """In which order tickets were drawn and served, and how many waiters were passed over."""
    served: list[int] = []
    passed: list[str] = []
    claim, pass_over = Line._claim, Line._pass_over

    def note_served(self, at, party, asked, words):
        if party.mark not in passed and party.state == 1:
            served.append(party.ticket)
        return claim(self, at, party, asked, words)

    def note_passed(self, party):
        passed.append(party.mark)
        pass_over(self, party)

    monkeypatch.setattr(Line, "_claim", note_served)
    monkeypatch.setattr(Line, "_pass_over", note_passed)
    return served, passed


def test_a_thousand_tasks(tickets) -> None:
    served, passed = tickets
    inside: list[int] = []

    async def main() -> None:
        async with AsyncClient("memory://") as client:
            first = await client.lock("a").acquire()
            busy = [0]

            async def work(number: int) -> None:
                async with client.lock("a") as lease:
                    busy[0] += 1
                    assert busy[0] == 1
                    inside.append(lease.token)
                    await asyncio.sleep(0)
                    busy[0] -= 1

            tasks = [asyncio.create_task(work(number)) for number in range(1000)]
            while len(client._desk.book.waiting) < 1000:
                await asyncio.sleep(0.001)
            await first.release()
            await asyncio.gather(*tasks)
            assert await client.inspect() == []

    asyncio.run(main())
    print(f"passed over: {len(passed)} of 1000 tasks")
    assert len(inside) == 1000
    assert inside == sorted(set(inside))
    assert served == sorted(served)


def test_two_hundred_threads_five_times_each(tickets) -> None:
    served, passed = tickets
    tokens: list[int] = []
    errors: list[BaseException] = []
    busy = [0]
    with Client("memory://") as client:
        lock = client.lock("a")

        def work() -> None:
            try:
                for _ in range(5):
                    with lock as lease:
                        busy[0] += 1
                        assert busy[0] == 1
                        tokens.append(lease.token)
                        busy[0] -= 1
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(200)]
        with lock:
            for thread in threads:
                thread.start()
        for thread in threads:
            thread.join(60)
        assert client.inspect() == []
    print(f"passed over: {len(passed)} of 1000 turns of 200 threads")
    assert not errors
    assert len(tokens) == 1000
    assert tokens == sorted(set(tokens))
    assert served == sorted(served)
