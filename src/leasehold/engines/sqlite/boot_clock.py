"""The clock of this machine, and whether two processes read the same one."""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from leasehold.errors import Unavailable

_EXHAUSTED_ERRNOS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


# The same instant for every process of the machine. Never steps, counts suspend, restarts at each boot.
seconds_since_boot: Final = partial(
    time.clock_gettime, time.CLOCK_BOOTTIME if sys.platform == "linux" else time.CLOCK_MONOTONIC
)


class BootClock:
    """`boot` and `time_namespace` together identify one running clock. `machine` distinguishes a reboot from another
    machine."""

    def __init__(
        self,
        machine: str,
        boot: str,
        time_namespace: str,  # a container may have one in which the clock is shifted
        now: Callable[[], float] = seconds_since_boot,
        wall: Callable[[], float] = time.time,  # only a lower bound for tokens
    ) -> None:
        self.machine, self.boot, self.time_namespace, self.now, self.wall = machine, boot, time_namespace, now, wall
        self.clock_id = f"{boot} {time_namespace}"  # two processes with the same id read the same clock

    @classmethod
    def of_this_machine(cls) -> BootClock:
        if sys.platform == "linux":
            return cls(
                _read_text("/etc/machine-id") or _read_text("/var/lib/dbus/machine-id"),
                _read_text("/proc/sys/kernel/random/boot_id"),
                _read_link("/proc/self/ns/time"),
            )
        return cls(_sysctl("kern.uuid"), _sysctl("kern.bootsessionuuid"), "")


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace").strip()
    except OSError as error:
        if error.errno in _EXHAUSTED_ERRNOS:  # without this id we would look like another machine, and block all others
            raise Unavailable(f"cannot read {path} now: {error.strerror}", engine="sqlite") from error
        return ""  # containers may lack a machine id; then the boot id alone decides


def _read_link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""  # a kernel without time namespaces


def _sysctl(name: str) -> str:
    import subprocess  # only here: Linux does without

    command = ("/usr/sbin/sysctl", "-n", name)  # where macOS has it, whatever $PATH says
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)  # noqa: S603  # fixed
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
