"""One name's line on rows: brought in as far as a verb needs it, decided by `core/admission.py`, written back.

`RowLine` adds no decision to `Line`. It brings in everything that occupies the name, the party that asks, and of those
in line the first, then the next whenever that one goes: a thousand waiters cost a verb no more than two. Nothing is
written before `save`, but for lapsed places, and all of it inside the verb's one transaction.
"""

from __future__ import annotations

import sqlite3
from bisect import insort
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, Final, NamedTuple, TypeAlias

from leasehold.core.admission import Line
from leasehold.core.party import COOLING, PASSED, WAITING, Counter, Moment, Party
from leasehold.core.timing import BEAT
from leasehold.engines.sql.rows import place
from leasehold.engines.sqlite.file import Moved
from leasehold.engines.sqlite.host import Host
from leasehold.model import Holder, Holding, Kind

Row: TypeAlias = "tuple[Any, ...]"

_GRANT: Final = "token, mark, state, client, label, host, pid, purpose, mode, delay, ticket, since, beat, until, slot"
_WAITER: Final = "passed, ticket, mark, client, label, host, pid, purpose, mode, delay, since, beat"

# One statement for all that an uncontended verb reads.
_LOAD: Final = f"""
    select m.stamp, m.token, m.ticket, l.kind, l.most, l.scan_at, l.told, l.told_end, g.life, g.kind, g.most,
        {", ".join(f"g.{column}" for column in _GRANT.split(", "))}
    from lh_meta m
    left join lh_line l on l.namespace = ?1 and l.name = ?2
    left join lh_grant g on g.namespace = ?1 and g.name = ?2"""
_OF_LOAD: Final = 11  # where the party's own columns begin

_BY_MARK: Final = f"select {_WAITER} from lh_waiter where mark = ? and namespace = ? and name = ?"
_NEXT: Final = f"""select {_WAITER} from lh_waiter
    where namespace = ? and name = ? and passed = 0 and ticket > ? order by ticket limit 1"""
_BEFORE: Final = "select count(*) from lh_waiter where namespace = ? and name = ? and passed = 0 and ticket < ?"
_ANY: Final = "select exists (select 1 from lh_waiter where namespace = ? and name = ?)"
_LAPSED: Final = "delete from lh_waiter where namespace = ? and name = ? and beat <= ?"

PUT_GRANT: Final = f"replace into lh_grant (namespace, name, life, kind, most, {_GRANT}) values ({', '.join('?' * 20)})"
_PUT_WAITER: Final = f"replace into lh_waiter (namespace, name, {_WAITER}) values ({', '.join('?' * 14)})"
_CUT_GRANT: Final = "delete from lh_grant where namespace = ? and name = ? and token = ?"
_CUT_WAITER: Final = "delete from lh_waiter where namespace = ? and name = ? and passed = ? and ticket = ?"

_AHEAD: Final = float("inf")


class Stored(NamedTuple):
    """A party, and its row as it stands in the table: None, there is none yet."""

    party: Party
    row: Row | None
    life: float = 0.0


class RowLine(Line):
    __slots__ = ("_counter", "_db", "_frontier", "_key", "_line_row", "_meta", "_now", "_stored", "_tickets")

    def __init__(
        self,
        db: sqlite3.Connection,
        host: Host,
        namespace: str,
        name: str,
        mark: str = "",
        kind: Kind = "lock",
        limit: int = 1,
    ) -> None:
        now = host.clock()  # inside the transaction: decisions and their times have one order
        super().__init__(now, kind, limit)
        self._db, self._key, self._now = db, (namespace, name), now
        self._stored: list[Stored] = []
        self._tickets: set[int] = set()  # of waiters brought in: never twice, or one removed would come back
        self._line_row: Row | None = None
        rows = db.execute(_LOAD, self._key).fetchall()
        if not rows or rows[0][0] != host.stamp:  # or somebody emptied the tables
            raise Moved
        first = rows[0]
        self._meta = (first[1], first[2])
        self._counter = Counter(first[1])
        self.tickets = first[2]
        if first[11] is not None:
            self.kind, self.limit = first[9], first[10]
            for row in rows:
                self._occupied(row)
            self._next_end = min(party.until for party in self.occupiers.values())
        self._frontier = _AHEAD  # every waiter with a ticket up to this one is in `waiters`
        if first[3] is not None:
            self._line_row = first[3:8]
            self.kind, self.limit, self._scan_at = first[3], first[4], first[5]
            self._told = (first[6], first[7])
            self._frontier = -1
            if mark and mark not in self.parties and (row := db.execute(_BY_MARK, (mark, *self._key)).fetchone()):
                self._queued(row)
            self._head()

    def moment(self, wall: Callable[[], float], reachable: Callable[[str], bool]) -> Moment:
        def issue() -> int:
            return self._counter.next(int(wall() * 1_000_000))

        return Moment(self._now, issue, reachable)

    def save(self) -> None:
        """Write what the verb has changed."""
        db, key = self._db, self._key
        queued = self._line_row is not None
        for party, row, life in self._stored:
            new = self._row_of(party)
            if new == row:
                continue
            if row is not None and (new is None or new[:2] != row[:2] or len(new) != len(row)):
                if len(row) == 15:
                    db.execute(_CUT_GRANT, (*key, row[0]))
                else:
                    db.execute(_CUT_WAITER, (*key, row[0], row[1]))
            if new is None:
                continue
            if len(new) == 15:
                if row is None or len(row) != 15 or row[13] != new[13]:
                    life = party.until - self._now
                db.execute(PUT_GRANT, (*key, life, self.kind, self.limit, *new))
            else:
                queued = True
                db.execute(_PUT_WAITER, (*key, *new))
        if (self._counter.last, self.tickets) != self._meta:
            db.execute("update lh_meta set token = ?, ticket = ?", (self._counter.last, self.tickets))
        if queued:
            self._save_line()

    def _save_line(self) -> None:
        if not self._db.execute(_ANY, self._key).fetchone()[0]:
            self._db.execute("delete from lh_line where namespace = ? and name = ?", self._key)
            return
        new = (self.kind, self.limit, self._scan_at, *self._told)
        if new != self._line_row:
            self._db.execute("replace into lh_line values (?, ?, ?, ?, ?, ?, ?)", (*self._key, *new))

    # ------------------------------------------- rows to parties and back

    def _occupied(self, row: Row) -> None:
        party = as_occupier(row[_OF_LOAD:])
        self.occupiers[party.token] = party
        if party.state != COOLING:
            self.parties[party.mark] = party
        self._stored.append(Stored(party, row[_OF_LOAD:], row[8]))

    def _queued(self, row: Row) -> None:
        party = as_waiter(row)
        self._tickets.add(party.ticket)
        self.parties[party.mark] = party
        if party.state == WAITING:
            insort(self.waiters, (party.ticket, party))
        self._stored.append(Stored(party, row))

    def _row_of(self, party: Party) -> Row | None:
        if self.occupiers.get(party.token) is party:
            return (
                *(party.token, party.mark, party.state, party.client, *party.holder, party.mode, party.delay),
                *(party.ticket, party.since, party.beat, party.until, party.slot),
            )
        if self.parties.get(party.mark) is party:
            passed = int(party.state == PASSED)
            return (
                *(passed, party.ticket, party.mark, party.client, *party.holder, party.mode, party.delay),
                *(party.since, party.beat),
            )
        return None

    # ------------------------------------- where a line in a table differs

    @property
    def idle(self) -> bool:
        return super().idle and (self._line_row is None or not self._db.execute(_ANY, self._key).fetchone()[0])

    def _head(self) -> Party | None:
        while self._frontier != _AHEAD and (not self.waiters or self.waiters[0][0] > self._frontier):
            row = self._db.execute(_NEXT, (*self._key, self._frontier)).fetchone()
            self._frontier = _AHEAD if row is None else row[1]
            if row is not None and row[1] not in self._tickets:
                self._queued(row)
        return super()._head()

    def _leave_line(self, party: Party) -> None:
        if party.state == WAITING:
            place = super()._place(party)  # among those brought in
            if place < len(self.waiters) and self.waiters[place][1] is party:
                del self.waiters[place]
            self._head()  # `waiters` must not look empty while the table has more

    def _scan(self, now: float) -> None:
        super()._scan(now)
        if self._line_row is not None:
            self._db.execute(_LAPSED, (*self._key, now))
            self._head()

    def _join(self, now: float, claim: Any, client: str) -> Party:
        if not self.waiters and self._line_row is None:
            self._scan_at = now + BEAT
        party = super()._join(now, claim, client)
        self._tickets.add(party.ticket)
        self._stored.append(Stored(party, None))
        return party

    def _place(self, party: Party) -> int:
        """How many wait before it: those in the table, corrected by what this verb has changed so far."""
        if self._line_row is None:
            return super()._place(party)
        (count,) = self._db.execute(_BEFORE, (*self._key, party.ticket)).fetchone()
        for known, row, _ in self._stored:
            if known.ticket < party.ticket:
                waited = row is not None and len(row) == 12 and row[0] == 0
                waits = known.state == WAITING and self.parties.get(known.mark) is known
                count += waits - waited
        return int(count)


def as_occupier(row: Row) -> Party:
    token, mark, state, client, label, host, pid, purpose, mode, delay, ticket, since, beat, until, slot = row
    holder = Holder(label, host, pid, purpose)
    return Party(mark, client, holder, mode, delay, ticket, since, beat, state, until, token, slot)


def as_waiter(row: Row) -> Party:
    passed, ticket, mark, client, label, host, pid, purpose, mode, delay, since, beat = row
    state = PASSED if passed else WAITING
    return Party(mark, client, Holder(label, host, pid, purpose), mode, delay, ticket, since, beat, state)


def holdings(db: sqlite3.Connection, host: Host, namespace: str, prefix: str, exact: bool) -> Iterator[Holding]:
    """Everything live, as one snapshot. Changes nothing: what is over is left out, what could go on is left to those
    whose turn it is."""
    now = host.clock()
    of_name = f"where namespace = ? and name {'=' if exact else '>='} ? order by name"
    grants = db.execute(f"select name, kind, most, {_GRANT} from lh_grant {of_name}", (namespace, prefix)).fetchall()
    waiters = db.execute(f"select name, {_WAITER} from lh_waiter {of_name}, ticket", (namespace, prefix)).fetchall()
    lines = db.execute(f"select name, kind, most from lh_line {of_name}", (namespace, prefix)).fetchall()
    found: dict[str, Line] = {}
    for name, kind, most, *row in grants:
        place(found.setdefault(name, Line(now, kind, most)), as_occupier(tuple(row)))
    for name, kind, most in lines:
        found.setdefault(name, Line(now, kind, most))
    for name, rows in groupby(waiters, key=lambda row: row[0]):
        for row in rows:
            place(found[name], as_waiter(row[1:]))
    for name in sorted(name for name in found if name.startswith(prefix)):
        found[name].tidy(now)
        yield from found[name].holdings(namespace, name, now)


def overdue(db: sqlite3.Connection, now: float, after: tuple[str, str], most: int) -> tuple[list[Row], tuple[str, str]]:
    """Names with something over, among the next few after a place in the table, and where to go on from."""
    grants = db.execute(
        "select namespace, name, max(until + delay) from lh_grant where (namespace, name) > (?, ?) "
        "group by namespace, name order by namespace, name limit ?",
        (*after, most),
    ).fetchall()
    lines = db.execute("select namespace, name from lh_line where scan_at + ? <= ? limit 1", (BEAT, now)).fetchall()
    over = [row[:2] for row in grants if row[2] <= now]
    return over + lines, grants[-1][:2] if len(grants) == most else ("", "")
