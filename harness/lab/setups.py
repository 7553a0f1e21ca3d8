"""The servers of each engine in the lab, and how contenders reach them: each through its own proxies.

A new engine is a class here, a line in `SETUPS`, and a word in the rows of `expectations.py`.
"""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import ClassVar, Final, cast

from harness.servers import fake_clock
from harness.servers.etcd import Cluster, Etcd
from harness.servers.folders import scratch
from harness.servers.hosts import EtcdMember, Host, RedisNode, ZookeeperMember, create_bridge
from harness.servers.lock_server import LockServer
from harness.servers.machine import hosts
from harness.servers.mysql import MariaDB
from harness.servers.postgresql import PostgreSQL
from harness.servers.process import Server, poll
from harness.servers.proxy import Proxy
from harness.servers.redis import CAN_FAKE_CLOCK, RedisServer
from harness.servers.redis_ha import SERVICE, SentinelServer
from harness.servers.sites import Site, Sites, can_make_sites
from harness.servers.zookeeper import Ensemble, Zookeeper

SITES_TTL: Final = 6.0  # seconds, as is the next
SITES_CALL_TIMEOUT: Final = 3.0
SITES_ELECTION: Final = 2000  # milliseconds: etcd's election timeout, at least ten round trips between sites
AOF_ALWAYS: Final = ("--appendonly", "yes", "--appendfsync", "always")
_DISK: Final = 400  # MB of a small disk: etcd, PostgreSQL and MariaDB allocate their logs at the start


class CannotRun(Exception):
    """The machine cannot inject this fault; the text says why."""


@dataclass(slots=True)
class Link:
    """How one contender reaches the servers. `proxies`: one for each of `Setup.servers`; `others`: of its helpers.
    `site`: where the contender runs."""

    url: str
    proxies: list[Proxy]
    others: list[Proxy] = field(default_factory=list)
    site: Site | None = None

    @property
    def all(self) -> list[Proxy]:
        return [*self.proxies, *self.others]


class Setup:
    """`servers`: those that decide. Faults use the methods below; a setup overrides what is special about it."""

    title: ClassVar[str]
    engine: ClassVar[str]  # the name of its guarantees page
    ttl: float = 2.0
    call_timeout: float = 1.0
    on_hosts: ClassVar[bool] = False  # a partition needs each server on a host of its own
    servers: Sequence[Server] = ()
    sites: Sites | None = None

    def __init__(self, needs: frozenset[str] = frozenset()) -> None:
        """`needs`: of the fault. `clock`: clocks that can be set. `disk`: a small disk. `hosts`: partitions. `sites`: a
        server in each of three sites."""
        self.disk = small_disk() if "disk" in needs else ""
        if "sites" in needs:
            if not can_make_sites():
                raise CannotRun("needs root, namespaces and TUN devices, for sites of their own")
            self.sites, self.ttl, self.call_timeout = Sites(), SITES_TTL, SITES_CALL_TIMEOUT
        self.session = self.ttl  # of engines with sessions
        self._linked = 0

    def start(self) -> None:
        for server in self.servers:
            server.launch()
        for server in self.servers:
            server.await_ready()

    def close(self) -> None:
        for server in self.servers:
            server.kill()
        if self.disk:
            subprocess.run(["umount", "-l", self.disk], check=False)  # noqa: S607
        if self.sites:
            self.sites.close()

    def link(self) -> Link:
        if self.sites:
            return self._link_at_next_site(self.sites)
        proxies = [Proxy(server.port, getattr(server, "host", "127.0.0.1")) for server in self.servers]
        return Link(self.url(hosts(proxies)), proxies)

    def _link_at_next_site(self, sites: Sites) -> Link:
        """Contenders are at the sites by turns, without proxies. The server of its own site is first in the URL."""
        site = sites.all[self._linked % len(sites.all)]
        self._linked += 1
        servers = [cast("EtcdMember", server) for server in self.servers]
        nearest_first = sorted(servers, key=lambda server: server.netns_host is not site)
        return Link(self.url(",".join(f"{server.host}:{server.port}" for server in nearest_first)), [], site=site)

    def url(self, addresses: str) -> str:
        raise NotImplementedError

    def direct_url(self) -> str:
        """For clients that no fault cuts off: without proxies, which could not carry much load."""
        return self.url(hosts(self.servers))

    def version(self) -> str:
        raise NotImplementedError

    def temporary_keys(self) -> int:
        """What the servers keep for claims, beside what `inspect` shows. There must be none without claims."""
        return 0

    # What faults do. The leader is the server without which no request is decided at this moment.

    def leader(self) -> Server:
        return self.servers[0]

    def restart_leader(self, pause: Callable[[], None]) -> None:
        """Kill the leader, and start it again on its data after a while."""
        leader = self.leader()
        leader.kill()
        pause()
        restart(leader)

    def minority(self) -> Sequence[Server]:
        """The servers on the leader's side of a partition. Of a single server: it, with no client on its side."""
        return [self.leader()]

    def partition(self, minority: Sequence[Server]) -> None:
        """Cut these servers off from the other servers; the lab cuts the contenders."""

    def heal_partition(self) -> None: ...

    def decide(self, servers: Sequence[Server]) -> bool:
        """Whether these servers, cut off from the others, may grant the lock."""
        return len(servers) > len(self.servers) // 2

    def set_clocks(self, seconds: float, majority: bool) -> None:
        """Step the clock of the leader, and of a majority or minority of several servers."""
        count = (len(self.servers) // 2 + 1 if majority else len(self.servers) // 2) or 1
        for server in [self.leader(), *(each for each in self.servers if each is not self.leader())][:count]:
            server.set_clock(seconds)  # type: ignore[attr-defined]

    def fill_disk(self) -> None:
        with suppress(OSError), open(os.path.join(self.disk, "filler"), "ab", buffering=0) as filler:
            while True:
                filler.write(bytes(65_536))

    def empty_disk(self) -> None:
        """Free the disk, and start again the servers that did not survive it."""
        os.unlink(os.path.join(self.disk, "filler"))
        if stopped := [server for server in self.servers if not server.running]:
            restart(*stopped)


def restart(*servers: Server) -> None:
    """Start servers again, all at once: a member is not ready before the others run. Some refuse to start for a moment,
    until the kernel has cleaned up behind the killed process."""

    def all_ready() -> bool:
        for server in servers:
            if not server.running:
                server.launch()
        return all(server.ready() for server in servers)

    poll(all_ready, servers[0].start_timeout, lambda: "; ".join(server.describe() for server in servers))


def small_disk() -> str:
    folder = scratch()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK}m,mode=711", "none", folder]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        raise CannotRun("needs root, to mount a small disk")
    return folder


def program_version(*command: str) -> str:
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = re.search(r"\d+\.\d+(\.\d+)?", output)
    return found[0] if found else "unknown"


def need_fake_clock(available: bool) -> None:
    if not available:
        raise CannotRun("needs libfaketime: apt-get install faketime")


# ------------------------------------------------------------------ the engines


class Sqlite(Setup):
    title, engine = "SQLite", "sqlite"

    def __init__(self, needs: frozenset[str] = frozenset()) -> None:
        super().__init__(needs)
        self.path = os.path.join(self.disk or scratch(), "locks.db")

    def link(self) -> Link:
        return Link(self.direct_url(), [])

    def direct_url(self) -> str:
        return f"sqlite://{self.path}"

    def version(self) -> str:
        return sqlite3.sqlite_version


class Redis(Setup):
    title, engine = "Redis", "redis"
    options: ClassVar[Sequence[str]] = ()

    def __init__(self, needs: frozenset[str] = frozenset(), count: int = 1) -> None:
        super().__init__(needs)
        if "clock" in needs:
            need_fake_clock(CAN_FAKE_CLOCK)
        disk = ("--dir", self.disk) if self.disk else ()
        self.servers = [
            RedisServer(*self.options, *(disk if number == 0 else ()), fake_clock="clock" in needs)
            for number in range(count)
        ]

    def url(self, addresses: str) -> str:
        return f"redis://{addresses}"

    def temporary_keys(self) -> int:
        """Only the counters of tokens do not expire."""
        found = [cast("RedisServer", server).info("keyspace").get("db0", "") for server in self.servers]
        return sum(int(text.partition("expires=")[2].split(",")[0] or 0) for text in found)

    def version(self) -> str:
        return program_version("redis-server", "--version")


class RedisAof(Redis):
    title, options = "Redis, `appendfsync always`", AOF_ALWAYS


class Redlock(Redis):
    """Five nodes that log every write; one at each of three sites."""

    title, engine = "Redlock, 5 nodes", "redlock"
    options: ClassVar[Sequence[str]] = AOF_ALWAYS

    def __init__(self, needs: frozenset[str] = frozenset()) -> None:
        super().__init__(needs, count=5)
        if self.sites:
            self.servers = [RedisNode(site, *self.options) for site in self.sites.all]

    def minority(self) -> Sequence[Server]:
        return self.servers[:2]

    def url(self, addresses: str) -> str:
        return f"redlock://{addresses}"


class RedlockEmpty(Redlock):
    """Five nodes that lose everything when they restart."""

    title, options = "Redlock, 5 nodes without a log", ()


class Sentinel(Setup):
    """A primary, a replica, and three sentinels. The replica and the sentinels reach the primary through a proxy."""

    title, engine = "Redis, replica and sentinels", "redis"
    options: ClassVar[Sequence[str]] = ()
    query: ClassVar[str] = ""
    confirmed: ClassVar[bool] = False  # by all replicas, so that a primary without them grants nothing

    def __init__(self, needs: frozenset[str] = frozenset()) -> None:
        super().__init__(needs)
        if "clock" in needs:
            need_fake_clock(CAN_FAKE_CLOCK)
        clock = "clock" in needs
        disk = ("--dir", self.disk) if self.disk else ()
        self.primary = RedisServer(*self.options, *disk, fake_clock=clock)
        self.inner = Proxy(self.primary.port)
        follow = ("--replicaof", "127.0.0.1", str(self.inner.port), "--repl-ping-replica-period", "1")
        self.replica = RedisServer(*self.options, *follow, fake_clock=clock)
        self.servers = [self.primary, self.replica]
        self.sentinels = [SentinelServer(self.inner, 0.7) for _ in range(3)]

    def start(self) -> None:
        super().start()
        for sentinel in self.sentinels:
            sentinel.start()
        poll(self._agree, 60, lambda: "the sentinels know each other and the replica")

    def _agree(self) -> bool:
        for sentinel in self.sentinels:
            facts = sentinel.ask("SENTINEL", "MASTER", SERVICE)
            found = dict(zip(facts[::2], facts[1::2], strict=True))
            if (found[b"num-other-sentinels"], found[b"num-slaves"]) != (b"2", b"1"):
                return False
        return "state=online" in self.primary.info("replication").get("slave0", "")

    def close(self) -> None:
        for sentinel in self.sentinels:
            sentinel.kill()
        super().close()
        self.inner.close()

    def link(self) -> Link:
        proxies = [Proxy(server.port) for server in self.servers]
        sentinels = [Proxy(sentinel.port) for sentinel in self.sentinels]
        known = (self.inner.port, self.primary.port, self.replica.port)
        reached = (proxies[0].port, proxies[0].port, proxies[1].port)
        remap = ",".join(f"127.0.0.1:{a}=127.0.0.1:{b}" for a, b in zip(known, reached, strict=True))
        return Link(
            f"redis+sentinel://{hosts(sentinels)}/{SERVICE}?remap={remap}{self.query}", proxies, others=sentinels
        )

    def direct_url(self) -> str:
        return f"redis+sentinel://{hosts(self.sentinels)}/{SERVICE}{self.query.replace('&', '?', 1)}"

    def leader(self) -> Server:
        port = self.sentinels[0].primary()
        return self.replica if port == self.replica.port else self.primary

    def restart_leader(self, pause: Callable[[], None]) -> None:
        """The sentinels promote the replica before the old primary is back, or it would wipe the replica."""
        old = self.leader()
        old.kill()
        poll(lambda: self.leader() is not old, 60, lambda: "the sentinels have promoted the replica")
        pause()
        restart(old)
        poll(self.replicates, 60, lambda: "the old primary follows the new one")

    def replicates(self) -> bool:
        leader = cast("RedisServer", self.leader())
        return "state=online" in leader.info("replication").get("slave0", "")

    def partition(self, minority: Sequence[Server]) -> None:
        self.inner.cut()

    def decide(self, servers: Sequence[Server]) -> bool:
        return self.replica in servers or (self.primary in servers and not self.confirmed)

    def heal_partition(self) -> None:
        self.inner.restore()
        poll(self.replicates, 60, lambda: "the old primary follows the new one")

    def version(self) -> str:
        return program_version("redis-server", "--version")


class SentinelConfirmed(Sentinel):
    """Every grant is confirmed by the only replica, and logged."""

    title, options = "the same, `min_replicas=1`, `appendfsync always`", AOF_ALWAYS
    query, confirmed = "&min_replicas=1", True


class ThreeEtcd(Setup):
    title, engine, on_hosts = "etcd, 3 members", "etcd", True

    def __init__(self, needs: frozenset[str] = frozenset()) -> None:
        super().__init__(needs)
        if "clock" in needs and os.getuid() != 0:
            raise CannotRun("needs root, for time namespaces")
        self.cluster = Cluster(3)
        self.members: Sequence[Etcd] = self.cluster.members
        if "hosts" in needs:
            self.members = [EtcdMember(host, index) for index, host in enumerate(three_hosts())]
        if self.sites:
            election = ("--election-timeout", str(SITES_ELECTION))
            self.members = [EtcdMember(site, index, *election) for index, site in enumerate(self.sites.all)]
        self.cluster.members[:] = self.members
        if self.disk:
            self.members[0].data = os.path.join(self.disk, "data")
        self.servers = self.members

    def url(self, addresses: str) -> str:
        return f"etcd://{addresses}"

    def leader(self) -> Server:
        return self.cluster.leader()

    def set_clocks(self, seconds: float, majority: bool) -> None:
        """Only ahead, and by a restart: a Go program reads its clocks without libc, and those of a time namespace are
        set before it starts."""
        leader = self.cluster.leader()
        leader.clock_ahead = int(seconds)
        leader.kill()
        restart(leader)

    def partition(self, minority: Sequence[Server]) -> None:
        cut_off(minority, self.servers, "add")
        self._cut = minority

    def heal_partition(self) -> None:
        cut_off(self._cut, self.servers, "del")

    def version(self) -> str:
        return program_version("etcd", "--version")


class ThreeZookeeper(Setup):
    title, engine, on_hosts = "ZooKeeper, 3 members", "zookeeper", True

    def __init__(self, needs: frozenset[str] = frozenset()) -> None:
        super().__init__(needs)
        self.clocks = [os.path.join(scratch(), "clock") for _ in range(3)] if "clock" in needs else []
        environments: list[dict[str, str]] = [{}, {}, {}]
        if "clock" in needs:
            need_fake_clock(fake_clock.is_available())
            prefixes = [fake_clock.FakeClock(path).command() for path in self.clocks]
            environments = [dict(each.split("=", 1) for each in prefix[1:]) for prefix in prefixes]
            for environment in environments:  # without a cache Java is too slow to keep its sessions
                del environment["FAKETIME_NO_CACHE"]
                environment["FAKETIME_CACHE_DURATION"] = "1"
            self.ttl, self.call_timeout = 8.0, 8.0  # an election takes seconds
        self.ensemble = Ensemble({"tickTime": 2000 if "clock" in needs else 500}, environments)
        if "hosts" in needs:
            self.ensemble.members = [ZookeeperMember(host, index) for index, host in enumerate(three_hosts())]
        if self.sites:
            self.ensemble.members = [ZookeeperMember(site, index) for index, site in enumerate(self.sites.all)]
        if self.disk:
            self._move_to_disk(self.ensemble.members[0])
        self.servers = self.ensemble.members

    def _move_to_disk(self, member: Zookeeper) -> None:
        old = member.data
        member.data = os.path.join(self.disk, "data")
        os.makedirs(member.data)
        member.set_id(1)
        path = os.path.join(member.folder, "zoo.cfg")
        with open(path) as file:
            text = file.read()
        with open(path, "w") as file:
            file.write(text.replace(f"dataDir={old}", f"dataDir={member.data}"))

    def url(self, addresses: str) -> str:
        return f"zookeeper://{addresses}/?session={self.session}"

    def leader(self) -> Server:
        return self.ensemble.leader()

    def partition(self, minority: Sequence[Server]) -> None:
        cut_off(minority, self.servers, "add")
        self._cut = minority

    def heal_partition(self) -> None:
        cut_off(self._cut, self.servers, "del")

    def set_clocks(self, seconds: float, majority: bool) -> None:
        leader = self.servers.index(self.leader())
        for number in range(2 if majority else 1):
            fake_clock.FakeClock(self.clocks[(leader + number) % 3]).set_offset(seconds)

    def version(self) -> str:
        return program_version("dpkg-query", "-W", "-f", "${Version}", "zookeeper")


class Postgresql(Setup):
    title, engine = "PostgreSQL", "postgresql"

    def __init__(self, needs: frozenset[str] = frozenset()) -> None:
        super().__init__(needs)
        if "clock" in needs:
            need_fake_clock(fake_clock.is_available())
        small = ("min_wal_size=32MB", "max_wal_size=32MB", "wal_recycle=off") if self.disk else ()
        self.server = PostgreSQL(*small, folder=self.disk or None, fake_clock="clock" in needs)
        self.servers = [self.server]

    def start(self) -> None:
        self.server.start()

    def fill_disk(self) -> None:
        """A log segment has room for a while: switch to the next one, which has not."""
        super().fill_disk()
        with suppress(Exception):
            self.server.ask("select pg_switch_wal()")
        super().fill_disk()

    def url(self, addresses: str) -> str:
        return f"postgresql://postgres@{addresses}/postgres"

    def version(self) -> str:
        return program_version(self.server.program, "--version")


class Mysql(Setup):
    title, engine = "MariaDB", "mysql"

    def __init__(self, needs: frozenset[str] = frozenset()) -> None:
        super().__init__(needs)
        if "clock" in needs:
            need_fake_clock(fake_clock.is_available())
        small = ("innodb-log-file-size=8M",) if self.disk else ()
        self.server = MariaDB(*small, folder=self.disk or None, fake_clock="clock" in needs)
        self.servers = [self.server]

    def start(self) -> None:
        self.server.start()

    def url(self, addresses: str) -> str:
        return f"mysql://root@{addresses}/test"

    def version(self) -> str:
        return program_version("mariadbd", "--version")


class LockServers(Setup):
    """Two lock servers over one Redis that logs every write; the first reaches it through a proxy."""

    title, engine = "two lock servers over Redis", "server"

    def __init__(self, needs: frozenset[str] = frozenset()) -> None:
        super().__init__(needs - {"disk"})  # the disk is that of Redis
        self.behind = RedisAof(needs)
        self.behind.start()
        (redis,) = self.behind.servers
        self.inner = Proxy(redis.port)
        # In `crowd` thousands of tasks ask two servers for one name at once: more than they admit by default.
        limits = ("--limits-calls", "20000", "--limits-calls-per-namespace", "0", "--limits-calls-per-name", "0")
        self.servers = [LockServer(f"redis://127.0.0.1:{port}", *limits) for port in (self.inner.port, redis.port)]

    def url(self, addresses: str) -> str:
        return f"http://{addresses}"

    def close(self) -> None:
        super().close()
        self.behind.close()
        self.inner.close()

    def partition(self, minority: Sequence[Server]) -> None:
        """One lock server alone loses its engine."""
        self.inner.cut()

    def decide(self, servers: Sequence[Server]) -> bool:
        return self.servers[1] in servers

    def heal_partition(self) -> None:
        self.inner.restore()

    def set_clocks(self, seconds: float, majority: bool) -> None:
        self.behind.set_clocks(seconds, majority)

    def fill_disk(self) -> None:
        self.behind.fill_disk()

    def empty_disk(self) -> None:
        self.behind.empty_disk()

    def version(self) -> str:
        return self.behind.version()


def three_hosts() -> list[Host]:
    create_bridge()
    return [Host(index) for index in range(3)]


def cut_off(minority: Sequence[Server], servers: Sequence[Server], verb: str) -> None:
    for member in minority:
        others = [cast("EtcdMember", each).netns_host for each in servers if each not in minority]
        cast("EtcdMember", member).netns_host.partition_from(others, verb)


SETUPS: Final[dict[str, type[Setup]]] = {
    "sqlite": Sqlite,
    "redis": Redis,
    "redis-aof": RedisAof,
    "sentinel": Sentinel,
    "sentinel-confirmed": SentinelConfirmed,
    "redlock": Redlock,
    "redlock-empty": RedlockEmpty,
    "zookeeper": ThreeZookeeper,
    "etcd": ThreeEtcd,
    "postgresql": Postgresql,
    "mysql": Mysql,
    "server": LockServers,
}
