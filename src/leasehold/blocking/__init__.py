"""The blocking API: every call runs on the caller's own thread. `leasehold.aio` is its asyncio twin, file by file.

client.py    Client, RWLock
locks.py     Lock, Lease, ThreadingLock
groups.py    MultiLock, Leases, Election, Terms
records.py   Schedule, Status, Value, optimistic

No logic lives here: each method is one line over `leasehold.client` or `leasehold.records`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

from leasehold.blocking.client import Client, RWLock
from leasehold.blocking.locks import Lease, Lock, ThreadingLock

if TYPE_CHECKING:
    from leasehold.blocking.groups import Election, Leases, MultiLock, Terms
    from leasehold.blocking.records import Schedule, Status, optimistic

__all__ = [
    "Client",
    "Election",
    "Lease",
    "Leases",
    "Lock",
    "MultiLock",
    "RWLock",
    "Schedule",
    "Status",
    "Terms",
    "ThreadingLock",
    "optimistic",
]

_LAZY: Final = {
    **dict.fromkeys(("Election", "Leases", "MultiLock", "Terms"), "groups"),
    **dict.fromkeys(("Schedule", "Status", "optimistic"), "records"),
}


def __getattr__(name: str) -> object:
    """Loads groups and records when they are first used: a program that only locks names starts sooner."""
    if name not in _LAZY:
        raise AttributeError(f"module 'leasehold.blocking' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"leasehold.blocking.{_LAZY[name]}"), name)
    return found
