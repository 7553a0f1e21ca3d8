"""Which node a waiter watches, and how it is woken when the connection breaks."""

from __future__ import annotations

import time

from leasehold import Client
from tests.support.timing import check_seconds


def test_waiter_survives_a_broken_connection(url_of, server, proxy, client_pair, count_waiters, wait_until) -> None:
    with Client(url_of(server)) as holder, Client(url_of(proxy)) as waiter:
        pair = client_pair(holder, waiter)
        waiter_thread = pair.start_second()
        wait_until(lambda: count_waiters(holder) == 1)
        for _ in range(5):
            proxy.reset()
        released = time.monotonic()
        assert pair.first_lease.release()
        waiter_thread.join(30)
        check_seconds(pair.granted_at - released, 4, "the waiter re-checks when it has reconnected")
