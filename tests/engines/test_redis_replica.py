"""A primary and its replica: what a fail-over loses, and what `min_replicas` makes of that."""

from __future__ import annotations

import time

import pytest

from leasehold import Client, Unavailable
from leasehold.testing.redis_rig import RedisRig
from leasehold.testing.servers.process import poll
from leasehold.testing.servers.proxy import Proxy
from leasehold.testing.servers.redis import RedisServer
from leasehold.testing.suite import made


class Pair:
    """A primary, and a replica that follows it through a proxy which can be cut."""

    def __init__(self) -> None:
        self.primary = RedisServer().start()
        self.proxy = Proxy(self.primary.port)
        follow = ("--replicaof", "127.0.0.1", str(self.proxy.port), "--repl-ping-replica-period", "1")
        self.replica = RedisServer(*follow).start()
        self.in_step()

    def in_step(self) -> None:
        poll(self._online, 30, lambda: "the replica is in step")

    def _online(self) -> bool:
        found = self.primary.info("replication")
        return f"state=online,offset={found['master_repl_offset']}" in found.get("slave0", "")

    def promote(self) -> None:
        """What a fail-over does, however it came about."""
        self.replica.ask("REPLICAOF", "NO", "ONE")

    def close(self) -> None:
        self.primary.kill()
        self.replica.kill()
        self.proxy.close()


@pytest.fixture
def pair():
    made(RedisRig)  # a skip where there is no Redis
    pair = Pair()
    yield pair
    pair.close()


def url(server, options: str = "") -> str:
    return f"redis://127.0.0.1:{server.port}{options}"


def test_a_fail_over_keeps_what_was_replicated(pair) -> None:
    holder = Client(url(pair.primary, "?min_replicas=1"), call_timeout=3)
    with holder, Client(url(pair.replica)) as other:
        lease = holder.lock("job", ttl=60).acquire()
        pair.primary.kill()
        pair.promote()
        assert other.lock("job").try_acquire() is None
        (holding,) = other.inspect()
        assert holding.token == lease.token


def test_a_release_that_was_lost_keeps_the_name_until_the_ttl_is_over(pair) -> None:
    holder = Client(url(pair.primary, "?min_replicas=1"), call_timeout=3)
    with holder, Client(url(pair.replica)) as other:
        lease = holder.lock("job", ttl=2).acquire()
        pair.proxy.cut()
        assert lease.release()
        pair.promote()
        assert other.lock("job").try_acquire() is None, "documented: a release is not confirmed by replicas"
        with other.lock("job", wait=10) as theirs:
            assert theirs.token > lease.token


def test_two_primaries_with_a_replica_each_both_grant_unless_all_must_confirm(pair, start_redis) -> None:
    """A partition: one replica goes on following the old primary, another follows the new one."""
    loyal = start_redis("--replicaof", "127.0.0.1", str(pair.primary.port), "--repl-ping-replica-period", "1")
    poll(lambda: loyal.info("replication")["master_link_status"] == "up", 30, lambda: "it follows the old one")
    pair.promote()
    follower = start_redis("--replicaof", "127.0.0.1", str(pair.replica.port), "--repl-ping-replica-period", "1")
    poll(lambda: follower.info("replication")["master_link_status"] == "up", 30, lambda: "it follows the new one")
    old, new = url(pair.primary, "?min_replicas=1"), url(pair.replica, "?min_replicas=1")
    with Client(old, call_timeout=5) as holder, Client(new, call_timeout=5) as other:
        lease, theirs = holder.lock("job", ttl=60).acquire(), other.lock("job", ttl=60).acquire()
        assert lease.held, "documented: one of three replicas is not enough to tell"
        assert theirs.token > lease.token
    with (
        Client(url(pair.primary, "?min_replicas=2"), call_timeout=1) as careful,
        pytest.raises(Unavailable, match="2 of its replicas"),
    ):
        careful.lock("another").acquire()


def test_a_fail_over_that_lost_the_write_makes_two_holders_and_the_token_rises(pair) -> None:
    with Client(url(pair.primary)) as holder, Client(url(pair.replica)) as other:
        pair.proxy.cut()
        lease = holder.lock("job", ttl=60).acquire()
        pair.promote()
        theirs = other.lock("job", ttl=60).acquire()
        assert lease.held, "documented: it cannot know yet"
        assert theirs.token > lease.token, "the resource tells them apart"


def test_with_min_replicas_there_are_never_two(pair) -> None:
    with Client(url(pair.primary, "?min_replicas=1"), call_timeout=1) as holder, Client(url(pair.replica)) as other:
        holder.ping()
        pair.proxy.cut()
        began = time.monotonic()
        with pytest.raises(Unavailable, match="replicas"):
            holder.lock("job", ttl=60).acquire()
        assert time.monotonic() - began < 1.5
        pair.promote()
        with other.lock("job", ttl=60) as theirs:
            assert theirs.held


def test_a_renewal_that_no_replica_has_is_none(pair) -> None:
    with Client(url(pair.primary, "?min_replicas=1"), call_timeout=3) as holder:
        lease = holder.lock("job", ttl=3).acquire()
        pair.proxy.cut()
        with pytest.raises(Unavailable, match="replicas"):
            lease.renew()
        assert lease.state == "AT_RISK"
        assert lease.wait_lost(5), "what cannot be shown to be renewed ends by its own clock"
        assert lease.lost_reason == "unreachable"


def test_a_refused_grant_does_not_stay(pair) -> None:
    with Client(url(pair.primary, "?min_replicas=1"), call_timeout=0.5) as holder, Client(url(pair.primary)) as other:
        holder.ping()
        pair.proxy.cut()
        with pytest.raises(Unavailable):
            holder.lock("job", ttl=60).acquire()
        poll(lambda: not other.inspect(), 10, lambda: "what could not be confirmed is given back")
        pair.proxy.mend()
        pair.in_step()
    with Client(url(pair.primary, "?min_replicas=1")) as holder, holder.lock("job", wait=5):
        pass


def test_a_busy_answer_needs_no_replica(pair) -> None:
    with Client(url(pair.primary, "?min_replicas=1"), call_timeout=0.5) as client, Client(url(pair.primary)) as other:
        held = other.lock("job").acquire()
        pair.proxy.cut()
        assert client.lock("job").try_acquire() is None
        assert held.release()


def test_a_replica_takes_no_locks(pair) -> None:
    with Client(url(pair.replica)) as client, pytest.raises(Unavailable, match="is a replica"):
        client.lock("job").acquire()


def test_a_primary_that_became_a_replica_is_noticed(pair) -> None:
    with Client(url(pair.primary), call_timeout=1) as client:
        with client.lock("job"):
            pass
        pair.promote()
        pair.primary.ask("REPLICAOF", "127.0.0.1", pair.replica.port)
        for _ in range(2):  # by its refusal, then by its settings on the new connection
            with pytest.raises(Unavailable):
                client.lock("job").acquire()
        pair.primary.ask("REPLICAOF", "NO", "ONE")
        with client.lock("job"):
            pass
