"""The blocking API: every call runs on the caller's own thread. `leasehold.aio` is its asyncio twin, file by file.

client.py    Client, RWLock
locks.py     Lock, Lease, ThreadingLock
groups.py    MultiLock, Leases, Election, Terms
records.py   Schedule, Status, Value, optimistic

No logic lives here: each method is one line over `leasehold.client` or `leasehold.records`.
"""

from leasehold.blocking.client import Client, RWLock
from leasehold.blocking.groups import Election, Leases, MultiLock, Terms
from leasehold.blocking.locks import Lease, Lock, ThreadingLock
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
