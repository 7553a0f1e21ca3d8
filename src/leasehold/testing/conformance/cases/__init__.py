"""The conformance cases, by subject. Importing this package registers them all in `CASES`.

acquire.py             which claim is granted a name, with which token, and for how long
queue.py               the queue, wake-ups, heartbeats
release_renew.py       what the engine answers about a claim, and what is left of one that has ended
rwlock_semaphore.py    readers, permits with slots, many names at once
lease_loss.py          how a holder learns that its lease is lost
unavailable.py         an engine that does not answer
lost_messages.py       each request and each answer lost, repeated or delayed
instances.py           what a lock server needs of its engine
client_api.py          the promises as users see them
any_of.py  multilock_election.py  once.py     the same for what is built on locks
"""

from leasehold.testing.conformance.case import CASES
from leasehold.testing.conformance.cases import (
    acquire,
    any_of,
    client_api,
    instances,
    lease_loss,
    lost_messages,
    multilock_election,
    once,
    queue,
    release_renew,
    rwlock_semaphore,
    unavailable,
)

__all__ = [
    "CASES",
    "acquire",
    "any_of",
    "client_api",
    "instances",
    "lease_loss",
    "lost_messages",
    "multilock_election",
    "once",
    "queue",
    "release_renew",
    "rwlock_semaphore",
    "unavailable",
]
