"""The trace that a call belongs to, in the W3C format `traceparent`, without any tracing package.

`telemetry.otel` sets it around each acquire. The client of a lock server sends it along, the server reads it, and log
lines show its trace id. `leasehold run` takes it from and gives it to its environment.
"""

from __future__ import annotations

import re
from contextlib import suppress
from contextvars import ContextVar
from typing import Final

HEADER: Final = "traceparent"
VARIABLES: Final = ("TRACEPARENT", "TRACESTATE", "BAGGAGE")  # of the environment, as OpenTelemetry names them

# Of the acquire or request that runs in this thread or task.
current: ContextVar[str | None] = ContextVar("leasehold_traceparent", default=None)

_FORMAT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-[!-~]*)?")

# A member of `tracestate`. Of the whole, W3C asks for at most 32, and that 512 characters are passed on.
_STATE: Final = re.compile(
    r"(?:[a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})=[ -+\--<>-~]{0,255}[!-+\--<>-~]"
)
_MAX_STATES, _MAX_STATE_LENGTH = 32, 512

_MAX_LEASES: Final = 100_000
_of_leases: dict[str, str] = {}  # fingerprint -> trace id; the oldest are dropped


def trace_id(traceparent: str | None) -> str | None:
    """The trace id; None if there is none or it is malformed."""
    found = _FORMAT.fullmatch(traceparent) if traceparent else None
    if found is None or (found[0].startswith("00") and len(found[0]) != 55):  # version 00 has no further fields
        return None
    return found[1]


def trace_state(text: str) -> str:
    """A `tracestate` that is well formed, else none: OpenTelemetry logs all of one that is not, and for older
    versions, one of many spaces is work for a tenth of a second."""
    if len(text) > _MAX_STATE_LENGTH:
        return ""
    members = [each.strip(" \t") for each in text.split(",")]
    well_formed = len(members) <= _MAX_STATES and all(not each or _STATE.fullmatch(each) for each in members)
    return text if well_formed else ""


def current_parent() -> str | None:
    """The `traceparent` of the running call, if it is well formed, and so safe in a header."""
    found = current.get()
    return found if trace_id(found) is not None else None


def remember(fingerprint: str, trace: str) -> None:
    """A lease belongs to this trace. For what happens to it later, outside of the trace: log lines of the watchdog, and
    audit records and the dashboard of a server."""
    _of_leases[fingerprint] = trace
    if len(_of_leases) > _MAX_LEASES:
        with suppress(KeyError, RuntimeError, StopIteration):  # another thread was faster
            del _of_leases[next(iter(_of_leases))]


def forget(fingerprint: str) -> None:
    _of_leases.pop(fingerprint, None)


def find(fingerprint: str | None) -> str | None:
    """The trace id of a lease, or of the running call."""
    return (_of_leases.get(fingerprint) if fingerprint else None) or trace_id(current.get())
