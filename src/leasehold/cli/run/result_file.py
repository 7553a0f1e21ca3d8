"""The file of `run --result-file`: one JSON object with the outcome, for programs that need more than an exit code."""

from __future__ import annotations

import errno
import json
import os
import stat
from datetime import UTC, datetime
from typing import Any

from leasehold.blocking import Lease
from leasehold.cli.option import usage_error
from leasehold.cli.render import busy_text, rounded
from leasehold.errors import ConfigError, LeaseholdError, NotAcquired
from leasehold.files import open_folder


class RunResult:
    """Filled in during the run; every key is always present. docs/reference/json.md documents them."""

    def __init__(self, namespace: str, name: str, command: list[str], path: str | None) -> None:
        self._path = None if path is None else os.path.abspath(path)
        if path is not None:
            _check_path(path)  # now, rather than after an hour of work
        self.end_signal: int | None = None  # the terminating signal that this process received and forwarded
        self.child_ended_by_itself = False
        self._facts: dict[str, Any] = {
            "namespace": namespace,
            "name": name,
            "command": command,
            "outcome": "failed",
            "exit_code": 1,
            "child_exit_code": None,
            "token": None,
            "slot": None,
            "holder": None,
            "waited": None,
            "ran": None,
            "lost_reason": None,
            "error": None,
            "began": _now(),
            "ended": None,
        }

    @property
    def outcome(self) -> str:
        return str(self._facts["outcome"])

    @property
    def exit_code(self) -> int:
        return int(self._facts["exit_code"])

    def granted(self, lease: Lease, waited: float) -> None:
        self._facts |= {"token": lease.token, "slot": lease.slot, "holder": lease.holder, "waited": rounded(waited)}

    def busy(self, busy: NotAcquired, code: int) -> None:
        # Here `holder` and `token` are those of the current holder.
        self._facts |= {"outcome": "busy", "exit_code": code, "token": busy.token, "holder": busy.holder}
        self._facts |= {"waited": rounded(busy.waited), "error": busy_text(busy)}

    def not_run(self, text: str, code: int) -> None:
        self._facts |= {"outcome": "not run", "exit_code": code, "error": text}

    def ended(self, code: int, child_code: int, ran: float, lost_reason: str | None, end_signal: int | None) -> None:
        self.end_signal = end_signal
        self.child_ended_by_itself = lost_reason is None
        outcome = "done" if lost_reason is None else "lost"
        self._facts |= {"outcome": outcome, "exit_code": code, "child_exit_code": child_code}
        self._facts |= {"ran": rounded(ran), "lost_reason": lost_reason}

    def lost_at_release(self, reason: str, code: int) -> None:
        self._facts |= {"outcome": "lost", "exit_code": code, "lost_reason": reason}

    def failed(self, error: LeaseholdError, code: int) -> None:
        self._facts |= {"outcome": "failed", "exit_code": code, "error": str(error)}

    def interrupted(self, code: int) -> None:
        self._facts |= {"outcome": "interrupted", "exit_code": code}

    def write(self) -> None:
        """Write the file atomically: readers never see half of it. Raises `OSError`."""
        if self._path is None:
            return
        self._facts["ended"] = _now()
        folder_path, name = os.path.split(self._path)
        try:
            with open_folder(folder_path) as folder, folder.new_file(0o600) as (fd, temporary):
                with open(fd, "w", encoding="utf-8", closefd=False) as file:
                    json.dump(self._facts, file)
                    file.write("\n")
                os.replace(temporary, name, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
        except ConfigError as unsafe:  # since the run began, another user has put a link there
            raise PermissionError(errno.EPERM, str(unsafe)) from None


def _check_path(path: str) -> None:
    folder_path, name = os.path.split(os.path.abspath(path))
    try:
        with open_folder(folder_path) as folder:
            found = folder.find(name)
            if not path or (found is not None and not stat.S_ISREG(found.st_mode)):
                raise usage_error(
                    f"--result-file {path!r} is not a regular file (a symbolic link is not followed); "
                    "choose another path"
                )
            if not os.access(".", os.W_OK | os.X_OK, dir_fd=folder.fd):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder_path)
    except (FileNotFoundError, NotADirectoryError):
        raise usage_error(f"--result-file {path!r}: its directory does not exist") from None
    except ConfigError as unsafe:
        raise usage_error(f"--result-file {path!r}: {unsafe}") from None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
