"""Members of etcd for these tests: one and three that all share, and some with settings of their own."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from harness.rigs.etcd import EtcdClusterRig, EtcdRig
from harness.servers.etcd import Cluster, Etcd
from harness.servers.proxy import Proxy
from leasehold import Client, LeaseholdError
from leasehold.testing.conformance.suite import rig_or_skip


@pytest.fixture
def member() -> Etcd:
    return rig_or_skip(EtcdRig).cluster.members[0]


@pytest.fixture
def prefix() -> str:
    """What all keys of a test begin with."""
    return f"test-{os.urandom(5).hex()}/"


@pytest.fixture
def url(member: Etcd, prefix: str) -> str:
    return f"etcd://127.0.0.1:{member.port}/{prefix[:-1]}"


@pytest.fixture
def claims(member: Etcd, prefix: str) -> Callable[[], dict[str, int]]:
    """The keys of all claims, and the lease of each."""
    return lambda: {key: lease for key, lease in member.keys(prefix).items() if "/q/" in key}


@pytest.fixture
def proxy(member: Etcd) -> Iterator[Proxy]:
    made = Proxy(member.port)
    yield made
    made.close()


@pytest.fixture
def proxied_url(url: str, member: Etcd, proxy: Proxy) -> str:
    """The same place, by a way that can be hurt."""
    return url.replace(f":{member.port}", f":{proxy.port}")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Three members, all of them up before and after."""
    cluster = rig_or_skip(EtcdClusterRig).cluster
    yield cluster
    cluster.start()


@pytest.fixture
def start_member() -> Iterator[Callable[..., Etcd]]:
    """Starts members with settings of their own; ends them."""
    started: list[Etcd] = []

    def start(*options: str) -> Etcd:
        rig_or_skip(EtcdRig)  # or it is absent
        cluster = Cluster(1, *options)
        started.append(cluster.members[0])
        return cluster.start().members[0]

    yield start
    for member in started:
        member.kill()


@pytest.fixture
def etcdctl() -> Callable[..., str]:
    """etcd's own tool."""

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
    """What is true in the end; an engine that cannot be reached counts as not yet."""

    def wait(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
        end = time.monotonic() + seconds
        while True:
            with suppress(LeaseholdError, OSError):
                if found := condition():
                    return found
            assert time.monotonic() < end, "it did not come true in time"
            time.sleep(0.01)

    return wait


class WaitingThread:
    """Somebody who waits for a lock, in a thread of its own: what it was granted, and when."""

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
        """The moment of its grant."""
        self.thread.join(seconds)
        assert self.times, self.errors or f"not granted within {seconds} s"
        return self.times[0]


@pytest.fixture
def start_waiter(eventually: Callable[..., Any]) -> Callable[..., WaitingThread]:
    def begin(client: Client, name: str = "job", lock: Any = None) -> WaitingThread:
        """Waits until it stands there."""
        before = len(client.inspect(name))
        waiter = WaitingThread(lock or client.lock(name))
        eventually(lambda: len(client.inspect(name)) > before or waiter.times)
        return waiter

    return begin
