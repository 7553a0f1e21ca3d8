"""Nodes of a Redis cluster that fail, fail over or fall silent: leases and waiters continue at the new primary."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import hiredis
import pytest

from harness.rigs.redis import RedisRig
from harness.servers.process import poll
from harness.servers.redis_ha import ClusterNode, RedisCluster
from leasehold import Client, Unavailable
from leasehold.model import Alive
from leasehold.runtime.base import run_sync
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support import probe
from tests.support.timing import check_elapsed, check_seconds


@pytest.fixture
def cluster_with_replicas():
    """A cluster with replicas and a short node timeout, so that a failover starts soon."""
    rig_or_skip(RedisRig)  # skips if Redis is not installed
    redis_cluster = RedisCluster(node_timeout=1, replicas=True)
    yield redis_cluster
    redis_cluster.close()


def fail_over_to(cluster: RedisCluster, replica: ClusterNode) -> None:
    """A manual failover: no write is lost, and the old primary becomes a replica."""

    def is_primary() -> bool:
        if replica.info("replication")["role"] == "master":
            return True
        with suppress(hiredis.ReplyError):  # it refuses until the nodes know each other
            replica.ask("CLUSTER", "FAILOVER")
        return False

    poll(is_primary, 30, lambda: "the replica is the primary")


@pytest.mark.parametrize("fault", ["killed", "demoted"])
def test_waiter_gets_wakeup_from_promoted_replica(cluster_with_replicas, fault) -> None:
    """A replica accepts subscriptions too, but the scripts on the primary do not count them."""
    owner = cluster_with_replicas.owner("job")
    replica = cluster_with_replicas.replicas[cluster_with_replicas.primaries.index(owner)]
    with (
        Client(cluster_with_replicas.url(), call_timeout=20) as holder,
        Client(cluster_with_replicas.url(), call_timeout=20) as other,
    ):
        lease = holder.lock("job", ttl=60).acquire()
        grants = []
        waiter = threading.Thread(
            target=lambda: grants.append((other.lock("job", wait=60).acquire(), time.monotonic()))
        )
        waiter.start()
        poll(lambda: len(holder.inspect()) == 2, 60, lambda: "the claim is queued")
        poll(lambda: replica.ask("DBSIZE") > 2, 60, lambda: "the replica has the keys")
        if fault == "killed":
            owner.kill()
        else:
            fail_over_to(cluster_with_replicas, replica)
        poll(lambda: replica.info("replication")["role"] == "master", 30, lambda: "the replica is promoted")
        began = time.monotonic()
        poll(lambda: len(replica.ask("PUBSUB", "SHARDCHANNELS")) == 2, 60, lambda: "both clients are subscribed there")
        check_elapsed(began, 2.5, "the clients subscribe at once, not with their next call")
        began = time.monotonic()
        assert lease.release()
        waiter.join(60)
        check_seconds(grants[0][1] - began, 1, "notified by push")
        assert grants[0][0].release()


def test_lease_survives_node_failure_on_promoted_replica(cluster_with_replicas) -> None:
    names = cluster_with_replicas.name_on_each_node()
    with (
        Client(cluster_with_replicas.url(), call_timeout=20) as client,
        Client(cluster_with_replicas.url(), call_timeout=20) as other,
    ):
        leases = [client.lock(name, ttl=60).acquire() for name in names]
        for replica in cluster_with_replicas.replicas:
            poll(lambda replica=replica: replica.ask("DBSIZE") > 1, 60, lambda: "the replica has the keys")
        cluster_with_replicas.owner(names[0]).kill()
        assert other.lock(names[0]).try_acquire() is None, "the replica has the grant"
        for lease in leases:
            lease.verify()
            assert lease.release()
        with other.lock(names[0]) as theirs:
            assert theirs.token > leases[0].token


def test_promoted_replica_without_grant_issues_a_higher_token(cluster_with_replicas) -> None:
    owner = cluster_with_replicas.owner("job")
    replica = cluster_with_replicas.replicas[cluster_with_replicas.primaries.index(owner)]
    with (
        Client(cluster_with_replicas.url(), call_timeout=20) as client,
        Client(cluster_with_replicas.url(), call_timeout=20) as other,
    ):
        with client.lock("job"):
            pass
        replica.ask("CONFIG", "SET", "repl-timeout", 3600)
        replica.ask("CONFIG", "SET", "masterauth", "wrong")  # the replica cannot reconnect
        owner.ask("CONFIG", "SET", "requirepass", "other")
        owner.use_password("other")
        owner.ask("CLIENT", "KILL", "TYPE", "replica")
        lease = client.lock("job", ttl=60).acquire()
        replica.ask("CLUSTER", "FAILOVER", "TAKEOVER")
        poll(lambda: cluster_with_replicas.owner("job") is replica, 60, lambda: "the replica owns the slot")
        owner.kill()
        with other.lock("job") as theirs:  # documented: both clients may believe they hold it
            assert theirs.token > lease.token
        with pytest.raises(Exception, match="lost"):
            lease.verify()


def test_paused_node_loses_only_its_own_leases(cluster) -> None:
    names = cluster.name_on_each_node()
    with Client(cluster.url(), call_timeout=1) as client:
        leases = {name: client.lock(name, ttl=3).acquire() for name in names}
        paused_node = cluster.owner(names[0])
        paused_node.pause()
        engine, runtime = probe.engine(client), probe.runtime(client)
        answers = run_sync(engine.renew([probe.renewal_claim(lease) for lease in leases.values()], runtime.now() + 1))
        assert [isinstance(answer, Alive) for answer in answers] == [False, True, True]
        assert leases[names[0]].wait_lost(6)
        assert leases[names[0]].lost_reason == "unreachable"
        assert [leases[name].held for name in names[1:]] == [True, True]
        began = time.monotonic()
        with pytest.raises(Unavailable, match=str(paused_node.port)):
            client.lock(names[0]).acquire()
        check_elapsed(began, 1.5)
        with client.lock("x" + names[1]):
            pass


def test_pending_release_to_paused_node_does_not_delay_other_nodes(cluster) -> None:
    names = cluster.name_on_each_node()
    with Client(cluster.url(), call_timeout=0.5) as client, Client(cluster.url()) as other:
        first, second = (client.lock(name, ttl=60).acquire() for name in names[:2])
        paused_node = cluster.owner(names[0])
        paused_node.pause()
        assert not first.release(), "not confirmed: a pending release"
        probe.registry(client).retry_release(probe.renewal_claim(second))
        poll(lambda: not other.lock(names[1]).locked(), 60, lambda: "the release on the other node is confirmed")
        assert paused_node.paused
        paused_node.resume()
        poll(lambda: not other.inspect(), 60, lambda: "the pending release is confirmed")


def test_unavailable_names_the_node_that_is_down(cluster) -> None:
    name = cluster.name_on_each_node()[0]
    node = cluster.owner(name)
    with Client(cluster.url(), call_timeout=1) as client:
        with client.lock(name):
            pass
        node.kill()
        try:
            began = time.monotonic()
            with pytest.raises(Unavailable, match=f"127.0.0.1:{node.port}"):
                client.lock(name).acquire()
            check_elapsed(began, 1.5)
            with pytest.raises(Unavailable, match=f"127.0.0.1:{node.port}"):
                client.inspect()
        finally:
            node.start()
            poll(cluster.is_healthy, 60, lambda: "the cluster is healthy")
        with client.lock(name, wait=10):
            pass


@pytest.mark.faults
def test_failover_during_slot_move_loses_grant_but_token_rises(cluster_with_replicas) -> None:
    slot, source = cluster_with_replicas.slot("job"), cluster_with_replicas.owner("job")
    replica = cluster_with_replicas.replicas[cluster_with_replicas.primaries.index(source)]
    with (
        Client(cluster_with_replicas.url("?min_replicas=1"), call_timeout=20) as client,
        Client(cluster_with_replicas.url()) as other,
    ):
        lease = client.lock("job", ttl=60).acquire()
        cluster_with_replicas.begin_move(slot, source, cluster_with_replicas.other_than(source))
        assert cluster_with_replicas.move_keys(slot, source, cluster_with_replicas.other_than(source)) == 2
        poll(lambda: replica.ask("DBSIZE") == 0, 60, lambda: "the replica has removed the keys, too")
        source.kill()
        poll(lambda: replica.info("replication")["role"] == "master", 30, lambda: "the replica is promoted")
        with other.lock("job", ttl=60, wait=10) as theirs:  # documented: both clients may believe they hold it
            assert theirs.token > lease.token
