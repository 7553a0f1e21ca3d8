"""One name's state on rows: loaded as far as a verb needs it, decided by `core/lock_state.py`, written back.

`RowLockState` adds no decision to `LockState`. It loads every holder of the name, the entry of the claim in question,
and of the queue only the first waiter, then the next one whenever the first leaves: a thousand waiters cost a verb no
more than two. Nothing is written before `save`, except that expired waiters are deleted; all of it is one transaction.
"""

from __future__ import annotations

import sqlite3
from bisect import insort
from collections.abc import Callable
from contextlib import ExitStack, closing
from heapq import merge
from itertools import groupby
from math import isfinite
from operator import index, itemgetter
from typing import Any, Final, NamedTuple, TypeAlias

from leasehold.core.listing import ListingBudget
from leasehold.core.lock_state import LockState
from leasehold.core.queue_entry import COOLING, PASSED, RESERVED, WAITING, Context, QueueEntry, TokenCounter, never_dead
from leasehold.core.timing import NEVER, WAITER_TTL
from leasehold.engines.sql.codec import add_entry
from leasehold.engines.sqlite.boot_clock import BootClock
from leasehold.engines.sqlite.connection import ClockChanged, NeedsSync
from leasehold.model import Claim, Holder, Holding, Kind

Row: TypeAlias = "tuple[Any, ...]"

_GRANT_COLUMNS: Final = (
    "token, id_hash, state, client, label, host, pid, purpose, mode, delay, ticket, since, "
    "heartbeat_expires_at, until, slot, min_hold, process_bound"
)
_KINDS: Final = ("lock", "semaphore")
_MAX_TEXTS: Final = 8192  # characters of a row; ours have below 4,000
_GRANT_LENGTH: Final = len(_GRANT_COLUMNS.split(", "))
_WAITER_LENGTH: Final = 12
_WAITER_COLUMNS: Final = (
    "passed, ticket, id_hash, client, label, host, pid, purpose, mode, delay, since, heartbeat_expires_at"
)

# Everything that an uncontended verb reads, in one statement.
_SELECT_NAME: Final = f"""
    select m.clock_id, m.token, m.ticket, m.ceiling,
        l.kind, l.grant_limit, l.scan_at, l.notified_id_hash, l.notified_recheck_at, l.limit_set,
        g.granted_ttl, g.kind, g.grant_limit,
        {", ".join(f"g.{column}" for column in _GRANT_COLUMNS.split(", "))}
    from lh_meta m
    left join lh_queue l on l.namespace = ? and l.name = ?
    left join lh_grant g on g.namespace = ? and g.name = ?"""  # noqa: S608  # constants of ours
_GRANT_OFFSET: Final = 13  # where the columns of the grant begin

_SELECT_BY_ID_HASH: Final = f"select {_WAITER_COLUMNS} from lh_waiter where id_hash = ? and namespace = ? and name = ?"  # noqa: S608  # constants of ours
_SELECT_NEXT_WAITER: Final = f"""select {_WAITER_COLUMNS} from lh_waiter
    where namespace = ? and name = ? and passed = 0 and ticket > ? order by ticket limit 1"""  # noqa: S608  # constants of ours
_COUNT_AHEAD: Final = "select count(*) from lh_waiter where namespace = ? and name = ? and passed = 0 and ticket < ?"
_EXISTS_WAITER: Final = "select exists (select 1 from lh_waiter where namespace = ? and name = ?)"
_DELETE_EXPIRED: Final = "delete from lh_waiter where namespace = ? and name = ? and heartbeat_expires_at <= ?"

REPLACE_GRANT: Final = (
    f"replace into lh_grant (namespace, name, granted_ttl, kind, grant_limit, {_GRANT_COLUMNS}) "  # noqa: S608  # constants of ours
    f"values ({', '.join('?' * 22)})"
)
REPLACE_WAITER: Final = f"replace into lh_waiter (namespace, name, {_WAITER_COLUMNS}) values ({', '.join('?' * 14)})"  # noqa: S608  # constants of ours
_DELETE_GRANT: Final = "delete from lh_grant where namespace = ? and name = ? and token = ?"
_DELETE_WAITER: Final = "delete from lh_waiter where namespace = ? and name = ? and passed = ? and ticket = ?"

_ALL_LOADED: Final = float("inf")
_PAGE: Final = 500  # rows of a list in one transaction, or all rows of one name: some milliseconds
_CEILING_STEP: Final = 600_000_000  # tokens are microseconds: about one transaction in ten minutes of use has to sync


class StoredEntry(NamedTuple):
    """An entry and its row as stored in the table; None: not stored yet."""

    entry: QueueEntry
    row: Row | None
    granted_ttl: float = 0.0


def must_survive(claim: Claim | QueueEntry) -> bool:
    """Whether a power cut must not undo its grant. After one, every process has ended: a grant that is bound to its
    process is over then, unless its `delay` begins."""
    return not claim.process_bound or claim.delay > 0


class RowLockState(LockState):
    __slots__ = (
        "_ceiling",
        "_counter",
        "_db",
        "_key",
        "_loaded_tickets",
        "_loaded_up_to",
        "_now",
        "_queue_row",
        "_stored",
        "_stored_counters",
        "_stored_limit",
    )

    def __init__(
        self,
        db: sqlite3.Connection,
        boot_clock: BootClock,
        namespace: str,
        name: str,
        id_hash: str = "",
        kind: Kind = "lock",
        limit: int = 1,
    ) -> None:
        now = boot_clock.now()  # inside the transaction, so that decisions and their times have the same order
        super().__init__(now, kind, limit)
        self._db, self._key, self._now = db, (namespace, name), now
        self._stored: list[StoredEntry] = []
        self._loaded_tickets: set[int] = set()  # a waiter is loaded only once, or a removed one would come back
        self._queue_row: Row | None = None
        rows = db.execute(_SELECT_NAME, self._key * 2).fetchall()
        if not rows or rows[0][0] != boot_clock.clock_id:  # without rows: the tables were emptied
            raise ClockChanged
        first = rows[0]
        self._stored_counters, self._ceiling = (first[1], first[2]), first[3]
        self._counter = TokenCounter(first[1])
        self.last_ticket = first[2]
        if first[_GRANT_OFFSET] is not None:
            self.kind, self.limit = first[11], first[12]
            for row in rows:
                self._load_holder(row)
            self._next_expiry = min(entry.expires_at for entry in self.holders.values())
            _check_kind(self.kind, self.limit)
        self._stored_limit = self.limit  # of the grants
        self._loaded_up_to = _ALL_LOADED  # every waiter with a ticket up to this one is in `waiters`
        if first[4] is not None:
            self._queue_row = first[4:10]
            self.kind, self.limit, self._next_waiter_scan = first[4], first[5], min(first[6], now + WAITER_TTL)
            _check_kind(self.kind, self.limit)
            self._notified_head = (first[7], first[8])
            self.limit_set = bool(first[9])
            self._loaded_up_to = -1
            if (
                id_hash
                and id_hash not in self.entries
                and (row := db.execute(_SELECT_BY_ID_HASH, (id_hash, *self._key)).fetchone())
            ):
                self._load_waiter(row)
            self._head()

    def context(
        self,
        wall: Callable[[], float],
        reachable: Callable[[str], bool],
        dead: Callable[[str], bool] = never_dead,
    ) -> Context:
        def issue_token() -> int:
            return self._counter.next(int(wall() * 1_000_000))

        return Context(self._now, issue_token, reachable, dead)

    def processes(self) -> tuple[str, ...]:
        """The addresses of the clients that hold the name or have it reserved, and whose end frees it."""
        return tuple(
            {entry.client for entry in self.holders.values() if entry.process_bound or entry.state == RESERVED}
        )

    def save(self, synced: bool = True) -> None:
        """Write the changes of the verb. `synced=False`: a power cut may undo this transaction. NeedsSync: it must not,
        because of a grant that has to survive it, or of the ceiling of tokens."""
        queued = self._queue_row is not None or self.limit_set
        if self.limit != self._stored_limit:
            self._db.execute(
                "update lh_grant set grant_limit = ? where namespace = ? and name = ?", (self.limit, *self._key)
            )
        for stored in self._stored:
            new = self._row_of(stored.entry)
            if new != stored.row:
                queued = self._save_entry(stored, new, synced) or queued
        if (self._counter.last, self.last_ticket) != self._stored_counters:
            self._save_counters(synced)
        if queued:
            self._save_queue()

    def _save_entry(self, stored: StoredEntry, new: Row | None, synced: bool) -> bool:
        """Replace the row of an entry by this one. True: it is a waiter's row."""
        db, key, (entry, row, granted_ttl) = self._db, self._key, stored
        if row is not None and (new is None or new[:2] != row[:2] or len(new) != len(row)):
            if len(row) == _GRANT_LENGTH:
                db.execute(_DELETE_GRANT, (*key, row[0]))
            else:
                db.execute(_DELETE_WAITER, (*key, row[0], row[1]))
        if new is None:
            return False
        if len(new) != _GRANT_LENGTH:
            db.execute(REPLACE_WAITER, (*key, *new))
            return True
        if not synced and entry.state != RESERVED and must_survive(entry):
            raise NeedsSync
        if row is None or len(row) != _GRANT_LENGTH or row[13] != new[13]:
            granted_ttl = entry.expires_at - self._now
        db.execute(REPLACE_GRANT, (*key, granted_ttl, self.kind, self.limit, *new))
        return False

    def _save_counters(self, synced: bool) -> None:
        token = self._counter.last
        if token > self._ceiling:
            if not synced:
                raise NeedsSync
            self._ceiling = token + _CEILING_STEP
        self._db.execute(
            "update lh_meta set token = ?, ticket = ?, ceiling = ?", (token, self.last_ticket, self._ceiling)
        )

    def _save_queue(self) -> None:
        has_waiters = self._db.execute(_EXISTS_WAITER, self._key).fetchone()[0]
        if not has_waiters and not self.limit_set:
            self._db.execute("delete from lh_queue where namespace = ? and name = ?", self._key)
            return
        scan_at = self._next_waiter_scan if has_waiters else NEVER
        new = (self.kind, self.limit, scan_at, *self._notified_head, int(self.limit_set))
        if new != self._queue_row:
            self._db.execute("replace into lh_queue values (?, ?, ?, ?, ?, ?, ?, ?)", (*self._key, *new))

    # ------------------------------------------- rows to entries and back

    def _load_holder(self, row: Row) -> None:
        entry = holder_from_row(row[_GRANT_OFFSET:])
        self.holders[entry.token] = entry
        if entry.state != COOLING:
            self.entries[entry.id_hash] = entry
        self._stored.append(StoredEntry(entry, row[_GRANT_OFFSET:], row[10]))

    def _load_waiter(self, row: Row) -> None:
        entry = waiter_from_row(row)
        self._loaded_tickets.add(entry.ticket)
        self.entries[entry.id_hash] = entry
        if entry.state == WAITING:
            insort(self.waiters, (entry.ticket, entry))
        self._stored.append(StoredEntry(entry, row))

    def _row_of(self, entry: QueueEntry) -> Row | None:
        if self.holders.get(entry.token) is entry:
            return (
                *(entry.token, entry.id_hash, entry.state, entry.client, *entry.holder, entry.mode, entry.delay),
                *(entry.ticket, entry.since, entry.heartbeat_expires_at, entry.expires_at, entry.slot),
                *(entry.min_hold, entry.process_bound),
            )
        if self.entries.get(entry.id_hash) is entry:
            passed = int(entry.state == PASSED)
            return (
                *(passed, entry.ticket, entry.id_hash, entry.client, *entry.holder, entry.mode, entry.delay),
                *(entry.since, entry.heartbeat_expires_at),
            )
        return None

    # --------------------------- where a queue in a table needs other code

    @property
    def empty(self) -> bool:
        return super().empty and (
            self._queue_row is None or not self._db.execute(_EXISTS_WAITER, self._key).fetchone()[0]
        )

    def _head(self) -> QueueEntry | None:
        while self._loaded_up_to != _ALL_LOADED and (not self.waiters or self.waiters[0][0] > self._loaded_up_to):
            row = self._db.execute(_SELECT_NEXT_WAITER, (*self._key, self._loaded_up_to)).fetchone()
            self._loaded_up_to = _ALL_LOADED if row is None else row[1]
            if row is not None and row[1] not in self._loaded_tickets:
                self._load_waiter(row)
        return super()._head()

    def _leave_queue(self, entry: QueueEntry) -> None:
        position = super()._position(entry)  # among the loaded waiters
        if position < len(self.waiters) and self.waiters[position][1] is entry:
            del self.waiters[position]
        self._head()  # `waiters` must not be empty while the table has more

    def _expire_waiters(self, now: float) -> None:
        super()._expire_waiters(now)
        if self._queue_row is not None:
            self._db.execute(_DELETE_EXPIRED, (*self._key, now))
            # No longer stored: `_position` would subtract them once more.
            self._stored = [
                each
                for each in self._stored
                if each.row is None or len(each.row) != _WAITER_LENGTH or each.entry.heartbeat_expires_at > now
            ]
            self._head()

    def _add_entry(self, now: float, claim: Claim, client: str) -> QueueEntry:
        if not self.waiters and self._queue_row is None:
            self._next_waiter_scan = now + WAITER_TTL
        entry = super()._add_entry(now, claim, client)
        self._loaded_tickets.add(entry.ticket)
        self._stored.append(StoredEntry(entry, None))
        return entry

    def _position(self, entry: QueueEntry) -> int:
        """How many waiters are ahead: those in the table, corrected by what this verb has changed so far."""
        if self._queue_row is None:
            return super()._position(entry)
        (count,) = self._db.execute(_COUNT_AHEAD, (*self._key, entry.ticket)).fetchone()
        for known, row, _ in self._stored:
            if known.ticket < entry.ticket:
                waited = row is not None and len(row) == _WAITER_LENGTH and row[0] == 0
                waits = known.state == WAITING and self.entries.get(known.id_hash) is known
                count += waits - waited
        return int(count)


def holder_from_row(row: Row) -> QueueEntry:
    (
        token,
        id_hash,
        state,
        client,
        label,
        host,
        pid,
        purpose,
        mode,
        delay,
        ticket,
        since,
        heartbeat_expires_at,
        until,
        slot,
        min_hold,
        process_bound,
    ) = row
    _check_texts(id_hash, client, mode)
    _check_finite(delay + since + heartbeat_expires_at + until + min_hold)
    _check_whole(token, state, ticket, 0 if slot is None else slot)
    holder = check_holder(label, host, pid, purpose)
    in_queue = (id_hash, client, holder, mode, delay, ticket, since, heartbeat_expires_at)
    return QueueEntry(*in_queue, state, until, token, slot, min_hold, bool(process_bound))


def waiter_from_row(row: Row) -> QueueEntry:
    passed, ticket, id_hash, client, label, host, pid, purpose, mode, delay, since, heartbeat_expires_at = row
    _check_texts(id_hash, client, mode)
    _check_finite(delay + since + heartbeat_expires_at)
    _check_whole(ticket)
    state, holder = PASSED if passed else WAITING, check_holder(label, host, pid, purpose)
    return QueueEntry(id_hash, client, holder, mode, delay, ticket, since, heartbeat_expires_at, state)


def _check_texts(*texts: str) -> None:
    """A member of the group can edit any number of rows, and each would stay in memory. TypeError: one is no text."""
    if len("".join(texts)) > _MAX_TEXTS:
        raise LookupError("a row with a very long text")


def check_holder(label: str, host: str, pid: int, purpose: str) -> Holder:
    """The holder that these columns name."""
    _check_texts(label, host, purpose)
    _check_whole(pid)
    return Holder(label, host, pid, purpose)


def _check_kind(kind: str, limit: int) -> None:
    if kind not in _KINDS:
        raise LookupError("a row of an unknown kind")
    _check_whole(limit)


def _check_whole(*numbers: int) -> None:
    """TypeError: one is a text or a fraction. A column of SQLite's can have values of any type."""
    for number in numbers:
        index(number)


def _check_finite(seconds: float) -> None:
    """SQLite can store infinity, which JSON cannot express."""
    if not isfinite(seconds):
        raise LookupError("a row with an infinite time")


def page_of_holdings(
    db: sqlite3.Connection,
    boot_clock: BootClock,
    budget: ListingBudget,
    namespace: str,
    prefix: str,
    exact: bool,
    after: str = "",
) -> tuple[list[Holding], str]:
    """Everything live of the next names after `after`, each as one snapshot, and the name to continue after; empty at
    the end. Changes nothing: expired entries are left out, and names that could be granted are left to their waiters.
    """
    now = boot_clock.now()
    where = f"where namespace = ? and name {'=' if exact else '>' if after else '>='} ? order by name"
    found: list[Holding] = []
    rows_read = 0
    encoding = db.execute("pragma encoding").fetchone()[0]  # of an application's own file; SQLite compares its bytes
    with ExitStack() as cursors:  # open ones would keep the transaction open

        def select(columns: str, table: str, then_by: str = "") -> sqlite3.Cursor:
            statement = f"select name, {columns} from {table} {where}{then_by}"  # noqa: S608  # constants of ours
            return cursors.enter_context(closing(db.execute(statement, (namespace, after or prefix))))

        rows = merge(
            select("kind, grant_limit", "lh_queue"),
            select(f"kind, grant_limit, {_GRANT_COLUMNS}", "lh_grant"),
            select(_WAITER_COLUMNS, "lh_waiter", ", ticket"),
            key=itemgetter(0) if encoding == "UTF-8" else lambda row: str.encode(row[0], encoding),
        )
        for name, rows_of_name in groupby(rows, itemgetter(0)):
            if not name.startswith(prefix):
                break
            if rows_read >= _PAGE:
                return found, after
            after, lock_state = name, None
            for row in rows_of_name:
                rows_read += 1
                if len(row) != 1 + _WAITER_LENGTH:
                    if lock_state is None:
                        _check_kind(row[1], row[2])
                        lock_state = LockState(now, row[1], row[2])
                    if len(row) != 3 + _GRANT_LENGTH:
                        continue
                    entry = holder_from_row(row[3:])
                else:
                    entry = waiter_from_row(row[1:])
                if lock_state is None:
                    raise LookupError("waiters without a queue")
                budget.spend(name, entry.holder.label, entry.holder.host, entry.holder.purpose)
                add_entry(lock_state, entry)
            if lock_state is not None:
                lock_state.expire(now)
                found += lock_state.holdings(namespace, name, now)
    return found, ""


def clients_of_holders(db: sqlite3.Connection) -> set[str]:
    """The addresses of the clients whose end would free a name."""
    return {client for (client,) in db.execute("select client from lh_grant where process_bound")}


def find_expired(
    db: sqlite3.Connection, now: float, after: tuple[str, str], max_names: int
) -> tuple[list[Row], tuple[str, str]]:
    """Names with expired grants, among the next few after `after` in the table, or with waiters that are overdue for a
    scan; and where to continue."""
    grants = db.execute(
        "select namespace, name, max(until + delay) from lh_grant where (namespace, name) > (?, ?) "
        "group by namespace, name order by namespace, name limit ?",
        (*after, max_names),
    ).fetchall()
    queues = db.execute(
        "select namespace, name from lh_queue where scan_at + ? <= ? limit 1", (WAITER_TTL, now)
    ).fetchall()
    expired = [row[:2] for row in grants if row[2] <= now]
    return expired + queues, grants[-1][:2] if len(grants) == max_names else ("", "")
