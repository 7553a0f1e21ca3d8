"""What tests read and change inside `core/lock_state.py`, the reference of all decisions."""

from __future__ import annotations

from leasehold.core.lock_state import LockState
from leasehold.core.queue_entry import Context, Notification, QueueEntry
from tests.support.probe import Place

# Steps that tests watch, or replace by a wrong one.
ADD_ENTRY = Place(LockState, "_add_entry")  # of a new claim
ADVANCE_QUEUE = Place(LockState, "_advance_queue")  # reserves what is free for those next in the queue
CAN_ADMIT = Place(LockState, "_can_admit")  # one more grant
CHANGE_KIND = Place(LockState, "_change_kind")  # to that of the claim, or refuse the claim
EXPIRE_HOLDERS = Place(LockState, "_expire_holders")
EXTEND = Place(LockState, "_extend")  # the life of a grant
FREE_SLOT = Place(LockState, "_free_slot")
GRANT_ENTRY = Place(LockState, "_grant_entry")
PASS_OVER = Place(LockState, "_pass_over")  # a waiter that cannot claim its reservation
POSITION = Place(LockState, "_position")  # in the queue
START_COOLING = Place(LockState, "_start_cooling")
WITHDRAW_RESERVATION = Place(LockState, "_withdraw_reservation")


def plan_waiter_scan(lock_state: LockState, at: float) -> None:
    """Set when the state looks for expired waiters next."""
    lock_state._next_waiter_scan = at


def set_notified_head(lock_state: LockState, id_hash: str, recheck_at: float) -> None:
    """Set which head of the queue knows when to re-check, and when."""
    lock_state._notified_head = (id_hash, recheck_at)


def remove(lock_state: LockState, entry: QueueEntry) -> None:
    """Remove a claim without any notification."""
    lock_state._remove(entry)


def advance_queue(lock_state: LockState, context: Context, notifications: list[Notification]) -> None:
    """Reserve what is free for the waiters that are next."""
    lock_state._advance_queue(context, notifications)
