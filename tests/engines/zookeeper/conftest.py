"""Servers of ZooKeeper for these tests, ways to look into them, and two clients whose leases must never overlap."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError

from leasehold import AsyncClient, Client
from leasehold.engines.zookeeper.session import Session
from leasehold.testing.servers.proxy import Proxy
from leasehold.testing.servers.zookeeper import Ensemble, Zookeeper
from leasehold.testing.suite import made
from leasehold.testing.zookeeper_rig import ZookeeperEnsembleRig, ZookeeperRig, alone, ensemble


@pytest.fixture(scope="session")
def server() -> Zookeeper:
    made(ZookeeperRig)
    return alone()


@pytest.fixture
def three() -> Iterator[Ensemble]:
    """An ensemble, all of it up before and after."""
    made(ZookeeperEnsembleRig)
    yield ensemble()
    ensemble().heal()


@pytest.fixture
def root() -> str:
    return f"/test-{os.urandom(6).hex()}"


@pytest.fixture
def url(server: Zookeeper, root: str) -> str:
    return f"zookeeper://127.0.0.1:{server.port}{root}"


@pytest.fixture
def url_of(root: str) -> Callable[..., str]:
    """The same place by way of these servers or proxies."""

    def url(*servers: Zookeeper | Proxy, session: float | None = None) -> str:
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
        return f"zookeeper://{hosts}{root}{f'?session={session}' if session else ''}"

    return url


@pytest.fixture
def proxy(server: Zookeeper) -> Iterator[Proxy]:
    found = Proxy(server.port)
    yield found
    found.close()


# -------------------------------------------------------------------------------------------------------------- looking


@pytest.fixture
def raw(server: Zookeeper) -> Iterator[KazooClient]:
    """A plain kazoo client, for looking at what is there."""
    client = KazooClient(f"127.0.0.1:{server.port}")
    client.start()
    yield client
    client.stop()
    client.close()


@pytest.fixture
def tree(raw: KazooClient, root: str) -> Callable[[], dict[str, bytes]]:
    """Every node of the test, and what it says; one may go while it is looked at."""

    def look(path: str = root) -> dict[str, bytes]:
        try:
            found = {path: raw.get(path)[0]}
            for child in raw.get_children(path):
                found |= look(f"{path}/{child}")
        except NoNodeError:
            return {}
        return found

    return look


@pytest.fixture
def session_of() -> Callable[[Client | AsyncClient], Session]:
    def session(client: Client | AsyncClient) -> Session:
        found = client._desk.book.shelf["zookeeper"]
        assert isinstance(found, Session)
        return found

    return session


@pytest.fixture
def in_line() -> Callable[..., int]:
    """How many wait for a name."""
    return lambda client, name="a": sum(one.state == "waiting" for one in client.inspect(name, exact=True))


# ---------------------------------------------------------------------------------------------------------- two clients


class Watcher:
    """Two clients after one name; notes whenever both trust a lease at once."""

    def __init__(self, one: Client, two: Client, ttl: float = 30.0) -> None:
        self.clients, self.ttl = (one, two), ttl
        self.overlaps: list = []
        self.granted_at = 0.0
        self._over = threading.Event()
        self.first = one.lock("a", ttl=ttl).acquire(wait=30)
        self.leases = [self.first]
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def follow(self, wait: float = 200.0) -> threading.Thread:
        """The second one stands in line from now on."""

        def take() -> None:
            lease = self.clients[1].lock("a", ttl=self.ttl).acquire(wait=wait)
            self.granted_at = time.monotonic()
            self.leases.append(lease)

        thread = threading.Thread(target=take)
        thread.start()
        return thread

    def stop_renewing(self) -> None:
        """As if the first one's watchdog were dead; its session lives."""
        dog = self.clients[0]._desk.dog
        dog._stopped = True
        dog._signal.set()

    def _look(self) -> None:
        over = False
        while not over:
            over = self._over.wait(0.001)  # and then looks once more, after whatever came last
            trusted = [lease for lease in self.leases if lease.held]
            if len(trusted) > 1:
                self.overlaps.append(trusted)

    def close(self) -> None:
        self._over.set()
        self._thread.join(10)
        assert self.overlaps == [], "two trusted their lease at once"
        tokens = [lease.token for lease in self.leases]
        assert tokens == sorted(set(tokens))


@pytest.fixture
def watcher() -> Iterator[Callable[..., Watcher]]:
    started: list[Watcher] = []

    def start(*args: Client, **more: float) -> Watcher:
        started.append(Watcher(*args, **more))
        return started[-1]

    yield start
    for each in started:
        each.close()
