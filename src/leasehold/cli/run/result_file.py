"""The file of `run --result-file`: one JSON object with the outcome, for programs that need more than an exit code."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from leasehold.blocking import Lease
from leasehold.cli.render import busy_text, rounded
from leasehold.errors import LeaseholdError, NotAcquired

if TYPE_CHECKING:
    from leasehold.cli.output_file import OutputFile


class RunResult:
    """Filled in during the run; every key is always present. docs/reference/json.md documents them."""

    def __init__(self, namespace: str, name: str, command: list[str], path: str | None) -> None:
        self._file: OutputFile | None = None
        if path is not None:
            from leasehold.cli.output_file import OutputFile

            self._file = OutputFile("--result-file", path)
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
        """Raises `OSError`."""
        if self._file is None:
            return
        self._facts["ended"] = _now()
        self._file.write(f"{json.dumps(self._facts)}\n")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
