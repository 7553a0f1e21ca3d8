"""A process that kills the process group of CMD if the wrapper dies, even by `kill -9`.

The kernel kills CMD itself with its parent (`child.py`), but not the processes that CMD started: they would keep
working at the same time as the next holder. So a second child reads from a pipe whose other end only the wrapper has.
A byte means that the run is over. End of file without one means that the wrapper died, and the group of CMD is killed.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import Final, NoReturn

_DONE: Final = b"."
_DESCRIPTORS: Final = 4096  # more than this process has open so early


class OrphanKiller:
    def __init__(self, group: int) -> None:
        """Create it before any thread starts, and after CMD's process, which must not inherit the pipe."""
        reader, self._writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _watch(group, reader)
        os.close(reader)

    def dismiss(self) -> None:
        """The run is over, or CMD never ran: end without killing anything. Harmless if repeated."""
        if self._writer < 0:
            return
        with suppress(BrokenPipeError):  # it was killed
            os.write(self._writer, _DONE)
        os.close(self._writer)
        self._writer = -1
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def _watch(group: int, reader: int) -> NoReturn:
    """In the orphan killer: close everything inherited from the wrapper but the pipe, and wait."""
    try:
        os.setsid()  # no Ctrl-C and no hang-up here: those are for the wrapper
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        os.dup2(reader, 0)
        os.closerange(1, _DESCRIPTORS)
        if not os.read(0, 1):
            os.killpg(group, signal.SIGKILL)
    finally:
        os._exit(0)
