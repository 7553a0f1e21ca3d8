"""Settings and limits of the server."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest

from leasehold import Client, Unavailable


def test_longer_election_timeout_raises_min_ttl(start_member) -> None:
    member = start_member("--heartbeat-interval", "200", "--election-timeout", "4000")
    with Client(f"etcd://127.0.0.1:{member.port}") as client, client.lock("job", ttl=2) as lease:
        assert 5 < lease.ttl <= 6
        assert client.traits.min_ttl == 6.0
        lease.renew()
        assert 5.9 < lease.ttl <= 6


def test_full_database_refuses_new_claims_and_keeps_held_leases(start_member, eventually, etcdctl) -> None:
    member = start_member("--quota-backend-bytes", str(2 * 1024 * 1024))
    with Client(f"etcd://127.0.0.1:{member.port}", call_timeout=3) as client:
        lease = client.lock("job", ttl=10).acquire()
        delayed = client.lock("delayed", ttl=10, delay=5).acquire()
        with suppress(OSError):
            for number in range(200):
                member.put(f"fill{number}", "x" * 100_000)
        began = time.monotonic()
        with pytest.raises(Unavailable, match="NOSPACE"):
            client.lock("other").acquire()
        assert time.monotonic() - began < 2, "not refused at once"
        lease.verify()
        assert lease.release(), "a release needs no space"
        assert delayed.release(), "a release with a delay needs no space either"
        for number in range(200):
            member.delete(f"fill{number}")
        member.compact()
        etcdctl(member, "defrag")
        etcdctl(member, "alarm", "disarm")
        eventually(lambda: client.lock("other").acquire(wait=0).release())
        assert client.inspect() == []
