"""A release of a name nobody came for does without its bucket. Whoever comes at that very moment is not forgotten."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from leasehold import Client, inside
from leasehold.core.names import bucket
from leasehold.engines.sql.rows import key
from leasehold.model import Busy, Claim, Grant


@pytest.fixture
def one(database, bare) -> Any:
    found = bare(database.url())
    found.release(found.takes(found.claim()))  # the tables are there, and the name's bucket
    return found


class Later:
    """Something another thread does, and what came of it."""

    def __init__(self, work: Any) -> None:
        self._found: list[Any] = []
        self._thread = threading.Thread(target=lambda: self._found.append(work()), daemon=True)
        self._thread.start()

    def result(self) -> Any:
        self._thread.join(20)
        assert self._found, "it has not ended, or failed"
        return self._found[0]


@contextmanager
def halfway(database, verb: str, *values: object) -> Iterator[Any]:
    """A verb whose transaction has not ended yet: it commits when the block ends."""
    places = ", ".join(["%s"] * len(values))
    with database.server.connect() as session, session.transaction():
        yield session.execute(f'select "{database.schema}".lh_{verb}_v1({places})', values).fetchone()[0]


def releasing(claim: Claim) -> tuple[object, ...]:
    return (*key(claim), 0, True, 5000)


def attempting(claim: Claim) -> tuple[object, ...]:
    more = (*claim.holder, claim.mode, claim.kind, claim.limit, 30_000_000, 0, claim.queue, 0, 5000)
    return (*key(claim), "", *more)


def blocked(database) -> bool:
    query = "select 1 from pg_stat_activity where wait_event_type = 'Lock' and query like %s"
    return bool(database.ask(query, f'%"{database.schema}"%'))


# ------------------------------------------------------ it meets somebody who comes


def test_who_joins_the_line_while_the_holder_leaves_has_the_name(database, bare, one, until) -> None:
    held, other = one.takes(one.claim()), bare(database.url())
    with halfway(database, "release", *releasing(held)) as ended:
        assert ended
        joins = Later(lambda: other.attempt(other.claim(queue=True)))
        until(lambda: blocked(database))
    granted = joins.result()
    assert isinstance(granted, Grant), "nobody would ever tell it"
    assert granted.token > held.token


def test_who_leaves_while_somebody_joins_the_line_sees_to_it(database, bare, one, until) -> None:
    held, other = one.takes(one.claim()), bare(database.url())
    waiter = other.claim(queue=True)
    with halfway(database, "attempt", *attempting(waiter)) as answer:
        assert answer[0] == 0
        leaves = Later(lambda: one.release(held))
        until(lambda: blocked(database))
    assert leaves.result() is True
    assert database.ask("select mark, state from {s}.lh_grant") == [(waiter.mark, 1)], "its turn was given"
    assert isinstance(other.attempt(waiter), Grant)


def test_a_release_that_was_undone_leaves_the_line_as_it_was(database, bare, one, until) -> None:
    held, other = one.takes(one.claim()), bare(database.url())
    waiter = other.claim(queue=True)
    with pytest.raises(ZeroDivisionError), halfway(database, "release", *releasing(held)):
        joins = Later(lambda: other.attempt(waiter))
        until(lambda: blocked(database))
        raise ZeroDivisionError
    assert isinstance(joins.result(), Busy)
    assert one.release(held)
    assert isinstance(other.attempt(waiter), Grant)


@pytest.mark.parametrize("comes", ["tries", "again"])
def test_who_asks_while_the_holder_leaves_is_answered_for_what_is_then(database, bare, one, until, comes) -> None:
    """`again`: a repetition of the holder's own attempt. It must not confirm what was just given up."""
    held, other = one.takes(one.claim()), bare(database.url())
    claim = held if comes == "again" else other.claim()
    with halfway(database, "release", *releasing(held)):
        asks = Later(lambda: other.attempt(claim))
        until(lambda: blocked(database))
    granted = asks.result()
    assert isinstance(granted, Grant)
    assert granted.token > held.token
    assert database.ask("select token from {s}.lh_grant") == [(granted.token,)]


def test_a_break_does_not_claim_what_was_being_released(database, one, until) -> None:
    held = one.takes(one.claim())
    with halfway(database, "release", *releasing(held)):
        values = ("", bucket("job"), "job", held.token, 5000)
        breaks = Later(lambda: database.ask("select {s}.lh_break_v1(%s, %s, %s, %s, %s)", *values))
        until(lambda: blocked(database))
    assert breaks.result() == [(False,)]


def test_a_release_and_those_who_come_never_wait_for_each_other(database) -> None:
    """In a storm nobody is forgotten until it looks for itself, and the server finds no deadlock."""
    deadlocks = "select deadlocks from pg_stat_database where datname = current_database()"
    before, ended, slowest = database.ask(deadlocks), time.monotonic() + 4, [0.0]
    with Client(database.url(), ttl=60) as first, Client(database.url(), ttl=60) as second:
        tokens: list[int] = []

        def work(client: Client, wait: float) -> None:
            while time.monotonic() < ended:
                began = time.monotonic()
                lease = client.lock("hot", wait=wait).acquire() if wait else client.lock("hot").try_acquire()
                slowest[0] = max(slowest[0], time.monotonic() - began)
                if lease is not None:
                    tokens.append(lease.token)
                    assert lease.release()

        workers = [Later(lambda c=c, wait=wait: work(c, wait) or "done") for c in (first, second) for wait in (30, 0)]
        assert [each.result() for each in workers] == ["done"] * 4
    assert slowest[0] < 0.9, "the next look of one forgotten would be a second later, or five"
    assert tokens == sorted(set(tokens))
    assert database.ask(deadlocks) == before


# -------------------------------------------------------------------- alone


def test_a_release_does_not_wait_for_others_of_its_bucket(database, one) -> None:
    held = one.takes(one.claim())
    with database.frozen():
        assert one.release(held)


def test_a_lease_renewed_and_checked_is_released_like_any_other(database) -> None:
    with Client(database.url(), ttl=60) as client:
        lease = client.lock("job").acquire()
        with database.server.connect() as session:
            with session.transaction():
                inside.check(lease, session)
            lease.renew()
            with session.transaction():
                inside.check(lease, session)
                assert lease.release(), "the transaction is not waited for"
                assert client.lock("job").try_acquire() is None
        assert client.lock("job", wait=10).acquire().release()
        assert not client.inspect()
