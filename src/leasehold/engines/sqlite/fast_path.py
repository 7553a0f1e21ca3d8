"""The two verbs on a name that nobody else wants, in which case there is nothing to decide: most locks are free when
they are asked for, and nobody waits when they are given back.

Each begins with one statement that changes something only if that is so, inside the verb's own transaction. Where it
changed nothing, the line is brought in and decides (`rows.py`). A pair costs a third less by this.
"""

from __future__ import annotations

import sqlite3
from typing import Final

from leasehold.core.queue_entry import HELD
from leasehold.core.timing import WAITER_TTL
from leasehold.engines.sqlite.boot_clock import BootClock
from leasehold.engines.sqlite.rows import REPLACE_GRANT
from leasehold.model import Claim, Grant

# The next token and ticket (E3), if nothing occupies the name, nobody waits for it, and the clock is still ours (E1).
_NEXT_TOKEN_IF_FREE: Final = """
    update lh_meta set token = max(token + 1, ?3), ticket = ticket + 1 where clock_id = ?4
        and not exists (select 1 from lh_grant where namespace = ?1 and name = ?2)
        and not exists (select 1 from lh_queue where namespace = ?1 and name = ?2)"""

# A grant that is held and not over ends, if nobody waits for the name.
_DELETE_IF_NO_WAITER: Final = """
    delete from lh_grant where namespace = ?1 and name = ?2 and id_hash = ?3 and state = ?4 and until > ?5
        and not exists (select 1 from lh_queue where namespace = ?1 and name = ?2)
        and exists (select 1 from lh_meta where clock_id = ?6)"""


def acquire_uncontended(db: sqlite3.Connection, boot_clock: BootClock, claim: Claim, client: str) -> Grant | None:
    """The grant of an idle name; None: it is not idle."""
    key = (claim.namespace, claim.name)
    if not db.execute(_NEXT_TOKEN_IF_FREE, (*key, int(boot_clock.wall() * 1_000_000), boot_clock.clock_id)).rowcount:
        return None
    token, ticket = db.execute("select token, ticket from lh_meta").fetchone()
    now, slot = boot_clock.now(), 0 if claim.kind == "semaphore" else None
    holder_values = (token, claim.id_hash, HELD, client, *claim.holder, claim.mode, claim.delay)
    time_values = (ticket, now, now + WAITER_TTL, now + claim.ttl, slot)
    db.execute(REPLACE_GRANT, (*key, claim.ttl, claim.kind, claim.limit, *holder_values, *time_values))
    return Grant(token, claim.ttl, slot)


def release_uncontended(db: sqlite3.Connection, boot_clock: BootClock, claim: Claim) -> bool:
    """Whether a held claim ended at once, with nobody to be told."""
    if claim.min_hold or not claim.id:
        return False
    values = (claim.namespace, claim.name, claim.id_hash, HELD, boot_clock.now(), boot_clock.clock_id)
    return bool(db.execute(_DELETE_IF_NO_WAITER, values).rowcount)
