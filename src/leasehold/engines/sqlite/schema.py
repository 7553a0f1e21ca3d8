"""The tables of the SQLite engine, created on first use.

Times are seconds of the host's boot clock. A name without holders, waiters and a limit that was set has no row in any
table.

    lh_meta    one row: schema version, the machine and clock the times belong to, the last token and ticket, and the
               ceiling of tokens: no token above it is given before a higher ceiling is safe from a power cut
    lh_grant   one row per reservation or grant (reserved, held, cooling); `granted_ttl` is the ttl last granted
    lh_waiter  one row per queued claim: waiting, or passed over
    lh_queue   one row per name with waiters, or with a limit that was set (`limit_set`): its kind, when to scan for
               expired waiters, how its head was notified
"""

from __future__ import annotations

import sqlite3
from typing import Final

from leasehold.core.queue_entry import COOLING, HELD
from leasehold.core.timing import WAITER_TTL
from leasehold.engines.sqlite.boot_clock import BootClock
from leasehold.errors import ConfigError

VERSION: Final = 1

SCHEMA: Final = (
    """create table lh_meta (
        id integer primary key check (id = 1), version integer not null,
        machine text not null, boot text not null, clock_id text not null,
        token integer not null, ticket integer not null, ceiling integer not null)""",
    """create table lh_grant (
        namespace text not null, name text not null, token integer not null,
        id_hash text not null, state integer not null, client text not null,
        label text not null, host text not null, pid integer not null, purpose text not null,
        mode text not null, delay real not null, ticket integer not null,
        since real not null, heartbeat_expires_at real not null, until real not null, slot integer,
        granted_ttl real not null, kind text not null, grant_limit integer not null, min_hold real not null,
        process_bound integer not null,
        primary key (namespace, name, token)) without rowid""",
    """create table lh_waiter (
        namespace text not null, name text not null, passed integer not null, ticket integer not null,
        id_hash text not null, client text not null,
        label text not null, host text not null, pid integer not null, purpose text not null,
        mode text not null, delay real not null, since real not null, heartbeat_expires_at real not null,
        primary key (namespace, name, passed, ticket)) without rowid""",
    "create index lh_waiter_id_hash on lh_waiter (id_hash)",
    """create table lh_queue (
        namespace text not null, name text not null, kind text not null, grant_limit integer not null,
        scan_at real not null, notified_id_hash text not null, notified_recheck_at real not null,
        limit_set integer not null,
        primary key (namespace, name)) without rowid""",
)


def check_schema(db: sqlite3.Connection, path: str) -> None:
    """Raise ConfigError if anything in the file that concerns our tables is not exactly as we create it: a view in
    place of a table, or a trigger, would run statements of its author in our transactions. Names have no case, and
    SQLite keeps them as their author wrote them."""
    rows = db.execute(
        "select name, sql from sqlite_schema "
        "where (lower(name) glob 'lh_*' or lower(tbl_name) glob 'lh_*') and sql is not null"
    ).fetchall()
    foreign = sorted(name for name, sql in rows if not isinstance(sql, str) or _normalise(sql) not in _EXPECTED)
    if foreign or len(rows) not in (0, len(SCHEMA)):
        what = f"{foreign[0]!r} is not" if foreign else "some of its tables are not"
        raise ConfigError(
            f"{path} is not a file of Leasehold's: {what} as Leasehold creates it; choose another path, or move the "
            "file away"
        )


def _normalise(sql: str) -> str:
    return " ".join(sql.split()).lower()


_EXPECTED: Final = frozenset(_normalise(statement) for statement in SCHEMA)


def write_nothing(db: sqlite3.Connection) -> None:
    """A write that leaves no trace. (SQLite does not write a row that is updated with its own values.)"""
    db.execute("insert into lh_queue values ('', '', '', 0, 0, '', 0, 0)")  # no lock has an empty name
    db.execute("delete from lh_queue where namespace = '' and name = ''")


def prepare_schema(db: sqlite3.Connection, path: str, boot_clock: BootClock) -> None:
    """Inside an immediate transaction: create the tables, and check which clock the times in them belong to.

    Same boot and time namespace: this clock. Another boot of this machine: the clock has restarted and every process of
    the last boot has ended. A lease bound to its process has ended too, and its `delay` starts now; every other lease
    gets its full ttl again, never less. Another machine, or a shifted clock: its times mean nothing here, so the file
    is refused unless it contains no claims.
    """
    if db.execute("select 1 from sqlite_schema where type = 'table' and name = 'lh_meta'").fetchone() is None:
        for statement in SCHEMA:
            db.execute(statement)
    row = db.execute("select version, machine, boot, clock_id from lh_meta").fetchone()
    if row is None:
        values = (VERSION, boot_clock.machine, boot_clock.boot, boot_clock.clock_id)
        db.execute("insert into lh_meta values (1, ?, ?, ?, ?, 0, 0, 0)", values)
        return
    version, machine, boot, clock_id = row
    if version.__class__ is not int or version > VERSION:
        raise ConfigError(
            f"{path} was created by a newer Leasehold (schema version {version!r:.20}, this one supports {VERSION}): "
            "upgrade Leasehold"
        )
    if version < VERSION:
        raise ConfigError(
            f"{path} was created by an older Leasehold (schema version {version}, this one supports {VERSION}): use "
            "another file, once no program uses this one"
        )
    if clock_id == boot_clock.clock_id:
        return
    now = boot_clock.now()
    if boot != boot_clock.boot:  # tokens up to the ceiling may have been given, though the highest of them is lost
        db.execute("update lh_meta set token = max(token, ceiling)")
    if boot != boot_clock.boot and machine == boot_clock.machine:
        db.execute("delete from lh_grant where state = ? and process_bound and delay = 0", (HELD,))
        db.execute(
            "update lh_grant set state = ?, granted_ttl = delay where state = ? and process_bound", (COOLING, HELD)
        )
        db.execute(
            "update lh_grant set until = ? + granted_ttl, since = ?, heartbeat_expires_at = ?",
            (now, now, now + WAITER_TTL),
        )
        db.execute("update lh_waiter set since = ?, heartbeat_expires_at = ?", (now, now + WAITER_TTL))
        db.execute("update lh_queue set scan_at = ?, notified_id_hash = ''", (now + WAITER_TTL,))
    elif db.execute("select exists (select 1 from lh_grant) or exists (select 1 from lh_waiter)").fetchone()[0]:
        origin = "another time namespace of this machine" if boot == boot_clock.boot else "another machine"
        raise ConfigError(
            f"{path} contains leases from {origin}, whose clock cannot be compared with this one: use the file only "
            "from one machine and one time namespace; if the other one is gone for good, remove the file"
        )
    db.execute(
        "update lh_meta set machine = ?, boot = ?, clock_id = ?",
        (boot_clock.machine, boot_clock.boot, boot_clock.clock_id),
    )
