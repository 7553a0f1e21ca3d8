"""etcd members for these tests: one member and a cluster of three that tests share, and members with own settings."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from harness.rigs import with_own_server
from harness.rigs.etcd import EtcdClusterRig, EtcdRig
from harness.servers.etcd import Cluster, Etcd
from harness.servers.proxy import Proxy
from leasehold import Client, LeaseholdError
from leasehold.testing.conformance.suite import rig_or_skip


@pytest.fixture
def member() -> Etcd:
    return rig_or_skip(with_own_server(EtcdRig)).cluster.members[0]


@pytest.fixture
def prefix() -> str:
    """The prefix of all keys of a test."""
    return f"test-{os.urandom(5).hex()}/"


@pytest.fixture
def url(member: Etcd, prefix: str) -> str:
    return f"etcd://127.0.0.1:{member.port}/{prefix[:-1]}"


@pytest.fixture
def claims(member: Etcd, prefix: str) -> Callable[[], dict[str, int]]:
    """Return the key of every claim and the lease attached to it."""
    return lambda: {key: lease for key, lease in member.keys(prefix).items() if "/q/" in key}


@pytest.fixture
def lease_of(member: Etcd, prefix: str) -> Callable[[str], int]:
    """Return the lease attached to the key of the claim with this id hash."""

    def find(id_hash: str) -> int:
        (key,) = [key for key, value in member.values(prefix).items() if id_hash.encode() in value]
        return member.keys(prefix)[key]

    return find


@pytest.fixture
def proxy(member: Etcd) -> Iterator[Proxy]:
    made = Proxy(member.port)
    yield made
    made.close()


@pytest.fixture
def proxied_url(url: str, member: Etcd, proxy: Proxy) -> str:
    """The same member and prefix, reached through a proxy that can fail."""
    return url.replace(f":{member.port}", f":{proxy.port}")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Three members, all of them running before and after the test."""
    cluster = rig_or_skip(EtcdClusterRig).cluster
    yield cluster
    cluster.start()


@pytest.fixture
def start_member() -> Iterator[Callable[..., Etcd]]:
    """Starts members with the given options; kills them after the test."""
    started: list[Etcd] = []

    def start(*options: str) -> Etcd:
        rig_or_skip(EtcdRig)  # skips if etcd is not installed
        cluster = Cluster(1, *options)
        started.append(cluster.members[0])
        return cluster.start().members[0]

    yield start
    for member in started:
        member.kill()


@pytest.fixture
def etcdctl() -> Callable[..., str]:
    """Runs etcd's command line client."""

    def run(member: Etcd, *arguments: str, user: str = "") -> str:
        command = [
            "etcdctl",
            "--endpoints",
            f"127.0.0.1:{member.port}",
            *(["--user", user] if user else []),
            *arguments,
        ]
        environment = {**os.environ, "ETCDCTL_API": "3"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def eventually() -> Callable[..., Any]:
    """Waits until a condition is true and returns its value; an unreachable engine counts as not yet."""

    def wait(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
        end = time.monotonic() + seconds
        while True:
            with suppress(LeaseholdError, OSError):
                if found := condition():
                    return found
            assert time.monotonic() < end, "the condition did not become true in time"
            time.sleep(0.01)

    return wait


class WaitingThread:
    """A thread that waits for a lock and records its token and the time of its grant."""

    def __init__(self, lock: Any) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.errors: list[Exception] = []
        self._lock = lock
        self.thread = threading.Thread(target=self._wait)
        self.thread.start()

    def _wait(self) -> None:
        try:
            with self._lock as lease:
                self.times.append(time.monotonic())
                self.tokens.append(lease.token)
        except LeaseholdError as error:
            self.errors.append(error)

    def wait_granted(self, seconds: float = 30.0) -> float:
        """Return the time of the grant."""
        self.thread.join(seconds)
        assert self.times, self.errors or f"not granted within {seconds} s"
        return self.times[0]


@pytest.fixture
def start_waiter(eventually: Callable[..., Any]) -> Callable[..., WaitingThread]:
    def begin(client: Client, name: str = "job", lock: Any = None) -> WaitingThread:
        """Returns once the waiter is queued."""
        before = len(client.inspect(name))
        waiter = WaitingThread(lock or client.lock(name))
        eventually(lambda: len(client.inspect(name)) > before or waiter.times)
        return waiter

    return begin
