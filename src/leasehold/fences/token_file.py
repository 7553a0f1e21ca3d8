"""Highest tokens in a file, protected by flock, for the processes of one machine.

The file has one record of 32 bytes for each slot; the first is for locks. A record never crosses a sector, so it is
written completely or not at all. It is written in place, because the flock belongs to the file and not to its name:
replacing the file would make two locks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from leasehold.errors import ConfigError, Unavailable
from leasehold.events import FenceKind
from leasehold.fences.rules import NO_TOKEN, LeaseLike, TokenInfo, check_token, parse_highest_token
from leasehold.files import open_folder

try:
    import fcntl
except ImportError:  # pragma: no cover  # Windows
    raise ConfigError("file fences need POSIX file locks (flock), which this system does not have") from None

_RECORD_SIZE: Final = 32
_MIN_PAUSE, _MAX_PAUSE = 0.001, 0.05  # between two attempts to lock


class TokenFile:
    """The highest tokens of one resource. Not for NFS, where flock and fsync promise less."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._folder, self._name = os.path.split(path)

    @contextmanager
    def locked(self, wait: float) -> Iterator[int]:
        """The file's descriptor, locked. Raises `Unavailable` if another process keeps it locked for `wait` seconds. A
        writer that is stopped half-way keeps the lock, so no other token can pass between its check and its write."""
        deadline, pause = time.monotonic() + wait, _MIN_PAUSE
        while (fd := self.try_lock()) is None:
            if (remaining := deadline - time.monotonic()) <= 0:
                raise Unavailable(f"another process has kept {self.path} locked for {wait:g} s: check if it is stopped")
            time.sleep(min(pause, remaining))
            pause = min(2 * pause, _MAX_PAUSE)
        try:
            yield fd
        finally:
            unlock(fd)

    def try_lock(self) -> int | None:
        """The descriptor, locked until it is closed; None if another process has the lock. Never waits."""
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
            os.close(fd)  # the file was removed or replaced before we locked it: lock the current one

    def check_and_raise(
        self, fd: int, lease: LeaseLike, token_info: TokenInfo, resource: str, fence: FenceKind | None
    ) -> None:
        """Compare and raise the highest token. It is on disk when this returns, before the fenced operation starts."""
        offset = _RECORD_SIZE * (0 if token_info.slot is None else 1 + token_info.slot)
        highest_token = _parse_record(os.pread(fd, _RECORD_SIZE, offset), self.path)
        new_highest = check_token(lease, token_info, highest_token, resource, fence)
        if new_highest != highest_token:
            os.pwrite(fd, b"%31d\n" % new_highest, offset)
            os.fsync(fd)
        # The process that created the file may have died before this line, and losing the file would lose the token.
        if highest_token == NO_TOKEN:
            with open_folder(self._folder) as folder:
                folder.sync()

    def _open(self) -> int:
        with open_folder(self._folder) as folder:
            return folder.open_file(self._name, os.O_RDWR, create=True)


def _parse_record(record: bytes, path: str) -> int:
    text = record.strip(b"\0 \n")
    if not text:
        return NO_TOKEN
    return parse_highest_token(text if len(record) == _RECORD_SIZE else b"half of one", path)


def unlock(fd: int) -> None:
    """Unlock and close. Closing is not enough: a child forked meanwhile has the descriptor too, and so the lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def _same_file(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
