"""Acquire and release of an uncontended name, where there is nothing to decide: most locks are free when they are
requested and have no waiters when they are released.

Each verb starts, inside its own transaction, with one statement that changes a row only in that case. If it changed
nothing, the verb loads the name's state and decides on it (`rows.py`). This makes an acquire and release a third
cheaper.
"""

from __future__ import annotations

import sqlite3
from typing import Final

from leasehold.core.queue_entry import HELD
from leasehold.core.timing import WAITER_TTL
from leasehold.engines.sqlite.boot_clock import BootClock
from leasehold.engines.sqlite.rows import REPLACE_GRANT
from leasehold.model import Claim, Grant

# Issues the next token and ticket (E3) if the name has no holder and no waiter and the file's clock is still ours (E1).
# A token above the ceiling is left to `rows.py`, which raises it.
_NEXT_TOKEN_IF_FREE: Final = """
    update lh_meta set token = max(token + 1, ?), ticket = ticket + 1
        where clock_id = ? and max(token + 1, ?) <= ceiling
        and not exists (select 1 from lh_grant where namespace = ? and name = ?)
        and not exists (select 1 from lh_queue where namespace = ? and name = ?)"""  # noqa: S105  # a statement

# Ends a grant that is held and has not expired, if the name has no waiters.
_DELETE_IF_NO_WAITER: Final = """
    delete from lh_grant where namespace = ? and name = ? and id_hash = ? and state = ? and until > ?
        and (min_hold = 0 or ?)
        and not exists (select 1 from lh_queue where namespace = ? and name = ?)
        and exists (select 1 from lh_meta where clock_id = ?)"""


def acquire_uncontended(db: sqlite3.Connection, boot_clock: BootClock, claim: Claim, client: str) -> Grant | None:
    """Grant an idle name; None: the name is not idle, or the ceiling of tokens is reached.

    If the grant must survive a power cut, the caller's transaction has to sync."""
    key, least = (claim.namespace, claim.name), int(boot_clock.wall() * 1_000_000)
    if not db.execute(_NEXT_TOKEN_IF_FREE, (least, boot_clock.clock_id, least, *key, *key)).rowcount:
        return None
    token, ticket = db.execute("select token, ticket from lh_meta").fetchone()
    now, slot = boot_clock.now(), 0 if claim.kind == "semaphore" else None
    holder_values = (token, claim.id_hash, HELD, client, *claim.holder, claim.mode, claim.delay)
    time_values = (ticket, now, now + WAITER_TTL, now + claim.ttl, slot, max(0.0, claim.min_hold), claim.process_bound)
    db.execute(REPLACE_GRANT, (*key, claim.ttl, claim.kind, claim.limit, *holder_values, *time_values))
    return Grant(token, claim.ttl, slot)


def release_uncontended(db: sqlite3.Connection, boot_clock: BootClock, claim: Claim) -> bool:
    """Release a held claim that has no waiter to notify. False: not such a claim, and nothing has changed."""
    if not claim.id:
        return False
    key = (claim.namespace, claim.name)
    values = (*key, claim.id_hash, HELD, boot_clock.now(), claim.min_hold < 0, *key, boot_clock.clock_id)
    return bool(db.execute(_DELETE_IF_NO_WAITER, values).rowcount)
