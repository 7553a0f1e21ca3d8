"""A process that kills the process group of CMD if the wrapper dies, even by `kill -9`.

The kernel kills CMD itself with its parent (`child.py`), but not the processes that CMD started: they would keep
working at the same time as the next holder. So a second child reads from a socket whose other end only the wrapper has.
A byte means that the run is over. End of file without one means that the wrapper died, and the group of CMD is killed.

Some engines free a name as soon as the process that holds it has ended: while a descriptor is open, the process lives.
The orphan killer gets a copy of that descriptor, and so the name is kept until the group of CMD is gone.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import suppress
from struct import Struct
from typing import Final, NoReturn

from leasehold.cli.run.signals import TERMINATING

_MESSAGE: Final = Struct("=cd")  # a kind, and seconds
_DONE: Final = b"."
_DESCRIPTOR: Final = b"+"  # comes with one, and with the ttl of the lease
_GROUP_POLL_INTERVAL: Final = 0.005  # the end of another process's children sends no signal here
_DESCRIPTORS: Final = 4096  # that this process may have, if the system does not list them


class OrphanKiller:
    def __init__(self, group: int) -> None:
        """Create it before any thread starts, with signals held back, and after CMD's process, which must not inherit
        the socket."""
        reader, self._writer = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            _watch(group, reader)
        reader.close()

    def keep_open(self, descriptor: int, ttl: float) -> None:
        """Keep a copy open until the group of CMD is gone, if the wrapper dies, but no longer than the lease lives."""
        with suppress(OSError):  # it was killed
            socket.send_fds(self._writer, [_MESSAGE.pack(_DESCRIPTOR, ttl)], [descriptor])

    def dismiss(self) -> None:
        """The run is over, or CMD never ran: end without killing anything. Harmless if repeated."""
        if self._writer.fileno() < 0:
            return
        with suppress(BrokenPipeError):  # it was killed
            self._writer.sendall(_MESSAGE.pack(_DONE, 0.0))
        self._writer.close()
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def _watch(group: int, reader: socket.socket) -> NoReturn:
    """In the orphan killer: close everything inherited from the wrapper but the socket, and wait."""
    try:
        os.setsid()  # no Ctrl-C and no hang-up here: those are for the wrapper
        for signum in TERMINATING:
            signal.signal(signum, signal.SIG_IGN)
        os.dup2(reader.fileno(), 0)
        os.closerange(1, _last_descriptor() + 1)
        ttl = 0.0
        with socket.socket(fileno=0) as wrapper:
            while message := socket.recv_fds(wrapper, _MESSAGE.size, 1)[0]:  # a descriptor stays open from now on
                kind, ttl = _MESSAGE.unpack(message)
                if kind == _DONE:
                    os._exit(0)
        # Until the group is gone: `killpg` raises ProcessLookupError then. Dead processes that no process waits for
        # stay in it, and so do those of another user (`-- sudo CMD`), which cannot be killed from here.
        end = time.monotonic() + ttl
        while True:
            with suppress(PermissionError):
                os.killpg(group, signal.SIGKILL)
            if time.monotonic() >= end:
                break
            time.sleep(_GROUP_POLL_INTERVAL)
    finally:
        os._exit(0)


def _last_descriptor() -> int:
    """The highest one that is open: a caller may pass on thousands. CMD starts once no process has the other end of its
    pipe."""
    try:
        return max(map(int, os.listdir("/dev/fd")))
    except OSError:
        return _DESCRIPTORS
