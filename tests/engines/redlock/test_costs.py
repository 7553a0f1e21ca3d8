"""What failed calls of the Redlock engine leave in the client's process: no descriptors, threads, tasks or messages."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time

import pytest

from leasehold import AsyncClient, Client, Unavailable


def test_failed_calls_leak_no_descriptors_or_threads(nodes, wait_until) -> None:
    with Client(nodes.url, call_timeout=0.3) as client:
        client.lock("job").acquire().release()
        nodes.all[0].kill()
        nodes.all[1].kill()
        nodes.pause(2)
        with pytest.raises(Unavailable):
            client.lock("job").acquire(wait=0)
        files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        for _ in range(12):
            with pytest.raises(Unavailable):
                client.lock("job").acquire(wait=0)
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) <= files + 6
        assert threading.active_count() <= threads + 2, "threads for callbacks and listener, but none per call"
        nodes.resume()


def test_failed_asyncio_calls_leave_no_task_and_no_log_message(nodes, caplog) -> None:
    async def main() -> None:
        async with AsyncClient(nodes.url, call_timeout=2.0) as client:
            await client.ping()
            nodes.all[0].kill()
            nodes.pause(1, 2)
            for _ in range(4):
                with pytest.raises(Unavailable):
                    await client.lock("job").acquire(wait=0)
            tasks = [asyncio.create_task(client.lock("job").acquire(wait=5)) for _ in range(20)]
            await asyncio.sleep(0.05)  # pause: the tasks are cancelled while they wait for answers
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            nodes.resume()
            end = time.monotonic() + 5
            while len(asyncio.all_tasks()) > 1:
                assert time.monotonic() < end, asyncio.all_tasks()
                await asyncio.sleep(0.01)
        gc.collect()

    asyncio.run(main(), debug=True)
    assert "never retrieved" not in caplog.text
    assert "was destroyed" not in caplog.text
