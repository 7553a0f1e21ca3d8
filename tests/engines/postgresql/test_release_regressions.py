"""Attacks on the release that does not lock its bucket: a call comes between its read of the row and its delete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from leasehold.core.names import bucket
from leasehold.model import Busy, Grant
from tests.engines.postgresql.test_release import BackgroundCall

_PAUSE_LOCK = 4711
_PAUSING_CLOCK = f"""
create or replace function {{s}}.lh_now_v1() returns bigint language plpgsql volatile cost 100000 as $$
begin
    if current_setting('application_name') = 'slow' then
        perform pg_advisory_xact_lock_shared({_PAUSE_LOCK});
    end if;
    return (date_part('epoch', clock_timestamp()) * 1000000)::bigint;
end $$
"""


@pytest.fixture
def background_call() -> Any:
    return BackgroundCall


@pytest.fixture
def slow_driver(database, make_driver) -> Any:
    """A driver that pauses where it reads the clock: the last condition that its delete checks for a row."""
    found = make_driver(database.url(application_name="slow"))
    found.release(found.acquire(found.claim()))  # creates the tables and the name's bucket
    database.ask(_PAUSING_CLOCK)
    return found


@contextmanager
def paused(database, wait_until, work: Any) -> Iterator[Any]:
    """Start `work` on the slow driver, which continues when the block ends."""
    with database.server.connect() as session, session.transaction():
        session.execute(f"select pg_advisory_xact_lock({_PAUSE_LOCK})")
        call = work()
        wait_until(lambda: is_waiting_for(database, "advisory"))
        yield call


def is_waiting_for(database, *wait_events: str) -> bool:
    query = "select 1 from pg_stat_activity where application_name = 'slow' and wait_event = any(%s)"
    return bool(database.ask(query, list(wait_events)))


@pytest.mark.parametrize("comes", ["a renewal", "a waiter"])
def test_contested_release_locks_no_row_while_waiting_for_the_bucket(
    database, make_driver, slow_driver, wait_until, background_call, comes
) -> None:
    """The call that has locked the bucket may wait for that row: the two would wait for each other."""
    held, other = slow_driver.acquire(slow_driver.claim()), make_driver(database.url())
    row = f"select 1 from \"{database.schema}\".lh_grant where name = 'job' for no key update nowait"
    with database.server.connect() as session, session.transaction():
        with paused(database, wait_until, lambda: background_call(lambda: slow_driver.release(held))) as release_call:
            if comes == "a renewal":
                other.renew(held)
            else:
                waiter = other.claim(queue=True)
                assert isinstance(other.attempt(waiter), Busy)
            session.execute(f'select 1 from "{database.schema}".lh_bucket for update')
        wait_until(lambda: is_waiting_for(database, "transactionid", "tuple"))
        assert session.execute(row).fetchall() == [(1,)]
    assert release_call.result() is True
    assert isinstance(other.attempt(waiter if comes == "a waiter" else other.claim()), Grant)


def test_release_does_not_wait_for_a_concurrent_lease_check(
    database, make_driver, slow_driver, wait_until, background_call
) -> None:
    """Otherwise a new claim could wait for the release and keep the bucket locked until that transaction ends."""
    held, other = slow_driver.acquire(slow_driver.claim()), make_driver(database.url())
    neighbour = next(name for name in map(str, range(100_000)) if bucket(name) == bucket("job"))
    check = f'select "{database.schema}".lh_check_v1(%s, %s, %s)'
    with database.server.connect() as session, session.transaction():
        with paused(database, wait_until, lambda: background_call(lambda: slow_driver.release(held))) as release_call:
            assert session.execute(check, ("", "job", held.token)).fetchone() == (True,)
        assert release_call.result() is True
        assert isinstance(other.attempt(other.claim()), Busy), "the checked lease holds until the transaction ends"
        assert isinstance(other.attempt(other.claim(neighbour)), Grant)
    assert isinstance(other.attempt(other.claim()), Grant)
