"""The clock that counts `keep`: that of the server, which is not its local time."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime

import pymysql
import pytest

from harness.servers import fake_clock
from harness.servers.mysql import MariaDB
from harness.servers.postgresql import PostgreSQL
from leasehold.records.store import Record
from leasehold.records.stores.mysql import DIALECT
from leasehold.runtime.base import run_sync
from leasehold.testing.conformance.rig import Absent

BERLIN = "CET-1CEST,M3.5.0,M10.5.0/3"
WINTER_BEGINS = datetime(2026, 10, 25, 1, tzinfo=UTC).timestamp()  # 3:00 becomes 2:00
MINUTE = 60.0


@pytest.fixture(params=["postgresql", "mysql"])
def steppable_server(request, monkeypatch) -> Iterator[tuple[PostgreSQL | MariaDB, str]]:
    """A server whose clock can be set, and the URL of a store."""
    monkeypatch.setenv("TZ", BERLIN)  # of the server: this process does not read it again
    try:
        server = {"postgresql": PostgreSQL, "mysql": MariaDB}[request.param](fake_clock=True).start()
    except Absent as absent:
        pytest.skip(str(absent))
    if request.param == "postgresql":
        server.ask(f"alter database postgres set timezone = '{BERLIN}'")
    yield server, server.url() if request.param == "postgresql" else f"mysql://root@127.0.0.1:{server.port}/test"
    server.kill()


def test_clock_set_back_during_a_statement_counts_back_by_no_more() -> None:
    """MySQL's clock was ahead by half an hour then: a write took the record of another caller for an expired one."""
    try:
        server = MariaDB().start()
    except Absent as absent:
        pytest.skip(str(absent))
    try:
        connection = pymysql.connect(host="127.0.0.1", port=server.port, user="root", autocommit=True)
        with connection, connection.cursor() as cursor:
            for seconds in (-600, 0, 0.5, 600):  # that the clock is behind the statement's beginning
                cursor.execute(f"set timestamp = unix_timestamp(sysdate(6)) + {seconds}")
                cursor.execute(f"select {DIALECT.now} - unix_timestamp(sysdate(6))")
                assert abs(float(cursor.fetchone()[0])) < 60
    finally:
        server.kill()


@pytest.mark.skipif(not fake_clock.is_available(), reason="faketime is not installed")
def test_record_is_kept_as_long_when_the_local_time_is_put_back(steppable_server, open_runner) -> None:
    server, url = steppable_server
    store = open_runner(url)

    def set_clock(at: float) -> None:
        server.set_clock(at - time.time())

    for minutes in (-65, -30, -1, 30):  # of the write, before the change and after it
        written, key, record = WINTER_BEGINS + minutes * MINUTE, str(minutes), Record(uuid.uuid4().hex, b"done")
        set_clock(written)
        assert run_sync(store.write(key, record, keep=40 * MINUTE))
        set_clock(written + 30 * MINUTE)
        assert run_sync(store.read(key)) == record
        set_clock(written + 50 * MINUTE)
        assert run_sync(store.read(key)) is None
