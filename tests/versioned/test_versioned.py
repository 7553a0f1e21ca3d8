"""Compare-and-set on real servers: nothing is lost, conflicts are counted, and it ends."""

from __future__ import annotations

import asyncio
import inspect
import socket
import threading
import time
from base64 import b64encode

import pytest

from leasehold import ConfigError, Conflict, Event, Unavailable
from leasehold.testing import etcd_rig
from leasehold.versioned import AsyncEtcdKey, AsyncZooKeeperNode, EtcdKey, Versioned, ZooKeeperNode


def test_a_life(value):
    assert value.read() == Versioned(None, 0)
    first = value.write("one", 0)
    assert first.value == b"one"
    assert first.version > 0
    assert value.read() == first
    second = value.write(b"", first.version)
    assert value.read() == second == Versioned(b"", second.version)
    assert second.version > first.version


def test_what_was_decided_by_an_older_version_is_refused(value):
    first = value.write("one", 0)
    second = value.write("two", first.version)
    for version in (0, first.version, second.version + 1):
        with pytest.raises(Conflict):
            value.write("late", version)
    assert value.read() == second


def add_one(found: bytes | None) -> str:
    return str(int(found or 0) + 1)


def test_of_many_that_add_nothing_is_lost(value):
    conflicts: list[Event] = []

    def work() -> None:
        for _ in range(10):
            value.update(add_one, attempts=1000, pause=0.001, most_pause=0.02, on_event=conflicts.append)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert value.read().value == b"60"
    assert {event.kind for event in conflicts} <= {"conflict"}


def test_it_is_bounded_and_conflicts_are_counted(value, other):
    conflicts: list[Event] = []
    calls: list[bytes | None] = []

    def overtaken(found: bytes | None) -> str:
        calls.append(found)
        other.update(add_one)  # somebody else, in between
        return "never"

    with pytest.raises(Conflict, match="in each of 3 attempts") as over:
        value.update(overtaken, attempts=3, pause=0, on_event=conflicts.append)
    assert over.value.attempts == 3
    assert calls == [None, b"1", b"2"], "each attempt reads again"
    assert [event.kind for event in conflicts] == ["conflict"] * 3
    assert value.read().value == b"3"


def test_a_function_that_decides_for_nothing_leaves_it(value):
    first = value.write("one", 0)
    assert value.update(lambda found: None) == first
    assert value.read() == first
    assert value.update(lambda found, more: found + more, b" and two").value == b"one and two"


def test_async_functions(gateway):
    async def add(found: bytes | None) -> str:
        await asyncio.sleep(0)
        return add_one(found)

    async def main() -> None:
        key = AsyncEtcdKey(gateway, f"/test/{time.time_ns()}")
        await asyncio.gather(*(key.update(add, attempts=100, pause=0.001) for _ in range(10)))
        assert (await key.read()).value == b"10"

    asyncio.run(main())
    with pytest.raises(ConfigError, match="coroutine function"):
        EtcdKey(gateway, "/test/x").update(add)  # type: ignore[arg-type]


@pytest.mark.parametrize("version", [-1, True, None, 1.0])
def test_a_version_that_was_never_read_is_refused(value, version):
    """ZooKeeper takes -1 for any version at all: it must never be sent."""
    first = value.write("one", 0)
    with pytest.raises(ConfigError):
        value.write("two", version)
    assert value.read() == first


@pytest.mark.parametrize("wrong", [None, 7, ["x"]])
def test_a_value_is_bytes_or_text(value, wrong):
    with pytest.raises(ConfigError):
        value.write(wrong, 0)


def test_a_key_that_was_deleted_and_made_anew_is_not_the_old_one(gateway):
    key = EtcdKey(gateway, f"/test/{time.time_ns()}")
    old = key.write("one", 0)
    member = etcd_rig.alone().members[0]
    member.ask("kv/deleterange", key=b64encode(key.name.encode()).decode())
    assert key.read() == Versioned(None, 0)
    new = key.write("two", 0)
    with pytest.raises(Conflict):
        key.write("late", old.version)
    assert key.read() == new


@pytest.mark.parametrize(
    "build",
    [
        lambda keeper: EtcdKey("127.0.0.1:2379", "/x"),
        lambda keeper: EtcdKey([], "/x"),
        lambda keeper: EtcdKey("http://127.0.0.1:1", ""),
        lambda keeper: ZooKeeperNode(keeper, "x"),
        lambda keeper: ZooKeeperNode(keeper, "/x/"),
        lambda keeper: ZooKeeperNode(keeper, "/x", timeout=0),
    ],
)
def test_what_cannot_work_is_refused_when_built(build, keeper):
    with pytest.raises(ConfigError):
        build(keeper)


def test_the_faces_have_the_same_calls():
    for face, twin in ((EtcdKey, AsyncEtcdKey), (ZooKeeperNode, AsyncZooKeeperNode)):
        for verb in ("__init__", "read", "write", "update"):
            ours, theirs = inspect.signature(getattr(face, verb)), inspect.signature(getattr(twin, verb))
            assert list(ours.parameters) == list(theirs.parameters)
            assert [one.default for one in ours.parameters.values()] == [
                one.default for one in theirs.parameters.values()
            ]
            assert getattr(twin, verb).__doc__
            assert inspect.iscoroutinefunction(getattr(twin, verb)) == (verb != "__init__")


# ----------------------------------------------------------------- no answer


def test_nobody_there_is_unavailable(gateway):
    closed = socket.create_server(("127.0.0.1", 0))
    port = closed.getsockname()[1]
    closed.close()
    with pytest.raises(Unavailable, match="no member"):
        EtcdKey(f"http://127.0.0.1:{port}", "/x").read()
    assert EtcdKey([f"http://127.0.0.1:{port}", gateway], "/x").read() is not None, "the next member is asked"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n",
    ],
)
def test_an_answer_that_is_none_is_not_taken_for_one_and_not_asked_for_again(answer):
    """The write may have been done: only who asked can decide whether to ask again."""
    asked = []

    def serve() -> None:
        for _ in range(9):
            try:
                link, _ = listening.accept()
            except OSError:
                return
            with link:
                link.settimeout(5)
                while b"\r\n\r\n" not in (heard := link.recv(65536)):
                    pass
                asked.append(heard)
                link.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        key = EtcdKey(f"http://127.0.0.1:{listening.getsockname()[1]}", "/x", timeout=1.0)
        with pytest.raises(Unavailable):
            key.write("x", 7)
        assert len(asked) == 1
        with pytest.raises(Unavailable):
            key.update(add_one)
        assert len(asked) == 2
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def test_a_silent_zookeeper_is_unavailable_in_time(keeper):
    node = ZooKeeperNode(keeper, f"/test/{time.time_ns()}", timeout=0.5)
    first = node.write("one", 0)
    keeper.stop()  # nobody will answer any more
    for ask in (node.read, lambda: node.write("two", first.version), lambda: node.update(add_one)):
        began = time.monotonic()
        with pytest.raises(Unavailable):
            ask()
        assert time.monotonic() - began < 1.0
