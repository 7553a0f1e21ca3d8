"""What SQL engine tests need from a server, for PostgreSQL and for MariaDB."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from urllib.parse import quote, urlencode

from harness.rigs import mysql, postgresql
from harness.servers.mysql import MariaDB
from harness.servers.postgresql import PostgreSQL
from leasehold.engines.mysql import schema as mysql_schema
from leasehold.engines.postgresql import schema as postgresql_schema
from leasehold.engines.postgresql.schema import quote_identifier


class Database(ABC):
    """A test's own schema on a shared server; the first client creates it."""

    server: Any
    max_connections: int  # connections of one client
    lingering_sessions: int = 0  # how many of them outlive a killed process for a while
    extra_queue_values: str = ", false"  # SQL for the last columns of a row of lh_queue
    inspect_query: str  # the query of an operator

    def __init__(self, server: Any, schema: str) -> None:
        self.server, self.schema = server, schema

    @abstractmethod
    def ask(self, query: str, *values: object) -> list[Any]:
        """`{s}` in the query stands for the schema."""

    @abstractmethod
    def named_url(self, name: str, port: int | None = None, **options: str) -> str:
        """The URL of a client whose sessions can be found by `name`."""

    @abstractmethod
    def sessions(self, name: str) -> Any:
        """The sessions of the client with this name."""

    @abstractmethod
    def is_blocked(self, name: str) -> bool:
        """Whether one of these sessions waits for a lock.

        Poll at most 5 times a second: MariaDB does not refresh its answer for faster readers."""

    @abstractmethod
    def call_counts(self) -> dict[str, int]:
        """The server's own count of our statements, by verb, since `start_counting`."""

    @abstractmethod
    def start_counting(self) -> None: ...

    @abstractmethod
    def lock_all_buckets(self) -> AbstractContextManager[None]:
        """A foreign transaction keeps every bucket locked while the block runs."""

    @abstractmethod
    def create_granted_role(self, name: str, port: int | None = None) -> str:
        """Create a role with exactly the rights that the manual lists; return its URL."""

    @abstractmethod
    def create_login_role(self, name: str) -> str:
        """Create a role that may only log in; return its URL."""

    @abstractmethod
    def drop_verb(self, verb: str) -> None:
        """Drop the function of a verb."""

    @abstractmethod
    def set_role_locked(self, name: str, locked: bool) -> None:
        """Forbid or allow a role to log in."""

    @abstractmethod
    def drop_role(self, name: str) -> None: ...

    @abstractmethod
    def drop(self) -> None: ...


VERBS = ("attempt", "release", "heartbeat", "renew")


class PostgresqlDatabase(Database):
    server: PostgreSQL
    max_connections = 3
    inspect_query = "select * from {s}.lh_inspect_v1('', '', false)"

    def url(self, user: str = "postgres", port: int | None = None, **options: str) -> str:
        query = urlencode({"schema": self.schema, **options}, quote_via=quote)
        return f"{self.server.url(user=user, port=port)}?{query}"

    def named_url(self, name: str, port: int | None = None, **options: str) -> str:
        return self.url(port=port, application_name=name, **options)

    def ask(self, query: str, *values: object) -> list[Any]:
        return self.server.ask(query.replace("{s}", quote_identifier(self.schema)), *values)

    def sessions(self, name: str) -> dict[int, str]:
        """The last statement of each session, by process id."""
        return dict(self.server.ask("select pid, query from pg_stat_activity where application_name = %s", name))

    def is_blocked(self, name: str) -> bool:
        query = "select 1 from pg_stat_activity where application_name = %s and wait_event_type = 'Lock'"
        return bool(self.server.ask(query, name))

    def terminate_sessions(self, application: str) -> None:
        self.server.ask(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name = %s", application
        )

    def start_counting(self) -> None:
        self.ask("create extension if not exists pg_stat_statements")
        self.ask("select pg_stat_statements_reset()")

    def call_counts(self) -> dict[str, int]:
        rows = self.ask(
            "select substring(query from 'lh_([a-z]+)_v1'), sum(calls)::integer from pg_stat_statements "
            "where query like %s group by 1",
            f'select %"{self.schema}".lh\\_%',
        )
        return {verb: count for verb, count in rows if verb in VERBS}

    @contextmanager
    def lock_all_buckets(self) -> Iterator[None]:
        with self.server.connect() as session, session.transaction():
            session.execute(f'select 1 from "{self.schema}".lh_bucket for update'.encode())
            yield

    def create_login_role(self, name: str) -> str:
        self.ask(f'create role "{name}" login')
        return self.url(quote(name))

    def drop_verb(self, verb: str) -> None:
        query = "select oid::regprocedure::text from pg_proc where proname = %s and pronamespace = %s::regnamespace"
        for (signature,) in self.ask(query, f"lh_{verb}_v1", f'"{self.schema}"'):
            self.ask(f"drop function {signature}")

    def create_granted_role(self, name: str, port: int | None = None) -> str:
        self.create_login_role(name)
        self.ask(postgresql_schema.grants(name, self.schema).replace("%", "%%"))
        return self.url(quote(name), port)

    def set_role_locked(self, name: str, locked: bool) -> None:
        self.ask(f'alter role "{name}" {"nologin" if locked else "login"}')

    def drop_role(self, name: str) -> None:
        self.ask(f'drop owned by "{name}"')
        self.ask(f'drop role "{name}"')

    def drop(self) -> None:
        self.server.ask(f"drop schema if exists {quote_identifier(self.schema).replace('%', '%%')} cascade")


class MysqlDatabase(Database):
    """Sessions are found by their account. During a call that is the account that created the procedures."""

    server: MariaDB
    max_connections = 4
    lingering_sessions = 1
    extra_queue_values = ", '', false"
    inspect_query = "call {s}.lh_inspect_v1('', '', false)"

    def __init__(self, server: MariaDB, schema: str) -> None:
        super().__init__(server, schema)
        self._accounts: set[str] = set()

    def url(self, user: str = "root", port: int | None = None, **options: str) -> str:
        location = f"{quote(user, safe=':')}@127.0.0.1:{port or self.server.port}/{quote(self.schema, safe='')}"
        return f"mysql://{location}?{urlencode(options, quote_via=quote)}"

    def named_url(self, name: str, port: int | None = None, **options: str) -> str:
        if name not in self._accounts:
            self._accounts.add(name)
            self.server.run(f"create or replace user '{name}'", f"grant all on *.* to '{name}'")
        return self.url(name, port, **options)

    def ask(self, query: str, *values: object) -> list[Any]:
        return self.server.ask(query.replace("{s}", mysql_schema.quote_identifier(self.schema)), *values)

    def sessions(self, name: str) -> list[int]:
        return [number for (number,) in self.ask("select id from information_schema.processlist where user = %s", name)]

    def is_blocked(self, name: str) -> bool:
        return bool(self.ask("select 1 from information_schema.innodb_trx where trx_state = 'LOCK WAIT'"))

    def start_counting(self) -> None:
        """Turn on the general log: it has the statements of clients, not those inside procedures."""
        self.server.run("set global log_output = 'TABLE'", "truncate mysql.general_log", "set global general_log = 1")

    def call_counts(self) -> dict[str, int]:
        query = "select count(*) from mysql.general_log where command_type = 'Query' and argument like %s"
        counts = {verb: self.ask(query, f"call %{self.schema}%.lh_{verb}_v1(%")[0][0] for verb in (*VERBS, "listen")}
        return {verb: count for verb, count in counts.items() if count}

    @contextmanager
    def lock_all_buckets(self) -> Iterator[None]:
        with self.server.connect(autocommit=False) as session, session.cursor() as cursor:
            cursor.execute(f"select 1 from {mysql_schema.quote_identifier(self.schema)}.lh_bucket for update")
            yield
            session.rollback()

    def create_login_role(self, name: str) -> str:
        self._accounts.add(name)
        self.server.run(f"create user '{name}'")
        return self.url(name)

    def drop_verb(self, verb: str) -> None:
        self.server.run(f"drop procedure {mysql_schema.quote_identifier(self.schema)}.lh_{verb}_v1")

    def create_granted_role(self, name: str, port: int | None = None) -> str:
        self.create_login_role(name)
        self.server.run(*mysql_schema.statements(mysql_schema.grants(name, self.schema)))
        return self.url(name, port)

    def set_role_locked(self, name: str, locked: bool) -> None:
        self.server.run(f"alter user '{name}' account {'lock' if locked else 'unlock'}")

    def drop_role(self, name: str) -> None:
        self._accounts.discard(name)
        self.server.run(f"drop user '{name}'")

    def drop(self) -> None:
        self.server.run("set global general_log = 0")
        self.server.run(f"drop database if exists {mysql_schema.quote_identifier(self.schema)}")
        for name in self._accounts:
            self.server.run(f"drop user if exists '{name}'")


DATABASES: dict[str, tuple[Any, type[Database]]] = {
    "mysql": (mysql, MysqlDatabase),
    "postgresql": (postgresql, PostgresqlDatabase),
}
