"""Replies that ZooKeeper would not send."""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
from contextlib import suppress
from unittest import mock

import pytest

from leasehold import Client, Unavailable
from leasehold.engines.zookeeper import connection
from leasehold.engines.zookeeper.requests import (
    MAX_CHILDREN,
    Create2,
    GetChildren,
    GetChildren2,
    GetData,
    GetFewChildren,
    GetShortData,
)
from tests.support import probe_logs, probe_zookeeper
from tests.support.timing import check_elapsed


def test_answer_with_an_unknown_error_keeps_the_session(url, monkeypatch, session_of) -> None:
    with Client(url) as client, client.lock("kept", ttl=60) as lease:
        own_session_id = session_of(client).session_id
        original = connection.ReplyHeader.deserialize
        first_only = iter([True])

        def deserialize(body, offset):
            header, end = original(body, offset)
            return (header._replace(err=-4711) if header.xid > 0 and next(first_only, False) else header), end

        monkeypatch.setattr(connection.ReplyHeader, "deserialize", deserialize)
        with pytest.raises(Unavailable):
            client.ping()
        client.ping()
        assert session_of(client).session_id == own_session_id
        lease.renew()


def test_reply_that_is_not_zookeeper_is_unavailable_by_the_deadline() -> None:
    """The engine never raises an exception of the driver (E9)."""
    for reply in (b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0\0\0\4junk", b"\xff" * 64, b"\0\0\0\x24" + b"\0" * 36):
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def answer(listener=listener, reply=reply) -> None:
                while True:
                    try:
                        accepted, _ = listener.accept()
                        with accepted:
                            accepted.recv(1000)
                            accepted.sendall(reply)
                    except OSError:
                        return

            thread = threading.Thread(target=answer, daemon=True)
            thread.start()
            client = Client(f"zookeeper://127.0.0.1:{listener.getsockname()[1]}", call_timeout=0.3)
            began = time.monotonic()
            with pytest.raises(Unavailable):
                client.lock("a").acquire(wait=0)
            check_elapsed(began, 0.8 + 2)
            client.close()
            listener.shutdown(socket.SHUT_RDWR)
        thread.join(60)


STAT = bytes(68)


def text(size: int) -> bytes:
    return size.to_bytes(4, "big", signed=True)


@pytest.mark.parametrize(
    "reply",
    [
        text(MAX_CHILDREN + 1),
        text(-1),
        text(1) + text(-1),  # a text that is left out
        text(2) + text(1) + b"a",
        text(1) + text(5) + b"a",
        text(1) + text(1) + b"\xff",
    ],
)
def test_children_that_a_server_cannot_have_raise_value_error(reply) -> None:
    for request in (GetChildren, GetChildren2):
        with pytest.raises(ValueError, match=r"children|text|truncated|codec"):
            request.deserialize(reply + (STAT if request is GetChildren2 else b""), 0)


def test_children_and_data_are_decoded() -> None:
    children = text(2) + text(1) + b"a" + text(0)
    assert GetChildren.deserialize(children, 0) == ["a", ""]
    assert GetFewChildren.deserialize(children, 0) == ["a", ""]
    assert GetFewChildren.deserialize(text(501), 0) is None
    assert GetData.deserialize(text(2) + b"ab" + STAT, 0)[0] == b"ab"
    assert GetData.deserialize(text(-1) + STAT, 0)[0] == b""
    assert GetShortData.deserialize(text(20_000) + b"x" * 20_000 + STAT, 0)[0] == b""
    with pytest.raises(ValueError, match="truncated"):
        GetData.deserialize(text(100), 0)
    with pytest.raises(ValueError, match="text"):
        Create2.deserialize(text(-1) + STAT, 0)


def test_name_with_more_than_a_few_claims_is_listed(url) -> None:
    """Read on its own, not with other names in a pipeline."""
    with Client(url) as client:
        leases = [client.semaphore("many", 3).acquire() for _ in range(3)]
        one = client.lock("one").acquire()
        with mock.patch.object(*probe_zookeeper.MAX_FEW, 2):
            assert [each.name for each in client.inspect()] == ["many"] * 3 + ["one"]
        for lease in (*leases, one):
            lease.release()


class BrokenZookeeper:
    """Gives every client a session, and sends `reply` to each of its requests."""

    def __init__(self, reply: bytes) -> None:
        self._reply, self.accepted = reply, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.accepted += 1
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            connection.recv(1000)
            connection.sendall(framed(struct.pack(">iiqi", 0, 10_000, 7, 16) + b"p" * 16 + b"\0"))
            while connection.recv(1000):
                connection.sendall(self._reply)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def framed(body: bytes) -> bytes:
    return struct.pack(">i", len(body)) + body


def reply_to(xid: int, body: bytes = b"") -> bytes:
    return framed(struct.pack(">iqi", xid, 1, 0) + body)


@pytest.mark.parametrize("xid", [-4, 99, 0], ids=["credentials", "another request", "nothing"])
def test_replies_to_what_was_not_asked_end_the_connection_and_log_once(xid, caplog, monkeypatch) -> None:
    """Such a server filled the log, and the client connected again a hundred times a second."""
    monkeypatch.setattr(*probe_logs.RECENT_LINES, {})
    server = BrokenZookeeper(reply_to(xid, framed(b"/x")))
    try:
        with Client(f"zookeeper://127.0.0.1:{server.port}", call_timeout=1.5) as client:
            with pytest.raises(Unavailable):
                client.lock("job").acquire()
            assert server.accepted < 30
    finally:
        server.close()
    assert len([each for each in caplog.records if each.levelno >= logging.ERROR]) == 1
