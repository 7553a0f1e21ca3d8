"""The states of a `once` record and what may follow: run, take over, or return the stored result.

    (none) ──▶ running ──▶ done
                 │  ▲ │
      taken over └──┘ └──▶ failed ──▶ running again, unless the failure is kept

A record in state `running` whose lock has no holder is *expired*: its runner died or lost its lease. The next holder of
the lock takes the record over with a higher token. That changes the record's version, so the store refuses everything
that the late runner still writes. No clock decides any of this.
"""

from __future__ import annotations

import json
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

from leasehold.core.record_fields import is_count, is_text, is_time, load_fields
from leasehold.errors import ConfigError

RunState: TypeAlias = Literal["running", "done", "failed"]

_MAX_ERROR_CHARS: Final = 500  # of an error's text


class RunRecord(NamedTuple):
    """The content of a record."""

    state: RunState
    token: int  # the runner's; rises with every take-over
    runs: int  # how often a run began
    holder: str  # of the last run; for display only
    at: float  # when the last run began, by its runner's wall clock; for display only
    request: str = ""  # identifies the request, if callers give it; another request under the same key is refused
    result: Any = None
    error: str = ""
    final: bool = False  # a failure that is kept

    @property
    def finished(self) -> bool:
        """The key is not run again."""
        return self.state == "done" or (self.state == "failed" and self.final)


_IS_VALID: Final = {
    "state": get_args(RunState).__contains__,
    "token": is_count,
    "runs": is_count,
    "holder": is_text,
    "at": is_time,
    "request": is_text,
    "error": is_text,
    "final": lambda value: isinstance(value, bool),
}
_OPTIONAL: Final = RunRecord._field_defaults.keys()


def dump(run: RunRecord) -> bytes:
    return json.dumps(run._asdict(), ensure_ascii=False, separators=(",", ":")).encode()


def load(data: bytes) -> RunRecord:
    """Parse a record, ignoring fields that this version does not know. Raises ConfigError."""
    found = load_fields(data, "a `once` record", _IS_VALID, _OPTIONAL)
    return RunRecord(**{field: value for field, value in found.items() if field in RunRecord._fields})


def next_run(previous: RunRecord | None, *, token: int, holder: str, at: float, request: str) -> RunRecord:
    """The record to write before a run. A lock's token may be below the record's if its engine has lost data."""
    if previous is None:
        return RunRecord("running", token, 1, holder, at, request)
    return RunRecord("running", max(previous.token + 1, token), previous.runs + 1, holder, at, request)


def failed_run(run: RunRecord, error: BaseException, final: bool) -> RunRecord:
    return run._replace(state="failed", error=_error_text(error), final=final)


def _error_text(error: BaseException) -> str:
    """An error's text as it is stored: its class name at least."""
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be read)"
    return f"{type(error).__name__}: {text}"[:_MAX_ERROR_CHARS].encode(errors="backslashreplace").decode()


def json_round_trip(result: object, max_bytes: int) -> Any:
    """The result as every caller gets it, including the first: converted to JSON and back. None if no result is kept.
    Raises ConfigError."""
    if max_bytes == 0:
        return None
    try:
        text = json.dumps(result, ensure_ascii=False, allow_nan=False)
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the result cannot be stored as JSON: {error}; the job ran and is not run again") from error
    if size > max_bytes:
        raise ConfigError(
            f"the result has {size} bytes of JSON, more than max_result={max_bytes}; the job ran and is not run again: "
            "return a reference to the result instead"
        )
    return json.loads(text)
