"""What `leasehold top` polls: a thread that goes on whatever happens, and what it remembers between two answers."""

from __future__ import annotations

import time
from contextlib import closing

import pytest

from leasehold import Client, Unavailable
from leasehold.cli.console import Console
from leasehold.cli.top.source import Source
from tests.support.client_fixtures import poll_until


@pytest.fixture
def client():
    with Client("memory://top-source", namespace="shop") as client:
        yield client


def test_source_goes_on_after_errors_and_keeps_the_last_answer(client):
    outcomes, real = [], client.inspect

    def inspect(prefix: str):
        outcomes.append(prefix)
        if len(outcomes) == 2:
            raise Unavailable("no reply")
        if len(outcomes) == 3:
            raise ZeroDivisionError("a bug")
        return real(prefix)

    client.inspect = inspect
    seen = []
    with closing(Source(Console("memory://"), client, "orders/")) as source, client.lock("orders/1"):
        source.start(0.001, lambda: seen.append(source.snapshot))
        poll_until(lambda: len(seen) >= 4)
    first, unavailable, bug, again = seen[:4]
    assert [len(each.holdings) for each in seen[:4]] == [1, 1, 1, 1]
    assert [each.error for each in (first, unavailable, bug, again)] == [
        "",
        "no reply",
        "unexpected ZeroDivisionError: a bug",
        "",
    ]
    assert unavailable.at == first.at  # its age is shown
    assert set(outcomes) == {"orders/"}


def test_source_that_is_closed_asks_no_more(client):
    with closing(Source(Console("memory://"), client, "")) as source:
        source.start(0.001, lambda: None)
        poll_until(lambda: source.snapshot.taken)
    asked = []
    client.inspect = asked.append
    poll_until(lambda: time.monotonic() - source.snapshot.at > 0.1)
    assert len(asked) <= 1  # one may have been under way


def test_ttl_of_a_grant_is_the_most_that_was_seen(client):
    source = Source(Console("memory://"), client, "")
    with client.lock("a", ttl=30) as lease:
        (ttl,) = source.look().ttls.values()
        assert 29 < ttl <= 30
        lease.renew(ttl=10)
        assert list(source.look().ttls.values()) == [ttl]
    assert source.look().ttls == {}
