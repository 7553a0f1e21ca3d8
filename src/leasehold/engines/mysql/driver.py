"""PyMySQL's connections, safe from hosts that pose as the server: for the engine's logins and for records.

By itself PyMySQL restarts its timeout with every byte, reads whatever a server sends, sends a password in clear text to
any server that asks, and asks the terminal for the password of an encrypted key.
"""

from __future__ import annotations

import socket
import ssl
import time
from typing import Any, Final

import pymysql
from pymysql.constants import CLIENT, CR

from leasehold.engines.mysql.url import MyTarget
from leasehold.runtime.net.tls_socket import TlsSocket
from leasehold.runtime.polling import POLLIN, new_poll

_CLEAR_TEXT_PLUGINS: Final = (b"mysql_clear_password", b"dialog")
_MAX_HANDSHAKE: Final = 1 << 20  # bytes, certificates not included
_MIN_TIMEOUT: Final = 0.001  # seconds
_READ_COST: Final = 64  # bytes that each read counts as at least: a packet takes so much memory, even if it is empty


def _unverified_tls() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


# One for all handshakes. OpenSSL makes a context under a lock that a fork does not release: if one thread of the parent
# made a context at the moment of the fork, the child would wait for that lock for ever when it makes its own.
_UNVERIFIED_TLS: Final = _unverified_tls()


class _TlsInMemory:
    """What PyMySQL uses of a context. It also wraps the socket of the session."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context

    def wrap_socket(self, sock: socket.socket, server_hostname: str) -> TlsSocket:
        wrapped = TlsSocket(sock, self._context, server_hostname)
        wrapped.shake_hands(wrapped.gettimeout() or _MIN_TIMEOUT)
        return wrapped


class SafeConnection(pymysql.Connection):  # type: ignore[misc]
    """A connection that neither waits beyond its deadline nor reads more than its limit. `allow` sets both, also before
    `connect`.

    If the URL has no TLS options, PyMySQL uses TLS when the server offers it, without verifying the certificate.
    Loading all the certificate authorities of the system for that would take nine tenths of a handshake's time."""

    _deadline = 0.0
    _bytes_left = 0
    _needs_tls = False  # the URL has TLS options

    def allow(self, seconds: float, most_bytes: int = _MAX_HANDSHAKE) -> None:
        """How long the next statements, or the handshake, may take in all, and how much the server may send."""
        self._deadline, self._bytes_left = time.monotonic() + seconds, most_bytes

    def _create_ssl_ctx(self, named: Any) -> Any:
        self._needs_tls = bool(named)
        # Without a password, OpenSSL would prompt for that of an encrypted key on the terminal, and wait for ever.
        return _TlsInMemory(super()._create_ssl_ctx({"password": "", **named}) if named else _UNVERIFIED_TLS)

    def _request_authentication(self) -> None:
        if self._needs_tls and not self.server_capabilities & CLIENT.SSL:
            raise pymysql.OperationalError(
                CR.CR_SSL_CONNECTION_ERROR,
                "the server does not offer TLS, which the URL asks for (ssl_ca=, ssl_cert=): turn TLS on at the server",
            )
        super()._request_authentication()

    def _process_auth(self, plugin_name: bytes, *args: Any, **kwargs: Any) -> Any:
        """Any host on the way can ask for this, whatever the server itself would accept."""
        if plugin_name in _CLEAR_TEXT_PLUGINS and not self._secure and self._sock.family != socket.AF_UNIX:
            raise pymysql.OperationalError(
                CR.CR_AUTH_PLUGIN_CANNOT_LOAD,
                "the server asks for the password in clear text, which is sent over TLS only: add ssl_ca= to the URL",
            )
        return super()._process_auth(plugin_name, *args, **kwargs)

    def is_in_step(self) -> bool:
        """Whether the server has sent nothing since its last reply: PyMySQL would take it for the next one."""
        if isinstance(self._sock, TlsSocket):
            return self._sock.is_quiet()
        poll = new_poll()
        poll.register(self._sock, POLLIN)
        return not poll.poll(0)

    def _execute_command(self, *args: Any) -> None:
        if self._sock is not None and not self.is_in_step():
            self._force_close()
            text = "the server closed the connection or sent a reply without a request"
            raise pymysql.OperationalError(CR.CR_SERVER_LOST, text)
        super()._execute_command(*args)

    def _read_bytes(self, num_bytes: int) -> bytes:
        self._bytes_left -= num_bytes + _READ_COST
        if self._bytes_left < 0:
            self._force_close()
            raise pymysql.OperationalError(CR.CR_MALFORMED_PACKET, "the server's reply is too long")
        parts, left = [], num_bytes
        try:
            while left:
                self._set_timeout()
                if not (data := self._rfile.read1(left)):
                    raise ConnectionResetError("the server closed the connection")
                parts.append(data)
                left -= len(data)
        except OSError as error:
            self._force_close()
            text = f"Lost connection to MySQL server during query ({error})"
            raise pymysql.OperationalError(CR.CR_SERVER_LOST, text) from error
        except BaseException:  # the rest of the reply is still to come
            self._force_close()
            raise
        return b"".join(parts)

    def _write_bytes(self, data: bytes) -> None:
        try:
            self._set_timeout()
            self._sock.sendall(data)
        except OSError as error:
            self._force_close()
            text = f"MySQL server has gone away ({error})"
            raise pymysql.OperationalError(CR.CR_SERVER_GONE_ERROR, text) from error

    def _set_timeout(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._sock.settimeout(left)


def new_socket(target: MyTarget, address: str) -> socket.socket:
    """For one of the target's addresses."""
    family = socket.AF_UNIX if target.path else socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.socket(family)


def connect_socket(sock: socket.socket, target: MyTarget, address: str, seconds: float) -> None:
    sock.settimeout(max(_MIN_TIMEOUT, seconds))
    sock.connect(target.path or (address, target.port))
    if target.path:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
