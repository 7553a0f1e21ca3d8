"""A process tied to its parent: the kernel kills it when the parent dies, however that dies, and also while stopped."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def die_with_parent(parent_pid: int) -> None:
    """To be called in the child, by the process that `parent_pid` started; kept over exec. Linux alone can.

    What counts is the thread of the parent that started it: that one must live as long as the parent does.
    """
    if sys.platform != "linux":
        return
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the kernel could be asked
        os._exit(0)
