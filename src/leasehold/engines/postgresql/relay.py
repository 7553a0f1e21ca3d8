"""Between libpq and the server: passes on what both send, and bounds what libpq receives.

By itself libpq reads as long as a server sends, and buffers a message however long it is; there is no option for a
limit, and one call of `consume_input` may take seconds and gigabytes. So libpq's descriptor is replaced by one end of a
socket pair. libpq gets only what `receive` writes to the other end.

libpq also keeps parameters and notifications that a server sends unasked, in five times as much memory, until the
session ends. So the bound is for all that a session receives, without the values and notifications that were taken from
libpq. When little is left, the session is replaced. With an honest server that takes tens of thousands of calls.
"""

from __future__ import annotations

import os
import socket
from array import array
from contextlib import suppress
from fcntl import ioctl
from termios import FIONREAD
from typing import Final
from weakref import finalize

from psycopg import pq

_READ_SIZE: Final = 8192  # bytes: libpq always has room for so many
_SEND_SIZE: Final = 65_536
_MAX_KEPT: Final = 1 << 20  # bytes
MIN_LEFT: Final = 1 << 18  # bytes: for any reply but the rows of `inspect`


class ReplyTooLong(OSError):
    """The server sent more than any reply takes."""


class Relay:
    """Begins with `attach`; until then libpq uses its socket directly."""

    def __init__(self, pg: pq.abc.PGconn) -> None:
        self._pg = pg
        self._server: socket.socket | None = None  # the socket that libpq opened
        self._libpq: socket.socket | None = None  # our end of the pair
        self._pair_inode = 0
        self._outgoing = b""  # from libpq, not sent yet
        self.bytes_left = _MAX_KEPT + MIN_LEFT  # that the server may send; what was taken from libpq is given back
        self.at_end = False  # the server has closed the connection
        self._out_of_step = False  # libpq has received what belongs to no request

    def attach(self) -> None:
        """Take over libpq's connection to the server, once it is made."""
        if self._server is not None:
            if os.fstat(self._pg.socket).st_ino == self._pair_inode:
                return
            self.close()  # libpq has connected again, on a new socket
        theirs, self._libpq = socket.socketpair()
        self._server = socket.socket(fileno=os.dup(self._pg.socket))
        for sock in (theirs, self._libpq, self._server):
            sock.setblocking(False)
        self._pair_inode = os.fstat(theirs.fileno()).st_ino
        os.dup2(theirs.fileno(), self._pg.socket, inheritable=False)
        theirs.close()
        for sock in (self._libpq, self._server):
            finalize(self, sock.close).atexit = False  # a client may be dropped without close()
        self._outgoing, self.bytes_left, self.at_end = b"", _MAX_KEPT + MIN_LEFT, False

    @property
    def attached(self) -> bool:
        return self._server is not None

    @property
    def server(self) -> socket.socket:
        """The connection to the server. OSError: it is closed."""
        if self._server is None:
            raise ConnectionResetError("the connection is closed")
        return self._server

    def is_in_step(self) -> bool:
        """Whether the server has sent nothing but the replies, and has not closed the connection. libpq would take what
        came with the last reply for the result of the next statement, but discards it with a notice when it is asked
        while no statement is under way."""
        if self._server is None:
            return False
        try:
            self._server.recv(1, socket.MSG_PEEK)
            return False
        except BlockingIOError:
            self._pg.is_busy()
            return not (self._out_of_step or (self._pg.ssl_in_use and self.has_unread()))
        except OSError:
            return False

    def on_notice(self, code: object) -> None:
        """`code`: the SQLSTATE of a notice. None: it is from libpq itself, which has received what no server sends
        then."""
        if code is None:
            self._out_of_step = True

    def send(self) -> bool:
        """Send what libpq has written. False: the socket is full, and the rest has to wait."""
        server, libpq = self._server, self._libpq
        if server is None or libpq is None:
            return True
        is_last = False  # libpq has written no more than what was just read: that saves looking again
        try:
            while True:
                if not self._outgoing:
                    try:
                        self._outgoing = libpq.recv(_SEND_SIZE)
                    except BlockingIOError:
                        return True
                    if not self._outgoing:
                        return True
                    is_last = len(self._outgoing) < _SEND_SIZE
                try:
                    sent = server.send(self._outgoing)
                except BlockingIOError:
                    return False
                self._outgoing = self._outgoing[sent:]
                if is_last and not self._outgoing:
                    return True
        except OSError:  # an end of the connection is noticed by the next `receive`
            return True

    def receive(self) -> None:
        """Let libpq have a part of what the server has sent. Raises `ReplyTooLong`."""
        server, libpq = self._server, self._libpq
        if server is None or libpq is None:
            raise ConnectionResetError("the connection is closed")
        try:
            data = server.recv(_READ_SIZE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:  # libpq finds out and says why
            self.at_end = True
            with suppress(OSError):
                libpq.shutdown(socket.SHUT_WR)
            return
        self.bytes_left -= len(data)
        if self.bytes_left < 0:
            raise ReplyTooLong("the server sent too long a reply")
        with suppress(BrokenPipeError):  # libpq has closed its end
            libpq.sendall(data)

    def has_unread(self) -> bool:
        """Whether libpq has not read all that it was given."""
        unread = array("i", [0])
        ioctl(self._pg.socket, FIONREAD, unread)
        return unread[0] > 0

    def close(self) -> None:
        """Close our descriptors. Sends nothing, so it may be called in a forked child."""
        for sock in (self._server, self._libpq):
            if sock is not None:
                sock.close()
        self._server = self._libpq = None
