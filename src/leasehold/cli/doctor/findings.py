"""What a check found: values, without I/O."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, NamedTuple, TypeAlias

Severity: TypeAlias = Literal["ok", "note", "warning", "danger"]

SEVERITIES: Final[tuple[Severity, ...]] = ("ok", "note", "warning", "danger")

# Set-ups that have cost others their data. A finding names the one it belongs to.
SINGLE_REDIS: Final = "single-redis-as-truth"  # one Redis without a durable log decides who may write
NO_TTL: Final = "no-ttl"  # a ttl that is so long that a dead holder blocks its name for hours
NO_OWNER_CHECK: Final = "no-owner-check"  # the engine issues no fencing tokens, so a resource cannot check the holder
CLIENT_CLOCK: Final = "client-clock"  # clocks that decide about leases differ
NO_MONITORING: Final = "no-monitoring"  # what the engine's operator must see is not visible
NEVER_TESTED: Final = "never-tested"  # a promise that a real lock did not keep


class Finding(NamedTuple):
    check: str  # what was checked, such as `storage`
    severity: Severity
    found: str
    fix: str = ""  # what to do; empty for `ok`
    promise: str = ""  # the promise of docs/guarantees that it touches, such as `E1`
    red_flag: str = ""


def worst(findings: Iterable[Finding]) -> Severity:
    return max((each.severity for each in findings), key=SEVERITIES.index, default="ok")
