"""Connect to a cluster member by a deadline: HTTP/2 over TLS with ALPN `h2` (RFC 9113, sections 3.2 and 9.2), or over
plain TCP by prior knowledge (section 3.3). Blocks, so under asyncio it runs on a worker thread."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Sequence

from leasehold.runtime.net.tls_socket import TlsMemory


def open_socket(addresses: Sequence[str], port: int, now: Callable[[], float], deadline: float) -> socket.socket:
    """Connect to the first address that accepts. Each gets its share of the time, so that a silent one cannot use up
    all of it. Raises OSError."""
    error: OSError = ConnectionRefusedError("the host has no address")
    for index, address in enumerate(addresses):
        if (left := deadline - now()) <= 0:
            raise TimeoutError("could not connect in time")
        try:
            return socket.create_connection((address, port), left / (len(addresses) - index))
        except OSError as refused:
            error = refused
    raise error


def tls_handshake(
    sock: socket.socket, context: ssl.SSLContext, host: str, now: Callable[[], float], deadline: float
) -> TlsMemory:
    """In memory: two threads must not read and write one SSL socket at once. Raises OSError, even if the server does
    not negotiate HTTP/2."""
    memory = TlsMemory.begin(context, host)
    tls, incoming, outgoing = memory
    while True:
        try:
            tls.do_handshake()
            break
        except ssl.SSLWantReadError:
            if now() >= deadline:  # a server can send messages without end that OpenSSL ignores
                raise TimeoutError("the TLS handshake did not end in time") from None
            sock.settimeout(max(deadline - now(), 0.001))
            sock.sendall(outgoing.read())
            sock.settimeout(max(deadline - now(), 0.001))
            if not (data := sock.recv(65_536)):
                raise ConnectionResetError("closed during the TLS handshake") from None
            incoming.write(data)
    sock.sendall(outgoing.read())
    if tls.selected_alpn_protocol() != "h2":
        raise ConnectionError("the server does not support HTTP/2")
    return memory
