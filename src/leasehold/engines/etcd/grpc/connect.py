"""A socket to a member of the cluster, with or without TLS, by a deadline. Blocks: it is called aside."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Sequence
from typing import TypeAlias

# In memory, with what came in and what is to go out: no SSL socket may be read and written by two threads at once.
Tls: TypeAlias = "tuple[ssl.SSLObject, ssl.MemoryBIO, ssl.MemoryBIO]"


def open_socket(addresses: Sequence[str], port: int, now: Callable[[], float], deadline: float) -> socket.socket:
    """The first of a host's numbers that answers, each in its share of the time: one that is silent must not use up all
    of it. Raises OSError."""
    error: OSError = ConnectionRefusedError("it has no address")
    for index, address in enumerate(addresses):
        timeout = (deadline - now()) / (len(addresses) - index)
        try:
            return socket.create_connection((address, port), max(timeout, 0.001))
        except OSError as refused:
            error = refused
    raise error


def tls_handshake(
    sock: socket.socket, context: ssl.SSLContext, host: str, now: Callable[[], float], deadline: float
) -> Tls:
    """Raises OSError."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname=host)
    while True:
        try:
            tls.do_handshake()
            break
        except ssl.SSLWantReadError:
            sock.settimeout(max(deadline - now(), 0.001))
            sock.sendall(outgoing.read())
            sock.settimeout(max(deadline - now(), 0.001))
            if not (data := sock.recv(65_536)):
                raise ConnectionResetError("closed during the TLS handshake") from None
            incoming.write(data)
    sock.sendall(outgoing.read())
    if tls.selected_alpn_protocol() != "h2":
        raise ConnectionError("the other side does not speak HTTP/2")
    return tls, incoming, outgoing
