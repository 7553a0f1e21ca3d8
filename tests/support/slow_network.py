"""A network so slow that a request takes an eighth of the ttl: leases must be kept nevertheless."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from harness.servers.proxy import Proxy
from leasehold import Client
from tests.support import probe

TTL: Final = 4.0
DELAY: Final = TTL / 8


def check_lease_is_kept(url: str, proxies: Iterable[Proxy]) -> None:
    """Acquire a lock when the network is slow already, and hold it for two ttls."""
    with Client(url, ttl=TTL) as client:
        client.lock("first").acquire().release()  # creates tables and loads scripts
        for proxy in proxies:
            proxy.delay = lambda: DELAY
        lease = client.lock("job").acquire()
        renewals, end = {probe.renewed_at(lease)}, time.monotonic() + 2 * TTL
        while lease.held and time.monotonic() < end:
            renewals.add(probe.renewed_at(lease))
            time.sleep(0.01)
        assert lease.held, lease.lost_reason
        assert len(renewals) > 2
        for proxy in proxies:
            proxy.delay = None
        assert lease.release()
