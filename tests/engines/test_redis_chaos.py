"""Servers are killed, paused and told to fail over, again and again, under a crowd that takes turns.

With `min_replicas=1` no two who both trust their lease are ever inside together; with or without it tokens rise.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest

from leasehold import Client, Lease, LeaseLost, NotAcquired, Unavailable
from leasehold.testing.redis_rig import RedisRig
from leasehold.testing.servers.process import poll
from leasehold.testing.servers.redis import RedisServer
from leasehold.testing.servers.redis_several import SERVICE, RedisCluster, Watched
from leasehold.testing.suite import made

pytestmark = pytest.mark.faults

NAMES = [f"job-{number}" for number in range(4)]
OPTIONS = pytest.mark.parametrize("options", ["?min_replicas=1", ""], ids=["confirmed", "plain"])


class Crowd:
    """Threads that take turns on a few names, each with a client of its own."""

    def __init__(self, url: str) -> None:
        self.tokens: dict[str, list[int]] = {name: [] for name in NAMES}
        self.together: list[tuple[int, int]] = []
        self._inside: dict[tuple[str, int], Lease] = {}
        self._guard, self._over = threading.Lock(), threading.Event()
        self._threads = [threading.Thread(target=self._use, args=(url, number)) for number in range(8)]
        for thread in self._threads:
            thread.start()

    def _use(self, url: str, number: int) -> None:
        with Client(url, call_timeout=3, ttl=3) as client:
            while not self._over.is_set():
                name = random.choice(NAMES)
                try:
                    with client.lock(name, wait=5) as lease:
                        self._enter(name, number, lease)
                        time.sleep(random.random() * 0.02)
                except (Unavailable, NotAcquired, LeaseLost):
                    continue
                finally:
                    with self._guard:
                        self._inside.pop((name, number), None)

    def _enter(self, name: str, number: int, lease: Lease) -> None:
        with self._guard:
            self.tokens[name].append(lease.token)
            others = [other for (where, _), other in self._inside.items() if where == name]
            self.together += [(other.token, lease.token) for other in others if other.held and lease.held]
            self._inside[name, number] = lease

    def goes_on(self) -> None:
        before = {name: len(tokens) for name, tokens in self.tokens.items()}
        poll(
            lambda: all(len(self.tokens[name]) > before[name] + 2 for name in NAMES), 40, lambda: "all names are taken"
        )

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)


def role(server: RedisServer) -> str:
    return server.info("replication")["role"]


def follows(server: RedisServer, other: RedisServer) -> bool:
    return role(server) == "slave" and "state=online" in other.info("replication").get("slave0", "")


def hurt(
    primary: RedisServer, replica: RedisServer, hand_over: Callable[[RedisServer], object], way: str, crowd: Crowd
) -> None:
    """Until the replica was promoted, and the pair is whole again."""
    if way == "kill":
        primary.kill()
    elif way == "pause":
        primary.pause()
    else:
        hand_over(replica)
    poll(lambda: role(replica) == "master", 40, lambda: "it is promoted")
    if way == "kill":
        primary.start()
    primary.resume()
    # Busy machines may take the one just promoted for dead, and go back: what counts is that one follows the other.
    poll(lambda: follows(primary, replica) or follows(replica, primary), 90, lambda: "one follows the other")
    crowd.goes_on()


def judge(crowd: Crowd, options: str) -> None:
    crowd.end()
    for name, tokens in crowd.tokens.items():
        assert tokens == sorted(set(tokens)), name
    if options:
        assert crowd.together == []


@OPTIONS
def test_fail_overs_by_sentinels(options) -> None:
    made(RedisRig)
    watched = Watched(down_after=0.5)
    crowd = Crowd(watched.url(options))
    try:
        for way in ("kill", "hand over", "pause", "kill"):
            pair = [watched.primary, watched.replica]
            primary, replica = sorted(pair, key=role)  # "master" before "slave"
            hurt(primary, replica, lambda _: watched.sentinels[0].ask("SENTINEL", "FAILOVER", SERVICE), way, crowd)
        judge(crowd, options)
    finally:
        crowd.end()
        watched.close()


@OPTIONS
def test_fail_overs_in_a_cluster(options) -> None:
    made(RedisRig)
    cluster = RedisCluster(node_timeout=1, replicas=True)
    crowd = Crowd(cluster.url(options))
    try:
        for way in ("kill", "hand over", "pause", "kill"):
            primary = cluster.owner(random.choice(NAMES))
            port = str(primary.port)
            replica = next(node for node in cluster.all if node.info("replication").get("master_port") == port)
            hurt(primary, replica, lambda replica: replica.ask("CLUSTER", "FAILOVER"), way, crowd)
        judge(crowd, options)
    finally:
        crowd.end()
        cluster.close()
