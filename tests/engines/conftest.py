"""Shared fixtures of the engine tests: child processes, servers, and ways to observe both."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import pytest

from harness.rigs.redis import RedisRig, ValkeyRig
from harness.rigs.redis_ha import three_node_cluster
from harness.servers.mysql import MariaDB
from harness.servers.redis import RedisServer, ValkeyServer
from harness.servers.redis_ha import RedisCluster
from leasehold import Client, Unavailable
from leasehold.runtime.base import run_sync
from leasehold.testing.conformance.rig import Absent
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support import probe_logs
from tests.support.bare_engine import BareEngineDriver
from tests.support.child_process import Child
from tests.support.databases import DATABASES, Database


@pytest.fixture(autouse=True)
def forget_logged_lines(monkeypatch) -> None:
    """So that a warning that an earlier test has met is not left out."""
    monkeypatch.setattr(*probe_logs.LOGGED_LINES, set())
    monkeypatch.setattr(*probe_logs.RECENT_LINES, {})


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    started: list[Child] = []

    def start(*args: object, **kwargs: Any) -> Child:
        started.append(Child(*args, **kwargs))
        return started[-1]

    yield start
    for process in started:
        process.close()


@pytest.fixture
def run_in_fork() -> Callable[[Callable[[], object]], None]:
    """Run a function in a forked child. An exception there fails the test; in a thread, pytest's warning does."""

    def run(body: Callable[[], object]) -> None:
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            status = 1
            try:
                body()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        end = time.monotonic() + 60
        while not (done := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                raise AssertionError("the child hangs")
            time.sleep(0.005)
        assert done[1] == 0

    return run


@pytest.fixture
def wait_until() -> Callable[..., None]:
    def wait(condition: Callable[[], object], seconds: float = 60.0, every: float = 0.005) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "the condition did not become true in time"
            time.sleep(every)

    return wait


@pytest.fixture
def wait_no_majority() -> Callable[[Client], Unavailable]:
    """Waits until a client is refused because the servers that it reaches have no majority. Returns the error."""

    def wait(client: Client) -> Unavailable:
        end = time.monotonic() + 60
        while True:
            with pytest.raises(Unavailable) as refusal:
                client.lock("without-majority").acquire(wait=0)
            if refusal.value.no_majority:
                return refusal.value
            assert time.monotonic() < end, f"the last refusal: {refusal.value}"

    return wait


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "locks.db")


@pytest.fixture
def url(path: str) -> str:
    return f"sqlite://{path}?durable=no"


@contextmanager
def skip_without_server() -> Iterator[None]:
    """Skip the test if its server is not installed; in CI, fail it."""
    try:
        yield
    except Absent as absent:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(absent))


@pytest.fixture
def require_server() -> Callable[[], AbstractContextManager[None]]:
    return skip_without_server


def _database(kind: str) -> Iterator[Database]:
    rig, make_database = DATABASES[kind]
    with skip_without_server():
        server = rig.server.own()
    instance = make_database(server, f"test-{uuid4().hex[:8]}")
    yield instance
    server.resume()
    if not server.running:
        server.start()
    instance.drop()


@pytest.fixture
def database() -> Iterator[Database]:
    yield from _database("postgresql")


@pytest.fixture
def mariadb() -> Iterator[Callable[..., MariaDB]]:
    """Start servers for this test alone, so that it may break them."""
    started: list[MariaDB] = []

    def start(*settings: str, **kwargs: Any) -> MariaDB:
        started.append(MariaDB(*settings, **kwargs).start())
        return started[-1]

    yield start
    for server in started:
        server.kill()


@pytest.fixture
def mysql() -> Iterator[Database]:
    yield from _database("mysql")


@pytest.fixture(params=sorted(DATABASES))
def sql(request: pytest.FixtureRequest) -> Iterator[Database]:
    """A database on each SQL server in turn."""
    yield from _database(request.param)


@pytest.fixture(scope="module", params=sorted(DATABASES))
def shared_sql(request: pytest.FixtureRequest) -> Iterator[Database]:
    """The same for all tests of a file, which keep to their own namespace: a schema takes a second to create."""
    yield from _database(request.param)


@pytest.fixture
def make_driver() -> Iterator[Callable[[str], BareEngineDriver]]:
    drivers: list[BareEngineDriver] = []

    def make(url: str) -> BareEngineDriver:
        drivers.append(BareEngineDriver(url))
        return drivers[-1]

    yield make
    for driver in drivers:
        run_sync(driver.engine.close())


@pytest.fixture
def start_redis(request: pytest.FixtureRequest) -> Iterator[Callable[..., RedisServer]]:
    """Start Redis servers for this test alone, so that it may break them. Or Valkey servers: the parameter `valkey`."""
    is_valkey = getattr(request, "param", "redis") == "valkey"
    rig_or_skip(ValkeyRig if is_valkey else RedisRig)  # skips if the server is not installed
    with ExitStack() as exit_stack:

        def run(*options: str, **kwargs: Any) -> RedisServer:
            server = (ValkeyServer if is_valkey else RedisServer)(*options, **kwargs).start()
            exit_stack.callback(server.kill)
            return server

        yield run


@pytest.fixture
def cluster() -> Iterator[RedisCluster]:
    """A Redis cluster of three nodes that is slow to detect a failure."""
    rig_or_skip(RedisRig)  # skips if Redis is not installed
    redis_cluster = three_node_cluster()
    yield redis_cluster
    for node in redis_cluster.all:
        node.resume()
        node.ask("FLUSHALL")


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[str, str]:
    """The paths of a key and its certificate."""
    key, cert = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    extra_arguments = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1")
    done = subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-keyout",
            key,
            "-out",
            cert,
            *extra_arguments,
        ],
        capture_output=True,
    )
    if done.returncode:
        pytest.skip("openssl is not installed")
    return key, cert


class Rights(NamedTuple):
    """The ACL rules that docs/guarantees/redis.md lists: for a server, in addition for a cluster, for a sentinel."""

    server: list[str]
    cluster: list[str]
    sentinel: list[str]


@pytest.fixture(scope="session")
def rights() -> Rights:
    page = (Path(__file__).parents[2] / "docs" / "guarantees" / "redis.md").read_text(encoding="utf-8")
    server, both = re.findall(r"```text\n(ACL SETUSER.*?|\+cluster.*?)```", page, re.S)
    cluster, _, sentinel = both.partition("\n")
    return Rights(server.split()[5:], cluster.split(), sentinel.split()[5:])  # skips "ACL SETUSER locks on >password"


@pytest.fixture
def drawn_secrets(monkeypatch) -> list[str]:
    """Every secret that a client draws for its claims."""
    found: list[str] = []
    urandom = os.urandom

    def recording_urandom(size: int) -> bytes:
        value = urandom(size)
        if size == 16:
            found.append(value.hex())
        return value

    monkeypatch.setattr(os, "urandom", recording_urandom)
    return found
