"""What a connection of the MySQL engine costs."""

from __future__ import annotations

import ssl

from leasehold import Client


def test_default_certificates_are_not_loaded_when_unused(mysql, monkeypatch) -> None:
    """Loading took 20 ms, nine tenths of every handshake. Under load, many reconnects used up whole deadlines."""
    loads: list[bool] = []
    monkeypatch.setattr(ssl.SSLContext, "load_default_certs", lambda *_: loads.append(True))
    with Client(mysql.url()) as client:
        client.ping()
    assert not loads
