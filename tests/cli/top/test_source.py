"""What `leasehold top` polls: a thread that goes on whatever happens, and what it remembers between two answers."""

from __future__ import annotations

import time
from contextlib import closing

import pytest

from leasehold import Client, Unavailable
from leasehold.cli.console import Console
from leasehold.cli.server_api import reading
from leasehold.cli.top.source import Source
from tests.support import probe_cli
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


@pytest.mark.parametrize(
    ("answers", "ttl"),
    [
        ([(0, 20.0), (5, 15.0), (8, 30.0), (18, 20.0)], 30.0),  # renewed in time
        ([(0, 30.0), (25, 5.0)], 30.0),  # not renewed: at risk
        ([(0, 60.0), (1, 10.0), (4, 7.0), (5, 10.0)], 10.0),  # `renew(ttl=10)` set a shorter life
        ([(0, 10.0), (1, 60.0), (21, 40.0)], 60.0),
        ([(0, 30.0), (21, 9.6), (22, 8.1), (22.5, 8.1)], 30.0),  # an engine that rounds
    ],
)
def test_ttl_of_a_grant_is_the_most_that_was_seen(client, answers, ttl):
    source = Source(Console("memory://"), client, "")
    with client.lock("a"):
        (holding,) = client.inspect("a")
    for at, left in answers:
        life = probe_cli.observe_life(source, holding._replace(fingerprint="f", left=left), at)
    assert life.ttl == ttl


def test_grant_that_is_gone_is_forgotten(client):
    source = Source(Console("memory://"), client, "")
    with client.lock("a", ttl=30):
        (ttl,) = source.read().ttls.values()
        assert 20 < ttl <= 30
    assert source.read().ttls == {}


# ------------------------------------------------------------------ a lock server

HOLDING = {
    "name": "a",
    "state": "held",
    "mode": "exclusive",
    "kind": "lock",
    "limit": 1,
    "fingerprint": "f",
    "holder": "web",
    "host": None,
    "pid": 7,
    "purpose": None,
    "acquired_at": 1.7e9,
    "expires_in": 9.0,
    "token": 5,
    "slot": None,
    "owner": "o",
}
WAITER = {
    "name": "a",
    "mode": "exclusive",
    "fingerprint": "g",
    "position": 0,
    "holder": "cron",
    "purpose": None,
    "waiting_for": 2.0,
    "owner": "p",
}


class ForgedServer:
    """Answers every request with the same page."""

    def __init__(self, **page):
        self._page = {"holdings": [HOLDING], "queue": [WAITER], "cursor": None, "as_of": 1.7e9 + 5, **page}

        self.asked = 0

    def get(self, path, **arguments):
        self.asked += 1
        return self._page


def test_list_of_a_server_is_read(client):
    source = Source(Console("memory://"), client, "")
    (holder, waiter), *_ = probe_cli.read_server(source, ForgedServer())
    assert (holder.token, holder.age, holder.acquired_at, holder.holder.pid) == (5, 5.0, 1.7e9, 7)
    assert (waiter.state, waiter.position, waiter.age, waiter.holder.label) == ("waiting", 0, 2.0, "cron")


@pytest.mark.parametrize(
    "page",
    [
        *[{"holdings": [{**HOLDING, member: None}]} for member in ("name", "state", "expires_in", "holder", "limit")],
        *[{"holdings": [{**HOLDING, "acquired_at": value}]} for value in ("now", -1, 1e300)],
        *[{"queue": [{**WAITER, member: "-rf"}]} for member in ("mode", "waiting_for", "position")],
        {"holdings": [{**HOLDING, "name": "x" * 100_000}]},
    ],
)
def test_list_with_a_member_of_another_form_is_no_answer(client, page):
    source = Source(Console("memory://"), client, "")
    with pytest.raises(Unavailable), reading("/v1/locks"):
        probe_cli.read_server(source, ForgedServer(**page))


def test_list_of_a_server_with_too_many_claims_is_unavailable(client, monkeypatch):
    monkeypatch.setattr(*probe_cli.MAX_CLAIMS, 5)
    source, server = Source(Console("memory://"), client, ""), ForgedServer(cursor="more")
    with pytest.raises(Unavailable, match="did not end after 6 claims"):
        probe_cli.read_server(source, server)
    assert server.asked == 3


def test_list_of_a_server_of_empty_pages_without_end_is_unavailable(client, monkeypatch):
    monkeypatch.setattr(*probe_cli.LIST_SECONDS, 0.01)
    source = Source(Console("memory://"), client, "")
    with pytest.raises(Unavailable, match="did not end after 0 claims"):
        probe_cli.read_server(source, ForgedServer(cursor="more", holdings=[], queue=[]))
