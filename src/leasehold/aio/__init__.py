"""The asyncio API: the twin of `leasehold.blocking`, file by file, awaited.

client.py    AsyncClient, AsyncRWLock
locks.py     AsyncLock, AsyncLease
groups.py    AsyncMultiLock, AsyncLeases, AsyncElection, AsyncTerms
records.py   AsyncSchedule, AsyncStatus, AsyncValue, optimistic_async

No logic lives here: each method is one line over `leasehold.client` or `leasehold.records`.
"""

from leasehold.aio.client import AsyncClient, AsyncRWLock
from leasehold.aio.groups import AsyncElection, AsyncLeases, AsyncMultiLock, AsyncTerms
from leasehold.aio.locks import AsyncLease, AsyncLock
from leasehold.aio.records import AsyncSchedule, AsyncStatus, optimistic_async

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
    "AsyncTerms",
    "optimistic_async",
]
