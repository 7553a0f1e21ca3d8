"""Nodes of a Redis cluster that fail, hand over or fall silent: leases and lines go on where the names are."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import hiredis
import pytest

from leasehold import Client, Unavailable
from leasehold.model import Alive
from leasehold.runtime.base import step
from leasehold.testing.redis_rig import RedisRig
from leasehold.testing.servers.process import poll
from leasehold.testing.servers.redis_several import ClusterNode, RedisCluster
from leasehold.testing.suite import made


@pytest.fixture
def failing():
    """With replicas, and quick to see a failure."""
    made(RedisRig)  # a skip where there is no Redis
    found = RedisCluster(node_timeout=1, replicas=True)
    yield found
    found.close()


def hand_over(cluster: RedisCluster, replica: ClusterNode) -> None:
    """As an operator has it done: nothing is lost, and the old primary stays as a replica."""

    def done() -> bool:
        if replica.info("replication")["role"] == "master":
            return True
        with suppress(hiredis.ReplyError):  # the two have just met
            replica.ask("CLUSTER", "FAILOVER")
        return False

    poll(done, 30, lambda: "it took over")


@pytest.mark.parametrize("way", ["killed", "demoted"])
def test_wake_ups_come_from_whoever_took_over_at_once(failing, way) -> None:
    """A replica takes subscriptions too, but nobody who decides counts them."""
    owner = failing.owner("job")
    replica = failing.replicas[failing.primaries.index(owner)]
    with Client(failing.url(), call_timeout=20) as holder, Client(failing.url(), call_timeout=20) as other:
        lease = holder.lock("job", ttl=60).acquire()
        turns = []
        waiter = threading.Thread(target=lambda: turns.append((other.lock("job", wait=60).acquire(), time.monotonic())))
        waiter.start()
        poll(lambda: len(holder.inspect()) == 2, 10, lambda: "it stands in line")
        poll(lambda: replica.ask("DBSIZE") > 2, 10, lambda: "it was replicated")
        if way == "killed":
            owner.kill()
        else:
            hand_over(failing, replica)
        poll(lambda: replica.info("replication")["role"] == "master", 30, lambda: "it was promoted")
        began = time.monotonic()
        poll(lambda: len(replica.ask("PUBSUB", "SHARDCHANNELS")) == 2, 10, lambda: "both listen there")
        assert time.monotonic() - began < 2.5, "not only when they next ask something"
        began = time.monotonic()
        assert lease.release()
        waiter.join(20)
        assert turns[0][1] - began < 1, "told by push"
        assert turns[0][0].release()


def test_a_node_fails_and_its_replica_goes_on(failing) -> None:
    names = failing.one_of_each()
    with Client(failing.url(), call_timeout=20) as client, Client(failing.url(), call_timeout=20) as other:
        leases = [client.lock(name, ttl=60).acquire() for name in names]
        for replica in failing.replicas:
            poll(lambda replica=replica: replica.ask("DBSIZE") > 1, 10, lambda: "it was replicated")
        failing.owner(names[0]).kill()
        assert other.lock(names[0]).try_acquire() is None, "the replica has the grant"
        for lease in leases:
            lease.verify()
            assert lease.release()
        with other.lock(names[0]) as theirs:
            assert theirs.token > leases[0].token


def test_a_promoted_replica_without_the_grant_gives_a_higher_token(failing) -> None:
    owner = failing.owner("job")
    replica = failing.replicas[failing.primaries.index(owner)]
    with Client(failing.url(), call_timeout=20) as client, Client(failing.url(), call_timeout=20) as other:
        with client.lock("job"):
            pass
        replica.ask("CONFIG", "SET", "repl-timeout", 3600)
        replica.ask("CONFIG", "SET", "masterauth", "wrong")  # it can connect no more
        owner.ask("CONFIG", "SET", "requirepass", "other")
        owner._sign_in = b"*2\r\n$4\r\nAUTH\r\n$5\r\nother\r\n"
        owner.ask("CLIENT", "KILL", "TYPE", "replica")
        lease = client.lock("job", ttl=60).acquire()
        replica.ask("CLUSTER", "FAILOVER", "TAKEOVER")
        poll(lambda: failing.owner("job") is replica, 20, lambda: "it has the slot")
        owner.kill()
        with other.lock("job") as theirs:  # documented: two may believe they hold it
            assert theirs.token > lease.token
        with pytest.raises(Exception, match="lost"):
            lease.verify()


def test_a_silent_node_costs_no_lease_on_another(cluster) -> None:
    names = cluster.one_of_each()
    with Client(cluster.url(), call_timeout=1) as client:
        leases = {name: client.lock(name, ttl=3).acquire() for name in names}
        silent = cluster.owner(names[0])
        silent.pause()
        engine, runtime = client._desk._engine, client._desk.runtime
        answers = step(engine.renew([lease._renewal() for lease in leases.values()], runtime.now() + 1))
        assert [isinstance(answer, Alive) for answer in answers] == [False, True, True]
        assert leases[names[0]].wait_lost(6)
        assert leases[names[0]].lost_reason == "unreachable"
        assert [leases[name].held for name in names[1:]] == [True, True]
        began = time.monotonic()
        with pytest.raises(Unavailable, match=str(silent.port)):
            client.lock(names[0]).acquire()
        assert time.monotonic() - began < 1.5
        with client.lock("x" + names[1]):
            pass


def test_what_is_owed_to_a_silent_node_holds_up_no_other_release(cluster) -> None:
    names = cluster.one_of_each()
    with Client(cluster.url(), call_timeout=0.5) as client, Client(cluster.url()) as other:
        first, second = (client.lock(name, ttl=60).acquire() for name in names[:2])
        silent = cluster.owner(names[0])
        silent.pause()
        assert not first.release(), "not confirmed: it is owed"
        client._desk.book.owe(second._renewal())
        poll(lambda: not other.lock(names[1]).locked(), 10, lambda: "that of the other node is not held up")
        assert silent._frozen
        silent.resume()
        poll(lambda: not other.inspect(), 10, lambda: "the first is repeated until it is answered")


def test_a_node_gone_for_good_is_named(cluster) -> None:
    name = cluster.one_of_each()[0]
    node = cluster.owner(name)
    with Client(cluster.url(), call_timeout=1) as client:
        with client.lock(name):
            pass
        node.kill()
        try:
            began = time.monotonic()
            with pytest.raises(Unavailable, match=f"127.0.0.1:{node.port}"):
                client.lock(name).acquire()
            assert time.monotonic() - began < 1.5
            with pytest.raises(Unavailable, match=f"127.0.0.1:{node.port}"):
                client.inspect()
        finally:
            node.start()
            poll(cluster.well, 60, lambda: "the cluster is well")
        with client.lock(name, wait=10):
            pass


@pytest.mark.faults
def test_a_node_that_fails_half_way_through_a_move_has_forgotten_what_went(failing) -> None:
    slot, source = failing.slot("job"), failing.owner("job")
    replica = failing.replicas[failing.primaries.index(source)]
    with Client(failing.url("?min_replicas=1"), call_timeout=20) as client, Client(failing.url()) as other:
        lease = client.lock("job", ttl=60).acquire()
        failing.begin_move(slot, source, failing.other_than(source))
        assert failing.move_keys(slot, source, failing.other_than(source)) == 2
        poll(lambda: replica.ask("DBSIZE") == 0, 10, lambda: "the replica has let them go too")
        source.kill()
        poll(lambda: replica.info("replication")["role"] == "master", 30, lambda: "it was promoted")
        with other.lock("job", ttl=60, wait=10) as theirs:  # documented: two may believe they hold it
            assert theirs.token > lease.token
