"""A Redis cluster: names on several nodes, and slots that move while their names are held."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter

import pytest

from harness.rigs.redis import single_server
from harness.servers.process import free_ports, poll
from leasehold import AsyncClient, Client, ConfigError, Unavailable
from leasehold.config import EngineConfig
from leasehold.engines.redis.cluster import SlotMap, slot_of
from leasehold.engines.redis.connections import BlockingPool
from leasehold.engines.redis.url import parse_cluster_url
from leasehold.runtime.base import run_sync
from tests.support import probe, probe_redis
from tests.support.timing import check_elapsed, check_seconds


def test_computed_slot_matches_the_slot_of_the_server(cluster) -> None:
    for tag in ("{:5}", "{shop%2F1:1023}", "{x:0}"):
        assert cluster.primaries[0].ask("CLUSTER", "KEYSLOT", f"lh1:{tag}:name") == slot_of(tag)


def test_inspect_shows_names_of_all_nodes(cluster) -> None:
    names = [f"job-{number:02}" for number in range(40)]
    with Client(cluster.url(), namespace="spread") as client:
        leases = [client.lock(name, ttl=60).acquire() for name in names]
        assert [holding.name for holding in client.inspect()] == names
        owners = Counter(cluster.owner(name, "spread").port for name in names)
        assert len(owners) == 3
        client.ping()
        for lease in leases:
            lease.release()
        assert not client.inspect()


def test_renewal_batch_is_one_round_trip_per_node(cluster, monkeypatch) -> None:
    round_trips = []
    calls = BlockingPool.calls

    def counting_calls(self, packed, count, *other_arguments):
        round_trips.append(count)
        return calls(self, packed, count, *other_arguments)

    with Client(cluster.url()) as client:
        leases = [client.lock(f"job-{number}", ttl=60).acquire() for number in range(60)]
        claims = [probe.renewal_claim(lease) for lease in leases]
        engine, runtime = probe.engine(client), probe.runtime(client)
        run_sync(engine.renew(claims, runtime.now() + 5))  # loads the script on every node
        monkeypatch.setattr(BlockingPool, "calls", counting_calls)
        answers = run_sync(engine.renew(claims, runtime.now() + 5))
        assert all(answer.ttl > 50 for answer in answers)
        assert len(round_trips) == 3
        assert sum(round_trips) == 60


# ------------------------------------------------------------ moving slots


def is_subscribed(client: Client, node) -> bool:
    return any(channel.endswith(probe.client_id(client).encode()) for channel in node.ask("PUBSUB", "SHARDCHANNELS"))


def test_lease_and_waiters_follow_a_slot_that_moves(cluster) -> None:
    slot, source = cluster.slot("job"), cluster.owner("job")
    target = cluster.other_than(source)
    with Client(cluster.url()) as holder, Client(cluster.url()) as other, Client(cluster.url()) as late:
        lease = holder.lock("job", ttl=60).acquire()
        grants = []
        waiters = [
            threading.Thread(target=lambda c=c: grants.append((c, c.lock("job", wait=30).acquire(), time.monotonic())))
            for c in (other, late)
        ]
        for count, waiter in enumerate(waiters):
            waiter.start()
            poll(lambda count=count: len(holder.inspect()) == count + 2, 60, lambda: "the claim is queued")
        try:
            (queue,) = source.ask("KEYS", "lh1:*:job:q")
            cluster.move(slot, source, target)
            assert cluster.owner("job") is target
            # Until it is subscribed at the new node, a client is passed over; its next attempt brings it back to its
            # position. So the order counts only from here.
            poll(
                lambda: (
                    is_subscribed(other, target) and is_subscribed(late, target) and target.ask("ZCARD", queue) == 2
                ),
                60,
                lambda: "both clients are subscribed and queued at the new node",
            )
            lease.renew()
            assert late.lock("job").try_acquire() is None
            began = time.monotonic()
            assert lease.release()
            poll(lambda: len(grants) == 1, 60, lambda: "the first waiter is granted")
            assert grants[0][0] is other
            check_seconds(grants[0][2] - began, 1.5, "notified by push from the new node")
            assert grants[0][1].release()
            poll(lambda: len(grants) == 2, 60, lambda: "the second waiter is granted")
            tokens = [lease.token, grants[0][1].token, grants[1][1].token]
            assert tokens == sorted(set(tokens))
            began = time.monotonic()
            assert holder.break_lock("job", token=tokens[-1])
            assert grants[1][1].wait_lost(60)
            check_elapsed(began, 5, "the break is notified by push")
            assert grants[1][1].lost_reason == "broken"
        finally:
            for waiter in waiters:
                waiter.join(30)
            cluster.move(slot, target, source)


def test_call_retries_while_keys_of_a_name_are_split_between_nodes(cluster) -> None:
    slot, source = cluster.slot("job"), cluster.owner("job")
    target = cluster.other_than(source)
    with Client(cluster.url(), call_timeout=10) as client, Client(cluster.url(), call_timeout=0.5) as impatient_client:
        lease = client.lock("job", ttl=60).acquire()
        answers = []
        attempt_thread = threading.Thread(target=lambda: answers.append(client.lock("job").try_acquire()))
        cluster.begin_move(slot, source, target)
        try:
            assert cluster.move_keys(slot, source, target, most=1) == 1
            began = time.monotonic()
            with pytest.raises(Unavailable, match="TRYAGAIN") as caught:
                impatient_client.lock("job").acquire()
            check_elapsed(began, 1.0)
            assert any(f"127.0.0.1:{node.port}" in str(caught.value) for node in (source, target))
            attempt_thread.start()
            attempt_thread.join(0.2)
            assert attempt_thread.is_alive(), "the client retries until all keys are on one node"
        finally:
            while cluster.move_keys(slot, source, target):
                continue
            cluster.end_move(slot, target)
        attempt_thread.join(60)
        assert answers == [None]
        lease.verify()
        assert lease.release()
        with client.lock("job") as new_lease:
            assert new_lease.token > lease.token
        cluster.move(slot, target, source)


def test_script_does_not_run_partially_while_slot_moves(cluster) -> None:
    """All keys are still on the source, but a script would fail there at a key that it has just removed itself."""
    slot, source = cluster.slot("job"), cluster.owner("job")
    target = cluster.other_than(source)
    with (
        Client(cluster.url(), call_timeout=0.5) as holder,
        Client(cluster.url()) as first,
        Client(cluster.url()) as second,
    ):
        lease = holder.lock("job", ttl=60).acquire()
        grants: list[Client] = []

        def wait(client: Client) -> None:
            with client.lock("job", wait=30):
                grants.append(client)

        waiters = [threading.Thread(target=wait, args=(client,)) for client in (first, second)]
        waiters[0].start()
        poll(lambda: len(holder.inspect()) == 2, 60, lambda: "the claim is queued")
        cluster.begin_move(slot, source, target)
        try:
            before = sorted(source.ask("CLUSTER", "GETKEYSINSLOT", slot, 10))
            assert len(before) == 4
            assert not lease.release(), "not confirmed: a pending release"
            assert sorted(source.ask("CLUSTER", "GETKEYSINSLOT", slot, 10)) == before
            waiters[1].start()
        finally:
            while cluster.move_keys(slot, source, target):
                continue
            cluster.end_move(slot, target)
            for waiter in waiters:
                waiter.join(30)
            cluster.move(slot, target, source)
        # In either order: the first waiter keeps its position, but is passed over until it subscribes at the new node.
        assert set(grants) == {first, second}


def test_renewal_batch_follows_many_moved_slots_with_few_queries(cluster) -> None:
    source, target = cluster.primaries[:2]
    names = [name for name in (f"job-{number}" for number in range(90)) if cluster.owner(name) is source]
    slots = sorted({cluster.slot(name) for name in names})

    def slot_map_queries() -> int:
        return sum(node.calls().get("cluster|slots", 0) for node in cluster.primaries)

    with Client(cluster.url(), call_timeout=10) as client:
        leases = [client.lock(name, ttl=60).acquire() for name in names]
        engine, runtime = probe.engine(client), probe.runtime(client)
        run_sync(engine.renew([probe.renewal_claim(lease) for lease in leases], runtime.now() + 10))
        try:
            for slot in slots:
                cluster.move(slot, source, target)
            before, began = slot_map_queries(), time.monotonic()
            answers = run_sync(engine.renew([probe.renewal_claim(lease) for lease in leases], runtime.now() + 10))
            assert all(answer.ttl > 50 for answer in answers)
            check_elapsed(began, 2)
            assert slot_map_queries() - before <= 3, "many redirects cause few queries of the slot map"
            for lease in leases:
                assert lease.release()
        finally:
            for slot in slots:
                cluster.move(slot, target, source)


def test_redirect_without_host_uses_same_host_with_other_port(cluster) -> None:
    slot, source = cluster.slot("job"), cluster.owner("job")
    target = cluster.other_than(source)
    kind = "cluster-preferred-endpoint-type"
    with Client(cluster.url(), call_timeout=5) as client:
        client.ping()  # loads the slot map; the client is not notified of the move
        try:
            for node in cluster.all:
                node.ask("CONFIG", "SET", kind, "unknown-endpoint")
            cluster.move(slot, source, target)
            with client.lock("job") as lease:
                assert lease.held
        finally:
            for node in cluster.all:
                node.ask("CONFIG", "SET", kind, "ip")
            cluster.move(slot, target, source)


def test_lock_stays_exclusive_while_slot_moves_back_and_forth(cluster) -> None:
    slot, source = cluster.slot("job"), cluster.owner("job")
    target = cluster.other_than(source)
    tokens: list[int] = []
    inside = 0

    async def work(client: AsyncClient, stopped: asyncio.Event) -> None:
        nonlocal inside
        while not stopped.is_set():
            async with client.lock("job", ttl=20) as lease:
                inside += 1
                assert inside == 1
                tokens.append(lease.token)
                await asyncio.sleep(0.001)
                inside -= 1

    def move_back_and_forth() -> None:
        for _ in range(5):
            for here, there in ((source, target), (target, source)):
                cluster.move(slot, here, there)
                count = len(tokens)
                poll(lambda count=count: len(tokens) > count + 3, 60, lambda: "the workers continue at the new node")

    async def main() -> None:
        stopped = asyncio.Event()
        async with AsyncClient(cluster.url()) as one, AsyncClient(cluster.url()) as two:
            workers = [asyncio.create_task(work(client, stopped)) for client in (one, two) for _ in range(4)]
            await asyncio.to_thread(move_back_and_forth)
            stopped.set()
            await asyncio.wait_for(asyncio.gather(*workers), 60)

    asyncio.run(main())
    assert len(tokens) > 20
    assert tokens == sorted(set(tokens))


def test_waiter_is_woken_after_subscriptions_are_killed(cluster) -> None:
    with Client(cluster.url()) as holder, Client(cluster.url()) as other:
        lease = holder.lock("job", ttl=60).acquire()
        grants = []
        waiter = threading.Thread(target=lambda: grants.append(other.lock("job", wait=30).acquire()))
        waiter.start()
        poll(lambda: len(holder.inspect()) == 2, 60, lambda: "the claim is queued")
        for node in cluster.primaries:
            node.ask("CLIENT", "KILL", "TYPE", "pubsub")
        assert lease.release()
        waiter.join(60)
        assert grants[0].token > lease.token


# ----------------------------------------- wrong servers, and permissions


def test_unreachable_cluster_raises_unavailable_without_password(cluster) -> None:
    first, second = free_ports(2)
    url = f"redis+cluster://:verysecret@127.0.0.1:{first},127.0.0.1:{second}"
    with Client(url, call_timeout=0.5) as client:
        began = time.monotonic()
        with pytest.raises(Unavailable) as caught:
            client.lock("job").acquire()
        check_elapsed(began, 1.0)
    assert f"the node at 127.0.0.1:{first} cannot be reached" in str(caught.value)
    assert "verysecret" not in str(caught.value)


@pytest.mark.parametrize(("first", "last"), [(0, 10**12), (-(10**12), 5), (7, 6), (16_384, 16_384)])
def test_slots_out_of_range_are_refused_before_memory_is_used(first, last) -> None:
    """A hostile node could make the client allocate a list of any length."""
    url = parse_cluster_url(EngineConfig.parse("redis+cluster://127.0.0.1:1", 1.0))
    replies = [b"cluster_state:ok\r\ncluster_current_epoch:1", [[first, last, [b"127.0.0.1", 1]]]]
    with pytest.raises(Unavailable, match="unexpected reply"):
        probe_redis.parse_slots(SlotMap(url), url.nodes[0], replies)


def test_cluster_node_as_single_server_is_refused_with_the_right_scheme(cluster) -> None:
    node = cluster.all[0]
    elsewhere = next(name for name in cluster.name_on_each_node() if cluster.owner(name) is not node)
    with (
        Client(f"redis://127.0.0.1:{node.port}") as client,
        pytest.raises(ConfigError, match=r"use the URL redis\+cluster://"),
    ):
        client.lock(elsewhere).acquire(wait=0)


def test_single_server_is_refused_as_cluster(cluster) -> None:
    url = f"redis+cluster://127.0.0.1:{single_server()[0].port}"
    began = time.monotonic()
    with Client(url) as client, pytest.raises(ConfigError, match="not part of a cluster"):
        client.lock("job").acquire()
    check_elapsed(began, 2, "nothing was granted, so close() has no pending release to wait for")


def test_user_with_documented_permissions_can_use_every_call(cluster, rights) -> None:
    for node in cluster.primaries:
        node.ask("ACL", "SETUSER", "locks", "on", ">pw", *rights.server, *rights.cluster)
    url = cluster.url().replace("://", "://locks:pw@")
    with Client(url) as one, Client(url) as other:
        one.ping()
        names = cluster.name_on_each_node()
        leases = [one.lock(name, ttl=60).acquire() for name in names]
        grants = []
        waiter = threading.Thread(target=lambda: grants.append(other.lock(names[0], wait=60).acquire()))
        waiter.start()
        poll(lambda: len(one.inspect()) == 4, 60, lambda: "the claim is queued")
        slot, source = cluster.slot(names[0]), cluster.owner(names[0])
        cluster.move(slot, source, cluster.other_than(source))
        try:
            leases[0].renew()
            assert other.break_lock(names[0], token=leases[0].token)
            assert leases[0].wait_lost(60)
            waiter.join(60)
            assert grants[0].release()
        finally:
            cluster.move(slot, cluster.other_than(source), source)
        key = f"rights-{names[0]}"
        assert one.once(key, lambda: 1) == other.once(key, lambda: 2) == 1
