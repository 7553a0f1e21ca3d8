"""One audit record as one line of JSON, bound to the line before it by a hash.

    {"action":"grant","at":"2026-11-16T01:13:02.118204Z",...,"prev":"c1d0...","seq":80412,"v":1,"hash":"8a4e..."}

`hash` is the SHA-256 of the line without `,"hash":"..."`: of the record as JSON with sorted keys, no spaces, in ASCII.
`prev` is the hash of the record before, so a record cannot be changed, removed, moved or inserted without changing all
that follow. With a key, `hash` is an HMAC-SHA-256: then only the owner of the key can write valid records.
"""

from __future__ import annotations

import gzip
import hashlib
import hmac
import json
import os
import re
import stat
import zlib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import IO, Any, Final, Literal, NamedTuple, TypeAlias

from leasehold.errors import ConfigError
from leasehold.files import open_folder

Action: TypeAlias = Literal[
    "open",  # a process began to write to the file
    "close",  # a process ended, or the file was rotated
    "grant",
    "release",
    "loss",  # a holder was notified that its lease is lost
    "renew_failed",
    "break",
    "resize",  # an operator set the limit of a semaphore; without `limit`: removed it
    "stale_token",  # a fence refused a token
    "denied",  # a caller had no right to what it asked for
    "config",
    "rebase",
    "drain",
    "gap",  # as many records as `missed` says could not be written before this one
]

VERSION: Final = 1
NO_HASH: Final = "0" * 64  # `prev` of the first record of all
MAX_LINE: Final = 1 << 20  # bytes; a longer line is not an audit record
_MIN_KEY: Final = 16

_BEGIN: Final = b'{"action":'  # of every line, because the keys are sorted
_LINE = re.compile(rb'(\{.*),"hash":"([0-9a-f]{64})"\}')


class AuditRecord(NamedTuple):
    """An audit record as it was read. `is_genuine` says whether its hash is right."""

    seq: int
    hash: str
    prev: str
    fields: dict[str, Any]
    body: bytes  # what is hashed

    def is_genuine(self, key: bytes | None) -> bool:
        return hmac.compare_digest(seal(self.body, key), self.hash)


def seal(body: bytes, key: bytes | None) -> str:
    """The hash of a record."""
    return hashlib.sha256(body).hexdigest() if key is None else hmac.digest(key, body, "sha256").hex()


def encode(fields: Mapping[str, object], key: bytes | None) -> tuple[bytes, str]:
    """The line of a record, and its hash."""
    body = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    found = seal(body, key)
    return b'%b,"hash":"%b"}\n' % (body[:-1], found.encode()), found


def is_torn(line: bytes) -> bool:
    """Whether a crash may have left this line: it is the beginning of a record, and not all of it."""
    if line[: len(_BEGIN)] != _BEGIN[: len(line)] or not line:
        return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):  # the beginning of a JSON object is never JSON
        return True
    return False


def decode(line: bytes) -> AuditRecord | None:
    """The record in a line, which is given without its line end. None: it is not an audit record."""
    found = _LINE.fullmatch(line)
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if found is None or not isinstance(fields, dict):
        return None
    match fields:
        case {"v": 1, "seq": int(seq), "prev": str(prev), "action": str(), "at": str()} if _has_types(fields, _TYPES):
            return AuditRecord(seq, found[2].decode(), prev, fields, found[1] + b"}")
    return None


def _has_types(fields: Mapping[str, Any], types: Mapping[str, Any]) -> bool:
    """Whether all members that are known have their types: a reader of records need not check them again."""
    for name, value in fields.items():
        wanted = types.get(name, object)
        if isinstance(wanted, dict):
            if not isinstance(value, dict) or not _has_types(value, wanted):
                return False
        elif not isinstance(value, wanted) or (isinstance(value, float) and not isfinite(value)):
            return False
    return True


_NUMBER: Final = (int, float)
_TYPES: Final[dict[str, Any]] = {
    "lock": {"limit": int, "slot": int} | dict.fromkeys(("namespace", "name", "kind", "mode", "purpose"), str),
    "who": {"pid": int} | dict.fromkeys(("subject", "address", "holder", "host"), str),
    **dict.fromkeys(("token", "seen", "missed"), int),
    **dict.fromkeys(("ttl", "waited", "held"), _NUMBER),
    **dict.fromkeys(("fingerprint", "server", "result", "why", "fence", "request", "trace", "since", "seal"), str),
}


class Line(NamedTuple):
    number: int
    text: bytes
    ended: bool  # by a line end


def read_lines(file: IO[bytes]) -> Iterator[Line]:
    """The lines of an open file, also of one that gzip has packed; a very long line in parts. Raises OSError; for
    damaged gzip, too."""
    number = 0
    try:
        while line := file.readline(MAX_LINE):
            number += 1
            yield Line(number, line.removesuffix(b"\n"), line.endswith(b"\n"))
    except (EOFError, zlib.error) as error:
        raise gzip.BadGzipFile(str(error)) from error


def utc(at: float) -> str:
    """A time as it is written in records."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def read_key(path: str | os.PathLike[str]) -> bytes:
    """The key in a file, without the line end. Raises ConfigError if other users can read it."""
    path = os.path.abspath(path)
    try:
        with open_folder(os.path.dirname(path)) as folder:
            fd = folder.open_file(os.path.basename(path), os.O_RDONLY)
        with open(fd, "rb") as file:
            mode = os.fstat(fd).st_mode
            key = file.read(MAX_LINE).rstrip(b"\r\n")
    except FileNotFoundError:
        raise ConfigError(f"there is no key file {path}: create it with `head -c 32 /dev/urandom | base64`") from None
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be read: {error.strerror}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"other users may use the key file {path}: `chmod 600 {path}`")
    if len(key) < _MIN_KEY:
        raise ConfigError(f"the key in {path} is shorter than {_MIN_KEY} bytes: `head -c 32 /dev/urandom | base64`")
    return key


_ROTATED = re.compile(r"-\d{8}T\d{6}Z-(\d+)\.jsonl")


def chain_name(path: str | os.PathLike[str]) -> tuple[str, str]:
    """The folder and name that all files of a chain share: `audit` for audit.jsonl, for what rotation made of it
    (audit-20261116T000000Z-00080413.jsonl) and for the names of logrotate (audit.jsonl.1.gz, audit.jsonl-20261116)."""
    folder, name = os.path.split(os.path.abspath(path))
    name = re.sub(r"\.gz\Z", "", name)
    name = re.sub(r"(?<=.)[.-]\d+\Z", "", name)
    return folder, re.sub(r"(-\d{8}T\d{6}Z-\d+)?\.jsonl\Z", "", name)


def rotated_seq(path: str | os.PathLike[str]) -> int | None:
    """The number of the last record of a rotated file, from its name. None: another name."""
    found = _ROTATED.search(Path(path).name)
    return int(found[1]) if found else None
