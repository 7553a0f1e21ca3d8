"""What a record of `once` says, and what may follow: run it, take it over, or give the stored result.

    (none) ──▶ running ──▶ done
                 │  ▲ │
      taken over └──┘ └──▶ failed ──▶ running again, unless the failure is kept

A record that says `running` while nobody holds the key's lock is *lapsed*: its runner died, or lost its lease. The next
to hold the lock takes it over under a higher token; the edition of the record then differs, so that whatever the late
runner still writes is refused. No clock decides any of this.
"""

from __future__ import annotations

import json
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from leasehold.errors import ConfigError

RunState: TypeAlias = Literal["running", "done", "failed"]

MAX_RESULT: Final = 65_536
_MAX_ERROR_CHARS: Final = 500  # characters of an error's text worth keeping


class RunRecord(NamedTuple):
    """What stands in the record."""

    state: RunState
    token: int  # the runner's; rises with every take-over
    runs: int  # how often it was begun
    holder: str  # who ran it, for people
    at: float  # when that began, by the runner's wall clock, for people
    request: str = ""  # what was asked for, if the callers say; another request under the same key is refused
    result: Any = None
    error: str = ""
    final: bool = False  # a failure that is kept

    @property
    def finished(self) -> bool:
        """Nobody runs it any more."""
        return self.state == "done" or (self.state == "failed" and self.final)


def dump(run: RunRecord) -> bytes:
    return json.dumps(run._asdict(), ensure_ascii=False, separators=(",", ":")).encode()


def load(data: bytes) -> RunRecord:
    """What it says, as far as this version understands it. Raises ConfigError."""
    try:
        return RunRecord(**{field: value for field, value in json.loads(data).items() if field in RunRecord._fields})
    except (ValueError, TypeError, AttributeError):
        raise ConfigError(
            "what the store has under this key is no record of `once`: was something else kept there?"
        ) from None


def next_run(previous: RunRecord | None, *, token: int, holder: str, at: float, request: str) -> RunRecord:
    """What to write before running it. A lock's token may be lower than the record's: its engine may have lost data."""
    if previous is None:
        return RunRecord("running", token, 1, holder, at, request)
    return RunRecord("running", max(previous.token + 1, token), previous.runs + 1, holder, at, request)


def failed_run(run: RunRecord, error: BaseException, final: bool) -> RunRecord:
    return run._replace(state="failed", error=_error_text(error), final=final)


def _error_text(error: BaseException) -> str:
    """Any error has a text that can be kept, if only its name."""
    try:
        text = str(error)
    except Exception:
        text = "(it cannot say what it is)"
    return f"{type(error).__name__}: {text}"[:_MAX_ERROR_CHARS].encode(errors="backslashreplace").decode()


def json_round_trip(result: object, max_bytes: int) -> Any:
    """The result as every caller gets it, the first one too: through JSON and back; None where none is kept. Raises
    ConfigError."""
    if max_bytes == 0:
        return None
    try:
        text = json.dumps(result, ensure_ascii=False, allow_nan=False)
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the result cannot be kept as JSON: {error}; it ran, and is not run again") from error
    if size > max_bytes:
        raise ConfigError(
            f"the result has {size} bytes of JSON, more than max_result={max_bytes}; it ran, and is not run again: "
            "return a reference to it instead"
        )
    return json.loads(text)
