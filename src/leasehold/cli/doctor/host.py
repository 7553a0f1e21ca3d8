"""Judges the machine that runs the command."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from typing import Final

from leasehold.cli.doctor.findings import CLIENT_CLOCK, Finding

_TIME_ERROR: Final = 5  # the answer of adjtimex: the clock is not synchronised
_TIMEX_BYTES: Final = 512  # more than the structure has on any Linux
# File systems on which SQLite's locks do not exclude other machines, or not reliably.
_NETWORK_FILE_SYSTEMS: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "ceph", "glusterfs"}
)


def check_clock(state: int | None) -> Finding:
    """`state`: the answer of `clock_state`."""
    if state is None:
        return Finding("host clock", "note", "this system does not say whether its clock is synchronised")
    if state == _TIME_ERROR:
        return Finding(
            "host clock",
            "note",
            "the clock of this machine is not synchronised",
            "run an NTP client such as chrony, on the servers of the engine as well",
            "E8",
            CLIENT_CLOCK,
        )
    return Finding("host clock", "ok", "synchronised")


def clock_state() -> int | None:
    """What the kernel says of its clock: 5 if it is not synchronised. None: it does not say."""
    try:
        return int(ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES)))
    except (OSError, AttributeError):
        return None


def check_file_system(path: str, mounts: Iterable[str]) -> Finding:
    """`mounts`: the lines of /proc/self/mounts."""
    kind = _file_system(os.path.realpath(path), mounts)
    if kind is None:
        return Finding("file system", "note", "unknown: make sure that the file is on a local disk")
    if kind in _NETWORK_FILE_SYSTEMS or kind.startswith("fuse."):
        return Finding(
            "file system",
            "danger",
            f"{path} is on {kind}, where locks of one machine may not exclude another",
            "move the file to a local disk; for several machines use an engine with a server",
            "E1",
        )
    return Finding("file system", "ok", f"local ({kind})")


def _file_system(path: str, mounts: Iterable[str]) -> str | None:
    """The type of the mount point that is the longest prefix of the path; of several there, the last."""
    best, kind = "", None
    for line in mounts:
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        if len(point) >= len(best) and (path == point or path.startswith(point.rstrip("/") + "/")):
            best, kind = point, fields[2]
    return kind
