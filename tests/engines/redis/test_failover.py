"""A client during a failover: which sentinel it believes, which server it asks, how it fails if all are silent."""

from __future__ import annotations

import asyncio
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from harness.rigs.redis import RedisRig
from harness.servers.process import poll
from harness.servers.redis import RedisServer
from harness.servers.redis_ha import SERVICE, RedisCluster, SentinelSetup
from leasehold import AsyncClient, Client, Lease, LeaseLost, NotAcquired, Unavailable
from leasehold.engines.redis.discovery import DiscoveryNode
from leasehold.engines.redis.sentinel import Primary, SentinelSet, SentinelTopology
from leasehold.engines.redis.server import RedisEndpoint
from leasehold.runtime.base import Runtime
from leasehold.runtime.net.blocking import SocketAddress
from leasehold.runtime.threads import Threads
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support import probe_redis
from tests.support.timing import check_elapsed


@pytest.fixture
def sentinel_setup() -> Iterator[SentinelSetup]:
    rig_or_skip(RedisRig)  # skips if Redis is not installed
    setup = SentinelSetup(down_after=30)
    yield setup
    setup.close()


def known_primary_port(client: Client | AsyncClient) -> int:
    """The port of the server that this client takes for the primary."""
    server = probe_redis.sentinels(client).server
    return 0 if server is None else server.address.port


class DelayedConnect:
    """Delays one new connection to the server at `port` until `resume` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.connected, self.resume = threading.Event(), threading.Event()
        self.port = 0
        original_open = getattr(*probe_redis.OPEN)

        async def open_delayed(server: RedisEndpoint, runtime: Runtime, deadline: float):
            stream = await original_open(server, runtime, deadline)
            if server.address.port == self.port:
                self.port = 0
                self.connected.set()
                if runtime.blocking:
                    self.resume.wait(30)
                else:
                    await asyncio.to_thread(self.resume.wait, 30)
            return stream

        monkeypatch.setattr(*probe_redis.OPEN, open_delayed)


NAMES = [f"job-{number}" for number in range(4)]


OPTIONS = pytest.mark.parametrize("options", ["?min_replicas=1", ""], ids=["confirmed", "plain"])


class WorkerThreads:
    """Threads that contend for a few names, each with its own client."""

    def __init__(self, url: str) -> None:
        self.tokens: dict[str, list[int]] = {name: [] for name in NAMES}
        self.overlapping_tokens: list[tuple[int, int]] = []
        self._held: dict[tuple[str, int], Lease] = {}
        self._mutex, self._stopped = threading.Lock(), threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(url, number)) for number in range(8)]
        for thread in self._threads:
            thread.start()

    def _work(self, url: str, number: int) -> None:
        with Client(url, call_timeout=10, ttl=3) as client:
            while not self._stopped.is_set():
                name = random.choice(NAMES)
                try:
                    with client.lock(name, wait=5) as lease:
                        self._record_grant(name, number, lease)
                        time.sleep(random.random() * 0.02)
                except (Unavailable, NotAcquired, LeaseLost):
                    continue
                finally:
                    with self._mutex:
                        self._held.pop((name, number), None)

    def _record_grant(self, name: str, number: int, lease: Lease) -> None:
        with self._mutex:
            self.tokens[name].append(lease.token)
            others = [other for (held_name, _), other in self._held.items() if held_name == name]
            self.overlapping_tokens += [(other.token, lease.token) for other in others if other.held and lease.held]
            self._held[name, number] = lease

    def wait_for_progress(self) -> None:
        before = {name: len(tokens) for name, tokens in self.tokens.items()}
        poll(
            lambda: all(len(self.tokens[name]) > before[name] + 2 for name in NAMES),
            120,
            lambda: "every name was granted again",
        )

    def end(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(60)


def role(server: RedisServer) -> str:
    return server.info("replication")["role"]


def is_replica_of(server: RedisServer, other: RedisServer) -> bool:
    return role(server) == "slave" and "state=online" in other.info("replication").get("slave0", "")


def fail_over_and_recover(
    primary: RedisServer,
    replica: RedisServer,
    start_failover: Callable[[RedisServer], object],
    fault: str,
    workers: WorkerThreads,
) -> None:
    """Returns when the replica was promoted and one server replicates from the other again."""
    if fault == "kill":
        primary.kill()
    elif fault == "pause":
        primary.pause()
    else:
        start_failover(replica)
    poll(lambda: role(replica) == "master", 40, lambda: "the replica is promoted")
    if fault == "kill":
        primary.start()
    primary.resume()
    # On a busy machine the new primary may be declared dead and replaced in turn, so accept either role.
    poll(
        lambda: is_replica_of(primary, replica) or is_replica_of(replica, primary),
        90,
        lambda: "one server replicates from the other",
    )
    workers.wait_for_progress()


def check_tokens(workers: WorkerThreads, options: str) -> None:
    workers.end()
    for name, tokens in workers.tokens.items():
        assert tokens == sorted(set(tokens)), name
    if options:
        assert workers.overlapping_tokens == []


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_replaced_primary_grants_nothing(sentinel_setup, monkeypatch, kind) -> None:
    """The old primary still reports the role master, and the call chose it before the failover."""
    delayed_connect = DelayedConnect(monkeypatch)
    clients: list[Client | AsyncClient] = []
    answers: list[object] = []

    def delay_next_connect(client: Client | AsyncClient) -> None:
        """Delay the next connection to the primary. The listener is connected, so a call opens it."""
        listener = probe_redis.subscriptions(client)
        listener.start()
        poll(lambda: listener.active, 60, lambda: "the listener is subscribed")
        probe_redis.drop_connections(client)
        delayed_connect.port = sentinel_setup.primary.port
        clients.append(client)

    def run_blocking() -> None:
        with Client(sentinel_setup.url(), call_timeout=15) as client:
            client.ping()
            delay_next_connect(client)
            answers.append(client.lock("job", ttl=60).try_acquire())

    async def run_asyncio() -> None:
        async with AsyncClient(sentinel_setup.url(), call_timeout=15) as client:
            await client.ping()
            delay_next_connect(client)
            answers.append(await client.lock("job", ttl=60).try_acquire())

    thread = threading.Thread(target=run_blocking if kind is Client else lambda: asyncio.run(run_asyncio()))
    thread.start()
    assert delayed_connect.connected.wait(60)
    sentinel_setup.sentinels[0].ask("SENTINEL", "FAILOVER", SERVICE)
    poll(
        lambda: known_primary_port(clients[0]) == sentinel_setup.replica.port,
        60,
        lambda: "the client knows the new primary",
    )
    with Client(sentinel_setup.url(), call_timeout=15) as other:
        other.ping()
        assert known_primary_port(other) == sentinel_setup.replica.port
        with other.lock("job", ttl=60) as lease:
            assert sentinel_setup.primary.info("replication")["role"] == "master", "the old primary is not demoted yet"
            delayed_connect.resume.set()
            thread.join(30)
            assert lease.held
    assert answers == [None], "the client repeats the attempt at the new primary, where the name is held"


@pytest.mark.parametrize("where", ["redis+cluster://{}", "redis+sentinel://{}/locks"])
def test_concurrent_calls_raise_unavailable_when_servers_are_silent(where) -> None:
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        url = where.format(",".join(f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners))
        client = stack.enter_context(Client(url, call_timeout=0.6))
        answers: list[object] = []

        def call(method) -> None:
            try:
                answers.append(method())
            except Unavailable as error:
                answers.append(error)

        threads = [threading.Thread(target=call, args=(method,)) for method in (client.inspect, client.ping) * 3]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        check_elapsed(began, 1.1)
        assert [isinstance(answer, Unavailable) for answer in answers] == [True] * 6


def test_lost_connection_is_not_replaced_while_all_sentinels_are_down(sentinel_setup) -> None:
    """The primary is up and reports the role master, but only a sentinel knows whether it was replaced."""
    with Client(sentinel_setup.url(), call_timeout=1) as client:
        lease = client.lock("job", ttl=60).acquire()
        for sentinel in sentinel_setup.sentinels:
            sentinel.pause()
        lease.renew()
        sentinel_setup.primary.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        began = time.monotonic()
        with pytest.raises(Unavailable, match="the sentinel at"):
            client.lock("another").acquire()
        check_elapsed(began, 1.5)
        sentinel_setup.sentinels[0].resume()
        with client.lock("another"):
            lease.renew()


def test_threads_share_one_connection_pool_after_failover() -> None:
    runtime = Threads()
    sentinels = SentinelSet(
        [DiscoveryNode(SocketAddress("127.0.0.1", 1), None, title="sentinel")], "locks", RedisEndpoint, runtime
    )
    topology = SentinelTopology(sentinels, runtime)
    switch_interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for epoch in range(100):
            probe_redis.update_primary(sentinels, Primary(epoch, SocketAddress("127.0.0.1", 7000 + epoch)))
            pools, barrier = [], threading.Barrier(8)

            def get_pool(pools=pools, barrier=barrier) -> None:
                barrier.wait(60)
                pools.append(topology.connections(""))

            threads = [threading.Thread(target=get_pool) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert len(set(map(id, pools))) == 1
    finally:
        sys.setswitchinterval(switch_interval)


@pytest.mark.faults
def test_stale_sentinel_is_polled_at_a_limited_rate(sentinel_setup) -> None:
    stale_sentinel, *others = sentinel_setup.sentinels
    with Client(sentinel_setup.url(), call_timeout=5) as client:
        lease = client.lock("job", ttl=60).acquire()
        stale_sentinel.kill()
        others[0].ask("SENTINEL", "FAILOVER", SERVICE)
        poll(
            lambda: known_primary_port(client) == sentinel_setup.replica.port,
            20,
            lambda: "the client knows the new primary",
        )
        for sentinel in others:
            sentinel.kill()
        stale_sentinel.start()
        assert stale_sentinel.primary() == sentinel_setup.primary.port

        def connections() -> int:
            return int(stale_sentinel.info("stats")["total_connections_received"])

        poll(lambda: connections() > 5, 20, lambda: "the client polls the stale sentinel")
        before, end = connections(), time.monotonic() + 3
        poll(lambda: time.monotonic() > end, 60, lambda: "three seconds have passed")
        assert connections() - before < 20, "the client polls at a limited rate"
        lease.verify()
        assert known_primary_port(client) == sentinel_setup.replica.port


# --------------------------------------------------------- repeated failovers


@pytest.mark.faults
@OPTIONS
def test_tokens_rise_over_repeated_sentinel_failovers(options) -> None:
    rig_or_skip(RedisRig)
    sentinel_setup = SentinelSetup(down_after=0.5)
    workers = WorkerThreads(sentinel_setup.url(options))
    try:
        for fault in ("kill", "hand over", "pause", "kill"):
            pair = [sentinel_setup.primary, sentinel_setup.replica]
            primary, replica = sorted(pair, key=role)  # "master" before "slave"
            fail_over_and_recover(
                primary,
                replica,
                lambda _: sentinel_setup.sentinels[0].ask("SENTINEL", "FAILOVER", SERVICE),
                fault,
                workers,
            )
        check_tokens(workers, options)
    finally:
        workers.end()
        sentinel_setup.close()


@pytest.mark.faults
@OPTIONS
def test_tokens_rise_over_repeated_cluster_failovers(options) -> None:
    rig_or_skip(RedisRig)
    cluster = RedisCluster(node_timeout=1, replicas=True)
    workers = WorkerThreads(cluster.url(options))
    try:
        for fault in ("kill", "hand over", "pause", "kill"):
            primary = cluster.owner(random.choice(NAMES))
            port = str(primary.port)
            replica = next(node for node in cluster.all if node.info("replication").get("master_port") == port)
            fail_over_and_recover(primary, replica, lambda replica: replica.ask("CLUSTER", "FAILOVER"), fault, workers)
        check_tokens(workers, options)
    finally:
        workers.end()
        cluster.close()
