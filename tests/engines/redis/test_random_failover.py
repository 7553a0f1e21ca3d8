"""Servers are killed, paused and failed over repeatedly while threads contend for a few names.

Tokens always rise. With `min_replicas=1`, two leases of the same name never report `held` at the same time.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest

from harness.rigs.redis import RedisRig
from harness.servers.process import poll
from harness.servers.redis import RedisServer
from harness.servers.redis_ha import SERVICE, RedisCluster, SentinelSetup
from leasehold import Client, Lease, LeaseLost, NotAcquired, Unavailable
from leasehold.testing.conformance.suite import rig_or_skip

pytestmark = pytest.mark.faults

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
        with Client(url, call_timeout=3, ttl=3) as client:
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
            40,
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
