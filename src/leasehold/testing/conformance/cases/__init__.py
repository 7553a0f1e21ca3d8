"""The conformance cases, by subject. Importing this package registers them all in `CASES`."""

from leasehold.testing.conformance.case import CASES
from leasehold.testing.conformance.cases import (
    acquire,
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
