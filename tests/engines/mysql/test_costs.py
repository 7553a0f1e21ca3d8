"""What a connection of the MySQL engine costs."""

from __future__ import annotations

import ssl
from contextlib import closing

import pytest

from harness.servers.proxy import Proxy
from leasehold import Client


def test_default_certificates_are_not_loaded_when_unused(mysql, monkeypatch) -> None:
    """Loading took 20 ms, nine tenths of every handshake. Under load, many reconnects used up whole deadlines."""
    loads: list[bool] = []
    monkeypatch.setattr(ssl.SSLContext, "load_default_certs", lambda *_: loads.append(True))
    with Client(mysql.url()) as client:
        client.ping()
    assert not loads


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
