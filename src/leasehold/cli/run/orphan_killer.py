"""A process that outlives `kill -9`: it ends what CMD started, should the wrapper die without a word.

The kernel takes CMD itself along with its parent (`child.py`), but not what CMD started: that would work on beside the
next holder. So a second child waits at a pipe whose other end the wrapper alone has. A word on it means that all is
done; its end without one means that the wrapper is no more, and the group of CMD is killed.
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
        """To be made before there is any thread, and after CMD's process: that must not have the pipe."""
        reader, self._writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _watch(group, reader)
        os.close(reader)

    def dismiss(self) -> None:
        """All is done, or CMD never ran: kill nothing. Harmless if repeated."""
        if self._writer < 0:
            return
        with suppress(BrokenPipeError):  # somebody killed it
            os.write(self._writer, _DONE)
        os.close(self._writer)
        self._writer = -1
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def _watch(group: int, reader: int) -> NoReturn:
    """In the guard: hold on to nothing of the wrapper's but the pipe, and wait."""
    try:
        os.setsid()  # Ctrl-C and a hang-up are for the wrapper
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        os.dup2(reader, 0)
        os.closerange(1, _DESCRIPTORS)
        if not os.read(0, 1):
            os.killpg(group, signal.SIGKILL)
    finally:
        os._exit(0)
