"""What a role without rights can learn about the claims of others, and what a hostile server can make libpq keep."""

from __future__ import annotations

import psycopg

from leasehold import Client
from leasehold.engines.postgresql.relay import MIN_LEFT
from tests.support import probe_sql


def test_unprivileged_role_cannot_listen_for_id_hashes(database, make_driver) -> None:
    """Every role may read pg_locks, and a role that knows an id hash could release its claim."""
    database.ask("create role nosy login")
    try:
        driver = make_driver(database.url())
        held = driver.acquire(driver.claim())
        driver.attempt(driver.claim(queue=True))
        with psycopg.connect(database.server.url(user="nosy"), autocommit=True) as nosy:
            seen = nosy.execute(
                "select to_hex(classid::bigint), to_hex(objid::bigint) from pg_locks where locktype = 'advisory'"
            ).fetchall()
            assert seen
            for high, low in seen:
                nosy.execute(f"listen lh_{high.zfill(8)}{low.zfill(8)}".encode())
            driver.release(held)
            assert [note.payload for note in nosy.notifies(timeout=1)] == []
    finally:
        database.ask("drop role nosy")


def test_session_is_replaced_when_libpq_may_keep_much(database) -> None:
    with Client(database.url()) as client, client.lock("held") as lease:
        session = probe_sql.session(client)
        session.relay.bytes_left = MIN_LEFT + 1
        lease.renew()  # the bytes that are not a part of a value are not given back
        assert probe_sql.session(client) is session
        assert session.relay.bytes_left < MIN_LEFT
        lease.renew()
        assert probe_sql.session(client) is not session
        assert lease.held


def test_replies_of_an_honest_server_replace_no_session(database) -> None:
    pairs = 50
    with Client(database.url()) as client:
        for _ in range(2):  # the first calls also prepare the statements
            with client.lock("job"):
                pass
        client.inspect()
        session = probe_sql.session(client)
        before = session.relay.bytes_left
        for _ in range(pairs):
            with client.lock("job") as lease:
                lease.renew()
        client.inspect()
        assert probe_sql.session(client) is session
        assert before - session.relay.bytes_left < 100 * pairs
