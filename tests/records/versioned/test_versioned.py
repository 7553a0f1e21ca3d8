"""Compare-and-set on real servers: no update is lost, conflicts are counted, and retries are bounded."""

from __future__ import annotations

import asyncio
import inspect
import socket
import threading
import time
from base64 import b64encode

import pytest

from harness.rigs import etcd
from leasehold import ConfigError, Conflict, Event, Unavailable
from leasehold.versioned import AsyncEtcdKey, AsyncZooKeeperNode, EtcdKey, Versioned, ZooKeeperNode


def test_value_is_created_read_and_replaced(value):
    assert value.read() == Versioned(None, 0)
    first = value.write("one", 0)
    assert first.value == b"one"
    assert first.version > 0
    assert value.read() == first
    second = value.write(b"", first.version)
    assert value.read() == second == Versioned(b"", second.version)
    assert second.version > first.version


def test_write_with_another_version_is_conflict(value):
    first = value.write("one", 0)
    second = value.write("two", first.version)
    for version in (0, first.version, second.version + 1):
        with pytest.raises(Conflict):
            value.write("late", version)
    assert value.read() == second


def add_one(found: bytes | None) -> str:
    return str(int(found or 0) + 1)


def test_concurrent_updates_lose_nothing(value):
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


def test_update_gives_up_after_its_attempts_and_reports_conflicts(value, other):
    conflicts: list[Event] = []
    calls: list[bytes | None] = []

    def change_in_between(found: bytes | None) -> str:
        calls.append(found)
        other.update(add_one)  # another client writes in between
        return "never"

    with pytest.raises(Conflict, match="in each of 3 attempts") as over:
        value.update(change_in_between, attempts=3, pause=0, on_event=conflicts.append)
    assert over.value.attempts == 3
    assert calls == [None, b"1", b"2"], "each attempt must read again"
    assert [event.kind for event in conflicts] == ["conflict"] * 3
    assert value.read().value == b"3"


def test_update_returning_none_leaves_the_value(value):
    first = value.write("one", 0)
    assert value.update(lambda found: None) == first
    assert value.read() == first
    assert value.update(lambda found, more: found + more, b" and two").value == b"one and two"


def test_async_update_function_is_awaited_and_refused_when_blocking(etcd_url):
    async def add(found: bytes | None) -> str:
        await asyncio.sleep(0)
        return add_one(found)

    async def main() -> None:
        key = AsyncEtcdKey(etcd_url, f"/test/{time.time_ns()}")
        await asyncio.gather(*(key.update(add, attempts=100, pause=0.001) for _ in range(10)))
        assert (await key.read()).value == b"10"

    asyncio.run(main())
    with pytest.raises(ConfigError, match="coroutine function"):
        EtcdKey(etcd_url, "/test/x").update(add)  # type: ignore[arg-type]


@pytest.mark.parametrize("version", [-1, True, None, 1.0])
def test_write_with_invalid_version_is_refused(value, version):
    """ZooKeeper takes -1 for any version, so it must never be sent."""
    first = value.write("one", 0)
    with pytest.raises(ConfigError):
        value.write("two", version)
    assert value.read() == first


@pytest.mark.parametrize("wrong", [None, 7, ["x"]])
def test_write_of_value_other_than_bytes_or_text_is_refused(value, wrong):
    with pytest.raises(ConfigError):
        value.write(wrong, 0)


def test_version_of_deleted_key_does_not_match_the_recreated_key(etcd_url):
    key = EtcdKey(etcd_url, f"/test/{time.time_ns()}")
    old = key.write("one", 0)
    member = etcd.single_member_cluster().members[0]
    member.ask("kv/deleterange", key=b64encode(key.name.encode()).decode())
    assert key.read() == Versioned(None, 0)
    new = key.write("two", 0)
    with pytest.raises(Conflict):
        key.write("late", old.version)
    assert key.read() == new


@pytest.mark.parametrize(
    "build",
    [
        lambda zookeeper_client: EtcdKey("127.0.0.1:2379", "/x"),
        lambda zookeeper_client: EtcdKey([], "/x"),
        lambda zookeeper_client: EtcdKey("http://127.0.0.1:1", ""),
        lambda zookeeper_client: ZooKeeperNode(zookeeper_client, "x"),
        lambda zookeeper_client: ZooKeeperNode(zookeeper_client, "/x/"),
        lambda zookeeper_client: ZooKeeperNode(zookeeper_client, "/x", timeout=0),
    ],
)
def test_invalid_arguments_are_refused_when_built(build, zookeeper_client):
    with pytest.raises(ConfigError):
        build(zookeeper_client)


def test_async_classes_have_the_methods_of_blocking_classes():
    for blocking_class, async_class in ((EtcdKey, AsyncEtcdKey), (ZooKeeperNode, AsyncZooKeeperNode)):
        for verb in ("__init__", "read", "write", "update"):
            ours, theirs = (
                inspect.signature(getattr(blocking_class, verb)),
                inspect.signature(getattr(async_class, verb)),
            )
            assert list(ours.parameters) == list(theirs.parameters)
            assert [parameter.default for parameter in ours.parameters.values()] == [
                parameter.default for parameter in theirs.parameters.values()
            ]
            assert getattr(async_class, verb).__doc__
            assert inspect.iscoroutinefunction(getattr(async_class, verb)) == (verb != "__init__")


# ----------------------------------------------------------------- no answer


def test_unreachable_etcd_is_unavailable_and_next_member_is_tried(etcd_url):
    closed = socket.create_server(("127.0.0.1", 0))
    port = closed.getsockname()[1]
    closed.close()
    with pytest.raises(Unavailable, match="any etcd member"):
        EtcdKey(f"http://127.0.0.1:{port}", "/x").read()
    assert EtcdKey([f"http://127.0.0.1:{port}", etcd_url], "/x").read() is not None, "the next member must be tried"


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
def test_invalid_etcd_response_is_unavailable_and_not_retried(answer):
    """The write may have been applied: only the caller can decide whether to retry."""
    requests = []

    def serve() -> None:
        for _ in range(9):
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(5)
                while b"\r\n\r\n" not in (request := connection.recv(65536)):
                    pass
                requests.append(request)
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        key = EtcdKey(f"http://127.0.0.1:{listening.getsockname()[1]}", "/x", timeout=1.0)
        with pytest.raises(Unavailable):
            key.write("x", 7)
        assert len(requests) == 1
        with pytest.raises(Unavailable):
            key.update(add_one)
        assert len(requests) == 2
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def test_silent_zookeeper_is_unavailable_in_time(zookeeper_client):
    node = ZooKeeperNode(zookeeper_client, f"/test/{time.time_ns()}", timeout=0.5)
    first = node.write("one", 0)
    zookeeper_client.stop()  # there are no answers from here on
    for call in (node.read, lambda: node.write("two", first.version), lambda: node.update(add_one)):
        began = time.monotonic()
        with pytest.raises(Unavailable):
            call()
        assert time.monotonic() - began < 1.0
