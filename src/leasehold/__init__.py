"""Distributed locks that stay safe when things go wrong.

with leasehold.Client("memory://") as client:
    with client.lock("orders/42", ttl=30, wait=5) as lease:
        ledger.write(lease, row)               # a fence: it refuses holders of the past
        lease.check()                          # raises LeaseLost once the lease cannot be trusted
"""

from leasehold import fences
from leasehold.aio import AsyncClient, AsyncLease, AsyncLock, AsyncRWLock
from leasehold.blocking import Client, Lease, Lock, RWLock
from leasehold.current import CurrentLease, current_lease
from leasehold.errors import (
    ConfigError,
    LeaseholdError,
    LeaseLost,
    Mismatch,
    NotAcquired,
    SelfDeadlock,
    StaleToken,
    Unavailable,
    Unsupported,
)
from leasehold.events import Event
from leasehold.model import Holder, Holding, Traits
from leasehold.recipes.lease import LeaseState

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "AsyncLease",
    "AsyncLock",
    "AsyncRWLock",
    "Client",
    "ConfigError",
    "CurrentLease",
    "Event",
    "Holder",
    "Holding",
    "Lease",
    "LeaseLost",
    "LeaseState",
    "LeaseholdError",
    "Lock",
    "Mismatch",
    "NotAcquired",
    "RWLock",
    "SelfDeadlock",
    "StaleToken",
    "Traits",
    "Unavailable",
    "Unsupported",
    "current_lease",
    "fences",
]
