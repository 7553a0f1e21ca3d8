"""What a role without rights can learn about the claims of others."""

from __future__ import annotations

import psycopg


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
