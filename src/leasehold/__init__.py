"""Distributed locks that stay safe when things go wrong.

with leasehold.Client("memory://") as client:
    with client.lock("orders/42", ttl=30, wait=5) as lease:
        ledger.write(lease, row)               # a fence: it refuses stale holders
        lease.check()                          # raises LeaseLost once the lease cannot be trusted
"""

from importlib import import_module
from typing import TYPE_CHECKING

from leasehold._version import __version__ as __version__
from leasehold.blocking import Client, Lease, Lock, RWLock
from leasehold.client.lease import LeaseState
from leasehold.config import advise_ttl
from leasehold.core.deadlocks import Deadlock
from leasehold.environment import CurrentLease, current_lease
from leasehold.errors import (
    ConfigError,
    Conflict,
    Deadlocked,
    LeaseholdError,
    LeaseLost,
    Mismatch,
    NotAcquired,
    RunFailed,
    SelfDeadlock,
    StaleToken,
    Unavailable,
    Unsupported,
)
from leasehold.events import Event
from leasehold.model import Holder, Holding, Outcome, Term, Traits

if TYPE_CHECKING:
    from leasehold import fences, telemetry, versioned
    from leasehold.aio import (
        AsyncClient,
        AsyncElection,
        AsyncLease,
        AsyncLeases,
        AsyncLock,
        AsyncMultiLock,
        AsyncRWLock,
        AsyncSchedule,
        AsyncStatus,
        optimistic_async,
    )
    from leasehold.blocking import Election, Leases, MultiLock, Schedule, Status, optimistic

__all__ = [
    "AsyncClient",
    "AsyncElection",
    "AsyncLease",
    "AsyncLeases",
    "AsyncLock",
    "AsyncMultiLock",
    "AsyncRWLock",
    "AsyncSchedule",
    "AsyncStatus",
    "Client",
    "ConfigError",
    "Conflict",
    "CurrentLease",
    "Deadlock",
    "Deadlocked",
    "Election",
    "Event",
    "Holder",
    "Holding",
    "Lease",
    "LeaseLost",
    "LeaseState",
    "LeaseholdError",
    "Leases",
    "Lock",
    "Mismatch",
    "MultiLock",
    "NotAcquired",
    "Outcome",
    "RWLock",
    "RunFailed",
    "Schedule",
    "SelfDeadlock",
    "StaleToken",
    "Status",
    "Term",
    "Traits",
    "Unavailable",
    "Unsupported",
    "advise_ttl",
    "current_lease",
    "fences",
    "optimistic",
    "optimistic_async",
    "telemetry",
    "versioned",
]

_PACKAGES = ("fences", "telemetry", "versioned")
_BLOCKING = ("Election", "Leases", "MultiLock", "Schedule", "Status", "optimistic")


def __getattr__(name: str) -> object:
    """Loads packages, the asyncio API, groups and records when they are first used: a program that only locks names
    starts sooner."""
    if name in _PACKAGES:
        return import_module(f"leasehold.{name}")
    if name in __all__:
        api = import_module("leasehold.blocking" if name in _BLOCKING else "leasehold.aio")
        found = globals()[name] = getattr(api, name)
        return found
    raise AttributeError(f"module 'leasehold' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
