"""The three calls of a hand-off in a crowd, without loading the queue: a release that reserves the name for the next
waiter, that waiter's claim, and the attempt with which another claim joins the queue.

Each covers only the usual case: a lock that is held exclusively, by a grant that has not expired, with waiters whose
clients can be reached. In any other case the function changes nothing, and the verb loads the name's state and decides
on it (`rows.py`). Both do the same: the tests compare the answers and the rows with `core/lock_state.py`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Final

from leasehold.core.queue_entry import HELD, RESERVED, Notification
from leasehold.core.timing import RESERVATION_PROBE, RESERVATION_TTL, WAITER_TTL
from leasehold.engines.sqlite.boot_clock import BootClock
from leasehold.engines.sqlite.rows import REPLACE_WAITER, check_holder, must_survive
from leasehold.model import Busy, Claim, Grant

_ONLY_GRANT: Final = """g.kind = 'lock' and g.grant_limit = 1 and g.mode = 'exclusive' and not exists (
        select 1 from lh_grant o where o.namespace = g.namespace and o.name = g.name and o.token <> g.token)"""

# The claim's grant, and the first two waiters of the queue, in any order: a row for each.
_SELECT_NEXT_TWO: Final = f"""
    select w.ticket, w.id_hash, w.client, w.mode, w.heartbeat_expires_at,
        m.clock_id, m.token, m.ceiling, g.until, q.scan_at, q.notified_id_hash,
        exists (select 1 from lh_waiter p where p.namespace = w.namespace and p.name = w.name and passed = 1)
    from (select * from lh_waiter where namespace = ? and name = ? and passed = 0 order by ticket limit 2) w
    join lh_queue q on q.namespace = w.namespace and q.name = w.name
    join lh_grant g on g.namespace = w.namespace and g.name = w.name
    join lh_meta m
    where g.id_hash = ? and g.state = {HELD} and (g.min_hold = 0 or ?) and {_ONLY_GRANT}"""  # noqa: S608  # constants

_RESERVE: Final = f"""
    update lh_grant set (id_hash, client, label, host, pid, purpose, mode, delay, ticket, heartbeat_expires_at) = (
            select id_hash, client, label, host, pid, purpose, mode, delay, ticket, heartbeat_expires_at
            from lh_waiter w where w.namespace = lh_grant.namespace and w.name = lh_grant.name and passed = 0
                and w.ticket = ?),
        state = {RESERVED}, token = ?, since = ?, until = ?, granted_ttl = ?, slot = null, min_hold = 0.0,
        process_bound = 0
    where namespace = ? and name = ?"""  # noqa: S608  # constants

# If there is no queue, or its head attempts again by the end of the new grant (`LockState._head_knows`).
_CLAIM_RESERVED: Final = f"""
    update lh_grant as g set state = {HELD}, client = ?, since = ?, heartbeat_expires_at = ?, until = ?,
        granted_ttl = ?, delay = ?, min_hold = ?, process_bound = ?
    where namespace = ? and name = ? and id_hash = ? and state = {RESERVED} and until > ? and {_ONLY_GRANT}
        and exists (select 1 from lh_meta where clock_id = ?)
        and not exists (select 1 from lh_queue q where q.namespace = g.namespace and q.name = g.name and (
            q.scan_at <= ? or q.notified_recheck_at > ? or q.notified_id_hash is not (select id_hash from lh_waiter w
                where w.namespace = g.namespace and w.name = g.name and passed = 0 order by ticket limit 1)))"""  # noqa: S608  # constants

# The grant and the head of the queue, if the head knows when to attempt again, and the claim is not known.
_SELECT_QUEUE: Final = f"""
    select m.clock_id, m.ticket, w.client, w.heartbeat_expires_at, q.scan_at, q.notified_recheck_at,
        g.state, g.until, g.token, g.client, g.process_bound, g.label, g.host, g.pid, g.purpose,
        (select count(*) from lh_waiter c where c.namespace = w.namespace and c.name = w.name and passed = 0)
    from (select * from lh_waiter where namespace = ? and name = ? and passed = 0 order by ticket limit 1) w
    join lh_queue q on q.namespace = w.namespace and q.name = w.name and q.notified_id_hash = w.id_hash
    join lh_grant g on g.namespace = w.namespace and g.name = w.name
    join lh_meta m
    where g.state in ({RESERVED}, {HELD}) and {_ONLY_GRANT} and g.id_hash <> ? and not exists (
        select 1 from lh_waiter c where c.id_hash = ? and c.namespace = w.namespace and c.name = w.name)"""  # noqa: S608  # constants


def hand_over(
    db: sqlite3.Connection, boot_clock: BootClock, claim: Claim, is_reachable: Callable[[str], bool]
) -> list[Notification] | None:
    """Release a held claim and reserve the name for the next waiter. Returns the notifications to send; None: not such
    a case, and nothing has changed."""
    key = (claim.namespace, claim.name)
    rows = db.execute(_SELECT_NEXT_TWO, (*key, claim.id_hash, claim.min_hold < 0)).fetchall() if claim.id else []
    if not rows:
        return None
    (ticket, id_hash, client, mode, alive_until, *state), *others = sorted(rows)
    clock_id, last_token, ceiling, until, scan_at, notified_id_hash, any_passed = state
    now, token = boot_clock.now(), max(last_token + 1, int(boot_clock.wall() * 1_000_000))
    if (
        clock_id != boot_clock.clock_id
        or token > ceiling
        or now >= min(until, scan_at, alive_until)
        or mode != "exclusive"
        or not is_reachable(client)
    ):
        return None
    end, recheck_at = now + RESERVATION_TTL, now + RESERVATION_PROBE
    notifications = [Notification(client, "reserved", id_hash)]
    if others:
        _, next_id_hash, next_client, _, next_alive_until, *_ = others[0]
        if now >= next_alive_until or notified_id_hash == next_id_hash or not is_reachable(next_client):
            return None
        notifications.append(Notification(next_client, "recheck", next_id_hash, recheck_at - now))
        db.execute(
            "update lh_queue set notified_id_hash = ?, notified_recheck_at = ? where namespace = ? and name = ?",
            (next_id_hash, recheck_at, *key),
        )
    elif any_passed:
        return None
    else:
        db.execute("delete from lh_queue where namespace = ? and name = ?", key)
    db.execute(_RESERVE, (ticket, token, now, end, end - now, *key))
    db.execute("delete from lh_waiter where namespace = ? and name = ? and passed = 0 and ticket = ?", (*key, ticket))
    db.execute("update lh_meta set token = ?", (token,))
    return notifications


def claim_reserved(db: sqlite3.Connection, boot_clock: BootClock, claim: Claim, client: str) -> Grant | None:
    """Grant a lock that is reserved for this claim. None: not such a case, and nothing has changed."""
    if claim.kind != "lock" or claim.limit != 1 or must_survive(claim):
        return None
    now, key = boot_clock.now(), (claim.namespace, claim.name, claim.id_hash)
    end = now + claim.ttl
    new_values = (client, now, now + WAITER_TTL, end, claim.ttl, claim.delay, claim.min_hold, claim.process_bound)
    if not db.execute(_CLAIM_RESERVED, (*new_values, *key, now, boot_clock.clock_id, now, end)).rowcount:
        return None
    (token,) = db.execute("select token from lh_grant where namespace = ? and name = ? and id_hash = ?", key).fetchone()
    return Grant(token, claim.ttl)


def join_queue(
    db: sqlite3.Connection,
    boot_clock: BootClock,
    claim: Claim,
    client: str,
    is_reachable: Callable[[str], bool],
    is_dead: Callable[[str], bool],
) -> tuple[Busy, tuple[str, ...]] | None:
    """Queue a new claim behind other waiters. Returns the answer, and the addresses of the clients whose end frees the
    name; None: not such a case, and nothing has changed."""
    if claim.kind != "lock" or claim.limit != 1:
        return None
    key = (claim.namespace, claim.name)
    row = db.execute(_SELECT_QUEUE, (*key, claim.id_hash, claim.id_hash)).fetchone()
    if row is None:
        return None
    clock_id, ticket, head, head_alive_until, scan_at, head_recheck_at, state, until, token, holder = row[:10]
    (is_bound, *holder_values, position), now = row[10:], boot_clock.now()
    recheck_at = min(until, now + RESERVATION_PROBE) if state == RESERVED else until
    if (
        clock_id != boot_clock.clock_id
        or now >= min(until, scan_at, head_alive_until)
        or recheck_at < head_recheck_at
        or not is_reachable(head)
        or (not is_reachable(holder) if state == RESERVED else is_bound and is_dead(holder))
    ):
        return None
    waiter_values = (claim.id_hash, client, *claim.holder, claim.mode, claim.delay, now, now + WAITER_TTL)
    db.execute(REPLACE_WAITER, (*key, 0, ticket + 1, *waiter_values))
    db.execute("update lh_meta set ticket = ?", (ticket + 1,))
    processes = (holder,) if is_bound or state == RESERVED else ()
    return Busy(until - now, position, token, check_holder(*holder_values)), processes
