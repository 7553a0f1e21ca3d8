"""Folders for the data of servers, in memory where there is room, and their removal, also after runs that were killed.

A process has one folder, on which it holds a flock while it lives. `sweep` removes the folders without one: the kernel
releases it however the process ends, and does not mistake another process with the same number for it.
"""

from __future__ import annotations

import atexit
import fcntl
import glob
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from typing import Final

MEMORY: Final = "/dev/shm"  # noqa: S108  # a folder in memory (Linux)
_ROOM: Final = 4 << 30  # bytes: enough for the data of all servers of all test processes
_PREFIX: Final = "lh-run-"
_PARENTS: Final = [MEMORY, tempfile.gettempdir()]  # where to create folders: in the first one that has room
_NEW: Final = 60.0  # seconds: in these a process locks the folder that it has created


def scratch() -> str:
    """A new folder, removed at exit. Its path is short, because some servers put unix sockets in it. In memory where
    there is room: databases call fsync for every grant, and no test takes the power away."""
    parent = next((parent for parent in _PARENTS[:-1] if _has_room(parent)), _PARENTS[-1])
    folder = tempfile.mkdtemp(prefix="", dir=_own_folder(parent))
    os.chmod(folder, 0o711)  # a server that runs as another user must reach its folder  # noqa: S103
    return folder


def keep_on_disk() -> None:
    """From now on, create folders on the disk only: in a measurement a commit has to wait for it."""
    del _PARENTS[:-1]


@cache
def _own_folder(parent: str) -> str:
    """The folder of this process. It stays locked because nothing closes the descriptor."""
    folder = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
    os.chmod(folder, 0o711)  # noqa: S103
    fcntl.flock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_EX)
    atexit.register(_remove_if_own, folder, os.getpid())
    return folder


def _remove_if_own(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # and not a child that was forked
        shutil.rmtree(folder, ignore_errors=True)


def _has_room(folder: str) -> bool:
    with suppress(OSError):
        return os.access(folder, os.W_OK) and min(shutil.disk_usage(folder).free, _free_memory()) > _ROOM
    return False


def _free_memory() -> int:
    """Bytes. A folder in memory may be as large as all of the memory, however little of it is left."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def sweep(parents: Iterable[str] = (MEMORY, tempfile.gettempdir())) -> None:
    """Remove what processes of earlier runs have left that were killed."""
    for parent in parents:
        for folder in glob.glob(os.path.join(glob.escape(parent), f"{_PREFIX}*")):
            with suppress(OSError):  # locked: its process lives; of another user; or gone
                _remove_if_unlocked(folder)
    for pid in _pids_of_fake_clocks():
        if not os.path.exists(f"/proc/{pid}"):
            remove_fake_clock(pid)


def _remove_if_unlocked(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        seen = os.fstat(descriptor)
        if seen.st_uid == os.getuid() and time.time() - seen.st_mtime > _NEW:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def _pids_of_fake_clocks() -> set[int]:
    """Of the processes, dead or alive, whose clock libfaketime has set: each creates two files."""
    names = os.listdir(MEMORY) if os.path.isdir(MEMORY) else []
    return {int(found[1]) for name in names if (found := re.fullmatch(r"(?:sem\.)?faketime_(?:sem|shm)_(\d+)", name))}


def remove_fake_clock(pid: int) -> None:
    """Remove the files of libfaketime in a process that was killed, and so could not remove them itself."""
    for name in (f"faketime_shm_{pid}", f"sem.faketime_sem_{pid}"):
        with suppress(OSError):
            os.unlink(os.path.join(MEMORY, name))
