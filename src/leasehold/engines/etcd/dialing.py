"""A socket to a member of the cluster, with or without TLS, by a deadline. Blocks: it is called aside."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Sequence
from typing import TypeAlias

# In memory, with what came in and what is to go out: no SSL socket may be read and written by two threads at once.
Tls: TypeAlias = "tuple[ssl.SSLObject, ssl.MemoryBIO, ssl.MemoryBIO]"


def reach(numbers: Sequence[str], port: int, now: Callable[[], float], deadline: float) -> socket.socket:
    """The first of a host's numbers that answers, each in its share of the time: one that is silent must not use up all
    of it. Raises OSError."""
    error: OSError = ConnectionRefusedError("it has no address")
    for place, number in enumerate(numbers):
        share = (deadline - now()) / (len(numbers) - place)
        try:
            return socket.create_connection((number, port), max(share, 0.001))
        except OSError as refused:
            error = refused
    raise error


def shake_hands(
    made: socket.socket, context: ssl.SSLContext, host: str, now: Callable[[], float], deadline: float
) -> Tls:
    """Raises OSError."""
    inward, outward = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(inward, outward, server_hostname=host)
    while True:
        try:
            tls.do_handshake()
            break
        except ssl.SSLWantReadError:
            made.settimeout(max(deadline - now(), 0.001))
            made.sendall(outward.read())
            made.settimeout(max(deadline - now(), 0.001))
            if not (data := made.recv(65_536)):
                raise ConnectionResetError("closed during the TLS handshake") from None
            inward.write(data)
    made.sendall(outward.read())
    if tls.selected_alpn_protocol() != "h2":
        raise ConnectionError("the other side does not speak HTTP/2")
    return tls, inward, outward
