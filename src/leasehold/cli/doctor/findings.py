"""What a check found: values, without I/O."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, NamedTuple, TypeAlias

Severity: TypeAlias = Literal["ok", "note", "warning", "danger"]

SEVERITIES: Final[tuple[Severity, ...]] = ("ok", "note", "warning", "danger")

# Mistakes that have cost others their data. A finding names the one it belongs to.
SINGLE_REDIS: Final = "single-redis-as-truth"  # one Redis without a durable log decides who may write
NO_TTL: Final = "no-ttl"  # a ttl so long that a dead holder blocks its name for hours
NO_OWNER_CHECK: Final = "no-owner-check"  # no fencing tokens: a resource cannot check that a writer still owns the lock
CLIENT_CLOCK: Final = "client-clock"  # clocks that decide about leases differ
NO_MONITORING: Final = "no-monitoring"  # the engine does not show what its operator must see
NEVER_TESTED: Final = "never-tested"  # the test of a real lock failed, so the engine was never tested as it is


class Finding(NamedTuple):
    check: str  # what was checked, such as `storage`
    severity: Severity
    found: str
    fix: str = ""  # what to do; empty for `ok`
    promise: str = ""  # the promise of docs/guarantees that it affects, such as `E1`
    red_flag: str = ""


def worst(findings: Iterable[Finding]) -> Severity:
    return max((each.severity for each in findings), key=SEVERITIES.index, default="ok")
