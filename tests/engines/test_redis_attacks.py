"""The Redis engine attacked: hostile answers, foreign keys and messages, missing rights, a close at the wrong moment.

Each of these did harm once. On servers of its own, so that what is set here disturbs nobody.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import suppress

import hiredis
import pytest

from leasehold import AsyncClient, Client, ConfigError, NotAcquired, Unavailable
from leasehold.engines.redis.asking import Asked, Asking
from leasehold.engines.redis.scripts import Publishing, load
from leasehold.engines.redis.server import Server, pack
from leasehold.engines.redis.wire import PoolWire, Turns
from leasehold.runtime.base import step
from leasehold.runtime.loop import Loop
from leasehold.runtime.streams import Address
from leasehold.runtime.threads import Threads
from leasehold.testing.servers.process import poll


@pytest.fixture
def server(start_redis):
    return start_redis()


def url(server, options: str = "", user: str = "") -> str:
    return f"redis://{user}127.0.0.1:{server.port}{options}"


def of_names(server) -> list[bytes]:
    """The keys that are not a bucket's counter."""
    return [key for key in server.ask("KEYS", "*") if key.count(b":") > 2]


def in_line(client, name: str, count: int = 1) -> None:
    poll(
        lambda: sum(each.state == "waiting" for each in client.inspect(name)) == count,
        10,
        lambda: f"{count} in line for {name}",
    )


# ------------------------------------------------------------ odd answers


class Liar:
    """A server that signs everybody in, and then says always the same."""

    def __init__(self, says: bytes) -> None:
        self._says = says
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._door.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._door.accept()
                threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with near, suppress(OSError):
            near.recv(65_536)
            near.sendall(b"$20\r\nredis_version:7.0.15\r\n*0\r\n")
            while asked := near.recv(65_536):
                near.sendall(b"*3\r\n$9\r\nsubscribe\r\n$1\r\nx\r\n:1\r\n" if b"SUBSCRIBE" in asked else self._says)

    def close(self) -> None:
        self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()


BUSY = b"*6\r\n:0\r\n:5\r\n:0\r\n:7\r\n%b:1\r\n"


@pytest.mark.parametrize(
    "says",
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
def test_odd_answers_are_unavailable(says) -> None:
    liar = Liar(says)
    try:
        with Client(f"redis://127.0.0.1:{liar.port}", call_timeout=0.3) as client:
            with pytest.raises(Unavailable):
                client.lock("job").acquire(wait=0.2)
            with pytest.raises(Unavailable):
                client.inspect()

        async def main() -> None:
            async with AsyncClient(f"redis://127.0.0.1:{liar.port}", call_timeout=0.3) as client:
                with pytest.raises(Unavailable):
                    await client.lock("job").acquire(wait=0.2)

        asyncio.run(main())
    finally:
        liar.close()


def test_foreign_keys_are_passed_over(server) -> None:
    server.ask("SET", "lh1:{%:1}:%zz", "1")
    server.ask("SET", "lh1:{:1}:%FF", "1")
    with Client(url(server)) as client, client.lock("job"):
        assert [holding.name for holding in client.inspect()] == ["job"]


def test_foreign_messages_do_not_deafen_a_client(server) -> None:
    with Client(url(server)) as one, Client(url(server)) as other:
        lease = one.lock("job", ttl=60).acquire()
        other.lock("warm").acquire().release()
        key = b"lh1:{:1}:job"
        for channel in server.ask("PUBSUB", "CHANNELS", "*"):
            for said in (
                b"",
                b"go",
                b"head %b %b x" % (b"9" * 400, key),
                b"go nan %b x" % key,
                b"go 1 lh1:{%%:1}:%% x",
            ):
                server.ask("PUBLISH", channel, said)
        waiter = threading.Thread(target=lambda: other.lock("job", wait=20).acquire().release())
        waiter.start()
        in_line(one, "job")
        began = time.monotonic()
        lease.release()
        waiter.join(10)
        assert time.monotonic() - began < 1.0, "woken, not looking now and then"


# ---------------------------------------------------------- rights, secrets


def test_a_server_that_repeats_what_it_was_told_shows_no_password(start_redis) -> None:
    server = start_redis("--rename-command", "AUTH", "")
    for secret in ("verysecret", "verysecret" * 30):
        with Client(url(server, user=f"locks:{secret}@")) as client, pytest.raises(ConfigError) as caught:
            client.lock("job").acquire()
        assert "AUTH" in str(caught.value)
        assert "verysecret" not in str(caught.value)


@pytest.mark.parametrize("lacks", ["pubsub|numsub", "pexpireat", "publish", "zadd"])
def test_a_right_lacking_in_the_middle_of_a_script_is_said_and_leaves_nothing(server, lacks) -> None:
    server.ask("ACL", "SETUSER", "locks", "on", ">pw", "~*", "&*", "+@all", f"-{lacks}")
    with Client(url(server)) as one, Client(url(server, user="locks:pw@"), call_timeout=1) as other:
        lease = one.lock("job", ttl=60).acquire()
        with pytest.raises((ConfigError, NotAcquired)):  # not everything needs every right
            other.lock("job", wait=0.3).acquire()
        server.ask("ACL", "SETUSER", "locks", f"+{lacks}")  # what it could not give back meanwhile, it gives back now
        poll(lambda: len(one.inspect()) == 1, 10, lambda: "it left the line")
        lease.release()
        poll(lambda: not of_names(server), 10, lambda: "no key stays")


def test_a_waiter_refused_in_line_leaves_it(server) -> None:
    server.ask("ACL", "SETUSER", "locks", "on", ">pw", "~*", "&*", "+@all")
    with Client(url(server)) as one, Client(url(server, user="locks:pw@"), call_timeout=1) as other:
        lease = one.lock("job", ttl=60).acquire()
        refused: list[Exception] = []

        def wait() -> None:
            try:
                other.lock("job", wait=30).acquire()
            except ConfigError as error:
                refused.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        in_line(one, "job")
        server.ask("ACL", "SETUSER", "locks", "-evalsha")
        for held in other._desk.book.waiting.values():
            held.go = True
            held.signal.set()  # it asks again
        waiter.join(10)
        assert refused
        server.ask("ACL", "SETUSER", "locks", "+evalsha")
        began = time.monotonic()
        in_line(one, "job", 0)
        assert time.monotonic() - began < 5, "it had to lapse"
        assert lease.held


# ---------------------------------------------------------------- the ends


def test_a_client_closed_while_others_wait_leaves_nothing(server) -> None:
    for _ in range(5):
        client = Client(url(server), call_timeout=2)

        def take(client=client) -> None:
            with suppress(ConfigError):  # it is closed
                while True:
                    with client.lock("job", ttl=60, wait=20):
                        pass

        threads = [threading.Thread(target=take) for _ in range(8)]
        for each in threads:
            each.start()
        poll(lambda: server.ask("KEYS", "*:q"), 10, lambda: "some wait")
        client.close()
        for each in threads:
            each.join(10)
        poll(lambda: not of_names(server), 5, lambda: "all of them have left, and nobody holds")
    poll(lambda: server.info("clients")["connected_clients"] == "1", 5, lambda: "no connection is left but this one")


def test_a_connection_in_use_at_the_close_goes_too(server) -> None:
    runtime = Threads()
    for then in (b"", pack("PING")):
        wire = PoolWire(Server(Address("127.0.0.1", server.port)), runtime)
        assert step(wire.calls(pack("PING"), 1, runtime.now() + 5, then))[0] == b"PONG"
        assert len(wire._idle) == 1
        wire.close()
        step(wire.calls(pack("PING"), 1, runtime.now() + 5, then))  # by a thread that had begun before
        assert not wire._idle
        assert not wire._all


def test_a_break_is_not_lost_on_a_connection_closed_for_being_idle(server) -> None:
    with Client(url(server)) as client:
        lease = client.lock("job", ttl=60).acquire()
        server.ask("CLIENT", "KILL", "TYPE", "normal")
        assert client.break_lock("job", token=lease.token)
        assert lease.wait_lost(10)


def test_turns_are_limited_and_none_is_lost() -> None:
    async def main() -> None:
        turns, inside, most, came = Turns(Loop(), 3), 0, 0, []

        async def take(number: int, seconds: float) -> None:
            nonlocal inside, most
            if not await turns.enter(time.monotonic() + seconds):
                return
            inside, most = inside + 1, max(most, inside + 1)
            came.append(number)
            await asyncio.sleep(0)
            inside -= 1
            turns.leave()

        tasks = [asyncio.create_task(take(number, 0.0 if number % 7 == 5 else 10)) for number in range(200)]
        for number, task in enumerate(tasks):
            if number % 5 == 4:
                await asyncio.sleep(0)
                task.cancel()
        await asyncio.wait(tasks, timeout=10)
        assert all(task.done() for task in tasks)
        assert most == 3
        assert turns._free == 3
        assert came == sorted(came)

    asyncio.run(main())


def test_too_few_replicas_are_not_made_up_for_by_a_second_trip() -> None:
    """Some of a batch were known to the server and some were not: two trips, and both must be confirmed."""
    unknown = hiredis.ReplyError("NOSCRIPT")
    trips = [[[-1, -1], unknown, 0], [[-1, -1], 1]]

    class Wire:
        def calls(self, *_):
            return trips.pop(0)

    class Topology:
        follows = False
        known = Wire()

        def wire(self, tag):
            return self.known

        def replaced(self, wire):
            return False

    script = load("renew", Publishing())
    batch = [Asked("", script, packed, 1e9, confirm=True) for packed in (b"one", b"two")]
    answers = step(Asking(Threads(), Topology(), 1).many(batch))  # type: ignore[arg-type]
    assert answers == [([-1, -1], False)] * 2
