"""Marks in a file, under its flock: for the processes of one machine.

One record of 32 bytes for each slot, the first for locks. A record never crosses a sector and is written in place, so
that it is there whole or not at all, and the flock, which belongs to the file and not to its name, stays one lock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from leasehold.errors import ConfigError, Unavailable
from leasehold.fences.rules import NO_TOKEN, Pass, Shown, check_token, parse_highest_token

try:
    import fcntl
except ImportError:  # pragma: no cover  # Windows
    raise ConfigError("file fences need POSIX file locks (flock), which this system does not have") from None

_RECORD_SIZE: Final = 32
_MIN_PAUSE, _MAX_PAUSE = 0.001, 0.05  # between two looks at a lock that is taken


class TokenFile:
    """The marks of one resource. Not for NFS, where flock and fsync promise less."""

    def __init__(self, path: str) -> None:
        self.path = path

    @contextmanager
    def locked(self, wait: float) -> Iterator[int]:
        """The file's descriptor, alone with it. Raises `Unavailable` when somebody else keeps it for `wait` seconds:
        a writer that was stopped in the middle keeps it, and so nobody slips in behind its check."""
        deadline, pause = time.monotonic() + wait, _MIN_PAUSE
        while (fd := self.try_lock()) is None:
            if (remaining := deadline - time.monotonic()) <= 0:
                raise Unavailable(f"another process keeps {self.path} locked for {wait:g} s: is it stopped?")
            time.sleep(min(pause, remaining))
            pause = min(2 * pause, _MAX_PAUSE)
        try:
            yield fd
        finally:
            unlock(fd)

    def try_lock(self) -> int | None:
        """The descriptor, locked until it is closed, or None when another has it. Never waits."""
        while True:
            fd = self._open()
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _same_file(fd, self.path):
                    return fd
            except BlockingIOError:
                os.close(fd)
                return None
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # it was removed while we waited for it: lock the one that is there now

    def check_and_raise(self, fd: int, lease: Shown, token_info: Pass, resource: str) -> None:
        """Compare and raise the mark; it is on the disk when this returns, before whatever it lets through."""
        offset = _RECORD_SIZE * (0 if token_info.slot is None else 1 + token_info.slot)
        highest_token = _parse_record(os.pread(fd, _RECORD_SIZE, offset), self.path)
        new_highest = check_token(lease, token_info, highest_token, resource)
        if new_highest != highest_token:
            os.pwrite(fd, b"%31d\n" % new_highest, offset)
            os.fsync(fd)
        if (
            highest_token == NO_TOKEN
        ):  # whoever made the file may not have come so far: what is forgotten with it is the mark
            sync_folder(os.path.dirname(self.path))

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(self.path, flags)
        except FileNotFoundError:
            return os.open(self.path, flags | os.O_CREAT, 0o666)  # less the umask, as any file


def _parse_record(record: bytes, path: str) -> int:
    text = record.strip(b"\0 \n")
    if not text:
        return NO_TOKEN
    return parse_highest_token(text if len(record) == _RECORD_SIZE else b"half of one", path)


def unlock(fd: int) -> None:
    """Let go, and close. Closing alone would not do: a child forked meanwhile has the descriptor, and so the lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def _same_file(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def sync_folder(folder: str) -> None:
    """Have the names in a folder on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
