"""Attacks on the release that does without its bucket: somebody comes between its look at the row and its delete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from leasehold.core.names import bucket
from leasehold.model import Busy, Grant

_DOOR = 4711
_SLOW = f"""
create or replace function {{s}}.lh_now_v1() returns bigint language plpgsql volatile cost 100000 as $$
begin
    if current_setting('application_name') = 'slow' then
        perform pg_advisory_xact_lock_shared({_DOOR});
    end if;
    return (date_part('epoch', clock_timestamp()) * 1000000)::bigint;
end $$
"""


@pytest.fixture
def later(beside) -> Any:
    return beside("test_postgresql_releases").Later


@pytest.fixture
def slow(database, bare) -> Any:
    """One who stops where it asks for the time: a delete asks it last of all it asks about a row."""
    found = bare(database.url(application_name="slow"))
    found.release(found.takes(found.claim()))  # the tables are there, and the name's bucket
    database.ask(_SLOW)
    return found


@contextmanager
def stopped(database, until, work: Any) -> Iterator[Any]:
    """`work` of the slow one, which goes on when the block ends."""
    with database.server.connect() as door, door.transaction():
        door.execute(f"select pg_advisory_xact_lock({_DOOR})")
        under_way = work()
        until(lambda: waits_for(database, "advisory"))
        yield under_way


def waits_for(database, *what: str) -> bool:
    query = "select 1 from pg_stat_activity where application_name = 'slow' and wait_event = any(%s)"
    return bool(database.ask(query, list(what)))


@pytest.mark.parametrize("comes", ["a renewal", "a waiter"])
def test_a_release_that_met_somebody_keeps_no_row_while_it_waits_for_the_bucket(
    database, bare, slow, until, later, comes
) -> None:
    """Whoever has the bucket may wait for that row: each would wait for the other."""
    held, other = slow.takes(slow.claim()), bare(database.url())
    row = f"select 1 from \"{database.schema}\".lh_grant where name = 'job' for no key update nowait"
    with database.server.connect() as session, session.transaction():
        with stopped(database, until, lambda: later(lambda: slow.release(held))) as leaves:
            if comes == "a renewal":
                other.renew(held)
            else:
                waiter = other.claim(queue=True)
                assert isinstance(other.attempt(waiter), Busy)
            session.execute(f'select 1 from "{database.schema}".lh_bucket for update')
        until(lambda: waits_for(database, "transactionid", "tuple"))
        assert session.execute(row).fetchall() == [(1,)]
    assert leaves.result() is True
    assert isinstance(other.attempt(waiter if comes == "a waiter" else other.claim()), Grant)


def test_a_transaction_that_asks_at_the_moment_of_a_release_is_not_waited_for(
    database, bare, slow, until, later
) -> None:
    """Whoever came for the name could wait for the release, and keep the bucket as long as that transaction lasts."""
    held, other = slow.takes(slow.claim()), bare(database.url())
    neighbour = next(name for name in map(str, range(100_000)) if bucket(name) == bucket("job"))
    check = f'select "{database.schema}".lh_check_v1(%s, %s, %s)'
    with database.server.connect() as session, session.transaction():
        with stopped(database, until, lambda: later(lambda: slow.release(held))) as leaves:
            assert session.execute(check, ("", "job", held.token)).fetchone() == (True,)
        assert leaves.result() is True
        assert isinstance(other.attempt(other.claim()), Busy), "what it checked holds until it ends"
        assert isinstance(other.attempt(other.claim(neighbour)), Grant)
    assert isinstance(other.attempt(other.claim()), Grant)
