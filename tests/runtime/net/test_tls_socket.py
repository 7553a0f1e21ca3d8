"""TLS through memory: a server can keep OpenSSL busy with messages that it ignores, and must not keep its caller so."""

from __future__ import annotations

import fcntl
import socket
import ssl
import struct
import termios
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import hiredis
import pytest

from harness.servers.process import poll
from leasehold.engines.zookeeper.connection import KazooHandler
from leasehold.runtime.net.blocking import (
    WOULD_BLOCK,
    ReplyReader,
    SelfPipe,
    SocketAddress,
    SocketStream,
    connect_socket,
)
from leasehold.runtime.net.tls_socket import TlsSocket
from leasehold.runtime.threads import boot_clock
from tests.support.certificates import Authority

TICKETS = 600  # that the server sends after the handshake: two hundred bytes each
READ_AT_ONCE = 65_536
LAST = b"+bye\r\n"  # the server sends it back, together with the end of TLS, and leaves the socket open


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

    def connect(self, tickets: int = 0) -> TlsSocket:
        self._context.num_tickets = tickets
        threading.Thread(target=self._serve, daemon=True).start()
        context = ssl.create_default_context(cafile=self.authority.cert)
        address = SocketAddress("localhost", path=self._path)
        sock = connect_socket(address, context, boot_clock, boot_clock() + 20.0)
        assert isinstance(sock, TlsSocket)
        return sock

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
        replies = ReplyReader(hiredis.Reader()).read_available(sock)
        assert next(replies) == b"bye"
        with pytest.raises(ConnectionResetError):
            next(replies)
        assert sock.is_ready()
        assert sock.recv(100) == b""


def test_end_that_comes_with_the_last_reply_is_seen_before_poll_shows_it(server) -> None:
    """By the pool of connections, by a listener, and by kazoo."""
    with server.connect() as sock:
        stream = SocketStream(sock, hiredis.Reader(), boot_clock)
        assert stream.call(LAST, boot_clock() + 20) == b"bye"
        assert not stream.quiet()
        self_pipe = SelfPipe()
        assert not self_pipe.wait_woken(sock, 0.0)
        self_pipe.close()
        assert KazooHandler().select([sock], [], [], 0.0) == ([sock], [], [])
