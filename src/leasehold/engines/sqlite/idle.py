"""The two verbs on a name that nobody else wants, in which case there is nothing to decide: most locks are free when
they are asked for, and nobody waits when they are given back.

Each begins with one statement that changes something only if that is so, inside the verb's own transaction. Where it
changed nothing, the line is brought in and decides (`rows.py`). A pair costs a third less by this.
"""

from __future__ import annotations

import sqlite3
from typing import Final

from leasehold.core.party import HELD
from leasehold.core.timing import BEAT
from leasehold.engines.sqlite.host import Host
from leasehold.engines.sqlite.rows import PUT_GRANT
from leasehold.model import Claim, Grant

# The next token and ticket (E3), if nothing occupies the name, nobody waits for it, and the clock is still ours (E1).
_COUNT: Final = """
    update lh_meta set token = max(token + 1, ?3), ticket = ticket + 1 where stamp = ?4
        and not exists (select 1 from lh_grant where namespace = ?1 and name = ?2)
        and not exists (select 1 from lh_line where namespace = ?1 and name = ?2)"""

# A grant that is held and not over ends, if nobody waits for the name.
_END: Final = """
    delete from lh_grant where namespace = ?1 and name = ?2 and mark = ?3 and state = ?4 and until > ?5
        and not exists (select 1 from lh_line where namespace = ?1 and name = ?2)
        and exists (select 1 from lh_meta where stamp = ?6)"""


def taken(db: sqlite3.Connection, host: Host, claim: Claim, client: str) -> Grant | None:
    """The grant of an idle name; None: it is not idle."""
    key = (claim.namespace, claim.name)
    if not db.execute(_COUNT, (*key, int(host.wall() * 1_000_000), host.stamp)).rowcount:
        return None
    token, ticket = db.execute("select token, ticket from lh_meta").fetchone()
    now, slot = host.clock(), 0 if claim.kind == "semaphore" else None
    who = (token, claim.mark, HELD, client, *claim.holder, claim.mode, claim.delay)
    times = (ticket, now, now + BEAT, now + claim.ttl, slot)
    db.execute(PUT_GRANT, (*key, claim.ttl, claim.kind, claim.limit, *who, *times))
    return Grant(token, claim.ttl, slot)


def given_back(db: sqlite3.Connection, host: Host, claim: Claim) -> bool:
    """Whether a held claim ended at once, with nobody to be told."""
    if claim.min_hold or not claim.id:
        return False
    values = (claim.namespace, claim.name, claim.mark, HELD, host.clock(), host.stamp)
    return bool(db.execute(_END, values).rowcount)
