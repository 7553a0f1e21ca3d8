"""The schema: created on first use or by its owner, under any name, with minimal rights, run again while in use."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from hashlib import sha256
from typing import Any

import psycopg
import pymysql
import pytest
import sqlalchemy
from sqlalchemy.orm import Session

from leasehold import Client, ConfigError, Unavailable, stores, transaction
from leasehold.engines.mysql import schema as mysql_schema
from leasehold.engines.postgresql import schema as postgresql_schema
from tests.support import health


class PostgresqlDialect:
    """How to run a script, open an application's session and recognize a refusal on PostgreSQL."""

    owner, dialect = "postgres", "postgresql+psycopg"
    denied_error = psycopg.errors.InsufficientPrivilege
    schema = postgresql_schema
    advance = "select {s}.lh_advance_v1('', 1, '', 1, '')"
    drop_suffix = " cascade"

    @staticmethod
    def run(server: Any, script: str) -> None:
        server.ask(script.replace("%", "%%"))

    @staticmethod
    def session(server: Any, user: str) -> Any:
        return psycopg.connect(server.url(user=user))

    @staticmethod
    def creation_lock(schema: str) -> str:
        (number,) = re.findall(r"pg_advisory_xact_lock\((\d+)\)", postgresql_schema.text(schema))
        return f"select pg_advisory_lock({number})::text"


class MysqlDialect:
    owner, dialect = "root", "mysql+pymysql"
    denied_error = pymysql.OperationalError
    schema = mysql_schema
    advance = "call {s}.lh_advance_v1('', 1, '', 1, '')"
    drop_suffix = ""

    @staticmethod
    def run(server: Any, script: str) -> None:
        server.run(*mysql_schema.statements(script))

    @staticmethod
    def session(server: Any, user: str) -> Any:
        return server.connect(user=user, autocommit=False)

    @staticmethod
    def creation_lock(schema: str) -> str:
        digest = sha256(mysql_schema.quote_identifier(schema).encode()).hexdigest()
        return f"select get_lock('lh.make.{digest[:40]}', 0)"


DIALECTS = {"mysql": MysqlDialect, "postgresql": PostgresqlDialect}


@pytest.fixture
def server_dialect(sql) -> Any:
    return DIALECTS[sql.url().partition(":")[0]]


@pytest.fixture
def role(sql) -> Iterator[str]:
    """A role that may only log in."""
    name = f"app-{sql.schema}"
    sql.create_login_role(name)
    yield name
    sql.drop_role(name)


def print_schema(sql, *arguments: str) -> str:
    scheme = sql.url().partition(":")[0]
    command = [sys.executable, "-m", "leasehold", "schema", scheme, "--schema", sql.schema, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_schema_is_created_on_first_use_by_many_clients_at_once(sql, server_dialect) -> None:
    failed = []

    def first() -> None:
        try:
            with Client(sql.url(), call_timeout=30) as client, client.lock("job", wait=30):
                pass
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=first) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []
    assert sql.ask("select version from {s}.lh_meta") == [(server_dialect.schema.VERSION,)]


def test_lock_that_a_stranger_keeps_does_not_stop_the_creation(sql, server_dialect, role) -> None:
    """Every role may take the advisory lock or user lock under which clients create the schema."""
    with closing(server_dialect.session(sql.server, role)) as stranger:
        with closing(stranger.cursor()) as cursor:
            cursor.execute(server_dialect.creation_lock(sql.schema))
            assert list(cursor.fetchone()) in ([""], [1])
        created: list[bool] = []

        def use_lock() -> None:
            for _ in range(10):  # each call completes what time it has left for
                with suppress(Unavailable), Client(sql.url(), call_timeout=3) as client:
                    client.ping()
                    client.inspect()
                    created.append(True)
                    return

        threads = [threading.Thread(target=use_lock) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert created == [True] * 3


def test_mysql_client_completes_half_a_schema_with_what_is_missing(mysql) -> None:
    """Each statement commits on its own. On a slow disk, locks were granted for a moment by half a schema, and then not
    for seconds: every client ran all of the script again, for as long as its deadline allowed."""
    script = list(mysql_schema.statements(mysql_schema.text(mysql.schema)))
    created = [name for name in map(mysql_schema.procedure_of, script) if name]
    assert created[-2:] == ["lh_attempt_v1", "lh_release_v1"]  # so nothing is granted before the others exist
    mysql.server.run(*script[:-4])
    before = int(mysql.ask("show global status like 'Com_create_procedure'")[0][1])
    with Client(mysql.url(), call_timeout=30) as client, client.lock("job"):
        pass
    assert int(mysql.ask("show global status like 'Com_create_procedure'")[0][1]) - before <= 4
    assert len(mysql.ask(f"show procedure status where db = '{mysql.schema}'")) == len(created)


def test_role_that_may_not_create_the_schema_is_told_how(sql, role) -> None:
    with Client(sql.url(role)) as client, pytest.raises(ConfigError, match=r"leasehold schema (mysql|postgresql)"):
        client.lock("job").try_acquire()


def test_create_no_leaves_the_schema_to_its_owner(sql, server_dialect) -> None:
    with Client(sql.url(create="no")) as client:
        with pytest.raises(ConfigError, match="create=no"):
            client.inspect()
        server_dialect.run(sql.server, server_dialect.schema.text(sql.schema))
        with client.lock("job") as lease:
            assert lease.held


def test_printed_schema_and_grants_are_all_a_role_needs(sql, server_dialect, role, wait_until) -> None:
    server_dialect.run(sql.server, print_schema(sql, "--role", role))
    with Client(sql.url(role), ttl=30) as client, Client(sql.url(role)) as other:
        with client.lock("job") as lease:
            lease.renew()
            with pytest.raises(TimeoutError):
                other.lock("job", wait=0.5).acquire()
            wait_until(lambda: [holding.state for holding in client.inspect()] == ["held"])
            with server_dialect.session(sql.server, role) as connection:
                transaction.check(lease, connection)
                transaction.release_on_commit(lease, connection)
                connection.commit()
        lease = client.lock("job").acquire()
        assert other.break_lock("job", token=lease.token)
        lease.release()
    if sql.url().startswith("postgresql"):
        with Client(sql.url(role, durable="no")) as client, client.lock("job") as lease:
            lease.renew()
    assert health.probe(sql.url(role)).up
    tables = ["lh_grant", "lh_waiter", "lh_bucket", "lh_queue", "lh_meta"]
    if sql.url().startswith("postgresql"):
        tables.append("lh_on_commit")
    with server_dialect.session(sql.server, role) as connection:
        for query in (*(f"select * from {{s}}.{table}" for table in tables), server_dialect.advance):
            with pytest.raises(server_dialect.denied_error, match="denied"):
                connection.cursor().execute(query.replace("{s}", server_dialect.schema.quote_identifier(sql.schema)))
            connection.rollback()


def test_records_need_four_rights_on_their_table(sql, server_dialect, role) -> None:
    """As docs/stores.md says. The other tests run as the owner of the database, who creates the table on first use."""
    scheme = sql.url().partition(":")[0]
    quote = "'" if scheme == "mysql" else '"'
    grant = f"grant select, insert, update, delete on leasehold_records to {quote}{role}{quote};"
    server_dialect.run(sql.server, print_schema(sql, "--role", role) + "\n" + stores.schema(scheme) + "\n" + grant)
    with Client(sql.url(role)) as one, Client(sql.url(role)) as other:
        key = sql.schema
        assert one.once(key, lambda: 1) == other.once(key, lambda: 2) == 1
        assert one.once(f"{key}-2", lambda: 3, keep=0.001) == 3


def test_role_without_operator_rights_cannot_inspect_or_break(sql, server_dialect, role) -> None:
    server_dialect.run(sql.server, print_schema(sql, "--role", role, "--no-operator"))
    with Client(sql.url(role)) as client, client.lock("job") as lease:
        with pytest.raises(ConfigError, match="denied"):
            client.inspect()
        with pytest.raises(ConfigError, match="denied"):
            client.break_lock("job", token=lease.token)
        command = [sys.executable, "-m", "leasehold", "-u", sql.url(role), "break", "job", "--token", str(lease.token)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 77
        assert "denied" in done.stderr


def test_schema_may_be_run_again_while_clients_work(sql, server_dialect, wait_until) -> None:
    done, failed = threading.Event(), []

    def work() -> None:
        try:
            with Client(sql.url(), call_timeout=20) as client:
                while not done.is_set():
                    with client.lock("job", wait=20):
                        pass
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    with suppress(AssertionError):
        wait_until(lambda: sql.ask("select 1 from information_schema.tables where table_schema = %s", sql.schema), 60)
    for _ in range(5):
        server_dialect.run(sql.server, server_dialect.schema.text(sql.schema))
    done.set()
    for thread in threads:
        thread.join(60)
    assert failed == []


def test_newer_schema_serves_this_version_while_procedures_remain(sql) -> None:
    with Client(sql.url()) as client:
        lease = client.lock("job", ttl=60).acquire()
        sql.ask("update {s}.lh_meta set version = 2")
        lease.renew()
        with client.lock("other"):
            pass
        for verb in ("attempt", "release"):
            sql.drop_verb(verb)
        with pytest.raises(ConfigError, match="newer Leasehold"):
            client.lock("other").try_acquire()
        assert not lease.release(), "the release stays pending: an upgraded client may still send it"
        sql.ask("update {s}.lh_meta set version = 1")
        with client.lock("other"):  # the client recreates a missing procedure
            pass


SCHEMA_NAMES = ('a"b', "a`b", "x'y", "percent%s")
MORE_SCHEMA_NAMES = ("ünï", "with space", "semi;colon", "$1", "$$", "{db}", "a.b", "UPPER")


@pytest.mark.parametrize(
    "name", [*SCHEMA_NAMES, *(pytest.param(name, marks=pytest.mark.extended) for name in MORE_SCHEMA_NAMES)]
)
def test_schema_may_have_any_name(sql, server_dialect, name, monkeypatch) -> None:
    monkeypatch.setattr(sql, "schema", name)
    quoted = server_dialect.schema.quote_identifier(name)
    try:
        with Client(sql.url()) as client, client.lock("job") as lease:
            with server_dialect.session(sql.server, server_dialect.owner) as connection:
                transaction.check(lease, connection)
            engine = sqlalchemy.create_engine(
                f"{server_dialect.dialect}://{server_dialect.owner}@127.0.0.1:{sql.server.port}"
            )
            with Session(engine) as session, session.begin():
                transaction.check(lease, session)
                transaction.release_on_commit(lease, session)
            engine.dispose()
    finally:
        server_dialect.run(sql.server, f"drop schema if exists {quoted}{server_dialect.drop_suffix};")


def test_schema_that_cannot_be_created_is_an_error_each_time(sql) -> None:
    url = sql.create_login_role("maker")
    try:
        with Client(url) as client:
            for _ in range(4):
                with pytest.raises(ConfigError, match="leasehold schema"):
                    client.lock("job").try_acquire()
    finally:
        sql.drop_role("maker")


def test_deleted_schema_version_is_recreated(sql) -> None:
    with Client(sql.url()) as client:
        client.inspect()
        sql.ask("truncate {s}.lh_meta")
        sql.drop_verb("inspect")
        assert client.inspect() == []


@pytest.mark.parametrize("version", ["x", "9" * 5000])
def test_schema_version_that_is_no_number_raises_unavailable(sql, version) -> None:
    """As from a broken server."""
    with Client(sql.url()) as client:
        with client.lock("job"):
            pass
        sql.drop_verb("attempt")
        sql.ask("drop table {s}.lh_meta")
        sql.ask("create table {s}.lh_meta (version varchar(9000))")
        sql.ask("insert into {s}.lh_meta values ('" + version + "')")
        with pytest.raises(Unavailable):
            client.lock("job").try_acquire()
