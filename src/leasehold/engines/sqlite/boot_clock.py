"""This machine, as far as a file of leases must know it: a clock, and whether two processes read the same one."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from leasehold.errors import Unavailable

_EXHAUSTED_ERRNOS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def seconds_since_boot() -> float:
    """The same instant for every process of the machine: never steps, counts suspend, begins anew at each boot."""
    return time.clock_gettime(time.CLOCK_BOOTTIME if sys.platform == "linux" else time.CLOCK_MONOTONIC)


@dataclass(frozen=True, slots=True)
class BootClock:
    """`boot` and `time_namespace` together name one running clock; `machine` tells a restart from another machine."""

    machine: str
    boot: str
    time_namespace: str  # of time: a container may have one in which the clock is shifted
    now: Callable[[], float] = seconds_since_boot
    wall: Callable[[], float] = time.time  # a floor for tokens, nothing else

    @classmethod
    def of_this_machine(cls) -> BootClock:
        if sys.platform == "linux":
            return cls(
                _read_text("/etc/machine-id") or _read_text("/var/lib/dbus/machine-id"),
                _read_text("/proc/sys/kernel/random/boot_id"),
                _read_link("/proc/self/ns/time"),
            )
        return cls(
            _command_output("sysctl", "-n", "kern.uuid"), _command_output("sysctl", "-n", "kern.bootsessionuuid"), ""
        )

    @property
    def clock_id(self) -> str:
        """Two processes with one stamp agree on the time."""
        return f"{self.boot} {self.time_namespace}"


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace").strip()
    except OSError as error:
        if error.errno in _EXHAUSTED_ERRNOS:  # it is there: taken for another machine, we would shut everybody else out
            raise Unavailable(f"{path} cannot be read now: {error.strerror}", engine="sqlite") from error
        return ""  # containers may lack one; the boot id alone then decides


def _read_link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""  # a kernel without time namespaces


def _command_output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
