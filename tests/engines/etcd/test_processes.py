"""Forks, process exits and garbage-collected clients."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time

import pytest

from leasehold import AsyncClient, Client, Unavailable
from leasehold.runtime.threads import Threads
from tests.support.timing import check_elapsed


@pytest.mark.parametrize("forks", [4, pytest.param(15, marks=pytest.mark.faults)])
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_parent_and_child_keep_working_after_a_fork(url, run_in_fork, forks) -> None:
    """The parent forks repeatedly with an open watch, waiters and threads inside calls; the child forks too."""
    with Client(url) as client:
        held = client.lock("held", ttl=20).acquire()
        stop = threading.Event()
        rounds: list[int] = []

        def busy() -> None:
            while not stop.is_set():
                with client.lock("busy") as lease:
                    rounds.append(lease.token)

        threads = [threading.Thread(target=busy) for _ in range(4)]
        for thread in threads:
            thread.start()

        def child() -> None:
            assert held.lost_reason == "forked"
            assert not held.release()
            assert client.lock("held").try_acquire() is None, "the child acquired what its parent holds"
            with client.lock("child", wait=20) as lease:
                lease.renew()
                assert {holding.name for holding in client.inspect("child")} == {"child"}
            run_in_fork(grandchild)
            client.close()

        def grandchild() -> None:
            with client.lock("grandchild", wait=20), client.lock("busy", wait=20):
                pass

        for _ in range(forks):
            run_in_fork(child)
            held.verify()
            with client.lock("parent", wait=20):
                pass
        stop.set()
        for thread in threads:
            thread.join(30)
        assert rounds == sorted(set(rounds))
        assert held.held
        assert held.release()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_child_of_an_asyncio_client_can_lock(url, run_in_fork) -> None:
    async def main() -> None:
        async with AsyncClient(url) as client, client.lock("job") as lease:

            def child() -> None:
                assert lease.lost_reason == "forked"
                asyncio.run(use())

            async def use() -> None:
                assert await client.lock("job").try_acquire() is None
                async with client.lock("other"):
                    pass

            # The child uses a new event loop, as a server's worker does.
            thread = threading.Thread(target=run_in_fork, args=(child,))
            thread.start()
            while thread.is_alive():
                await asyncio.sleep(0.01)
            await lease.renew()

    asyncio.run(main())


def test_process_that_never_closes_its_client_exits_at_once(url) -> None:
    code = f"""
import leasehold, threading
client = leasehold.Client({url!r})
held = client.lock("job").acquire()
threading.Thread(target=lambda: client.lock("job").acquire(), daemon=True).start()
import time
while len(client.inspect()) < 2: time.sleep(0.01)
"""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    check_elapsed(began, 30)


def test_collected_client_leaves_no_thread(url, eventually) -> None:
    earlier_threads = set(threading.enumerate())  # of other clients, which may end meanwhile

    def names() -> list[str]:
        started = set(threading.enumerate()) - earlier_threads
        return [thread.name for thread in started if thread.name.startswith("leasehold")]

    client = Client(url)
    lease = client.lock("job").acquire()
    eventually(names)
    lease.release()
    del client, lease
    eventually(lambda: gc.collect() is not None and not names())


@pytest.mark.parametrize("name", ["leasehold-etcd", "leasehold-etcd-watch"])
def test_client_survives_a_thread_that_cannot_be_started(url, monkeypatch, start_waiter, name) -> None:
    """Without its reader thread, the client raises Unavailable. Without its watch thread, waiters poll."""
    with Client(url.replace("127.0.0.1", "localhost"), call_timeout=2) as client:
        original, limit = Threads.start_thread, [True]

        def start_thread(self, start, called) -> None:
            if limit[0] and called == name:
                raise RuntimeError("can't start new thread")
            original(self, start, called)

        monkeypatch.setattr(Threads, "start_thread", start_thread)
        if name != "leasehold-etcd-watch":
            with pytest.raises(Unavailable, match="thread"):
                client.lock("job").acquire()
            limit[0] = False
        lease = client.lock("job").acquire()
        waiting = start_waiter(client)
        lease.release()
        waiting.wait_granted(20)
        limit[0] = False
