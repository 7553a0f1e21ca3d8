"""An event loop runs the verbs itself, and leaves to a thread what would block it."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest

from leasehold import AsyncClient, Client
from leasehold.engines.sqlite.connection import SqliteConnection
from tests.support import probe_sqlite


@pytest.fixture
def threads(monkeypatch) -> list[threading.Thread]:
    """The thread of each transaction of an event loop's connection that was committed."""
    original, found = getattr(*probe_sqlite.TRANSACT), []

    def transact(self, *args):
        answer = original(self, *args)
        if not self._runtime.blocking:
            found.append(threading.current_thread())
        return answer

    monkeypatch.setattr(*probe_sqlite.TRANSACT, transact)
    return found


def run(path: str, body) -> None:
    async def main() -> None:
        async with AsyncClient(f"sqlite://{path}") as client:
            async with client.lock("first"):  # opens the file and raises the ceiling of tokens: on a thread
                pass
            await body(client)

    asyncio.run(main())


def test_loop_runs_verbs_itself_unless_they_wait_for_the_disk(path, threads) -> None:
    async def body(client: AsyncClient) -> None:
        threads.clear()
        async with client.lock("a"):
            pass
        assert threads == [threading.main_thread()] * 2
        threads.clear()
        async with client.lock("a", delay=5.0):
            pass
        assert [thread is threading.main_thread() for thread in threads] == [False, True]
        threads.clear()
        await client.inspect()  # may have to read many rows
        assert threading.main_thread() not in threads

    run(path, body)


def test_loop_goes_on_while_a_thread_uses_its_connection(path, threads) -> None:
    async def body(client: AsyncClient) -> None:
        threads.clear()
        mutex, taken, done = probe_sqlite.connection_mutex(client), threading.Event(), threading.Event()

        def use() -> None:
            with mutex:
                taken.set()
                done.wait(60)

        user = threading.Thread(target=use)
        user.start()
        taken.wait(60)
        acquiring = asyncio.create_task(client.lock("a").acquire())
        await asyncio.sleep(0.05)  # pause: the loop runs
        assert not acquiring.done()
        done.set()
        lease = await acquiring
        assert threading.main_thread() not in threads
        user.join()
        await lease.release()

    run(path, body)


def test_loop_retries_while_another_process_is_in_a_transaction(path) -> None:
    async def body(client: AsyncClient) -> None:
        with Client(f"sqlite://{path}") as other:
            other.ping()
            db = probe_sqlite.database(other)
            db.execute("begin immediate")
            acquiring = asyncio.create_task(client.lock("a").acquire())
            await asyncio.sleep(0.05)  # pause: the loop runs
            assert not acquiring.done()
            db.execute("rollback")
            await (await acquiring).release()

    run(path, body)


def test_thread_checkpoints_the_log_for_the_loop(path, monkeypatch) -> None:
    monkeypatch.setattr(*probe_sqlite.CHECKPOINT_EVERY, 10)
    original, found = SqliteConnection.checkpoint, []

    def checkpoint(self) -> None:
        original(self)
        found.append(threading.current_thread())

    monkeypatch.setattr(SqliteConnection, "checkpoint", checkpoint)

    async def body(client: AsyncClient) -> None:
        for _ in range(20):
            async with client.lock("a"):
                pass
        assert found
        assert threading.main_thread() not in found
        (pages,) = probe_sqlite.database(client).execute("pragma wal_autocheckpoint").fetchone()
        assert pages == 8000

    run(path, body)


def test_loop_leaves_a_full_socket_of_a_waiter_to_a_thread(path, monkeypatch) -> None:
    async def body(client: AsyncClient) -> None:
        lease = await client.lock("a").acquire()
        with Client(f"sqlite://{path}") as other:
            got = []

            def wait() -> None:
                with other.lock("a", wait=60) as mine:
                    got.append(mine.token)

            waiter = threading.Thread(target=wait)
            waiter.start()
            while len(await client.inspect("a")) < 2:
                await asyncio.sleep(0.005)
            senders, sent = getattr(*probe_sqlite.SENDER_SOCKETS.of(probe_sqlite.wakeups(client)))(), []

            class FullSocket:
                """The waiter's socket is full for as long as the loop sends."""

                def sendto(self, message: bytes, flags: int, path: str) -> int:
                    sent.append(threading.current_thread())
                    if flags & socket.MSG_DONTWAIT:
                        raise BlockingIOError
                    return senders[1].sendto(message, path)

            monkeypatch.setattr(
                *probe_sqlite.SENDER_SOCKETS.of(probe_sqlite.wakeups(client)), lambda: (senders[0], FullSocket())
            )
            await lease.release()
            began = time.monotonic()
            while not got and time.monotonic() < began + 60:
                await asyncio.sleep(0.005)
            waiter.join(60)
            assert [thread is threading.main_thread() for thread in sent[:2]] == [True, False]
            assert got
            monkeypatch.undo()

    run(path, body)
