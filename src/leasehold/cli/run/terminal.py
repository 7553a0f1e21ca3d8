"""The controlling terminal: which process group reads from it and gets its Ctrl-C.

The child has its own process group, and a terminal has one foreground group at a time. If stdin and stdout are both the
terminal, the child gets it at once. Otherwise (`leasehold run j -- report | less`) another process of the pipeline may
need it: then the child gets it when it first needs it, which shows as a stop by SIGTTIN or SIGTTOU.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

from leasehold.cli.console import is_terminal


class Terminal:
    def __init__(self) -> None:
        self._fd: int | None
        try:
            self._fd = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:  # no controlling terminal: cron, a container, a service
            self._fd = None

    @property
    def stdio_is_tty(self) -> bool:
        return is_terminal(sys.stdin, sys.stdout)

    def in_foreground(self) -> bool:
        """Whether this process's own group is in the foreground."""
        return self._foreground() == os.getpgrp()

    def is_foreground_group(self, group: int) -> bool:
        return self._foreground() == group

    def give_to(self, group: int) -> bool:
        """Make the group the foreground group, if this process is in the foreground now."""
        return self.in_foreground() and self._set_foreground(group)

    def take_back(self, group: int) -> None:
        if self.is_foreground_group(group):
            self._set_foreground(os.getpgrp())

    def _foreground(self) -> int | None:
        if self._fd is None:
            return None
        try:
            return os.tcgetpgrp(self._fd)
        except OSError:  # hung up
            return None

    def _set_foreground(self, group: int) -> bool:
        assert self._fd is not None  # noqa: S101  # for the type checker
        # tcsetpgrp from the background stops the caller by SIGTTOU, unless that signal is blocked.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        try:
            with suppress(OSError):
                os.tcsetpgrp(self._fd, group)
                return True
            return False
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
