"""Hide what Python on Windows lacks, then run a program: `python windows.py PROGRAM`.

Not Windows itself: its sockets, files and clocks behave in other ways. It shows what is needed only by name.
"""

import asyncio  # noqa: F401  # first, with all that the standard library itself needs on this system
import http.client  # noqa: F401
import importlib.abc
import os
import select
import signal
import socket
import ssl  # noqa: F401
import subprocess  # noqa: F401
import sys
import tempfile  # noqa: F401
import time

MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "termios", "tty"}
ATTRIBUTES = {
    os: """chown fchmod fchown fork getegid geteuid getgid getpgid getpgrp getuid killpg mkfifo register_at_fork
        sched_getaffinity setsid uname O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK O_PATH""",
    select: "epoll poll POLLERR POLLHUP POLLIN POLLOUT",
    signal: """pthread_kill pthread_sigmask setitimer sigwait SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT
        SIGSTOP SIGTSTP SIGTTIN SIGTTOU SIGUSR1 SIGUSR2 SIGWINCH""",
    socket: "AF_UNIX",
    time: "clock_gettime CLOCK_BOOTTIME CLOCK_MONOTONIC",
}


class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def hide() -> None:
    make_pair, family = socket.socketpair, socket.AF_UNIX
    socket.socketpair = lambda *_: make_pair(family)  # asyncio's: Windows makes one of TCP
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, Hidden())
    for module, names in ATTRIBUTES.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    sys.platform = "win32"


if __name__ == "__main__":
    hide()
    exec(compile(sys.argv[1], "<program>", "exec"), {"__name__": "__main__"})  # noqa: S102
