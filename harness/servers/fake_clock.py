"""A server clock that a test can set: the library of the Debian package faketime, and the file it reads."""

from __future__ import annotations

import glob
import os
from typing import Final

_FAKETIME: Final = "/usr/lib/*/faketime/libfaketime.so.1"


def is_available() -> bool:
    return bool(glob.glob(_FAKETIME))


class FakeClock:
    def __init__(self, path: str) -> None:
        self._path = path

    def command(self) -> list[str]:
        """The prefix of a server's command. It must run as the server's user, because the library creates a semaphore
        that belongs to its creator."""
        if not os.path.exists(self._path):
            self.set_offset(0)
        how = (f"FAKETIME_TIMESTAMP_FILE={self._path}", "FAKETIME_NO_CACHE=1", "DONT_FAKE_MONOTONIC=1")
        return ["env", f"LD_PRELOAD={glob.glob(_FAKETIME)[0]}", *how]

    def set_offset(self, seconds: float) -> None:
        """Set the clock this many seconds ahead of the true time."""
        with open(self._path, "w", encoding="ascii") as clock:
            clock.write(f"{seconds:+f}")
        os.chmod(self._path, 0o644)
