"""A release does not lock its bucket if no claim is queued. A claim that arrives at that moment is not missed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from leasehold import Client, transaction
from leasehold.core.names import bucket
from leasehold.engines.sql.codec import key
from leasehold.model import Busy, Claim, Grant
from tests.support.timing import check_seconds


@pytest.fixture
def driver(database, make_driver) -> Any:
    found = make_driver(database.url())
    found.release(found.acquire(found.claim()))  # creates the tables and the name's bucket
    return found


class BackgroundCall:
    """A call in another thread, and its result."""

    def __init__(self, work: Any) -> None:
        self._results: list[Any] = []
        self._thread = threading.Thread(target=lambda: self._results.append(work()), daemon=True)
        self._thread.start()

    def result(self) -> Any:
        self._thread.join(60)
        assert self._results, "the call has not ended, or it failed"
        return self._results[0]


@contextmanager
def uncommitted_call(database, verb: str, *values: object) -> Iterator[Any]:
    """Call a verb in a transaction that commits when the block ends."""
    placeholders = ", ".join(["%s"] * len(values))
    with database.server.connect() as session, session.transaction():
        yield session.execute(f'select "{database.schema}".lh_{verb}_v1({placeholders})', values).fetchone()[0]


def release_args(claim: Claim) -> tuple[object, ...]:
    return (*key(claim), True, True, 5000)


def attempt_args(claim: Claim) -> tuple[object, ...]:
    options = (*claim.holder, claim.mode, claim.kind, claim.limit, 30_000_000, 0, 0, claim.queue, 0, 5000)
    return (*key(claim), "", *options)


def is_blocked(database) -> bool:
    query = "select 1 from pg_stat_activity where wait_event_type = 'Lock' and query like %s"
    return bool(database.ask(query, f'%"{database.schema}"%'))


# ------------------------------------------------------ with a concurrent call


def test_waiter_that_joins_during_a_release_is_granted(database, make_driver, driver, wait_until) -> None:
    held, other = driver.acquire(driver.claim()), make_driver(database.url())
    with uncommitted_call(database, "release", *release_args(held)) as ended:
        assert ended
        join_call = BackgroundCall(lambda: other.attempt(other.claim(queue=True)))
        wait_until(lambda: is_blocked(database))
    granted = join_call.result()
    assert isinstance(granted, Grant), "a queued claim would never be notified"
    assert granted.token > held.token


def test_release_during_a_join_makes_the_waiters_reservation(database, make_driver, driver, wait_until) -> None:
    held, other = driver.acquire(driver.claim()), make_driver(database.url())
    waiter = other.claim(queue=True)
    with uncommitted_call(database, "attempt", *attempt_args(waiter)) as answer:
        assert answer[0] == 0
        release_call = BackgroundCall(lambda: driver.release(held))
        wait_until(lambda: is_blocked(database))
    assert release_call.result() is True
    assert database.ask("select id_hash, state from {s}.lh_grant") == [(waiter.id_hash, 1)], "reserved for the waiter"
    assert isinstance(other.attempt(waiter), Grant)


def test_rolled_back_release_leaves_the_queue_unchanged(database, make_driver, driver, wait_until) -> None:
    held, other = driver.acquire(driver.claim()), make_driver(database.url())
    waiter = other.claim(queue=True)
    with pytest.raises(ZeroDivisionError), uncommitted_call(database, "release", *release_args(held)):
        join_call = BackgroundCall(lambda: other.attempt(waiter))
        wait_until(lambda: is_blocked(database))
        raise ZeroDivisionError
    assert isinstance(join_call.result(), Busy)
    assert driver.release(held)
    assert isinstance(other.attempt(waiter), Grant)


@pytest.mark.parametrize("comes", ["tries", "again"])
def test_attempt_during_a_release_gets_a_new_grant(database, make_driver, driver, wait_until, comes) -> None:
    """`again`: the holder repeats its own attempt, which must not confirm the grant that was just released."""
    held, other = driver.acquire(driver.claim()), make_driver(database.url())
    claim = held if comes == "again" else other.claim()
    with uncommitted_call(database, "release", *release_args(held)):
        attempt_call = BackgroundCall(lambda: other.attempt(claim))
        wait_until(lambda: is_blocked(database))
    granted = attempt_call.result()
    assert isinstance(granted, Grant)
    assert granted.token > held.token
    assert database.ask("select token from {s}.lh_grant") == [(granted.token,)]


def test_break_during_a_release_reports_nothing_broken(database, driver, wait_until) -> None:
    held = driver.acquire(driver.claim())
    with uncommitted_call(database, "release", *release_args(held)):
        values = ("", bucket("job"), "job", held.token, 5000)
        break_call = BackgroundCall(lambda: database.ask("select {s}.lh_break_v1(%s, %s, %s, %s, %s)", *values))
        wait_until(lambda: is_blocked(database))
    assert break_call.result() == [(False,)]


def test_release_and_new_claims_never_deadlock(database) -> None:
    """Under load no waiter is missed until its own re-check, and the server finds no deadlock."""
    deadlocks = "select deadlocks from pg_stat_database where datname = current_database()"
    before, end_at, slowest = database.ask(deadlocks), time.monotonic() + 4, [0.0]
    with Client(database.url(), ttl=60) as first, Client(database.url(), ttl=60) as second:
        tokens: list[int] = []

        def work(client: Client, wait: float) -> None:
            while time.monotonic() < end_at:
                began = time.monotonic()
                lease = client.lock("hot", wait=wait).acquire() if wait else client.lock("hot").try_acquire()
                slowest[0] = max(slowest[0], time.monotonic() - began)
                if lease is not None:
                    tokens.append(lease.token)
                    assert lease.release()

        workers = [
            BackgroundCall(lambda c=c, wait=wait: work(c, wait) or "done") for c in (first, second) for wait in (30, 0)
        ]
        assert [each.result() for each in workers] == ["done"] * 4
    check_seconds(slowest[0], 0.9, "a missed waiter would re-check after one second, or five")
    assert tokens == sorted(set(tokens))
    assert database.ask(deadlocks) == before


# --------------------------------------------------- without a concurrent call


def test_release_does_not_wait_for_other_names_of_its_bucket(database, driver) -> None:
    held = driver.acquire(driver.claim())
    with database.lock_all_buckets():
        assert driver.release(held)


def test_renewed_and_checked_lease_is_released_without_waiting(database) -> None:
    with Client(database.url(), ttl=60) as client:
        lease = client.lock("job").acquire()
        with database.server.connect() as session:
            with session.transaction():
                transaction.check(lease, session)
            lease.renew()
            with session.transaction():
                transaction.check(lease, session)
                assert lease.release(), "the release does not wait for the transaction"
                assert client.lock("job").try_acquire() is None
        assert client.lock("job", wait=20).acquire().release()
        assert not client.inspect()


_PAUSE_LOCK = 4711


_PAUSING_CLOCK = f"""
create or replace function {{s}}.lh_now_v1() returns bigint language plpgsql volatile cost 100000 as $$
declare
    _lock_timeout text := current_setting('lock_timeout');
begin
    if current_setting('application_name') = 'slow' then
        perform set_config('lock_timeout', '0', true);  -- else the pause would end after 100 ms
        perform pg_advisory_xact_lock_shared({_PAUSE_LOCK});
        perform set_config('lock_timeout', _lock_timeout, true);
    end if;
    return (date_part('epoch', clock_timestamp()) * 1000000)::bigint;
end $$
"""


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
    database, make_driver, slow_driver, wait_until, comes
) -> None:
    """The call that has locked the bucket may wait for that row: the two would wait for each other."""
    held, other = slow_driver.acquire(slow_driver.claim()), make_driver(database.url())
    row = f"select 1 from \"{database.schema}\".lh_grant where name = 'job' for no key update nowait"
    with database.server.connect() as session, session.transaction():
        with paused(
            database, wait_until, lambda: BackgroundCall(lambda: slow_driver.release(held, 60.0))
        ) as release_call:
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


def test_release_does_not_wait_for_a_concurrent_lease_check(database, make_driver, slow_driver, wait_until) -> None:
    """Otherwise a new claim could wait for the release and keep the bucket locked until that transaction ends."""
    held, other = slow_driver.acquire(slow_driver.claim()), make_driver(database.url())
    neighbour = next(name for name in map(str, range(100_000)) if bucket(name) == bucket("job"))
    check = f'select "{database.schema}".lh_check_v1(%s, %s, %s)'
    with database.server.connect() as session, session.transaction():
        with paused(
            database, wait_until, lambda: BackgroundCall(lambda: slow_driver.release(held, 60.0))
        ) as release_call:
            assert session.execute(check, ("", "job", held.token)).fetchone() == (True,)
        assert release_call.result() is True
        assert isinstance(other.attempt(other.claim()), Busy), "the checked lease holds until the transaction ends"
        assert isinstance(other.attempt(other.claim(neighbour)), Grant)
    assert isinstance(other.attempt(other.claim()), Grant)
