"""MariaDB with a replica: a failover to it may lose a grant."""

from __future__ import annotations

import pytest

from harness.servers.proxy import Proxy
from leasehold import Client, LeaseLost


@pytest.mark.faults  # starts its own servers
def test_failover_to_a_replica_may_lose_a_grant_but_tokens_still_rise(mariadb, wait_until) -> None:
    primary, replica = mariadb("log-bin=b", "server-id=1"), mariadb("log-bin=b", "server-id=2")
    replica.follow(primary)
    proxy = Proxy(primary.port)
    try:
        url = f"mysql://root@127.0.0.1:{proxy.port}/leasehold"
        with Client(url, ttl=60, call_timeout=5) as client, Client(url, ttl=60, call_timeout=5) as other:
            copied = client.lock("copied").acquire()
            wait_until(
                lambda: (
                    replica.ask("show databases like 'leasehold'") and replica.ask("select * from leasehold.lh_grant")
                )
            )
            replica.run("stop slave")  # from here on nothing reaches the replica
            lease = client.lock("job").acquire()
            primary.kill()
            proxy.target = ("127.0.0.1", replica.port)
            second = other.lock("job", wait=20).acquire()
            assert second.token > lease.token, "two holders, but a fence can tell them apart"
            with pytest.raises(LeaseLost):
                lease.renew()
            assert other.lock("copied").try_acquire() is None, "the replicated grant is still held"
            assert second.release()
            assert copied.release()
    finally:
        proxy.close()
