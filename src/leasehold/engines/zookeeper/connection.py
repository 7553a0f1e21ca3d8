"""One connection of a session: a thread that writes requests, reads replies, and leaves a server that stops answering.

Pipelined requests leave in one write and their replies are read as they arrive; kazoo would wake up and poll for each.
"""

from __future__ import annotations

import logging
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from kazoo.exceptions import EXCEPTIONS, ConnectionDropped
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.connection import AUTH_XID, PING_XID, ConnectionHandler
from kazoo.protocol.serialization import Connect, ReplyHeader

from leasehold.core.texts import server_text
from leasehold.core.timing import backoff
from leasehold.engines.repeated_logs import log_seldom
from leasehold.runtime.net.tls_socket import TlsSocket
from leasehold.runtime.polling import POLLIN, POLLOUT, new_poll

if TYPE_CHECKING:
    from leasehold.engines.zookeeper.kazoo_adapter import KazooAdapter

_INT: Final = struct.Struct("!i")
_TWO_INTS: Final = struct.Struct("!ii")

# The time between heartbeats, as a share of the session timeout. The shorter it is, the sooner a silent server is
# noticed, and the longer a renewal is trusted.
HEARTBEAT_SHARE: Final = 1 / 16
# If no reply comes for this share, the client connects to another server, while a lease still has at least a fifth of
# the session left to be renewed there. kazoo would wait for two thirds, and start counting again with each request.
SILENCE_SHARE: Final = 1 / 6
MIN_SILENCE: Final = 0.5  # seconds: a busy server or a busy client must not count as silent

MAX_REPLY_SIZE: Final = 8 * 1024 * 1024  # bytes: eight times what a ZooKeeper server accepts or sends by default
_READ_SIZE: Final = 65_536

NOT_SERVING: Final = "not currently serving requests"  # the answer to `srvr` of a server outside a quorum
_TLS_OPTIONS: Final = ("use_ssl", "keyfile", "certfile", "ca", "keyfile_password", "verify_certs", "check_hostname")

_SHORT: Final = 1.0  # seconds

_UNKNOWN_ERROR: Final = -1  # replaces error codes that kazoo does not know


class KazooHandler(SequentialThreadingHandler):  # type: ignore[misc]
    """No worker threads: callbacks run on the thread that triggers them."""

    connect_timeout = 5.0  # seconds for a server to accept a connection or a session, before the next one is tried

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def dispatch_callback(self, callback: Any) -> None:
        callback.func(*callback.args)

    def select(
        self, reading: Any, writing: Any, _: Any, timeout: float | None = None
    ) -> tuple[list[Any], list[Any], Any]:
        """One `poll` call; kazoo's own method creates and closes an epoll object each time."""
        if decrypted := [sock for sock in reading if isinstance(sock, TlsSocket) and sock.is_ready()]:
            return decrypted, [], []
        poll, by_fd = new_poll(), {}
        for flag, sockets in ((POLLIN, reading), (POLLOUT, writing)):
            for sock in sockets:
                poll.register(sock, flag)
                by_fd[sock.fileno()] = sock
        ready = [by_fd[fd] for fd, _ in poll.poll(None if timeout is None else max(0, timeout * 1000))]
        return [sock for sock in reading if sock in ready], [sock for sock in writing if sock in ready], []

    def create_connection(self, address: tuple[str, int], timeout: float, hostname: str = "", **tls: Any) -> Any:
        """As kazoo's own, but it closes the socket if it fails."""
        seconds = min(timeout, self.connect_timeout)
        sock = socket.create_connection(address, seconds)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls["use_ssl"]:
                sock = tls_sock = wrap_tls(sock, hostname, **tls)
                tls_sock.shake_hands(seconds)
            return sock
        except BaseException:
            sock.close()
            raise


def wrap_tls(sock: socket.socket, hostname: str, **tls: Any) -> TlsSocket:
    context = ssl.create_default_context(cafile=tls["ca"])
    context.check_hostname = tls["check_hostname"]
    if not tls["verify_certs"]:
        context.verify_mode = ssl.CERT_NONE
    if tls["certfile"]:
        # Without a text, OpenSSL would prompt on the terminal and wait for ever.
        context.load_cert_chain(tls["certfile"], tls["keyfile"], tls["keyfile_password"] or "")
    return TlsSocket(sock, context, hostname)


def _checked_length(length: int) -> int:
    if not 0 <= length <= MAX_REPLY_SIZE:
        raise ConnectionDropped(f"the server announced a reply of {length} bytes")
    return length


class SilenceTimer:
    """Measures how long a request has been without any reply. It replaces kazoo's event for an unanswered ping, and
    counts as set when the client should leave the server."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self._since = now, float("inf")
        self.max_silence = float("inf")

    def set(self) -> None:
        """A request was sent."""
        self._since = min(self._since, self._now())

    def clear(self) -> None:
        """Every request was answered."""
        self._since = float("inf")

    def on_reply(self, pending: bool) -> None:
        self.clear()
        if pending:
            self.set()

    def is_set(self) -> bool:
        return self._now() - self._since > self.max_silence

    def check(self) -> None:
        if self.is_set():
            raise ConnectionDropped("the server stopped answering")


class KazooConnection(ConnectionHandler):  # type: ignore[misc]
    """Reports confirmed sessions and heartbeats to its KazooAdapter, leaves a server that stops answering, and closes
    its sockets when it ends."""

    client: KazooAdapter
    _xid: int
    _read_buffer: bytearray | None = None  # received and not parsed yet; None while connecting
    _last_server: tuple[Any, ...] = ()  # the server tried last
    _connected_at = float("-inf")  # when a server last gave a session
    _short_connections = 0  # that ended soon after that, one after the other
    _not_refused = 0  # servers of this round of connects that have not refused it, or not yet

    def __init__(self, client: KazooAdapter, *args: Any, **kwargs: Any) -> None:
        super().__init__(client, *args, **kwargs)
        self.ping_outstanding = SilenceTimer(client.now)
        self._pings_sent: deque[float] = deque()  # send times of the pings without a reply

    def _expand_client_hosts(self) -> list[tuple[Any, ...]]:
        """The servers in kazoo's order, but with the one tried last at the end: it refused or stopped answering. One
        host name may resolve to several."""
        servers = super()._expand_client_hosts()
        self._not_refused = len(servers)
        self.client.round += 1
        if not servers:
            self.client.on_all_refused("no host name could be resolved")
        self.handler.connect_timeout = self.client.connect_timeout(len(servers))
        return sorted(servers, key=lambda server: server == self._last_server)

    def _connect(self, *server: Any) -> tuple[float, float]:
        self._pause_after_short_connections()
        self._read_buffer, self._last_server = None, server
        self._pings_sent.clear()
        try:
            _, connect_timeout = super()._connect(*server)
        except Exception as error:
            self.client.last_error = error
            self._note_refusal(error.__context__)
            if isinstance(error, ConnectionDropped) and self._socket is not None and self._says_no_quorum(*server):
                self.client.no_quorum_round = self.client.round
            raise
        self._read_buffer, self._connected_at = bytearray(), self.client.now()
        self.ping_outstanding.max_silence = max(self.client.negotiated_timeout * SILENCE_SHARE, MIN_SILENCE)
        # kazoo sends a ping after half of what it calls its read timeout.
        return self.client.negotiated_timeout * 1000 * HEARTBEAT_SHARE * 2, min(
            connect_timeout, self.ping_outstanding.max_silence * 1000
        )

    def _pause_after_short_connections(self) -> None:
        """kazoo's pauses become longer only while no server gives a session."""
        is_short = self.client.now() - self._connected_at < _SHORT
        self._short_connections = self._short_connections + 1 if is_short else 0
        if self._short_connections > 1:
            self.handler.sleep_func(backoff(self._short_connections, 0.02, 0.5, 1.0))

    def _note_refusal(self, cause: BaseException | None) -> None:
        """`cause`: what kazoo's error was raised for. A timeout is no refusal: the server may be slow."""
        if isinstance(cause, OSError) and not isinstance(cause, TimeoutError):
            self._not_refused -= 1
            if self._not_refused == 0:
                self.client.on_all_refused(cause.strerror or str(cause))

    def _says_no_quorum(self, host: str, address: str, port: int) -> bool:
        """Ask a server that has accepted the connection but no session for its state, in a connection of its own."""
        client, timeout = self.client, self.handler.connect_timeout
        with suppress(OSError):
            options = {name: getattr(client, name) for name in _TLS_OPTIONS}
            with self.handler.create_connection((address, port), timeout, host, **options) as sock:
                sock.settimeout(timeout)
                sock.sendall(b"srvr")
                return NOT_SERVING.encode() in sock.recv(_READ_SIZE)
        return False

    def _authenticate_with_sasl(self, host: str, timeout: float) -> None:
        super()._authenticate_with_sasl(host, min(timeout, self.handler.connect_timeout))

    def _invoke(self, timeout: float, request: Any, xid: Any = None) -> Any:
        sent = self.client.now()
        reply = super()._invoke(min(timeout, self.handler.connect_timeout), request, xid)
        if isinstance(request, Connect) and reply[0].time_out > 0:
            self.client.negotiated_timeout = reply[0].time_out / 1000
            self.client.last_error = None
            self.client.on_session_confirmed(sent, self.client.negotiated_timeout, reply[0].session_id)
        return reply

    def _send_ping(self, timeout: float) -> None:
        self.ping_outstanding.check()
        self._pings_sent.append(self.client.now())
        super()._send_ping(timeout)
        self.client.on_sent()

    def _send_request(self, read_timeout: float, connect_timeout: float) -> None:
        """Send all queued requests in one write."""
        self.ping_outstanding.check()  # here, too: while there is much to send, kazoo sends no pings
        with suppress(OSError):
            self._read_sock.recv(4096)  # drop the wake-up bytes: there is one per request
        queue, frames = self.client._queue, bytearray()
        while queue:
            request, pending_reply = queue.popleft()
            self._xid = self._xid % 2147483647 + 1
            body = _TWO_INTS.pack(self._xid, request.type) + request.serialize()
            frames += _INT.pack(len(body)) + body
            self.client._pending.append((request, pending_reply, self._xid))
        self.ping_outstanding.set()
        self._write(frames, connect_timeout)
        self.client.on_sent()

    def _read_socket(self, timeout: float) -> Any:
        """Handle all replies that have arrived."""
        reply = None
        self._fill_buffer()
        while reply is None and self._has_whole_reply():
            seen_zxid = self.client.last_zxid
            try:
                reply = super()._read_socket(timeout)
            except (AttributeError, LookupError, RuntimeError, TypeError, ValueError, struct.error) as error:
                self.client.last_zxid = seen_zxid  # a server that has not seen it would refuse this client for ever
                detail = f": {type(error).__name__}: {server_text(error)}"
                log_seldom(self.logger, logging.ERROR, "ZooKeeper sent an invalid reply; reconnecting", detail)
                raise ConnectionDropped("the server sent an invalid reply") from error
            self.ping_outstanding.on_reply(bool(self._pings_sent or self.client._pending))
        return reply

    def _fill_buffer(self) -> None:
        """Read once: while a server sends without end, replies must be handled in between."""
        with self._socket_error_handling(), suppress(BlockingIOError, ssl.SSLWantReadError):
            assert self._read_buffer is not None  # noqa: S101  # for the type checker
            self._read_buffer += self._receive(_READ_SIZE)
            while getattr(self._socket, "pending", int)():  # decrypted already, so `poll` would not see it
                self._read_buffer += self._receive(_READ_SIZE)

    def _receive(self, size: int) -> bytes:
        chunk: bytes = self._socket.recv(min(size, _READ_SIZE))
        if not chunk:
            raise ConnectionDropped("socket connection broken")
        return chunk

    def _has_whole_reply(self) -> bool:
        """Whether a complete reply has arrived. Drops the connection if the announced one is too long."""
        buffer = self._read_buffer or b""
        if len(buffer) < 4:
            return False
        return len(buffer) >= 4 + _checked_length(_INT.unpack_from(buffer)[0])

    def _read(self, length: int, timeout: float) -> bytes:
        """While connecting: exactly `length` bytes, all within `timeout`. kazoo would allocate what a server announces,
        and restart the timeout with every byte."""
        data, until = bytearray(), self.client.now() + timeout
        with self._socket_error_handling():
            while len(data) < _checked_length(length):
                left = until - self.client.now()
                pending = getattr(self._socket, "pending", int)()
                if left <= 0 or not (pending or self.handler.select([self._socket], [], [], left)[0]):
                    raise self.handler.timeout_exception("socket time-out during read")
                with suppress(BlockingIOError, ssl.SSLWantReadError):
                    data += self._receive(length - len(data))
        return bytes(data)

    def _read_header(self, timeout: float) -> Any:
        buffer = self._read_buffer
        if buffer is None:
            return super()._read_header(timeout)
        end = 4 + _INT.unpack_from(buffer)[0]
        with memoryview(buffer) as view:  # copied once, as a reply may have megabytes
            body = bytes(view[4:end])
        del buffer[:end]
        header, offset = ReplyHeader.deserialize(body, 0)
        if header.xid == AUTH_XID:  # kazoo would take it for the reply to the oldest request
            raise RuntimeError("a reply to credentials, which were not sent")
        if header.xid == PING_XID and self._pings_sent:
            self.client.on_heartbeat(self._pings_sent.popleft())
        return (header if header.err in EXCEPTIONS else header._replace(err=_UNKNOWN_ERROR)), body, offset

    def zk_loop(self) -> None:
        try:
            super().zk_loop()
        except Exception as error:  # a refused SASL handshake, an unknown reply: the next call connects again
            self.client.last_error = error
        finally:
            try:
                self.close()
            finally:  # always: otherwise no call would connect again
                self.client.on_ended(self.client)
