"""What tests read and change inside telemetry."""

from __future__ import annotations

from typing import Any

from leasehold.telemetry import otel, text_file
from leasehold.telemetry.audit import file as audit_file
from leasehold.telemetry.audit import tail
from leasehold.telemetry.engine_health import EngineHealth
from leasehold.telemetry.groups import Groups
from leasehold.telemetry.otel import Hook
from tests.support.probe import Place

FILE_LOCK_SECONDS = Place(text_file, "_LOCK_SECONDS")  # how long a process waits for another to write the file
AUDIT_LOCK_SECONDS = Place(tail, "_LOCK_SECONDS")  # how long a process waits for another to write the file
MAX_AUDIT_FILE = Place(audit_file, "_MAX_FILE")  # bytes

otel_counters = otel._COUNTERS
otel_gauges = otel._GAUGES


def open_acquires(hook: Hook) -> Any:
    """The spans of acquires that have not ended."""
    return hook._acquiring


def open_holds(hook: Hook) -> Any:
    """The spans of leases that have not ended."""
    return hook._leases


def early_ends(hook: Hook) -> Any:
    """The losses of leases whose grant was not reported yet."""
    return hook._early


def is_probing(source: EngineHealth) -> bool:
    return source._began_at is not None


def runtime_of(source: EngineHealth) -> Any:
    return source._runtime


def cached_names(groups: Groups) -> int:
    """How many names the groups were found for, and are remembered."""
    return len(groups._by_name)
