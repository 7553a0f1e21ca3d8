"""Regressions of the Redis engine: malformed replies, foreign keys and messages, missing permissions, closing.

Each test starts its own server, because some change the server's settings.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import suppress

import hiredis
import pytest

from harness.servers.process import poll
from leasehold import AsyncClient, Client, ConfigError, NotAcquired, Unavailable
from leasehold.engines.redis.connections import BlockingPool, TaskSemaphore
from leasehold.engines.redis.executor import Executor, ScriptCall
from leasehold.engines.redis.scripts import PubSubCommands, load
from leasehold.engines.redis.server import RedisEndpoint, encode_command
from leasehold.runtime.base import run_sync
from leasehold.runtime.loop import Loop
from leasehold.runtime.net.blocking import SocketAddress
from leasehold.runtime.threads import Threads


@pytest.fixture
def server(start_redis):
    return start_redis()


def url(server, options: str = "", user: str = "") -> str:
    return f"redis://{user}127.0.0.1:{server.port}{options}"


def remaining_keys(server) -> list[bytes]:
    """All keys except the counters of buckets."""
    return [key for key in server.ask("KEYS", "*") if key.count(b":") > 2]


def wait_until_queued(client, name: str, count: int = 1) -> None:
    poll(
        lambda: sum(each.state == "waiting" for each in client.inspect(name)) == count,
        10,
        lambda: f"{count} claims wait for {name}",
    )


# ------------------------------------------------------ malformed replies


class FakeServer:
    """A server that accepts every handshake and then sends the same reply to every request."""

    def __init__(self, reply: bytes) -> None:
        self._reply = reply
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(65_536)
            connection.sendall(b"$20\r\nredis_version:7.0.15\r\n*0\r\n")
            while request := connection.recv(65_536):
                connection.sendall(
                    b"*3\r\n$9\r\nsubscribe\r\n$1\r\nx\r\n:1\r\n" if b"SUBSCRIBE" in request else self._reply
                )

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


BUSY = b"*6\r\n:0\r\n:5\r\n:0\r\n:7\r\n%b:1\r\n"


@pytest.mark.parametrize(
    "reply",
    [
        b"-NOSCRIPT for ever\r\n",
        BUSY % b"$1\r\n\xff\r\n",
        BUSY % b"$3\r\na\0b\r\n",
        BUSY % b"$5\r\na\0b\0c\r\n",
        b"%1\r\n+a\r\n+b\r\n",
        b"_\r\n",
        b",1.5\r\n",
        b"*2\r\n$1\r\n0\r\n:5\r\n",
    ],
)
def test_malformed_replies_raise_unavailable(reply) -> None:
    fake_server = FakeServer(reply)
    try:
        with Client(f"redis://127.0.0.1:{fake_server.port}", call_timeout=0.3) as client:
            with pytest.raises(Unavailable):
                client.lock("job").acquire(wait=0.2)
            with pytest.raises(Unavailable):
                client.inspect()

        async def main() -> None:
            async with AsyncClient(f"redis://127.0.0.1:{fake_server.port}", call_timeout=0.3) as client:
                with pytest.raises(Unavailable):
                    await client.lock("job").acquire(wait=0.2)

        asyncio.run(main())
    finally:
        fake_server.close()


def test_inspect_skips_foreign_keys(server) -> None:
    server.ask("SET", "lh1:{%:1}:%zz", "1")
    server.ask("SET", "lh1:{:1}:%FF", "1")
    with Client(url(server)) as client, client.lock("job"):
        assert [holding.name for holding in client.inspect()] == ["job"]


def test_client_still_receives_wakeups_after_foreign_messages(server) -> None:
    with Client(url(server)) as one, Client(url(server)) as other:
        lease = one.lock("job", ttl=60).acquire()
        other.lock("warm").acquire().release()
        key = b"lh1:{:1}:job"
        for channel in server.ask("PUBSUB", "CHANNELS", "*"):
            for message in (
                b"",
                b"go",
                b"head %b %b x" % (b"9" * 400, key),
                b"go nan %b x" % key,
                b"go 1 lh1:{%%:1}:%% x",
            ):
                server.ask("PUBLISH", channel, message)
        waiter = threading.Thread(target=lambda: other.lock("job", wait=20).acquire().release())
        waiter.start()
        wait_until_queued(one, "job")
        began = time.monotonic()
        lease.release()
        waiter.join(10)
        assert time.monotonic() - began < 1.0, "woken by push, not by its re-check"


# ----------------------------------------------------- permissions, secrets


def test_password_is_not_shown_when_server_echoes_the_command(start_redis) -> None:
    server = start_redis("--rename-command", "AUTH", "")
    for secret in ("verysecret", "verysecret" * 30):
        with Client(url(server, user=f"locks:{secret}@")) as client, pytest.raises(ConfigError) as caught:
            client.lock("job").acquire()
        assert "AUTH" in str(caught.value)
        assert "verysecret" not in str(caught.value)


@pytest.mark.parametrize("missing", ["pubsub|numsub", "pexpireat", "publish", "zadd"])
def test_missing_script_permission_leaves_no_claim_behind(server, missing) -> None:
    server.ask("ACL", "SETUSER", "locks", "on", ">pw", "~*", "&*", "+@all", f"-{missing}")
    with Client(url(server)) as one, Client(url(server, user="locks:pw@"), call_timeout=1) as other:
        lease = one.lock("job", ttl=60).acquire()
        with pytest.raises((ConfigError, NotAcquired)):  # some calls work without this permission
            other.lock("job", wait=0.3).acquire()
        server.ask("ACL", "SETUSER", "locks", f"+{missing}")  # the watchdog can now confirm the pending release
        poll(lambda: len(one.inspect()) == 1, 10, lambda: "the waiter has left the queue")
        lease.release()
        poll(lambda: not remaining_keys(server), 10, lambda: "no key is left")


def test_waiter_that_loses_its_permission_leaves_the_queue(server) -> None:
    server.ask("ACL", "SETUSER", "locks", "on", ">pw", "~*", "&*", "+@all")
    with Client(url(server)) as one, Client(url(server, user="locks:pw@"), call_timeout=1) as other:
        lease = one.lock("job", ttl=60).acquire()
        errors: list[Exception] = []

        def wait() -> None:
            try:
                other.lock("job", wait=30).acquire()
            except ConfigError as error:
                errors.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        wait_until_queued(one, "job")
        server.ask("ACL", "SETUSER", "locks", "-evalsha")
        for waiter_state in other._core.registry.waiting.values():
            waiter_state.woken = True
            waiter_state.signal.set()  # makes the waiter attempt again
        waiter.join(10)
        assert errors
        server.ask("ACL", "SETUSER", "locks", "+evalsha")
        began = time.monotonic()
        wait_until_queued(one, "job", 0)
        assert time.monotonic() - began < 5, "the claim was released, it did not expire"
        assert lease.held


# ----------------------------------------- closing, and closed connections


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
        poll(lambda: server.ask("KEYS", "*:q"), 10, lambda: "some claims are queued")
        client.close()
        for thread in threads:
            thread.join(10)
        poll(lambda: not remaining_keys(server), 5, lambda: "no claim is left")
    poll(
        lambda: server.info("clients")["connected_clients"] == "1", 5, lambda: "only the test's own connection is left"
    )


def test_pool_closes_connection_that_was_in_use_at_close(server) -> None:
    runtime = Threads()
    for compensation in (b"", encode_command("PING")):
        pool = BlockingPool(RedisEndpoint(SocketAddress("127.0.0.1", server.port)), runtime)
        assert run_sync(pool.calls(encode_command("PING"), 1, runtime.now() + 5, compensation))[0] == b"PONG"
        assert len(pool._idle) == 1
        pool.close()
        run_sync(
            pool.calls(encode_command("PING"), 1, runtime.now() + 5, compensation)
        )  # as by a thread that began before the close
        assert not pool._idle
        assert not pool._all


def test_break_works_when_server_closed_idle_connections(server) -> None:
    with Client(url(server)) as client:
        lease = client.lock("job", ttl=60).acquire()
        server.ask("CLIENT", "KILL", "TYPE", "normal")
        assert client.break_lock("job", token=lease.token)
        assert lease.wait_lost(10)


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
        await asyncio.wait(tasks, timeout=10)
        assert all(task.done() for task in tasks)
        assert max_inside == 3
        assert semaphore._free == 3
        assert entered == sorted(entered)

    asyncio.run(main())


def test_batch_is_unconfirmed_when_any_round_trip_lacks_replicas() -> None:
    """If the server lacks a script, a batch takes two round trips, and replicas must confirm both."""
    noscript = hiredis.ReplyError("NOSCRIPT")
    round_trips = [[[-1, -1], noscript, 0], [[-1, -1], 1]]

    class Wire:
        def calls(self, *_):
            return round_trips.pop(0)

    class Topology:
        names_can_move = False
        known = Wire()

        def connections(self, tag):
            return self.known

        def is_replaced(self, connections):
            return False

    script = load("renew", PubSubCommands())
    batch = [ScriptCall("", script, packed, 1e9, confirm=True) for packed in (b"one", b"two")]
    results = run_sync(Executor(Threads(), Topology(), 1).execute_batch(batch))  # type: ignore[arg-type]
    assert results == [([-1, -1], False)] * 2
