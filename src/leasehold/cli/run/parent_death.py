"""Tie a process to its parent: when the parent dies, for any reason, the kernel kills it, even if it is stopped."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def die_with_parent(parent_pid: int) -> None:
    """Call it in a child of `parent_pid`; it stays in force over exec. Does nothing on systems other than Linux.

    The kernel watches the thread that forked the child: that thread must live as long as the parent does.
    """
    if sys.platform != "linux":
        return
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # the parent died before prctl took effect
        os._exit(0)
