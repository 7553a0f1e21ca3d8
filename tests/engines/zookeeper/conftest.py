"""ZooKeeper servers for these tests, tools to inspect them, and two clients whose leases must never overlap."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError

from harness.rigs import with_own_server
from harness.rigs.zookeeper import ZookeeperEnsembleRig, ZookeeperRig, shared_ensemble
from harness.servers.proxy import Proxy
from harness.servers.zookeeper import Ensemble, Zookeeper
from leasehold import AsyncClient, Client
from leasehold.engines.zookeeper.session import ZookeeperSession
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support import probe, probe_zookeeper


@pytest.fixture(scope="session")
def server() -> Zookeeper:
    return rig_or_skip(with_own_server(ZookeeperRig)).servers[0]


@pytest.fixture
def three_servers() -> Iterator[Ensemble]:
    """An ensemble with all members running before and after the test."""
    rig_or_skip(ZookeeperEnsembleRig)
    yield shared_ensemble()
    shared_ensemble().restore()


@pytest.fixture
def root() -> str:
    return f"/test-{os.urandom(6).hex()}"


@pytest.fixture
def url(server: Zookeeper, root: str) -> str:
    return f"zookeeper://127.0.0.1:{server.port}{root}"


@pytest.fixture
def url_of(root: str) -> Callable[..., str]:
    """Builds a URL of the same root through these servers or proxies."""

    def url(*servers: Zookeeper | Proxy, session: float | None = None) -> str:
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
        return f"zookeeper://{hosts}{root}{f'?session={session}' if session else ''}"

    return url


@pytest.fixture
def proxy(server: Zookeeper) -> Iterator[Proxy]:
    found = Proxy(server.port)
    yield found
    found.close()


# ----------------------------------------------------------------------------------------------------------- inspection


@pytest.fixture
def kazoo(server: Zookeeper) -> Iterator[KazooClient]:
    """A plain kazoo client, to inspect the tree."""
    client = KazooClient(f"127.0.0.1:{server.port}")
    client.start()
    yield client
    client.stop()
    client.close()


@pytest.fixture
def read_tree(kazoo: KazooClient, root: str) -> Callable[[], dict[str, bytes]]:
    """Returns every node of the test and its data. Nodes may disappear while the tree is read."""

    def read_nodes(path: str = root) -> dict[str, bytes]:
        try:
            found = {path: kazoo.get(path)[0]}
            for child in kazoo.get_children(path):
                found |= read_nodes(f"{path}/{child}")
        except NoNodeError:
            return {}
        return found

    return read_nodes


@pytest.fixture
def session_of() -> Callable[[Client | AsyncClient], ZookeeperSession]:
    return probe_zookeeper.session


@pytest.fixture
def count_waiters() -> Callable[..., int]:
    """Returns how many waiters a name has."""
    return lambda client, name="a": sum(holding.state == "waiting" for holding in client.inspect(name, exact=True))


# ---------------------------------------------------------------------------------------------------------- two clients


class ClientPair:
    """Two clients that compete for one name. Records when both trust a lease at once."""

    def __init__(self, one: Client, two: Client, ttl: float = 30.0) -> None:
        self.clients, self.ttl = (one, two), ttl
        self.overlaps: list = []
        self.granted_at = 0.0
        self._stopping = threading.Event()
        self.first_lease = one.lock("a", ttl=ttl).acquire(wait=30)
        self.leases = [self.first_lease]
        self._thread = threading.Thread(target=self._watch_overlaps)
        self._thread.start()

    def start_second(self, wait: float = 200.0) -> threading.Thread:
        """Queue the second client."""

        def acquire_second() -> None:
            lease = self.clients[1].lock("a", ttl=self.ttl).acquire(wait=wait)
            self.granted_at = time.monotonic()
            self.leases.append(lease)

        thread = threading.Thread(target=acquire_second)
        thread.start()
        return thread

    def stop_renewing(self) -> None:
        """Stop the first client's watchdog; its session stays alive."""
        probe.watchdog(self.clients[0]).request_stop()

    def _watch_overlaps(self) -> None:
        stopping = False
        while not stopping:
            stopping = self._stopping.wait(0.001)  # checks once more after stop, for the last grant
            trusted = [lease for lease in self.leases if lease.held]
            if len(trusted) > 1:
                self.overlaps.append(trusted)

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(60)
        assert self.overlaps == [], "both clients trusted a lease at once"
        tokens = [lease.token for lease in self.leases]
        assert tokens == sorted(set(tokens))


@pytest.fixture
def client_pair() -> Iterator[Callable[..., ClientPair]]:
    started: list[ClientPair] = []

    def start(*args: Client, **options: float) -> ClientPair:
        started.append(ClientPair(*args, **options))
        return started[-1]

    yield start
    for pair in started:
        pair.close()
