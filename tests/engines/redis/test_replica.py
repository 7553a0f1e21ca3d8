"""A primary and its replica: what a failover loses, and what `min_replicas` prevents."""

from __future__ import annotations

import time

import pytest

from harness.rigs.redis import RedisRig
from harness.servers.process import poll
from harness.servers.proxy import Proxy
from harness.servers.redis import RedisServer
from leasehold import Client, Unavailable
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support.timing import check_elapsed


class ReplicatedPair:
    """A primary, and a replica that replicates through a proxy, which can be cut."""

    def __init__(self) -> None:
        self.primary = RedisServer().start()
        self.proxy = Proxy(self.primary.port)
        replica_options = ("--replicaof", "127.0.0.1", str(self.proxy.port), "--repl-ping-replica-period", "1")
        self.replica = RedisServer(*replica_options).start()
        self.wait_until_in_sync()

    def wait_until_in_sync(self) -> None:
        poll(self._is_in_sync, 30, lambda: "the replica is in sync")

    def _is_in_sync(self) -> bool:
        replication_info = self.primary.info("replication")
        return f"state=online,offset={replication_info['master_repl_offset']}" in replication_info.get("slave0", "")

    def promote(self) -> None:
        """What every kind of failover does to the replica."""
        self.replica.ask("REPLICAOF", "NO", "ONE")

    def close(self) -> None:
        self.primary.kill()
        self.replica.kill()
        self.proxy.close()


@pytest.fixture
def pair():
    rig_or_skip(RedisRig)  # skips if Redis is not installed
    pair = ReplicatedPair()
    yield pair
    pair.close()


def url(server, options: str = "") -> str:
    return f"redis://127.0.0.1:{server.port}{options}"


def test_failover_keeps_replicated_lease(pair) -> None:
    holder = Client(url(pair.primary, "?min_replicas=1"), call_timeout=6)
    with holder, Client(url(pair.replica)) as other:
        lease = holder.lock("job", ttl=60).acquire()
        pair.primary.kill()
        pair.promote()
        assert other.lock("job").try_acquire() is None
        (holding,) = other.inspect()
        assert holding.token == lease.token


def test_unreplicated_release_keeps_name_held_until_ttl_is_over(pair) -> None:
    holder = Client(url(pair.primary, "?min_replicas=1"), call_timeout=6)
    with holder, Client(url(pair.replica)) as other:
        lease = holder.lock("job", ttl=12).acquire()
        pair.proxy.cut()
        assert lease.release()
        pair.promote()
        assert other.lock("job").try_acquire() is None, "documented: a release is not confirmed by replicas"
        with other.lock("job", wait=60) as theirs:
            assert theirs.token > lease.token


def test_split_brain_grants_twice_unless_all_replicas_must_confirm(pair, start_redis) -> None:
    """A partition: one replica still follows the old primary, another follows the new one."""
    old_replica = start_redis("--replicaof", "127.0.0.1", str(pair.primary.port), "--repl-ping-replica-period", "1")
    poll(
        lambda: old_replica.info("replication")["master_link_status"] == "up",
        30,
        lambda: "the replica follows the old primary",
    )
    pair.promote()
    new_replica = start_redis("--replicaof", "127.0.0.1", str(pair.replica.port), "--repl-ping-replica-period", "1")
    poll(
        lambda: new_replica.info("replication")["master_link_status"] == "up",
        30,
        lambda: "the replica follows the new primary",
    )
    old_url, new_url = url(pair.primary, "?min_replicas=1"), url(pair.replica, "?min_replicas=1")
    with Client(old_url, call_timeout=5) as holder, Client(new_url, call_timeout=5) as other:
        lease, theirs = holder.lock("job", ttl=60).acquire(), other.lock("job", ttl=60).acquire()
        assert lease.held, "documented: one confirming replica of three does not exclude a second holder"
        assert theirs.token > lease.token
    with (
        Client(url(pair.primary, "?min_replicas=2"), call_timeout=1) as strict_client,
        pytest.raises(Unavailable, match="2 of its replicas"),
    ):
        strict_client.lock("another").acquire()


def test_failover_without_the_write_makes_two_holders_and_token_rises(pair) -> None:
    with Client(url(pair.primary)) as holder, Client(url(pair.replica)) as other:
        pair.proxy.cut()
        lease = holder.lock("job", ttl=60).acquire()
        pair.promote()
        theirs = other.lock("job", ttl=60).acquire()
        assert lease.held, "documented: the holder cannot know yet"
        assert theirs.token > lease.token, "a fence can reject the older token"


def test_min_replicas_prevents_a_second_holder_after_failover(pair) -> None:
    with Client(url(pair.primary, "?min_replicas=1"), call_timeout=1) as holder, Client(url(pair.replica)) as other:
        holder.ping()
        pair.proxy.cut()
        began = time.monotonic()
        with pytest.raises(Unavailable, match="replicas"):
            holder.lock("job", ttl=60).acquire()
        check_elapsed(began, 1.5)
        pair.promote()
        with other.lock("job", ttl=60) as theirs:
            assert theirs.held


@pytest.mark.extended  # the lease must not end before the renewal does
def test_renewal_without_replica_confirmation_is_unavailable(pair) -> None:
    with Client(url(pair.primary, "?min_replicas=1"), call_timeout=3) as holder:
        lease = holder.lock("job", ttl=3).acquire()
        pair.proxy.cut()
        with pytest.raises(Unavailable, match="replicas"):
            lease.renew()
        assert lease.state == "AT_RISK"
        assert lease.wait_lost(5), "an unconfirmed renewal does not extend the lease"
        assert lease.lost_reason == "unreachable"


def test_script_that_is_not_loaded_waits_for_replicas_only_once(pair) -> None:
    """A second wait, for a request that was not executed, left no time to run the script."""
    pair.proxy.cut()
    pair.primary.ask("SCRIPT", "FLUSH")
    with (
        Client(url(pair.primary, "?min_replicas=1"), call_timeout=5) as client,
        pytest.raises(Unavailable, match="could not confirm that 1 of its replicas have this write"),
    ):
        client.lock("job").acquire(wait=0)
    assert "calls=1," in pair.primary.info("commandstats")["cmdstat_wait"]


def test_unconfirmed_grant_is_released(pair) -> None:
    with Client(url(pair.primary, "?min_replicas=1"), call_timeout=0.5) as holder, Client(url(pair.primary)) as other:
        holder.ping()
        pair.proxy.cut()
        with pytest.raises(Unavailable):
            holder.lock("job", ttl=60).acquire()
        poll(lambda: not other.inspect(), 60, lambda: "the unconfirmed grant is released")
        pair.proxy.restore()
        pair.wait_until_in_sync()
    with Client(url(pair.primary, "?min_replicas=1")) as holder, holder.lock("job", wait=5):
        pass


def test_busy_answer_needs_no_replica(pair) -> None:
    with Client(url(pair.primary, "?min_replicas=1"), call_timeout=30) as client, Client(url(pair.primary)) as other:
        held = other.lock("job").acquire()
        pair.proxy.cut()
        assert client.lock("job").try_acquire() is None
        assert held.release()
    assert "cmdstat_wait" not in pair.primary.info("commandstats")


def test_replica_grants_no_locks(pair) -> None:
    with Client(url(pair.replica)) as client, pytest.raises(Unavailable, match="is a replica"):
        client.lock("job").acquire()


def test_primary_demoted_to_replica_is_detected(pair) -> None:
    with Client(url(pair.primary), call_timeout=1) as client:
        with client.lock("job"):
            pass
        pair.promote()
        pair.primary.ask("REPLICAOF", "127.0.0.1", pair.replica.port)
        for _ in range(2):  # by its refusal, then by the role that it reports on the new connection
            with pytest.raises(Unavailable):
                client.lock("job").acquire()
        pair.primary.ask("REPLICAOF", "NO", "ONE")
        with client.lock("job"):
            pass
