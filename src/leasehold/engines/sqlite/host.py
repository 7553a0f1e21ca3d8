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

_STARVED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def boot_clock() -> float:
    """The same instant for every process of the machine: never steps, counts suspend, begins anew at each boot."""
    return time.clock_gettime(time.CLOCK_BOOTTIME if sys.platform == "linux" else time.CLOCK_MONOTONIC)


@dataclass(frozen=True, slots=True)
class Host:
    """`boot` and `namespace` together name one running clock; `machine` tells a restart from another machine."""

    machine: str
    boot: str
    namespace: str  # of time: a container may have one in which the clock is shifted
    clock: Callable[[], float] = boot_clock
    wall: Callable[[], float] = time.time  # a floor for tokens, nothing else

    @classmethod
    def here(cls) -> Host:
        if sys.platform == "linux":
            return cls(
                _text("/etc/machine-id") or _text("/var/lib/dbus/machine-id"),
                _text("/proc/sys/kernel/random/boot_id"),
                _link("/proc/self/ns/time"),
            )
        return cls(_asked("sysctl", "-n", "kern.uuid"), _asked("sysctl", "-n", "kern.bootsessionuuid"), "")

    @property
    def stamp(self) -> str:
        """Two processes with one stamp agree on the time."""
        return f"{self.boot} {self.namespace}"


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace").strip()
    except OSError as error:
        if error.errno in _STARVED:  # it is there: taken for another machine, we would shut everybody else out
            raise Unavailable(f"{path} cannot be read now: {error.strerror}", engine="sqlite") from error
        return ""  # containers may lack one; the boot id alone then decides


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""  # a kernel without time namespaces


def _asked(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
