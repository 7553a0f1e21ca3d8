"""Where an audit file ends: its last record, and what a crash left behind it."""

from __future__ import annotations

import errno
import fcntl
import gzip
import os
import time
from collections import deque
from contextlib import suppress
from typing import IO, Final, NamedTuple, cast

from leasehold.errors import ConfigError
from leasehold.files import Folder
from leasehold.telemetry.audit.chain import NO_HASH, AuditRecord, chain_name, decode, is_torn, read_lines, rotated_seq

_LOCK_SECONDS: Final = 2.0  # at most, for other writers: a suspended one must not hold up this process for ever


class Tail(NamedTuple):
    """Where the file ends."""

    inode: int
    size: int
    seq: int
    hash: str
    day: str  # of the first record: the file is rotated on the next
    torn: bytes | None = None  # bytes behind the last record; None: there are none
    ends_line: bool = True  # whether the last byte is a line end


def lock_file(fd: int, path: str) -> None:
    end = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise TimeoutError(errno.ETIMEDOUT, "another process keeps the file locked", path) from None
            time.sleep(0.001)


def read_tail(fd: int, size: int, key: bytes | None, path: str) -> Tail:
    """Where a file ends: its last record, and what a crash left behind it. Raises ConfigError if it ends otherwise."""
    chunk = 4096
    while True:
        start = max(0, size - chunk)
        data = os.pread(fd, size - start, start)
        begin = data.find(b"\n") + 1 if start else 0  # of the first whole line
        end = len(data)
        while end > begin:
            line_begin = data.rfind(b"\n", 0, end - 1) + 1
            line = data[line_begin:end].removesuffix(b"\n")
            if not is_torn(line):
                record = _check_record(decode(line), key, path)
                return Tail(0, size, record.seq, record.hash, _first_day(fd), _torn(data[end:]), data[-1:] == b"\n")
            end = line_begin
        if not start:
            return Tail(0, size, 0, NO_HASH, "", _torn(data), data[-1:] in (b"", b"\n"))
        chunk *= 4


def _torn(rest: bytes) -> bytes | None:
    return rest.removesuffix(b"\n") if rest else None


def _check_record(record: AuditRecord | None, key: bytes | None, path: str) -> AuditRecord:
    if record is None:
        raise ConfigError(f"the last line of {path} is not an audit record: name another file, or move this one away")
    if not record.is_genuine(key):
        raise ConfigError(
            f"the last record of {path} was changed, or sealed with another key or none: look at it with `leasehold "
            "audit verify`, pass the same key file, or move the file away"
        )
    return record


def _first_day(fd: int) -> str:
    record = decode(os.pread(fd, 4096, 0).partition(b"\n")[0])
    return "" if record is None else str(record.fields["at"])[:10]


def _last_record(folder: Folder, name: str, key: bytes | None) -> tuple[int, str]:
    """Number and hash of the last record in a file that was renamed."""
    path = os.path.join(folder.path, name)
    with open(folder.open_file(name, os.O_RDONLY), "rb") as file:
        if name.endswith(".gz"):
            with gzip.open(file) as unpacked:
                last = deque(read_lines(cast(IO[bytes], unpacked)), 1)
            record = _check_record(decode(last[0].text) if last else None, key, path)
            return record.seq, record.hash
        lock_file(file.fileno(), path)  # the process that wrote to it last may not be ready
        tail = read_tail(file.fileno(), os.fstat(file.fileno()).st_size, key, path)
    return tail.seq, tail.hash


def find_predecessor(folder: Folder, name: str, key: bytes | None) -> tuple[int, str]:
    """Number and hash of the last record before an empty file: in the newest file that was made of it by rotation. What
    other users may have put into the folder does not count."""
    rotated = []
    for other in os.listdir(folder.path):
        if other != name and chain_name(other)[1] == chain_name(name)[1]:
            with suppress(ConfigError):
                if (found := folder.find(other)) is not None:
                    folder.check_file(other, found)
                    rotated.append((rotated_seq(other) or 0, found.st_mtime_ns, other))
    return _last_record(folder, max(rotated)[-1], key) if rotated else (0, NO_HASH)
