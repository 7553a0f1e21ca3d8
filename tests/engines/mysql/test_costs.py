"""What a connection of the MySQL engine costs."""

from __future__ import annotations

import hashlib
import ssl
from contextlib import closing

import pytest

from harness.servers.proxy import Proxy
from leasehold import Client
from leasehold.core.timing import WAITER_TTL
from leasehold.model import Alive


def test_default_certificates_are_not_loaded_when_unused(mysql, monkeypatch) -> None:
    """Loading took 20 ms, nine tenths of every handshake. Under load, many reconnects used up whole deadlines."""
    loads: list[bool] = []
    monkeypatch.setattr(ssl.SSLContext, "load_default_certs", lambda *_: loads.append(True))
    with Client(mysql.url()) as client:
        client.ping()
    assert not loads


def test_heartbeat_of_the_head_does_not_read_its_queue(mysql, make_driver) -> None:
    """It searched the whole queue for an earlier ticket: for 3 ms with ten thousand waiters, with the bucket locked."""

    def rows_read() -> int:
        return sum(int(count) for _, count in mysql.ask("show global status like 'Handler_read%%'"))

    driver = make_driver(mysql.url(listen="no"))
    driver.acquire(driver.claim())
    head = driver.claim(queue=True)
    driver.attempt(head)
    mysql.ask(
        "insert into {s}.lh_waiter select '', 'job', 0, 1000 + seq, md5(seq), '', 'l', 'h', 1, 'p', 'exclusive', 0, 0, "
        "%s from {s}.seq_1_to_2000",
        2**60,
    )
    before = rows_read()
    assert driver.renew(head) == Alive(WAITER_TTL, None)
    assert rows_read() - before < 200
    behind = head._replace(id_hash=hashlib.md5(b"1", usedforsecurity=False).hexdigest())
    assert driver.renew(behind) == Alive(WAITER_TTL, 1)


@pytest.mark.parametrize("procedures", ["yes", "no"])
def test_session_takes_two_round_trips_before_its_first_call(mysql, procedures) -> None:
    """There were five, and in a slow network the first renewal did not come in time: it opens a session."""
    with Client(mysql.url()) as first:
        first.inspect()
    with closing(Proxy(mysql.server.port)) as proxy:
        senders: list[bool] = []  # whether the client sent the next data
        proxy.watch = lambda from_client, _: senders.append(from_client)
        with Client(mysql.url(port=proxy.port, procedures=procedures)) as client:
            client.inspect()
            found = [
                sender for sender, before in zip(senders, [False, *senders], strict=False) if sender and not before
            ]
    assert len(found) == 2 + 1, "the login, the settings, and the call"
