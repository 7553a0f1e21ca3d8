"""Real resources for the fences: servers started once, and child processes that use them."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, Popen
from types import ModuleType
from typing import Any

import pytest

from harness.rigs import etcd, mysql, postgresql, redis, zookeeper
from harness.servers.folders import scratch
from harness.servers.process import Server, free_ports
from leasehold import Event, fences
from leasehold.testing import Absent
from tests.support import fence_kinds as resource_kinds
from tests.support import object_store
from tests.support.paths import SUPPORT, child_environment


class Service(Server):
    """A fenced service (`fenced_service.py`) in its own process."""

    package = "python3"

    def __init__(self, side: str, folder: str = "") -> None:
        super().__init__(scratch(), free_ports(1)[0])
        self._side, self._token_folder = side, folder

    def command(self) -> list[str]:
        return [
            sys.executable,
            str(SUPPORT / "fenced_service.py"),
            self._side,
            str(self.port),
            *filter(None, [self._token_folder]),
        ]

    def ready(self) -> bool:
        from urllib.request import urlopen

        with urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=5) as response:
            return response.status == 200


@pytest.fixture
def kinds() -> ModuleType:
    return resource_kinds


@pytest.fixture
def service() -> type[Service]:
    return Service


SERVERS: dict[str, Callable[[], Any]] = {  # of the run: every number has keys, nodes and tables of its own
    "redis": lambda: redis.single_server()[0],
    "postgresql": postgresql.server,
    "mysql": mysql.server,
    "zookeeper": zookeeper.shared_server,
    "etcd": lambda: etcd.single_member_cluster().members[0],
}


def start_server(name: str) -> int:
    """Start a server, if none runs yet, and return its port."""
    if name in SERVERS:
        return SERVERS[name]().port
    if name == "objects":
        return object_store.serve().server_port
    return Service(name).start().port


NEEDS = ("redis", "postgresql", "mysql", "zookeeper", "etcd", "objects", "wsgi", "asgi")
PORTS: dict[str, int] = {}
RUNS = itertools.count(1)


def port_of(name: str) -> int:
    if name not in PORTS:
        try:
            PORTS[name] = start_server(name)
        except Absent as missing:
            if os.environ.get("CI"):
                raise
            pytest.skip(str(missing))
    return PORTS[name]


def spec_of(kind: str, folder: Path) -> dict[str, Any]:
    """Return the spec of a new resource of this kind, usable in this process and in child processes."""
    parts = kind.replace("object", "objects").split("-")
    ports = {name: port_of(name) for name in NEEDS if name in parts}
    run = f"{os.getpid()}_{next(RUNS)}"
    return {"run": run, "path": str(folder / f"{kind}-{run}"), **ports}


@pytest.fixture
def resource(tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    """Create a new number of a kind: `resource("redis")`."""
    numbers: list[Any] = []

    def make(kind: str) -> Any:
        number = resource_kinds.KINDS[kind](spec_of(kind, tmp_path))
        numbers.append(number)
        number.make()
        return number

    yield make
    for number in numbers:
        number.close()


@pytest.fixture
def refusals() -> Iterator[list[Event]]:
    """The events of all fences of this process."""
    events: list[Event] = []
    fences.on_event(events.append)
    yield events
    fences.on_event(None)


@pytest.fixture
def stock(resource):
    """A table `stock` for each number, and a way to open more connections."""

    def make(database: str):
        number = resource(f"{database}-row")
        number.stock = f"stock_{number.spec['run']}"
        cursor = number.connection.cursor()
        cursor.execute(
            f"create table {number.stock} (item varchar(50) primary key, quantity integer not null, "
            "fence bigint not null default 0)"
        )
        cursor.execute(f"insert into {number.stock} (item, quantity) values ('teapot', 3)")
        number.connection.commit()
        return number

    return make


class Child:
    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "tests.support.fence_child", *map(str, arguments)]
        self.process = Popen(
            command, stdin=PIPE, stdout=PIPE, stderr=None, text=True, start_new_session=True, env=child_environment()
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the child ended with {self.process.wait(30)}"
        return json.loads(line)

    def send_newline(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def start(*arguments: object) -> Child:
        children.append(Child(*arguments))
        return children[-1]

    yield start
    for process in children:
        process.close()
