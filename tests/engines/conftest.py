"""Real processes for the tests of engines, each read by a thread of its own and gone when the test ends."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode
from uuid import uuid4

import pytest

from leasehold import engines
from leasehold.book import Book
from leasehold.config import EngineConfig
from leasehold.core.names import mark
from leasehold.engines.postgresql.schema import quoted
from leasehold.model import Busy, Claim, Grant, Holder
from leasehold.runtime.base import step
from leasehold.runtime.threads import Threads
from leasehold.testing.postgresql_rig import server
from leasehold.testing.redis_rig import RedisRig
from leasehold.testing.rig import Absent
from leasehold.testing.servers.postgresql import PostgreSQL
from leasehold.testing.servers.redis import RedisServer
from leasehold.testing.suite import made

CHILD = Path(__file__).parent / "sqlite_child.py"


class Child:
    def __init__(self, *args: object, script: Path = CHILD, **more: Any) -> None:
        command = [sys.executable, str(script), *map(str, args)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True, **more
        )
        self._said: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(line)
        self._said.put("")

    def hear(self, seconds: float = 60.0) -> Any:
        """The next thing it says."""
        line = self._said.get(timeout=seconds)
        assert line, f"the child ended with {self.process.wait(10)}"
        return json.loads(line)

    def heard(self) -> list[Any]:
        """All it said until it ended; a last line cut short by a kill is left out."""
        lines = list(iter(lambda: self._said.get(timeout=60), ""))
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait(10)

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        self._reader.join(60)  # it ends with the pipe, which must not be closed beneath it
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue


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


class Database:
    """A schema of its own on the tests' PostgreSQL, made by whoever uses it first."""

    def __init__(self, server: PostgreSQL, schema: str) -> None:
        self.server, self.schema = server, schema

    def url(self, user: str = "postgres", port: int | None = None, **options: str) -> str:
        query = urlencode({"schema": self.schema, **options}, quote_via=quote)
        return f"{self.server.url(user=user, port=port)}?{query}"

    def ask(self, query: str, *values: object) -> list[Any]:
        """`{s}` in the query stands for the schema."""
        return self.server.ask(query.replace("{s}", quoted(self.schema)), *values)

    def sessions(self, application: str) -> dict[int, str]:
        """The last statement of each session of that application, by its process."""
        return dict(self.server.ask("select pid, query from pg_stat_activity where application_name = %s", application))

    def end(self, application: str) -> None:
        self.server.ask(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name = %s", application
        )


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


def running_postgresql() -> PostgreSQL:
    with server_needed():
        return server()


@pytest.fixture
def database() -> Iterator[Database]:
    running = running_postgresql()
    found = Database(running, f"test-{uuid4().hex[:8]}")
    yield found
    running.resume()
    if not running.running:
        running.start()
    found.ask("drop schema if exists {s} cascade")


class Bare:
    """An engine without recipe or watchdog: nothing happens but what a test asks for."""

    def __init__(self, url: str) -> None:
        self.runtime = Threads()
        self.book = Book(self.runtime, self.runtime.entropy(8).hex())
        config = EngineConfig.parse(url, 5.0)
        self.engine = engines.opener(config.scheme)(config, self.runtime, self.book)

    def by(self, seconds: float = 5.0) -> float:
        return self.runtime.now() + seconds

    def claim(self, name: str = "job", **fields: Any) -> Claim:
        secret = self.runtime.entropy(16).hex()
        return Claim("", name, secret, mark(secret), Holder("bare"), 30.0)._replace(**fields)

    def attempt(self, claim: Claim) -> Grant | Busy:
        return step(self.engine.attempt(claim, self.by()))

    def takes(self, claim: Claim) -> Claim:
        grant = self.attempt(claim)
        assert isinstance(grant, Grant), grant
        return claim._replace(token=grant.token)

    def release(self, claim: Claim) -> bool:
        return step(self.engine.release(claim, self.by()))

    def renew(self, claim: Claim) -> Any:
        return step(self.engine.renew([claim], self.by()))[0]


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
