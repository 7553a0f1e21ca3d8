"""What tests read and change while a client acquires: its loop, the limit of attempts, and pools (`any_of`)."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from leasehold.client import acquire, any_of
from leasehold.client.attempt_limit import AttemptLimit
from tests.support.probe import Place

FIRST_REPORT_AFTER = Place(acquire, "_FIRST_REPORT")  # seconds of waiting, until the caller is told for whom

# Steps of a pool that tests watch, or during which they do harm.
ATTEMPT_EACH = Place(any_of._PoolAcquire, "_attempt_each")
FIRST_GRANT = Place(any_of, "_first_grant")  # waits for it
LEAVE_ALL = Place(any_of, "_leave_all")  # the queues of all members

PoolMember = any_of._Member
MemberSignal = any_of._MemberSignal


def mark_left(member: any_of._Member[Any]) -> None:
    """As if the member had left its queue."""
    member._left = True


def attempts_under_way(limit: AttemptLimit) -> set[str]:
    """The id hashes of the attempts that were sent."""
    return limit._under_way


def replace_attempts_under_way(limit: AttemptLimit, attempts: set[str]) -> None:
    limit._under_way = attempts


def callers_waiting(limit: AttemptLimit) -> Sized:
    """The callers whose attempt waits to be sent."""
    return limit._waiting
