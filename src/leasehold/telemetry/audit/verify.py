"""Whether audit files are complete and unchanged.

A chain that was checked begins and ends somewhere. That nothing was cut off at its end, or all of it rewritten, only
an anchor shows: the number and hash of a record, noted where the author of the change could not reach it.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import IO, Final, NamedTuple, cast

from leasehold.core.texts import escape
from leasehold.errors import ConfigError
from leasehold.telemetry.audit.chain import (
    MAX_LINE,
    NO_HASH,
    AuditRecord,
    Line,
    chain_name,
    decode,
    is_torn,
    read_lines,
)

_MAX_FAULTS: Final = 1000  # of one chain: a small file that gzip has packed may have billions


class FileMessage(NamedTuple):
    """A message about one line of a file, or about the whole file."""

    path: str
    line: int  # from 1; 0: the whole file
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}" if self.line else f"{self.path}: {self.text}"


@dataclass(slots=True)
class Report:
    """What was found in the files of one chain, in the order of its records."""

    paths: list[str]
    records: int = 0
    first: int | None = None  # numbers of the first and last record
    last: int | None = None
    last_hash: str | None = None
    faults: list[FileMessage] = field(default_factory=list)
    notes: list[FileMessage] = field(default_factory=list)  # worth knowing, and no faults


def find_files(paths: Iterable[str]) -> list[str]:
    """The files that these paths name: of a folder, all audit files in it; with a file, those that rotation made of it.
    Raises ConfigError if there are none."""
    found: list[str] = []
    for path in paths:
        if os.path.isdir(path):
            with os.scandir(path) as entries:
                inside = sorted(each.path for each in entries if ".jsonl" in each.name and _is_file(each))
            if not inside:
                raise ConfigError(f"the folder {path} has no audit files: their names contain .jsonl")
            found += inside
        elif os.path.exists(path):
            folder, chain = chain_name(path)
            found.append(path)
            if os.path.basename(path).removesuffix(".jsonl") == chain:
                found += sorted(os.path.join(os.path.dirname(path), name) for name in _rotated(folder, chain))
        else:
            raise ConfigError(f"there is no file {path}")
    return list(dict.fromkeys(found))


def _rotated(folder: str, chain: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if _is_file(entry) and chain_name(entry.path)[1] == chain:
                yield entry.name


def _is_file(entry: os.DirEntry[str]) -> bool:
    """Not for a link, which could show any file to the reader of the report."""
    return entry.is_file(follow_symlinks=False)


def read_file(path: str) -> Iterator[Line]:
    """The lines of a file. Raises OSError; ConfigError if it is a device or a pipe, which may never end."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ConfigError(f"{path} is not a regular file: name an audit file")
        if path.endswith(".gz"):
            with gzip.open(file) as unpacked:
                yield from read_lines(cast(IO[bytes], unpacked))
        else:
            yield from read_lines(file)


def sort_files(paths: Iterable[str]) -> list[list[str]]:
    """Files by chain, and within a chain by their first record."""
    chains: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for path in paths:
        chains.setdefault(chain_name(path), []).append((_first_seq(path), path))
    return [[path for _, path in sorted(files)] for _, files in sorted(chains.items())]


def _first_seq(path: str) -> float:
    try:
        first_lines = islice(read_file(path), _MAX_FAULTS)
        return next(record.seq for line in first_lines if (record := decode(line.text)) is not None)
    except (OSError, StopIteration):
        return float("inf")


def verify(paths: Sequence[str], key: bytes | None = None, anchors: Mapping[int, str] | None = None) -> Report:
    """Check the files of one chain, in this order. Raises ConfigError if they need a key, and `key` is None."""
    return _Check(Report(list(paths)), key, dict(anchors or {})).run()


class _Check:
    def __init__(self, report: Report, key: bytes | None, anchors: dict[int, str]) -> None:
        self._report, self._key, self._anchors = report, key, anchors
        self._path, self._line = "", 0
        self._previous: AuditRecord | None = None
        self._torn = bytearray()  # lines since the last record that a crash may have left

    def run(self) -> Report:
        report = self._report
        for self._path in report.paths:
            before, self._line = report.records, 0
            try:
                for line in read_file(self._path):
                    self._check_line(line)
                    if len(report.faults) >= _MAX_FAULTS:
                        self._add_fault("too many faults: the rest was not checked")
                        return report
            except OSError as error:
                self._line = 0
                self._add_fault(f"cannot be read to its end: {error.strerror or error}")
            if self._torn:
                self._add_fault("the last line is not complete: a crash, or its end was cut off")
                self._torn.clear()
            if report.records == before:
                self._line = 0
                self._add_fault("contains no audit record")
        for seq, wanted in self._anchors.items():
            self._line = 0
            self._add_fault(f"record {seq}, whose hash you gave as {wanted[:12]}..., is not in these files")
        return report

    def _add_fault(self, text: str) -> None:
        self._report.faults.append(FileMessage(self._path, self._line, text))

    def _check_line(self, line: Line) -> None:
        self._line = line.number
        record = decode(line.text)
        if record is None:
            if is_torn(line.text) and len(self._torn) < MAX_LINE:
                self._torn += line.text + b"\n"
            else:
                self._add_fault(f"not an audit record: {_excerpt(line.text)}")
            return
        if not record.is_genuine(self._key):
            if self._key is None and record.fields.get("seal") == "hmac-sha256":
                raise ConfigError(f"{self._path} was sealed with a key: pass --key-file")
            self._add_fault(f"record {record.seq} was changed{' or sealed with another key' if self._key else ''}")
        self._check_torn(record)
        self._check_order(record)
        if not line.ended:
            self._add_fault(f"record {record.seq} has no line end: it was cut off")
        self._check_anchor(record)
        report = self._report
        report.records += 1
        report.first = record.seq if report.first is None else report.first
        report.last, report.last_hash = record.seq, record.hash
        self._previous = record

    def _check_torn(self, record: AuditRecord) -> None:
        said, torn = record.fields.get("torn"), bytes(self._torn.removesuffix(b"\n"))
        found = {"bytes": len(torn), "sha256": hashlib.sha256(torn).hexdigest()} if self._torn else None
        if said == found:
            if found:
                text = (
                    f"{len(torn)} bytes of a record that a crash or a full disk cut short, as record {record.seq} says"
                )
                self._report.notes.append(FileMessage(self._path, self._line - 1, f"{text}: {_excerpt(torn)}"))
        elif said is None:
            self._line -= 1
            self._add_fault(f"not a whole record, and record {record.seq} does not say that a crash left it")
            self._line += 1
        else:
            self._add_fault(
                f"record {record.seq} says that a crash left bytes before it, and these are not those bytes"
            )
        self._torn.clear()

    def _check_order(self, record: AuditRecord) -> None:
        previous = self._previous
        if self._line == 1 and record.fields["action"] != "open":
            self._add_fault(
                f"the file begins with record {record.seq}, which is not `open`: lines before it were removed"
            )
        if previous is None:
            if record.seq != 1:
                note = f"begins with record {record.seq}: the records before it are not in the files given"
                self._report.notes.append(FileMessage(self._path, 0, note))
            elif record.prev != NO_HASH:
                self._add_fault("record 1 claims to follow another record")
        elif record.prev != previous.hash or record.seq != previous.seq + 1:
            self._add_fault(_describe_break(previous, record))

    def _check_anchor(self, record: AuditRecord) -> None:
        wanted = self._anchors.pop(record.seq, None)
        if wanted is not None and not record.hash.startswith(wanted):
            self._add_fault(f"record {record.seq} is not the one whose hash you gave: the chain was rewritten")


def _describe_break(previous: AuditRecord, record: AuditRecord) -> str:
    if record.seq > previous.seq + 1:
        return f"records {previous.seq + 1} to {record.seq - 1} are missing: {record.seq} follows {previous.seq}"
    if record.seq <= previous.seq:
        return f"record {record.seq} follows {previous.seq}: it was moved, duplicated or inserted"
    return f"record {record.seq} does not continue the chain: the records before it were replaced"


def _excerpt(line: bytes) -> str:
    text = escape(line[:60].decode(errors="replace"))
    return repr(text) + ("..." if len(line) > 60 else "")
