"""Replies that ZooKeeper would not send."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from leasehold import Client, Unavailable
from leasehold.engines.zookeeper import connection
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
        thread.join(5)
