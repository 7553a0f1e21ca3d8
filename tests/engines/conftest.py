"""What the tests of engines share: processes, servers, and ways to look at both."""

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
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from uuid import uuid4

import pytest

from leasehold.runtime.base import step
from leasehold.testing.redis_rig import RedisRig
from leasehold.testing.redis_several_rig import trio
from leasehold.testing.rig import Absent
from leasehold.testing.servers.mysql import MariaDB
from leasehold.testing.servers.redis import RedisServer
from leasehold.testing.servers.redis_several import RedisCluster
from leasehold.testing.suite import made


def load(name: str) -> ModuleType:
    """A file beside this one: tests are no package, and other folders have files of the same name."""
    known = f"beside_engines_{name}"
    if known not in sys.modules:
        spec = spec_from_file_location(known, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[known] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[known])
    return sys.modules[known]


Bare = load("bare").Bare
Child = load("children").Child
Database = load("databases").Database
DATABASES = load("databases").DATABASES


@pytest.fixture(scope="session")
def beside() -> Callable[[str], ModuleType]:
    return load


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    started: list[Child] = []

    def start(*args: object, **more: Any) -> Child:
        started.append(Child(*args, **more))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def in_fork() -> Callable[[Callable[[], object]], None]:
    """Runs a function in a forked child; what it raises fails the test (in a thread: its warning does)."""

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
def until() -> Callable[..., None]:
    def wait(true: Callable[[], object], seconds: float = 30.0, every: float = 0.005) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, "it did not come true in time"
            time.sleep(every)

    return wait


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "locks.db")


@pytest.fixture
def url(path: str) -> str:
    return f"sqlite://{path}?durable=no"


@contextmanager
def server_needed() -> Iterator[None]:
    """A server that is not installed is a reason to skip; in CI it is a failure."""
    try:
        yield
    except Absent as absent:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(absent))


@pytest.fixture
def present() -> Callable[[], AbstractContextManager[None]]:
    return server_needed


def _database(kind: str) -> Iterator[Database]:
    rig, made = DATABASES[kind]
    with server_needed():
        running = rig.server()
    found = made(running, f"test-{uuid4().hex[:8]}")
    yield found
    running.resume()
    if not running.running:
        running.start()
    found.drop()


@pytest.fixture
def database() -> Iterator[Database]:
    yield from _database("postgresql")


@pytest.fixture
def mariadb() -> Iterator[Callable[..., MariaDB]]:
    """Starts servers of the test's own, to be hurt."""
    started: list[MariaDB] = []

    def start(*settings: str, **more: Any) -> MariaDB:
        started.append(MariaDB(*settings, **more).start())
        return started[-1]

    yield start
    for each in started:
        each.kill()


@pytest.fixture
def mysql() -> Iterator[Database]:
    yield from _database("mysql")


@pytest.fixture(params=sorted(DATABASES))
def sql(request: pytest.FixtureRequest) -> Iterator[Database]:
    """Either: what must be so on every server of SQL."""
    yield from _database(request.param)


@pytest.fixture
def bare() -> Iterator[Callable[[str], Bare]]:
    made: list[Bare] = []

    def make(url: str) -> Bare:
        made.append(Bare(url))
        return made[-1]

    yield make
    for one in made:
        step(one.engine.close())


@pytest.fixture
def start_redis() -> Iterator[Callable[..., RedisServer]]:
    """Starts Redis servers of the test's own, to be hurt as it likes."""
    made(RedisRig)  # a skip where there is no Redis
    with ExitStack() as ends:

        def run(*options: str, **more: Any) -> RedisServer:
            server = RedisServer(*options, **more).start()
            ends.callback(server.kill)
            return server

        yield run


@pytest.fixture
def cluster() -> Iterator[RedisCluster]:
    """Of Redis: three nodes, slow to see a failure."""
    made(RedisRig)  # a skip where there is no Redis
    found = trio()
    yield found
    for node in found.all:
        node.resume()
        node.ask("FLUSHALL")


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[str, str]:
    """A key, and its certificate."""
    key, cert = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    more = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1")
    done = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key, "-out", cert, *more],
        capture_output=True,
    )
    if done.returncode:
        pytest.skip("openssl is not installed")
    return key, cert


class Rights(NamedTuple):
    """What docs/guarantees/redis.md says a user needs: on a server, more in a cluster, at a sentinel."""

    server: list[str]
    cluster: list[str]
    sentinel: list[str]


@pytest.fixture(scope="session")
def rights() -> Rights:
    page = (Path(__file__).parents[2] / "docs" / "guarantees" / "redis.md").read_text(encoding="utf-8")
    server, both = re.findall(r"```text\n(ACL SETUSER.*?|\+cluster.*?)```", page, re.S)
    cluster, _, sentinel = both.partition("\n")
    return Rights(server.split()[5:], cluster.split(), sentinel.split()[5:])  # behind: ACL SETUSER locks on >password
