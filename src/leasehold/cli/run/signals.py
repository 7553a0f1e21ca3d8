"""Signals as exceptions before the child runs, and as values in a queue while it does.

The queue is the interpreter's wake-up socket, so a signal, the end of the child and a lost lease all end the same
`poll`. No thread is needed, and no handler does anything that could be interrupted half-way.
"""

from __future__ import annotations

import select
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

# To the child's process group, as a terminal does: if only a shell got it, the commands it started would keep running.
FORWARDED_TO_GROUP: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGWINCH)
TERMINATING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # these ask the program to end
# To the child only: their meaning is up to the program, and they kill every process that does not handle them.
FORWARDED_TO_CHILD: Final = (signal.SIGUSR1, signal.SIGUSR2)
HANDLED_HERE: Final = (signal.SIGCHLD, signal.SIGTSTP, signal.SIGCONT)

WOKEN: Final = 0  # not a signal: `wake` was called


class Interrupted(BaseException):
    """A terminating signal arrived while no child was running. Not an Exception, so that no handler swallows it."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        super().__init__(f"signal {signum}")


def raise_on_signals() -> None:
    """Raise `Interrupted` on signals, so that a queued claim is withdrawn before it expires (E7); at once if one has
    arrived since a queue was closed. Main thread only."""
    for signum in TERMINATING:
        if signal.getsignal(signum) is not signal.SIG_IGN:  # ignored by `nohup`, and for background jobs of a script
            signal.signal(signum, _raise)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if inherited as ignored, it would hide the child's exit status
    _raise_kept()


def _raise(signum: int, _frame: FrameType | None) -> None:
    _kept.append(signum)  # Python drops what is raised in a finalizer: then the program ends before CMD starts
    raise Interrupted(signum)


def _raise_kept() -> None:
    if _kept:
        raise Interrupted(_kept.pop(0))


@contextmanager
def held_back() -> Iterator[set[int | signal.Signals]]:
    """Signals that ask the program to end arrive only afterwards. For forks, and while modules are loaded: Python calls
    hooks then, and drops what a handler raises in one. Gives the mask to restore in a child, which a program would
    inherit."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, TERMINATING)
    try:
        yield mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class SignalQueue:
    """From `open` to `close`, all signals are queued here."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._poll = select.poll()  # `select` fails for descriptors above 1023
        self._poll.register(self._reader, select.POLLIN)
        self._writer.setblocking(False)

    def open(self) -> None:
        """Raises `Interrupted` if a signal has arrived that was to end the program, and did not."""
        _raise_kept()
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for signum in (*FORWARDED_TO_GROUP, *FORWARDED_TO_CHILD, *HANDLED_HERE):
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, _already_queued)

    def close(self) -> None:
        """The child has ended. Signals that ask the program to end are kept for `raise_on_signals`, which `elect` calls
        before its next term; all others, and those of a program that is about to exit, are dropped."""
        for signum in TERMINATING:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, _keep)
        signal.set_wakeup_fd(-1)
        _kept.extend(signum for signum in self.read(0.0) if signum in TERMINATING)
        self._reader.close()
        self._writer.close()

    def wake(self) -> None:
        """End the current `read`, or the next one. May be called from any thread."""
        try:
            self._writer.send(bytes([WOKEN]))
        except OSError:  # full, so `read` returns anyway; or closed, so there is no reader
            return

    def read(self, seconds: float) -> list[int]:
        """Wait up to `seconds`, and return the signals that arrived."""
        self._poll.poll(max(0.0, seconds) * 1000)
        try:
            return list(self._reader.recv(4096))
        except BlockingIOError:
            return []


_kept: Final[list[int]] = []


def _keep(signum: int, _frame: FrameType | None) -> None:
    _kept.append(signum)


def _already_queued(_signum: int, _frame: FrameType | None) -> None:
    """Do nothing: the interpreter has already written the number to the wake-up socket."""
