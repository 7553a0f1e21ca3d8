"""Real processes for the tests of engines, each read by a thread of its own and gone when the test ends."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode
from uuid import uuid4

import pytest

from leasehold import engines
from leasehold.book import Book
from leasehold.config import EngineConfig
from leasehold.core.names import mark
from leasehold.engines.mysql import schema as mysql_schema
from leasehold.engines.postgresql import schema as postgresql_schema
from leasehold.engines.postgresql.schema import quoted
from leasehold.model import Busy, Claim, Grant, Holder
from leasehold.runtime.base import step
from leasehold.runtime.threads import Threads
from leasehold.testing import mysql_rig, postgresql_rig
from leasehold.testing.redis_rig import RedisRig
from leasehold.testing.redis_several_rig import trio
from leasehold.testing.rig import Absent
from leasehold.testing.servers.mysql import MariaDB
from leasehold.testing.servers.postgresql import PostgreSQL
from leasehold.testing.servers.redis import RedisServer
from leasehold.testing.servers.redis_several import RedisCluster
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


@pytest.fixture(scope="session")
def beside() -> Callable[[str], ModuleType]:
    """Gives a file beside this one: tests are no package."""

    def load(name: str) -> ModuleType:
        if name not in sys.modules:
            spec = spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
            assert spec is not None
            assert spec.loader is not None
            sys.modules[name] = module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        return sys.modules[name]

    return load


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "locks.db")


@pytest.fixture
def url(path: str) -> str:
    return f"sqlite://{path}?durable=no"


class Database(ABC):
    """A schema of its own on a server of the tests, made by whoever uses it first."""

    server: Any
    most: int  # connections of one client
    lingers: int = 0  # of those, how many stay a while when their process was killed
    no_client: str = ""  # what a row of lh_line ends with
    inspection: str  # what an operator would ask

    def __init__(self, server: Any, schema: str) -> None:
        self.server, self.schema = server, schema

    @abstractmethod
    def ask(self, query: str, *values: object) -> list[Any]:
        """`{s}` in the query stands for the schema."""

    @abstractmethod
    def named(self, name: str, port: int | None = None, **options: str) -> str:
        """The URL of a client whose sessions are found by a name."""

    @abstractmethod
    def sessions(self, name: str) -> Any:
        """Those of a name."""

    @abstractmethod
    def blocked(self, name: str) -> bool:
        """Whether one of them waits for a lock. Not to be asked more than 5 times a second: MariaDB would not look."""

    @abstractmethod
    def calls(self) -> dict[str, int]:
        """The server's own count of our statements, by verb, since it was first asked or `count` was called."""

    @abstractmethod
    def count(self) -> None: ...

    @abstractmethod
    def frozen(self) -> AbstractContextManager[None]:
        """Every bucket is kept by a transaction of somebody else."""

    @abstractmethod
    def role(self, name: str, port: int | None = None) -> str:
        """The URL of a new role that has what the manual says, and no more."""

    @abstractmethod
    def newcomer(self, name: str) -> str:
        """The URL of a new role that may log in, and nothing else."""

    @abstractmethod
    def forget(self, verb: str) -> None:
        """Drop the function of a verb."""

    @abstractmethod
    def shut(self, name: str, out: bool) -> None:
        """Whether a role may no longer log in."""

    @abstractmethod
    def drop_role(self, name: str) -> None: ...

    @abstractmethod
    def drop(self) -> None: ...


VERBS = ("attempt", "release", "beat", "renew")


class PostgresqlDatabase(Database):
    server: PostgreSQL
    most = 3
    inspection = "select * from {s}.lh_inspect_v1('', '', false)"

    def url(self, user: str = "postgres", port: int | None = None, **options: str) -> str:
        query = urlencode({"schema": self.schema, **options}, quote_via=quote)
        return f"{self.server.url(user=user, port=port)}?{query}"

    def named(self, name: str, port: int | None = None, **options: str) -> str:
        return self.url(port=port, application_name=name, **options)

    def ask(self, query: str, *values: object) -> list[Any]:
        return self.server.ask(query.replace("{s}", quoted(self.schema)), *values)

    def sessions(self, name: str) -> dict[int, str]:
        """The last statement of each, by its process."""
        return dict(self.server.ask("select pid, query from pg_stat_activity where application_name = %s", name))

    def blocked(self, name: str) -> bool:
        query = "select 1 from pg_stat_activity where application_name = %s and wait_event_type = 'Lock'"
        return bool(self.server.ask(query, name))

    def end(self, application: str) -> None:
        self.server.ask(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name = %s", application
        )

    def count(self) -> None:
        self.ask("create extension if not exists pg_stat_statements")
        self.ask("select pg_stat_statements_reset()")

    def calls(self) -> dict[str, int]:
        rows = self.ask(
            "select substring(query from 'lh_([a-z]+)_v1'), sum(calls)::integer from pg_stat_statements "
            "where query like %s group by 1",
            f'select * from "{self.schema}".lh\\_%',
        )
        return {verb: count for verb, count in rows if verb in VERBS}

    @contextmanager
    def frozen(self) -> Iterator[None]:
        with self.server.connect() as session, session.transaction():
            session.execute(f'select 1 from "{self.schema}".lh_bucket for update'.encode())
            yield

    def newcomer(self, name: str) -> str:
        self.ask(f'create role "{name}" login')
        return self.url(quote(name))

    def forget(self, verb: str) -> None:
        found = "select oid::regprocedure::text from pg_proc where proname = %s and pronamespace = %s::regnamespace"
        for (signature,) in self.ask(found, f"lh_{verb}_v1", f'"{self.schema}"'):
            self.ask(f"drop function {signature}")

    def role(self, name: str, port: int | None = None) -> str:
        self.newcomer(name)
        self.ask(postgresql_schema.grants(name, self.schema).replace("%", "%%"))
        return self.url(quote(name), port)

    def shut(self, name: str, out: bool) -> None:
        self.ask(f'alter role "{name}" {"nologin" if out else "login"}')

    def drop_role(self, name: str) -> None:
        self.ask(f'drop owned by "{name}"')
        self.ask(f'drop role "{name}"')

    def drop(self) -> None:
        self.ask("drop schema if exists {s} cascade")


class MysqlDatabase(Database):
    """Sessions are found by their account; in the midst of a call they have that of whoever made the procedures."""

    server: MariaDB
    most = 4
    lingers = 1
    no_client = ", ''"
    inspection = "call {s}.lh_inspect_v1('', '', false)"

    def __init__(self, server: MariaDB, schema: str) -> None:
        super().__init__(server, schema)
        self._accounts: set[str] = set()

    def url(self, user: str = "root", port: int | None = None, **options: str) -> str:
        where = f"{quote(user, safe=':')}@127.0.0.1:{port or self.server.port}/{quote(self.schema, safe='')}"
        return f"mysql://{where}?{urlencode(options, quote_via=quote)}"

    def named(self, name: str, port: int | None = None, **options: str) -> str:
        if name not in self._accounts:
            self._accounts.add(name)
            self.server.run(f"create or replace user '{name}'", f"grant all on *.* to '{name}'")
        return self.url(name, port, **options)

    def ask(self, query: str, *values: object) -> list[Any]:
        return self.server.ask(query.replace("{s}", mysql_schema.quoted(self.schema)), *values)

    def sessions(self, name: str) -> list[int]:
        return [number for (number,) in self.ask("select id from information_schema.processlist where user = %s", name)]

    def blocked(self, name: str) -> bool:
        return bool(self.ask("select 1 from information_schema.innodb_trx where trx_state = 'LOCK WAIT'"))

    def count(self) -> None:
        """The server's log of what clients sent it: what happens in a procedure is not in it."""
        self.server.run("set global log_output = 'TABLE'", "truncate mysql.general_log", "set global general_log = 1")

    def calls(self) -> dict[str, int]:
        query = "select count(*) from mysql.general_log where command_type = 'Query' and argument like %s"
        counts = {verb: self.ask(query, f"call %{self.schema}%.lh_{verb}_v1(%")[0][0] for verb in (*VERBS, "listen")}
        return {verb: count for verb, count in counts.items() if count}

    @contextmanager
    def frozen(self) -> Iterator[None]:
        with self.server.connect(autocommit=False) as session, session.cursor() as cursor:
            cursor.execute(f"select 1 from {mysql_schema.quoted(self.schema)}.lh_bucket for update")
            yield
            session.rollback()

    def newcomer(self, name: str) -> str:
        self._accounts.add(name)
        self.server.run(f"create user '{name}'")
        return self.url(name)

    def forget(self, verb: str) -> None:
        self.server.run(f"drop procedure {mysql_schema.quoted(self.schema)}.lh_{verb}_v1")

    def role(self, name: str, port: int | None = None) -> str:
        self.newcomer(name)
        self.server.run(*mysql_schema.statements(mysql_schema.grants(name, self.schema)))
        return self.url(name, port)

    def shut(self, name: str, out: bool) -> None:
        self.server.run(f"alter user '{name}' account {'lock' if out else 'unlock'}")

    def drop_role(self, name: str) -> None:
        self._accounts.discard(name)
        self.server.run(f"drop user '{name}'")

    def drop(self) -> None:
        self.server.run("set global general_log = 0")
        self.server.run(f"drop database if exists {mysql_schema.quoted(self.schema)}")
        for name in self._accounts:
            self.server.run(f"drop user if exists '{name}'")


DATABASES: dict[str, tuple[Any, type[Database]]] = {
    "mysql": (mysql_rig, MysqlDatabase),
    "postgresql": (postgresql_rig, PostgresqlDatabase),
}


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
