"""The audit file: records are appended in order, by several threads and processes if need be.

A writer holds an exclusive lock on the file (flock) while it reads the last record, if another process has written
since, and appends its own. So all writers extend one chain. A record is in the file before the caller continues: it
survives the death of the process. When it is on disk depends on `sync`.

A line that a crash or a full disk cut short (a torn line) is never removed. The member `torn` of the next record has
its length in bytes and its SHA-256, which distinguishes it from a line that was changed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final, Literal, NamedTuple, TypedDict, Unpack

from leasehold import __version__, tracing
from leasehold.errors import ConfigError
from leasehold.events import Event
from leasehold.files import Folder, open_folder
from leasehold.telemetry.audit.chain import (
    NO_HASH,
    VERSION,
    Action,
    chain_name,
    encode,
    read_key,
    utc,
)
from leasehold.telemetry.audit.tail import Tail, find_predecessor, lock_file, read_tail
from leasehold.telemetry.families import Family, counter, gauge

_SYNC_SECONDS: Final = 0.1
_ANCHOR_RECORDS: Final = 1000
_ANCHOR_SECONDS: Final = 3600.0
_REPORT_SECONDS: Final = 10.0  # at most one log line about failures in this time
_MAX_TEXT: Final = 1000  # characters of a text in a record
_MAX_FILE: Final = 64 << 20
_HOST: Final = os.uname().nodename

_LOCK_FIELDS: Final = ("namespace", "name", "kind", "mode", "limit", "slot", "purpose")
_WHO_FIELDS: Final = ("subject", "scopes", "address", "holder", "host", "pid")

_log = logging.getLogger("leasehold.audit")
_FILES: weakref.WeakSet[AuditFile] = weakref.WeakSet()  # for the handler at fork


class AuditFields(TypedDict, total=False):
    """The fields of a record, besides its action. Fields that are None are left out."""

    at: float  # wall-clock time; default: now
    namespace: str | None
    name: str | None
    kind: str | None
    mode: str | None
    limit: int | None
    slot: int | None
    purpose: str | None
    token: int | None
    fingerprint: str | None  # of the claim; never its id
    subject: str | None  # who was authenticated, or the operator
    scopes: list[str] | None
    address: str | None
    holder: str | None
    host: str | None
    pid: int | None
    ttl: float | None
    waited: float | None  # seconds until the grant
    held: float | None  # seconds between grant and end
    queued: bool | None
    result: str | None
    done: bool | None  # False: the engine was not asked
    why: str | None
    fence: str | None
    seen: int | None  # the highest token that the fence had seen
    request: str | None
    trace: str | None


class _Locked(NamedTuple):
    """The file while no other process writes to it."""

    folder: Folder
    fd: int
    tail: Tail


class _CutShort(OSError):
    """A write that ended early. `left` are the records that are not in the file."""

    def __init__(self, path: str, left: list[dict[str, object]]) -> None:
        super().__init__(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        self.left = left


class AuditFile:
    """An audit file, and the hook that writes a client's events to it.

    path      the file; created with mode 0600 in a folder that exists. Several processes may write to the same file
    server    the name of this writer in the records; default: the host's name
    key_file  a file with a secret: records are then sealed with it, and cannot be forged without
    sync      when records are on disk: "batch" at most 0.1 s later, "always" before the call returns, "none" when
              the system decides. They are in the file at once in any case
    rotate    whether the file is renamed, and a new one begun, at 64 MiB and on a new day (UTC). If False, rename
              the file yourself at any time: writers notice

    Raises ConfigError if the file cannot be used: also if its last line is not a record that this key has sealed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        server: str | None = None,
        key_file: str | os.PathLike[str] | None = None,
        sync: Literal["batch", "always", "none"] = "batch",
        rotate: bool = True,
    ) -> None:
        if sync not in ("batch", "always", "none"):
            raise ConfigError(f"sync must be 'batch', 'always' or 'none', not {sync!r}")
        self.path = os.path.abspath(path)
        self.records = 0  # written
        self.errors = 0  # times that writing failed
        self.seq = 0  # of the last record that this process wrote
        self._server = server or _HOST
        self._key = None if key_file is None else read_key(key_file)
        self._sync_mode, self._rotate = sync, rotate
        self._folder: Folder | None = None
        self._fd: int | None = None
        self._tail: Tail | None = None
        self._waiting: deque[dict[str, object]] = deque()  # records to write
        self._missed_since, self._missed_why = "", ""
        self._reported_at, self._anchored_at = float("-inf"), time.monotonic()
        self._closed = False
        self._mutex = threading.RLock()  # reentrant: a signal handler may acquire a lock
        self._writing = False
        self._missed = 0  # records that could not be written since the last that was
        self._unsynced = threading.Event()
        self._syncer: threading.Thread | None = None
        _FILES.add(self)
        try:
            self._append([self._record("open", self._own_process())])
        except BaseException as error:
            self._close_fd()
            if not isinstance(error, OSError):
                raise
            raise ConfigError(f"the audit file {self.path} cannot be written: {error.strerror or error}") from error

    # ------------------------------------------------------------- the hook

    def __call__(self, event: Event) -> None:
        """Write an event, if it is one for the audit log. Never raises: failures are logged and counted."""
        fields = fields_of(event)
        if fields is not None:
            action, more = fields
            self.write(action, **more)
            with suppress(OSError, ConfigError):  # logged and counted
                self.flush()

    def families(self) -> Iterable[Family]:
        """Metrics of this file, for `leasehold.telemetry.metrics_text`."""
        none: dict[str, str] = {}
        return [
            counter("leasehold_audit_records", "Audit records written by this process.", (none, self.records)),
            counter("leasehold_audit_errors", "Times that audit records could not be written.", (none, self.errors)),
            gauge("leasehold_audit_seq", "Number of the last audit record of this process.", (none, self.seq)),
        ]

    # ---------------------------------------------------------- for servers

    def write(self, action: Action, **fields: Unpack[AuditFields]) -> None:
        """Add a record. The next `flush` writes it to the file."""
        self._waiting.append(self._record(action, fields))

    def flush(self) -> None:
        """Write all added records with one system call. Raises OSError, or ConfigError if another program has
        damaged the file; the records are then dropped, and the next record that is written says how many."""
        with self._mutex:
            if self._writing:  # this is a signal handler that interrupted a write, which writes these records too
                return
            self._writing = True
            try:
                while self._waiting:
                    batch = [self._waiting.popleft() for _ in range(len(self._waiting))]
                    try:
                        self._append(batch)
                    except (OSError, ConfigError) as error:
                        self._on_failure(error, error.left if isinstance(error, _CutShort) else batch)
                        raise
            finally:
                self._writing = False
        if self._sync_mode == "always":
            self._sync()
        elif self._sync_mode == "batch":
            self._sync_soon()

    def check(self) -> None:
        """Raise as `flush` does if the last write failed and the file still takes no record. A server that must not
        grant without a record calls this before it asks the engine, and `flush` before it answers."""
        if self._missed:
            self.write("gap")
            self.flush()

    def reopen(self) -> None:
        """Close the file, and open it by its path for the next record. Only needed to close a renamed file early:
        every write compares the path with the open file."""
        with self._mutex:
            self._close_fd()

    def close(self) -> None:
        """Write `close`, and sync the file to disk. Raises as `flush` does."""
        if self._closed:
            return
        self._closed = True
        self.write("close", **self._own_process())
        try:
            self.flush()
            if self._sync_mode != "none":
                self._sync()
            self._anchor()
        finally:
            self._unsynced.set()  # ends the thread
            with self._mutex:
                self._close_fd()

    def __enter__(self) -> AuditFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ appending

    def _own_process(self) -> AuditFields:
        return {"host": _HOST, "pid": os.getpid()}

    def _record(self, action: Action, fields: AuditFields) -> dict[str, object]:
        given: dict[str, Any] = {
            name: value[:_MAX_TEXT]
            if isinstance(value, str)
            else round(value, 6)
            if isinstance(value, float)
            else value
            for name, value in fields.items()
            if value is not None
        }
        record: dict[str, object] = {"v": VERSION, "action": action, "server": self._server}
        record["at"] = utc(given.pop("at", None) or time.time())
        for group, names in (("lock", _LOCK_FIELDS), ("who", _WHO_FIELDS)):
            if part := {name: given.pop(name) for name in names if name in given}:
                record[group] = part
        if action == "open":
            record |= {"version": __version__, "seal": "sha256" if self._key is None else "hmac-sha256"}
        return record | given

    def _append(self, batch: list[dict[str, object]]) -> None:
        with self._locked_file() as file:
            if not (file.tail.seq and self._rotate and self._is_due(file.tail) and self._rename(file)):
                self._write_records(file, batch)
                return
            self._write_records(file, [self._record("close", self._own_process())])
            self._anchor()
        self._append(batch)  # to the new file

    def _write_records(self, file: _Locked, batch: list[dict[str, object]]) -> None:
        (folder, fd, tail), records = file, list(batch)
        if self._missed:
            gap = next((each for each in records if each["action"] == "gap"), None)
            if gap is None:
                gap = self._record("gap", {})
                records.insert(0, gap)
            gap |= {"missed": self._missed, "since": self._missed_since, "why": self._missed_why}
        if not tail.seq and records[0]["action"] != "open":  # a new file
            records.insert(0, self._record("open", self._own_process()))
        if tail.torn is not None:
            records[0]["torn"] = {"bytes": len(tail.torn), "sha256": hashlib.sha256(tail.torn).hexdigest()}
        seq, previous = (tail.seq, tail.hash) if tail.seq else self._predecessor(folder)
        first, lines = seq, [] if tail.ends_line else [b"\n"]
        for record in records:
            seq += 1
            line, previous = encode({**record, "seq": seq, "prev": previous}, self._key)
            lines.append(line)
        data = b"".join(lines)
        written = os.write(fd, data)
        if written != len(data):
            done = max(0, data.count(b"\n", 0, written) - (not tail.ends_line))
            if any(each["action"] == "gap" for each in records[:done]):
                self._missed = 0
            raise _CutShort(self.path, [each for each in batch if not any(each is other for other in records[:done])])
        day = tail.day or str(records[0]["at"])[:10]
        self._tail = Tail(tail.inode, tail.size + len(data), seq, previous, day)
        self.records, self.seq, self._missed = self.records + len(records), seq, 0
        now = time.monotonic()
        if first // _ANCHOR_RECORDS != seq // _ANCHOR_RECORDS or now - self._anchored_at >= _ANCHOR_SECONDS:
            self._anchor()

    def _anchor(self) -> None:
        """Log what proves later that no record up to this one was removed: keep the log elsewhere."""
        if self._tail is not None:
            self._anchored_at = time.monotonic()
            _log.info("audit anchor of %s: %d:%s", self.path, self._tail.seq, self._tail.hash)

    def _on_failure(self, error: OSError | ConfigError, batch: list[dict[str, object]]) -> None:
        if not self._missed:
            self._missed_since = str(batch[0]["at"]) if batch else utc(time.time())
        self._missed += sum(each["action"] != "gap" for each in batch)
        self.errors += 1
        self._missed_why = str(getattr(error, "strerror", None) or error)[:_MAX_TEXT]
        self._report(f"the audit file {self.path} could not be written: {self._missed_why}")

    def _report(self, text: str) -> None:
        if time.monotonic() - self._reported_at >= _REPORT_SECONDS:
            self._reported_at = time.monotonic()
            _log.error("%s; %d failures so far, %d records missing", text, self.errors, self._missed)

    # ------------------------------------------------------------- the file

    @contextmanager
    def _locked_file(self) -> Iterator[_Locked]:
        while True:
            folder, fd = self._open()
            lock_file(fd, self.path)
            try:
                found, status = folder.find(os.path.basename(self.path)), os.fstat(fd)
                if found is not None and found.st_ino == status.st_ino and found.st_dev == status.st_dev:
                    yield _Locked(folder, fd, self._find_tail(fd, status))
                    return
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)
            self._close_fd()  # renamed or removed: the path belongs to another file now

    def _open(self) -> tuple[Folder, int]:
        if self._folder is None:
            self._folder = open_folder(os.path.dirname(self.path))
        if self._fd is None:
            flags = os.O_RDWR | os.O_APPEND
            self._fd = self._folder.open_file(os.path.basename(self.path), flags, create=True)
        return self._folder, self._fd

    def _close_fd(self) -> None:
        fd, self._fd = self._fd, None
        folder, self._folder = self._folder, None
        if fd is not None:
            os.close(fd)
        if folder is not None:
            folder.close()

    def _find_tail(self, fd: int, status: os.stat_result) -> Tail:
        size, known = status.st_size, self._tail
        if known is not None and known.inode != status.st_ino:
            known = None
        if known is not None and known.size == size:
            return known
        found = read_tail(fd, size, self._key, self.path)._replace(inode=status.st_ino)
        if known is not None and size < known.size:
            # Records were cut off. If we go on from the last one we wrote, `verify` finds the hole in the chain.
            self._report(f"the audit file {self.path} is shorter than what was written to it")
            found = found._replace(seq=known.seq, hash=known.hash)
        return found

    def _predecessor(self, folder: Folder) -> tuple[int, str]:
        """Number and hash of the record before a new file."""
        own = (self._tail.seq, self._tail.hash) if self._tail is not None else (0, NO_HASH)
        return max(own, find_predecessor(folder, os.path.basename(self.path), self._key))

    def _is_due(self, tail: Tail) -> bool:
        return tail.size >= _MAX_FILE or tail.day < utc(time.time())[:10]

    def _rename(self, file: _Locked) -> bool:
        """Give the file the name it keeps. False: that is not permitted here, so the file goes on."""
        seq, now = file.tail.seq + 1, time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        name, folder = f"{chain_name(self.path)[1]}-{now}-{seq:08}.jsonl", file.folder.fd
        try:
            os.rename(os.path.basename(self.path), name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as error:
            self._rotate = False
            _log.error("the audit file %s could not be rotated, and grows: %s", self.path, error.strerror)
            return False
        return True

    # ---------------------------------------------------------- to the disk

    def _sync_soon(self) -> None:
        self._unsynced.set()
        if self._syncer is None:
            self._syncer = threading.Thread(target=self._sync_repeatedly, name="leasehold-audit", daemon=True)
            with suppress(RuntimeError):  # no thread can be started while the interpreter exits
                self._syncer.start()

    def _sync_repeatedly(self) -> None:
        unsynced = self._unsynced
        while not self._closed:
            unsynced.wait()
            unsynced.clear()
            time.sleep(_SYNC_SECONDS)
            with suppress(OSError):  # logged and counted
                self._sync()

    def _sync(self) -> None:
        with self._mutex:
            if self._fd is None:
                return
            fd = os.dup(self._fd)
        try:
            os.fsync(fd)
        except OSError as error:
            self.errors += 1
            self._report(f"the audit file {self.path} could not be written to disk: {error.strerror}")
            raise
        finally:
            os.close(fd)

    def _after_fork(self) -> None:
        """In a forked child: the lock on a file belongs to all who share its descriptor, so get one of our own."""
        self._mutex, self._writing = threading.RLock(), False
        self._waiting.clear()
        self._missed = 0
        self._unsynced, self._syncer = threading.Event(), None
        self._close_fd()


def fields_of(event: Event) -> tuple[Action, AuditFields] | None:
    """The action and fields of an event; None: it is not one for the audit log."""
    action = _ACTIONS.get(event.kind)
    if action is None:
        return None
    fields: AuditFields = {
        "at": event.at,
        "namespace": event.namespace,
        "name": event.name,
        "mode": event.mode,
        "slot": event.slot,
        "purpose": event.purpose,
        "token": event.token,
        "fingerprint": event.fingerprint,
        "subject": event.actor,
        "limit": event.limit,
        "holder": None if action in ("break", "resize") else event.holder,
        "host": _HOST,
        "pid": os.getpid(),
        "why": event.why or event.reason,
        "fence": event.fence,
        "seen": event.seen,
        "trace": tracing.find(event.fingerprint),
    }
    if action == "grant":
        fields |= {"waited": event.seconds, "ttl": event.ttl, "queued": event.queued}
        if event.kind == "unguaranteed":
            fields["result"] = "unguaranteed"
    elif action in ("release", "loss"):
        fields["held"] = event.seconds
    return action, fields


_ACTIONS: Final[Mapping[str, Action]] = {
    "granted": "grant",
    "unguaranteed": "grant",
    "released": "release",
    "lost": "loss",
    "renew_failed": "renew_failed",
    "broken": "break",
    "resized": "resize",
    "stale_token": "stale_token",
}


def _after_fork_in_child() -> None:
    for file in list(_FILES):
        file._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
