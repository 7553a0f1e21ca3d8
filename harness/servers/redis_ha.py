"""Several Redis servers for the tests: a primary with a replica and sentinels, or a cluster."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

import hiredis

from harness.servers.process import free_ports, poll
from harness.servers.proxy import Proxy
from harness.servers.redis import RedisServer
from leasehold.engines.redis.cluster import slot_of
from leasehold.engines.redis.protocol import lock_keys

SERVICE: Final = "locks"
_SLOTS: Final = 16_384


class SentinelServer(RedisServer):
    """A sentinel that monitors the primary. Two sentinels must agree before they promote the replica."""

    def __init__(self, primary: RedisServer | Proxy, down_after: float) -> None:
        super().__init__()
        self._config_file = os.path.join(self.folder, "sentinel.conf")
        lines = (
            f"port {self.port}",
            "bind 127.0.0.1",
            f"dir {self.folder}",
            f"sentinel monitor {SERVICE} 127.0.0.1 {primary.port} 2",
            f"sentinel down-after-milliseconds {SERVICE} {down_after * 1000:.0f}",
            f"sentinel failover-timeout {SERVICE} 2000",
        )
        with open(self._config_file, "w") as file:  # Sentinel also writes its state to this file
            file.write("\n".join(lines) + "\n")

    def command(self) -> Sequence[str]:
        return [self._program, self._config_file, "--sentinel"]

    def primary(self) -> int:
        """The port of the primary, as this sentinel knows it."""
        return int(self.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)[1])


class SentinelSetup:
    """A primary, its replica, three sentinels, and a proxy that can cut off the replication."""

    def __init__(self, down_after: float) -> None:
        self.primary = RedisServer().start()
        self.replication_proxy = Proxy(self.primary.port)
        self.replica = RedisServer(
            *("--replicaof", "127.0.0.1", str(self.primary.port), "--repl-ping-replica-period", "1")
        ).start()
        self.sentinels = [SentinelServer(self.primary, down_after).start() for _ in range(3)]
        poll(self._sentinels_agree, 60, lambda: "the sentinels know each other and the replica")

    @property
    def all(self) -> list[RedisServer]:
        return [self.primary, self.replica, *self.sentinels]

    def _sentinels_agree(self) -> bool:
        for sentinel in self.sentinels:
            facts = sentinel.ask("SENTINEL", "MASTER", SERVICE)
            found = dict(zip(facts[::2], facts[1::2], strict=True))
            if (found[b"num-other-sentinels"], found[b"num-slaves"]) != (b"2", b"1"):
                return False
        return "state=online" in self.primary.info("replication").get("slave0", "")

    def url(self, options: str = "") -> str:
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/{SERVICE}{options}"

    def detach_replica(self) -> None:
        """Stop the replication unnoticed: the replica waits for a primary that does not answer."""
        self.replica.ask("CONFIG", "SET", "repl-timeout", 3600)
        self.replication_proxy.cut()
        self.replica.ask("REPLICAOF", "127.0.0.1", self.replication_proxy.port)

    def close(self) -> None:
        for server in self.all:
            server.kill()
        self.replication_proxy.close()


class ClusterNode(RedisServer):
    def __init__(self, node_timeout: float) -> None:
        super().__init__("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf")
        timeout, bus = f"{node_timeout * 1000:.0f}", str(free_ports(1)[0])
        self.options += ["--cluster-node-timeout", timeout, "--cluster-port", bus]
        self._bus = bus

    def meet(self, other: ClusterNode) -> None:
        self.ask("CLUSTER", "MEET", "127.0.0.1", other.port, other._bus)

    @property
    def id(self) -> str:
        return str(self.ask("CLUSTER", "MYID").decode())

    def state(self) -> dict[str, str]:
        pairs = (line.partition(":") for line in self.ask("CLUSTER", "INFO").decode().splitlines())
        return {name: value for name, _, value in pairs}

    def slots(self) -> int:
        """The number of slots that this node serves."""
        own_ranges = [slot_range for slot_range in self.ask("CLUSTER", "SLOTS") if slot_range[2][1] == self.port]
        return sum(last + 1 - first for first, last, *_ in own_ranges)


class RedisCluster:
    """Three primaries, and optionally a replica of each."""

    def __init__(self, node_timeout: float, replicas: bool = False) -> None:
        self.primaries = [ClusterNode(node_timeout).start() for _ in range(3)]
        self.replicas = [ClusterNode(node_timeout).start() for _ in range(3 if replicas else 0)]
        bounds = [_SLOTS * n // 3 for n in range(4)]
        for number, node in enumerate(self.all):
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            if number < 3:
                node.ask("CLUSTER", "ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
            node.meet(self.primaries[0])
        poll(self.is_healthy, 60, lambda: "the cluster is healthy")
        for primary, replica in zip(self.primaries, self.replicas, strict=False):
            replica.ask("CLUSTER", "REPLICATE", primary.id)
        poll(self._replicas_online, 60, lambda: "every primary has its replica")

    @property
    def all(self) -> list[ClusterNode]:
        return [*self.primaries, *self.replicas]

    def is_healthy(self) -> bool:
        states = [node.state() for node in self.all if node.running]
        known = str(len(self.all))
        return all(state["cluster_state"] == "ok" and state["cluster_known_nodes"] == known for state in states)

    def _replicas_online(self) -> bool:
        return not self.replicas or all(
            "state=online" in node.info("replication").get("slave0", "") for node in self.primaries
        )

    def url(self, options: str = "") -> str:
        return f"redis+cluster://{','.join(f'127.0.0.1:{node.port}' for node in self.all)}{options}"

    def owner(self, name: str, namespace: str = "") -> ClusterNode:
        """The node that serves a name, as the first running node knows it."""
        slot = self.slot(name, namespace)
        asked = next(node for node in self.all if node.running)
        port = next(
            slot_range[2][1] for slot_range in asked.ask("CLUSTER", "SLOTS") if slot_range[0] <= slot <= slot_range[1]
        )
        return next(node for node in self.all if node.port == port)

    def other_than(self, node: ClusterNode) -> ClusterNode:
        return next(each for each in self.primaries if each is not node)

    def name_on_each_node(self) -> list[str]:
        """One name for every node."""
        found: dict[int, str] = {}
        for number in range(100):
            found.setdefault(self.owner(f"name-{number}").port, f"name-{number}")
        return list(found.values())

    def _agree(self, slot: int, target: ClusterNode) -> bool:
        """Whether all nodes agree on the slot, and nodes that chose the same epoch have resolved that."""
        slot_ranges = [
            slot_range
            for node in self.primaries
            for slot_range in node.ask("CLUSTER", "SLOTS")
            if slot_range[0] <= slot <= slot_range[1]
        ]
        epochs = [node.state()["cluster_my_epoch"] for node in self.primaries]
        return {slot_range[2][1] for slot_range in slot_ranges} == {target.port} and len(set(epochs)) == len(epochs)

    def slot(self, name: str, namespace: str = "") -> int:
        return slot_of(lock_keys(namespace, name)[0].partition(":")[2])

    def begin_move(self, slot: int, source: ClusterNode, target: ClusterNode) -> None:
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.id)
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.id)

    def move_keys(self, slot: int, source: ClusterNode, target: ClusterNode, most: int = 1000) -> int:
        """Move keys of a slot. Returns how many were moved."""
        found: list[bytes] = source.ask("CLUSTER", "GETKEYSINSLOT", slot, most)
        if found:
            source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *found)
        return len(found)

    def end_move(self, slot: int, target: ClusterNode) -> None:
        for node in sorted(self.primaries, key=lambda node: node is not target):  # the target first
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", target.id)
        poll(lambda: self._agree(slot, target), 30, lambda: f"all nodes agree on the owner of slot {slot}")

    def move(self, slot: int, source: ClusterNode, target: ClusterNode) -> None:
        """Move a slot as `redis-cli --cluster reshard` does."""
        self.begin_move(slot, source, target)
        while self.move_keys(slot, source, target):
            continue
        self.end_move(slot, target)

    def close(self) -> None:
        for node in self.all:
            node.kill()


def scan_keys(server: RedisServer, pattern: str) -> set[bytes]:
    """All keys of one server that match a pattern."""
    found: set[bytes] = set()
    cursor: Any = b"0"
    while True:
        try:
            cursor, names = server.ask("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
        except hiredis.ReplyError:  # the server has just restarted
            continue
        found.update(names)
        if cursor == b"0":
            return found
