"""Files whose contents another user has made: planted tables, triggers and views, and edited rows."""

from __future__ import annotations

import sqlite3
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from leasehold import Client, ConfigError, LeaseholdError, Unavailable
from leasehold.cli import render
from tests.support import probe, probe_sqlite
from tests.support.bare_engine import BareEngineDriver
from tests.support.sqlite_files import ENDLESS, try_lock
from tests.support.timing import check_elapsed

# --------------------------------------------------------- planted schemas

PLANTED = {
    "view": f"drop table lh_meta; create view lh_meta as {ENDLESS}",
    "trigger": f"create trigger t before insert on lh_grant begin insert into junk {ENDLESS}; end",
    "column": "alter table lh_waiter add column extra integer default 7",
    "missing": "drop table lh_queue",
    "index": "create unique index mine on lh_grant (name)",
    "view, upper case": f"drop table lh_meta; create view LH_META as {ENDLESS}",
    "trigger, upper case": f"create trigger t before insert on LH_Grant begin insert into junk {ENDLESS}; end",
}


@pytest.mark.parametrize("kind", PLANTED)
def test_schema_that_is_not_ours_is_refused(url, path, kind) -> None:
    """A view or trigger that never ends kept `leasehold run -n` busy for ever."""
    with Client(url) as client:
        client.ping()
    db = sqlite3.connect(path, isolation_level=None)
    db.executescript(f"create table junk (x); {PLANTED[kind]}")
    db.close()
    with Client(url, call_timeout=5) as client, pytest.raises(ConfigError, match="not a file of Leasehold's"):
        client.lock("a").acquire(wait=0)


@pytest.mark.parametrize("kind", PLANTED)
def test_schema_that_is_changed_while_the_file_is_open_is_refused(url, path, kind) -> None:
    """A trigger of another member ran in every transaction of clients that had the file open."""
    with Client(url, call_timeout=5) as client:
        client.ping()
        db = sqlite3.connect(path, isolation_level=None, timeout=30)
        (version,) = db.execute("pragma schema_version").fetchone()
        db.executescript(f"create table junk (x); {PLANTED[kind]}")
        for _ in range(2):
            with pytest.raises(ConfigError, match="not a file of Leasehold's"):
                client.lock("a").acquire(wait=0)
            with pytest.raises(ConfigError, match="not a file of Leasehold's"):
                client.inspect()
            assert db.execute("select count(*) from junk").fetchone() == (0,)
            db.execute(f"pragma schema_version = {version}")  # the number that was found to be ours
        if kind.startswith("trigger"):
            db.execute("drop trigger t")
            client.lock("a").acquire(wait=0).release()
        db.close()


def test_statement_is_ended_at_the_deadline(url) -> None:
    with Client(url, call_timeout=0.3) as client:
        client.ping()
        connection = probe_sqlite.connection(client)
        began = time.monotonic()
        with pytest.raises(Unavailable, match="ended at the deadline"):
            connection.run_transaction(
                lambda db: db.execute(f"select count(*) from ({ENDLESS})").fetchone(), probe.runtime(client).now() + 0.3
            )
        assert time.monotonic() - began > 0.2
        check_elapsed(began, 30)
        with client.lock("a", wait=0):
            pass


def test_schema_of_others_is_not_trusted(url) -> None:
    with Client(url) as client:
        client.ping()
        assert probe_sqlite.database(client).execute("pragma trusted_schema").fetchone() == (0,)


# ------------------------------------------------------------- edited rows

EDITED = {
    "lh_grant": ("name", "state", "client", "purpose", "since", "until", "token", "label"),
    "lh_waiter": ("name", "id_hash", "client", "since", "heartbeat_expires_at", "label"),
    "lh_queue": ("name", "scan_at", "notified_recheck_at"),
    "lh_meta": ("version", "clock_id", "token"),
}
EDITS = ("x'ff007a'", "'abc' || char(27) || '[2J'", "cast(x'1bff' as text)")


@pytest.mark.parametrize("table", EDITED)
def test_edited_row_raises_only_errors_with_printable_texts(tmp_path, table, caplog) -> None:
    """Members of the group can edit rows: calls raised TypeError, KeyError and IndexError, and showed escape codes."""
    edits = [(column, value) for column in EDITED[table] for value in EDITS]
    for number, (column, value) in enumerate(edits):
        path = tmp_path / f"{number}.db"
        with Client(f"sqlite://{path}", call_timeout=0.2) as one, Client(f"sqlite://{path}", call_timeout=0.2) as two:
            lease = one.lock("a").acquire()
            queue_up(path)
            db = sqlite3.connect(path, isolation_level=None, timeout=5)
            with suppress(sqlite3.IntegrityError, sqlite3.OperationalError):
                db.execute(f"update {table} set {column} = {value}")
            db.close()
            for call in (two.inspect, partial(try_lock, two), lease.renew, lease.release):
                error = error_of(call)
                assert error is None or isinstance(error, LeaseholdError), (column, value, call, error)
                assert str(error).isprintable(), (column, value, call, error)
    assert all(record.getMessage().isprintable() for record in caplog.records)


def test_very_long_text_in_an_edited_row_is_not_read(tmp_path) -> None:
    """A member of the group made every call of the others take gigabytes, and minutes beyond their deadlines."""
    path = tmp_path / "locks.db"
    with Client(f"sqlite://{path}", call_timeout=5) as one, Client(f"sqlite://{path}", call_timeout=5) as two:
        lease = one.lock("a").acquire()
        db = sqlite3.connect(path, isolation_level=None, timeout=5)
        db.execute("update lh_grant set label = hex(zeroblob(10000000))")
        db.close()
        tracemalloc.start()
        try:
            for call in (two.inspect, partial(try_lock, two)):
                with pytest.raises(Unavailable, match="too big"):
                    call()
            assert tracemalloc.get_traced_memory()[1] < 2**20
        finally:
            tracemalloc.stop()
        two.lock("b").acquire(wait=0).release()
        lease.release()


def test_large_table_of_an_application_in_the_same_file_is_accepted(path) -> None:
    """Its definition is a row of the schema: calls failed if it was longer than a row of ours can be."""
    db = sqlite3.connect(path, isolation_level=None)
    db.execute(f"create table wide ({', '.join(f'column_{number} text not null' for number in range(1000))})")
    db.close()
    with Client(f"sqlite://{path}", call_timeout=5) as client, client.lock("a"):
        assert [holding.state for holding in client.inspect()] == ["held"]
        assert client.once("key", lambda: 1) == 1


def test_many_long_texts_in_edited_rows_are_not_kept(tmp_path) -> None:
    """In columns that no list counts: a list took a megabyte of the caller's memory for each row, or four."""
    path = tmp_path / "locks.db"
    with Client(f"sqlite://{path}", call_timeout=5) as client:
        lease = client.lock("a").acquire()
        db = sqlite3.connect(path, isolation_level=None, timeout=5)
        columns = [row[1] for row in db.execute("pragma table_info(lh_grant)")]
        for column in ("id_hash", "client", "mode"):
            long = ["a.token + n.value" if each == "token" else f"a.{each}" for each in columns]
            long[columns.index(column)] = "n.value || hex(zeroblob(20000))"
            numbers = "with n(value) as (select 1 union all select value + 1 from n where value < 50)"
            db.execute(f"{numbers} insert into lh_grant select {', '.join(long)} from lh_grant a, n")
            tracemalloc.start()
            try:
                with pytest.raises(Unavailable, match="a row that Leasehold never writes"):
                    client.inspect()
                assert tracemalloc.get_traced_memory()[1] < 2**20
            finally:
                tracemalloc.stop()
            db.execute("delete from lh_grant where length(id_hash) + length(client) + length(mode) > 1000")
        db.close()
        lease.release()


@pytest.mark.parametrize("column", ["delay", "since", "heartbeat_expires_at", "until", "min_hold"])
@pytest.mark.parametrize("infinite", ["9e999", "-9e999"])
def test_infinite_time_in_an_edited_row_is_unavailable(tmp_path, column, infinite) -> None:
    """`leasehold ls` and its JSON have no text for one."""
    path = tmp_path / "locks.db"
    with Client(f"sqlite://{path}", call_timeout=5) as client:
        lease = client.lock("a").acquire()
        queue_up(path)
        db = sqlite3.connect(path, isolation_level=None, timeout=5)
        for table in ("lh_grant", "lh_waiter"):
            before = db.execute(f"select * from {table}").fetchone()
            with suppress(sqlite3.OperationalError):  # waiters have no `until` and no `min_hold`
                db.execute(f"update {table} set {column} = {infinite}")
                with pytest.raises(Unavailable, match="a row that Leasehold never writes"):
                    client.inspect()
                db.execute(f"replace into {table} values ({', '.join('?' * len(before))})", before)
        db.close()
        assert [holding.state for holding in client.inspect()] == ["held", "waiting"]
        lease.release()


VALUES_OF_OTHER_TYPES = {
    "lh_grant": {
        **dict.fromkeys(("token", "state", "pid", "ticket", "slot", "grant_limit"), ("'abc'", "x'00'", "1.5")),
        **dict.fromkeys(("id_hash", "client", "label", "host", "purpose", "mode"), ("x'ff'",)),
        "kind": ("'abc'", "x'ff'"),
    },
    "lh_waiter": {
        **dict.fromkeys(("ticket", "pid"), ("'abc'", "x'00'", "1.5")),
        **dict.fromkeys(("id_hash", "client", "label", "host", "purpose", "mode"), ("x'ff'",)),
    },
    "lh_queue": {"grant_limit": ("'abc'", "x'00'", "1.5"), "kind": ("'abc'", "x'ff'")},
}


@pytest.mark.parametrize("table", VALUES_OF_OTHER_TYPES)
def test_value_of_another_type_in_an_edited_row_is_unavailable(tmp_path, table) -> None:
    """A column can have values of any type: `leasehold ls` ended with exit code 70."""
    path = tmp_path / "locks.db"
    with Client(f"sqlite://{path}", call_timeout=5) as client:
        lease = client.lock("a").acquire()
        if table != "lh_grant":  # a queue's kind and limit count, not those of the grants
            queue_up(path)
        db = sqlite3.connect(path, isolation_level=None, timeout=5)
        before = db.execute(f"select * from {table}").fetchone()
        for column, values in VALUES_OF_OTHER_TYPES[table].items():
            for value in values:
                db.execute(f"update {table} set {column} = {value}")
                with pytest.raises(Unavailable, match="a row that Leasehold never writes"):
                    client.inspect()
                db.execute(f"delete from {table}")
                db.execute(f"insert into {table} values ({', '.join('?' * len(before))})", before)
        db.close()
        assert client.inspect()[0].state == "held"
        lease.release()


def test_pid_of_another_type_is_not_shown_to_a_claim_that_joins_a_queue(tmp_path) -> None:
    """That attempt reads the holder in a statement of its own."""
    path = tmp_path / "locks.db"
    driver = BareEngineDriver(f"sqlite://{path}")
    driver.acquire(driver.claim("a"))
    driver.attempt(driver.claim("a", queue=True))  # the head of the queue
    db = sqlite3.connect(path, isolation_level=None, timeout=5)
    for value in ("'abc'", "x'00'", "1.5"):
        db.execute(f"update lh_grant set pid = {value}")
        with pytest.raises(Unavailable, match="a row that Leasehold never writes"):
            driver.attempt(driver.claim("a", queue=True))
    assert db.execute("select count(*) from lh_waiter").fetchone() == (1,)
    db.close()


def test_time_that_no_calendar_has_is_bounded(tmp_path) -> None:
    """`leasehold ls` ended with exit code 70, or said that stdout could not be written."""
    path = tmp_path / "locks.db"
    with Client(f"sqlite://{path}", call_timeout=5) as client:
        lease = client.lock("a").acquire()
        db = sqlite3.connect(path, isolation_level=None, timeout=5)
        for since in ("-1e12", "-9e18", "-1e300", "1e300"):
            db.execute(f"update lh_grant set since = {since}")
            (holding,) = client.inspect()
            assert 0 <= holding.age < 4e9
            assert render.holding_as_json(holding)["acquired_at"] is not None
        db.close()
        lease.release()


def error_of(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def queue_up(path: Path) -> None:
    """Add a waiter for "a" whose process does not answer."""
    db = sqlite3.connect(path, isolation_level=None, timeout=5)
    waiter = ("", "a", 0, 7, "0" * 32, "", "label", "host", 1, "", "exclusive", 0.0, 0.0, 1e12)
    db.execute(f"insert into lh_waiter values ({', '.join('?' * 14)})", waiter)
    db.execute("insert into lh_queue values ('', 'a', 'lock', 1, 1e12, '', 0.0, 0)")
    db.close()
