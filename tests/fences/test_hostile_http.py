"""Servers that are broken or hostile: no request of a fence waits, or takes memory, without end."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from itertools import repeat
from typing import Any

import pytest

from leasehold import ConfigError, Unavailable, fences
from tests.support.certificates import Authority
from tests.support.fixed_response import serve_response

HEAD = b"HTTP/1.1 200 OK\r\nETag: 1\r\nContent-Length: 10000000\r\n\r\n"
TIMEOUT = 0.5
PATIENT = 60.0


class StreamingServer:
    """Answers each request with these chunks, until the client hangs up."""

    def __init__(self, chunks: Callable[[], Iterator[bytes]], pause: float) -> None:
        self._chunks, self._pause, self.sent = chunks, pause, 0
        self._stopped = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            connection.recv(65_536)
            for chunk in self._chunks():
                connection.sendall(chunk)
                self.sent += len(chunk)
                if self._stopped.wait(self._pause):
                    return

    def close(self) -> None:
        self._stopped.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@contextmanager
def streaming(*chunks: bytes, pause: float = 0.0) -> Iterator[StreamingServer]:
    """The last chunk is repeated without end."""

    def all_chunks() -> Iterator[bytes]:
        yield from chunks
        yield from repeat(chunks[-1])

    server = StreamingServer(all_chunks, pause)
    try:
        yield server
    finally:
        server.close()


def calls(url: str) -> dict[str, Callable[[], Any]]:
    return {
        "etcd": lambda: fences.EtcdFence(url, "a", timeout=TIMEOUT).read(5),
        "service": lambda: fences.HTTPFence(url, timeout=TIMEOUT).read(5),
        "objects": lambda: fences.HTTPObjects(url, timeout=TIMEOUT).get("a"),
    }


@pytest.mark.parametrize("which", ["etcd", "service", "objects"])
@pytest.mark.parametrize(
    "chunks",
    [(b"H",), (HEAD[:-2], b"X: y\r\n"), (HEAD[:-2] + b"X: ", b"y" * 100), (HEAD, b"x")],
    ids=["status", "headers", "long header", "body"],
)
def test_answer_that_drips_without_end_is_given_up(which, chunks):
    """The timeout of a socket starts again at every byte."""
    with streaming(*chunks, pause=0.05) as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(calls(server.url)[which])
        wait([asked], PATIENT)
        is_done = asked.done()
        server.close()  # ends it if it is not
        assert is_done
        with pytest.raises((OSError, Unavailable)):
            asked.result()


@pytest.mark.parametrize("which", ["etcd", "service", "objects"])
def test_silent_name_server_keeps_no_request_beyond_its_timeout(which, monkeypatch) -> None:
    end = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: end.wait(2 * PATIENT) and [])
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(calls("http://silent.example")[which])
        wait([asked], PATIENT)
        is_done = asked.done()
        end.set()
        assert is_done
        with pytest.raises((OSError, Unavailable)):
            asked.result()


def test_proxy_cannot_pose_as_the_server(tmp_path, monkeypatch) -> None:
    """It has a certificate, but of its own name."""
    authority, received = Authority(tmp_path), list[bytes]()
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(*authority.issue("proxy", "IP:127.0.0.1"))

    def serve() -> None:
        with suppress(OSError), listener.accept()[0] as connection:
            connection.recv(65_536)
            connection.sendall(b"HTTP/1.1 200 Connected\r\n\r\n")
            with server_side.wrap_socket(connection, server_side=True) as tls:
                received.append(tls.recv(65_536))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{listener.getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        proxy = threading.Thread(target=serve, daemon=True)
        proxy.start()
        context = ssl.create_default_context(cafile=authority.cert)
        with pytest.raises(Unavailable, match="certificate"):
            fences.EtcdFence("https://server.example", "a", tls=context, timeout=PATIENT).read(5)
        proxy.join(PATIENT)
    assert not any(received)


@pytest.mark.parametrize("which", ["service", "objects"])
def test_long_body_has_more_time_than_the_timeout(which) -> None:
    """Another second for each kilobyte, also if nothing comes for longer than the timeout."""
    head = HEAD.replace(b"10000000", b"200001")
    with streaming(head + b"x" * 200_000, b"x", pause=2 * TIMEOUT) as server:
        found = calls(server.url)[which]()
    assert len(found.body if which == "objects" else found) == 200_001


def test_etcd_answer_without_end_is_not_read() -> None:
    with streaming(HEAD, b" " * 65_536) as server:
        fence = fences.EtcdFence(server.url, "a", timeout=PATIENT)
        with pytest.raises(Unavailable, match="unexpected response"):
            fence.read(5)
        assert server.sent < 32 << 20


def test_etcd_answer_of_very_many_objects_is_not_decoded() -> None:
    body = b"[" + b"{}," * 1_000_000 + b"{}]"
    with serve_response(body=body) as server, pytest.raises(Unavailable, match="unexpected response"):
        fences.EtcdFence(server.url, "a", timeout=PATIENT).read(5)


def test_etcd_error_without_end_is_not_read() -> None:
    with streaming(HEAD.replace(b"200 OK", b"400 Bad"), b"x" * 65_536) as server:
        with pytest.raises(ConfigError, match="etcd refused"):
            fences.EtcdFence(server.url, "a", timeout=PATIENT).read(5)
        assert server.sent < 32 << 20
