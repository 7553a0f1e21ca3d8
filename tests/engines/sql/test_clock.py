"""SQL servers whose clock steps. No other test can share such a server, so each test starts its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.servers import fake_clock
from harness.servers.mysql import MariaDB
from harness.servers.postgresql import PostgreSQL
from leasehold import Client, LeaseLost, NotAcquired


@pytest.fixture(params=["postgresql", "mysql", "mysql?procedures=no"])
def steppable_server(request) -> Iterator[tuple[PostgreSQL | MariaDB, str]]:
    """A server whose clock can be set, and the URL for its clients."""
    scheme, _, options = request.param.partition("?")
    server: PostgreSQL | MariaDB
    if scheme == "postgresql":
        server = PostgreSQL(fake_clock=True).start()
        url = server.url()
    else:
        server = MariaDB(fake_clock=True).start()
        url = f"mysql://root@127.0.0.1:{server.port}/leasehold?{options}"
    yield server, url
    server.kill()


@pytest.mark.skipif(not fake_clock.is_available(), reason="faketime is not installed")
def test_clock_step_expires_leases_and_tokens_still_rise(steppable_server) -> None:
    server, url = steppable_server
    with Client(url, ttl=30, call_timeout=20) as client, Client(url, ttl=30, call_timeout=20) as other:
        first = client.lock("job").acquire()
        server.set_clock(60)  # forward: all leases expire, and the holder learns so from its next call
        second = other.lock("job", wait=20).acquire()
        assert second.token > first.token
        with pytest.raises(LeaseLost):
            first.renew()
        server.set_clock(-3600)  # back: leases last longer, tokens still rise
        with pytest.raises(NotAcquired):
            client.lock("job", wait=0).acquire()
        assert second.release()
        third = client.lock("job", wait=20).acquire()
        assert third.token > second.token
        assert third.release()
