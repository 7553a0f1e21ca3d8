"""Signals as values: raised while nothing runs yet, queued for one loop to read once the child does.

The queue is the interpreter's own wake-up socket, so that a signal, a child's end and a lost lease all end the same
`select`. No thread is needed, and no handler does anything that could be interrupted half way.
"""

from __future__ import annotations

import select
import signal
import socket
from types import FrameType
from typing import Final

# To the child's whole group, as a terminal would: a signal that reached a shell alone would leave its work running.
FORWARDED_TO_GROUP: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGWINCH)
TERMINATING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # of those, what asks for an end
# To the child alone: these mean what the program says they mean, and end every process that says nothing.
FORWARDED_TO_CHILD: Final = (signal.SIGUSR1, signal.SIGUSR2)
HANDLED_HERE: Final = (signal.SIGCHLD, signal.SIGTSTP, signal.SIGCONT)

WOKEN: Final = 0  # not a signal: somebody called `wake`


class Interrupted(BaseException):
    """A signal that ends the program came while it was safe to go. Not an Exception: nobody is to swallow it."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        super().__init__(f"signal {signum}")


def raise_on_signals() -> None:
    """Leave by an exception, so that a claim in line is taken back instead of lapsing (E7). For the main thread."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # `nohup`, and jobs a script put in the background
            signal.signal(signum, _raise)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited as ignored, it would hide how the child ended


def _raise(signum: int, _frame: FrameType | None) -> None:
    raise Interrupted(signum)


class SignalQueue:
    """From `open` on, signals are read here and nowhere else."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def open(self) -> None:
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for signum in (*FORWARDED_TO_GROUP, *FORWARDED_TO_CHILD, *HANDLED_HERE):
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, _already_queued)

    def close(self) -> None:
        """The child is gone: what comes now finds a program that ends anyway, and is dropped."""
        signal.set_wakeup_fd(-1)
        self._reader.close()
        self._writer.close()

    def wake(self) -> None:
        """End the `read` under way, or the next one. From any thread."""
        try:
            self._writer.send(bytes([WOKEN]))
        except OSError:  # full: it wakes anyway; or closed: nobody is left to wake
            return

    def read(self, seconds: float) -> list[int]:
        """The signals that came, after `seconds` at the latest."""
        select.select([self._reader], [], [], max(0.0, seconds))
        try:
            return list(self._reader.recv(4096))
        except BlockingIOError:
            return []


def _already_queued(_signum: int, _frame: FrameType | None) -> None:
    """The interpreter has written the number to the wake-up socket already."""
