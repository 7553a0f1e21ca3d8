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

from leasehold import Client, LeaseholdError
from leasehold.testing.etcd_rig import EtcdClusterRig, EtcdRig
from leasehold.testing.servers.etcd import Cluster, Etcd
from leasehold.testing.servers.proxy import Proxy
from leasehold.testing.suite import made


@pytest.fixture
def member() -> Etcd:
    return made(EtcdRig).cluster.members[0]


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
def proxied(url: str, member: Etcd, proxy: Proxy) -> str:
    """The same place, by a way that can be hurt."""
    return url.replace(f":{member.port}", f":{proxy.port}")


@pytest.fixture
def trio() -> Iterator[Cluster]:
    """Three members, all of them up before and after."""
    cluster = made(EtcdClusterRig).cluster
    yield cluster
    cluster.start()


@pytest.fixture
def single() -> Iterator[Callable[..., Etcd]]:
    """Starts members with settings of their own; ends them."""
    started: list[Etcd] = []

    def start(*more: str) -> Etcd:
        made(EtcdRig)  # or it is absent
        cluster = Cluster(1, *more)
        started.append(cluster.members[0])
        return cluster.start().members[0]

    yield start
    for each in started:
        each.kill()


@pytest.fixture
def ctl() -> Callable[..., str]:
    """etcd's own tool."""

    def run(member: Etcd, *words: str, user: str = "") -> str:
        command = ["etcdctl", "--endpoints", f"127.0.0.1:{member.port}", *(["--user", user] if user else []), *words]
        environment = {**os.environ, "ETCDCTL_API": "3"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def eventually() -> Callable[..., Any]:
    """What is true in the end; an engine that cannot be reached counts as not yet."""

    def wait(true: Callable[[], Any], seconds: float = 30.0) -> Any:
        end = time.monotonic() + seconds
        while True:
            with suppress(LeaseholdError, OSError):
                if found := true():
                    return found
            assert time.monotonic() < end, "it did not come true in time"
            time.sleep(0.01)

    return wait


class InLine:
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

    def granted(self, seconds: float = 30.0) -> float:
        """The moment of its grant."""
        self.thread.join(seconds)
        assert self.times, self.errors or f"not granted within {seconds} s"
        return self.times[0]


@pytest.fixture
def in_line(eventually: Callable[..., Any]) -> Callable[..., InLine]:
    def begin(client: Client, name: str = "job", lock: Any = None) -> InLine:
        """Waits until it stands there."""
        before = len(client.inspect(name))
        waiting = InLine(lock or client.lock(name))
        eventually(lambda: len(client.inspect(name)) > before or waiting.times)
        return waiting

    return begin
