"""TLS through memory: a server can keep OpenSSL busy with messages that it ignores, and must not keep its caller so."""

from __future__ import annotations

import fcntl
import socket
import ssl
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from harness.servers.process import free_ports, poll
from leasehold.engines.redis.bounded_reader import BoundedReader
from leasehold.engines.zookeeper.connection import KazooHandler
from leasehold.runtime.net.blocking import (
    WOULD_BLOCK,
    ReplyReader,
    SelfPipe,
    SocketAddress,
    SocketStream,
    connect_socket,
)
from leasehold.runtime.net.fanout_blocking import NonblockingConnection
from leasehold.runtime.net.tls_socket import TlsSocket
from leasehold.runtime.polling import new_poll
from leasehold.runtime.threads import boot_clock
from tests.support import probe_runtime
from tests.support.certificates import Authority

TICKETS = 600  # that the server sends after the handshake: two hundred bytes each
READ_AT_ONCE = 65_536
LAST = b"+bye\r\n"  # the server sends it back, together with the end of TLS, and leaves the socket open


FAR = 20.0  # seconds


def unread(sock: socket.socket) -> int:
    """Bytes that the kernel has received, and the client has not read."""
    found: int = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.FIONREAD, b"\0" * 4))[0]
    return found


class TlsServer:
    """Serves one connection. Sends `tickets` session tickets, and then what it receives."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(*self.authority.issue("server", "DNS:localhost"))
        self._path = str(folder / "server")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._path)
        self._listener.listen()

        self.tls = ssl.create_default_context(cafile=self.authority.cert)
        self.address = SocketAddress("localhost", path=self._path)

    def serve(self, tickets: int) -> None:
        self._context.num_tickets = tickets
        threading.Thread(target=self._serve, daemon=True).start()

    def connect(self, tickets: int = 0) -> TlsSocket:
        self.serve(tickets)
        sock = connect_socket(self.address, self.tls, boot_clock, boot_clock() + 20.0)
        assert isinstance(sock, TlsSocket)
        return sock

    @staticmethod
    def handshake() -> tuple[bytes, int, Callable[[list[Any]], None]]:
        return b"+hello\r\n", 1, lambda _: None

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = self._context.wrap_bio(incoming, outgoing, server_side=True)
        shaken = False
        with connection, suppress(OSError):
            while data := connection.recv(READ_AT_ONCE):
                incoming.write(data)
                with suppress(ssl.SSLWantReadError):
                    if not shaken:
                        tls.do_handshake()
                        shaken = True
                    while received := tls.read(READ_AT_ONCE):
                        tls.write(received)
                        if received == LAST:
                            tls.unwrap()  # raises SSLWantReadError: the client has not said the same
                connection.sendall(outgoing.read())

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def server(tmp_path) -> Iterator[TlsServer]:
    found = TlsServer(tmp_path)
    yield found
    found.close()


@pytest.mark.parametrize(("timeout", "errors"), [(0.0, WOULD_BLOCK), (1e-6, TimeoutError)])
def test_flood_of_tickets_keeps_no_caller_busy(server, timeout, errors) -> None:
    """OpenSSL reads on behind a ticket, so a server that sent them without end blocked a call, or an event loop, for
    as long as it liked."""
    with server.connect(tickets=TICKETS) as sock:
        poll(lambda: unread(sock) > READ_AT_ONCE, 60, lambda: "the tickets have arrived")
        sock.settimeout(timeout)
        with pytest.raises(errors):
            sock.recv(100)
        assert unread(sock)
        assert sock.gettimeout() == timeout


def test_answer_behind_tickets_is_received(server) -> None:
    with server.connect(tickets=TICKETS) as sock:
        sock.settimeout(20)
        sock.sendall(b"hello")
        assert sock.recv(2) + sock.recv(100) == b"hello"


def test_more_than_the_kernel_accepts_is_sent_in_order(server) -> None:
    data = bytes(range(256)) * 8192
    with server.connect() as sock:
        received, sent = bytearray(), 0
        while len(received) < len(data):
            sock.settimeout(0)
            if sent < len(data):
                try:
                    sent += sock.send(data[sent:])
                except WOULD_BLOCK:
                    pass
                else:
                    continue
            sock.settimeout(20)
            received += sock.recv(READ_AT_ONCE)
    assert received == data


def test_end_that_comes_with_the_last_reply_is_noticed(server) -> None:
    """No more bytes come from the kernel: an event loop that waited for some would wait for ever."""
    with server.connect() as sock:
        sock.sendall(LAST)
        poll(lambda: unread(sock) > len(LAST), 60, lambda: "the reply has arrived")
        sock.settimeout(0)
        replies = ReplyReader(BoundedReader()).read_available(sock)
        assert next(replies) == b"bye"
        with pytest.raises(ConnectionResetError):
            next(replies)
        assert sock.is_ready()
        assert sock.recv(100) == b""


def test_end_that_comes_with_the_last_reply_is_seen_before_poll_shows_it(server) -> None:
    """By the pool of connections, by a listener, and by kazoo."""
    with server.connect() as sock:
        stream = SocketStream(sock, BoundedReader(), boot_clock)
        assert stream.call(LAST, boot_clock() + 20) == b"bye"
        assert not stream.quiet()
        self_pipe = SelfPipe()
        assert not self_pipe.wait_woken(sock, 0.0)
        self_pipe.close()
        assert KazooHandler().select([sock], [], [], 0.0) == ([sock], [], [])


def test_second_reply_over_tls_fails_the_next_call(server) -> None:
    with server.connect(tickets=2) as sock:  # tickets are no reply
        stream = SocketStream(sock, BoundedReader(), boot_clock)
        assert stream.call(b"+one\r\n", boot_clock() + FAR) == b"one"
        assert stream.quiet()
        sock.sendall(b"+unasked\r\n")
        poll(lambda: unread(sock), FAR, lambda: "it has arrived")
        with pytest.raises(ConnectionAbortedError, match="without a request"):
            stream.call(b"+two\r\n", boot_clock() + FAR)


def test_tickets_without_end_end_the_connection(server, monkeypatch) -> None:
    """Each costs the client time, for as long as it listens."""
    monkeypatch.setattr(*probe_runtime.MAX_TLS_OVERHEAD, READ_AT_ONCE)
    with server.connect(tickets=TICKETS) as sock:
        sock.settimeout(FAR)
        with pytest.raises(ConnectionAbortedError, match="without end"):
            sock.recv(100)


def test_tickets_without_end_end_a_connection_of_many(server, monkeypatch) -> None:
    """Of a client that asks several servers at once."""
    monkeypatch.setattr(*probe_runtime.MAX_TLS_OVERHEAD, READ_AT_ONCE)
    connection = NonblockingConnection(server, BoundedReader(), 1 << 20)
    connection.send_request(b"+hello\r\n", 1)
    server.serve(tickets=TICKETS)
    end = time.monotonic() + FAR
    with pytest.raises(ConnectionAbortedError, match="without end"):
        while time.monotonic() < end:
            new = new_poll()
            new.register(connection.fd, connection.events)
            new.poll(FAR * 1000)
            connection.advance()
    connection.close()


class CommandedServer:
    """`openssl s_server`, which sends messages of TLS itself on command."""

    def __init__(self, folder: Path, version: str) -> None:
        authority = Authority(folder)
        cert, key = authority.issue("server", "DNS:localhost")
        (port,) = free_ports(1)
        command = ["openssl", "s_server", "-accept", f"127.0.0.1:{port}", "-cert", cert, "-key", key, version]
        self._received = folder / "received"
        with self._received.open("wb") as out:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out)
        context, address = ssl.create_default_context(cafile=authority.cert), SocketAddress("127.0.0.1", port)
        end = time.monotonic() + FAR
        while True:
            try:
                sock = socket.create_connection(address[:2], FAR)
                break
            except ConnectionRefusedError:
                assert time.monotonic() < end
                time.sleep(0.02)
        self.sock = TlsSocket(sock, context, "localhost")
        self.sock.shake_hands(FAR)

    def send(self, command: bytes) -> None:
        """And let the client handle what comes."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + b"\n")
        self._process.stdin.flush()
        poll(lambda: unread(self.sock), FAR, lambda: "it has arrived")
        assert self.sock.is_quiet()

    def wait_for(self, data: bytes) -> None:
        poll(lambda: data in self._received.read_bytes(), FAR, lambda: f"{data!r} has arrived")

    def close(self) -> None:
        self.sock.close()
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def commanded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CommandedServer]:
    found = CommandedServer(tmp_path, request.param)
    yield found
    found.close()


@pytest.mark.parametrize("commanded", ["-tls1_3"], indirect=True)
def test_demands_for_new_keys_without_end_end_the_connection(commanded, monkeypatch) -> None:
    """OpenSSL answers each, and the answers filled the memory of a client that sent nothing."""
    commanded.send(b"K")
    commanded.sock.sendall(b"with new keys\n")
    commanded.wait_for(b"with new keys")
    monkeypatch.setattr(*probe_runtime.MAX_TLS_ANSWERS, 200)  # bytes
    with pytest.raises(ConnectionAbortedError, match="without end"):
        for _ in range(100):
            commanded.send(b"K")


@pytest.mark.parametrize("commanded", ["-tls1_2"], indirect=True)
def test_second_handshake_is_refused_and_does_not_stop_a_writer(commanded) -> None:
    """Until it ended, nothing could be written: an event loop tried without a pause."""
    commanded.send(b"r")
    commanded.sock.settimeout(0)
    assert commanded.sock.send(b"as before") == 9
