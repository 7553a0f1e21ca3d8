"""The schema: made on first use or by its owner, under any name, with the least rights, run again while in use."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psycopg
import pymysql
import pytest
import sqlalchemy
from sqlalchemy.orm import Session

from leasehold import Client, ConfigError, inside
from leasehold.engines.mysql import schema as mysql_schema
from leasehold.engines.postgresql import schema as postgresql_schema


class OnPostgresql:
    """What a script, a session of the application's and a refusal are there."""

    owner, dialect = "postgres", "postgresql+psycopg"
    refused = psycopg.errors.InsufficientPrivilege
    schema = postgresql_schema
    advance = "select {s}.lh_advance_v1('', 1, '', 1, '')"
    all_of_it = " cascade"

    @staticmethod
    def run(server: Any, script: str) -> None:
        server.ask(script.replace("%", "%%"))

    @staticmethod
    def session(server: Any, user: str) -> Any:
        return psycopg.connect(server.url(user=user))


class OnMysql:
    owner, dialect = "root", "mysql+pymysql"
    refused = pymysql.OperationalError
    schema = mysql_schema
    advance = "call {s}.lh_advance_v1('', 1, '', 1, '')"
    all_of_it = ""

    @staticmethod
    def run(server: Any, script: str) -> None:
        server.run(*mysql_schema.statements(script))

    @staticmethod
    def session(server: Any, user: str) -> Any:
        return server.connect(user=user, autocommit=False)


SERVERS = {"mysql": OnMysql, "postgresql": OnPostgresql}


@pytest.fixture
def there(sql) -> Any:
    return SERVERS[sql.url().partition(":")[0]]


@pytest.fixture
def role(sql) -> Iterator[str]:
    """One that may log in, and nothing else."""
    name = f"app-{sql.schema}"
    sql.newcomer(name)
    yield name
    sql.drop_role(name)


def printed(sql, *arguments: str) -> str:
    scheme = sql.url().partition(":")[0]
    command = [sys.executable, "-m", "leasehold", "schema", scheme, "--schema", sql.schema, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_it_is_made_on_first_use_by_many_at_once(sql, there) -> None:
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
    assert sql.ask("select version from {s}.lh_meta") == [(there.schema.VERSION,)]


def test_a_role_that_may_not_make_it_is_told_how(sql, role) -> None:
    with Client(sql.url(role)) as client, pytest.raises(ConfigError, match=r"leasehold schema (mysql|postgresql)"):
        client.lock("job").try_acquire()


def test_create_no_leaves_it_to_its_owner(sql, there) -> None:
    with Client(sql.url(create="no")) as client:
        with pytest.raises(ConfigError, match="create=no"):
            client.inspect()
        there.run(sql.server, there.schema.text(sql.schema))
        with client.lock("job") as lease:
            assert lease.held


def test_the_printed_schema_and_grants_are_all_a_role_needs(sql, there, role, until) -> None:
    there.run(sql.server, printed(sql, "--role", role))
    with Client(sql.url(role), ttl=30) as client, Client(sql.url(role)) as other:
        with client.lock("job") as lease:
            lease.renew()
            with pytest.raises(TimeoutError):
                other.lock("job", wait=0.5).acquire()
            until(lambda: [holding.state for holding in client.inspect()] == ["held"])
            with there.session(sql.server, role) as connection:
                inside.check(lease, connection)
        lease = client.lock("job").acquire()
        assert other.break_lock("job", token=lease.token)
        lease.release()
    tables = ("lh_grant", "lh_waiter", "lh_bucket", "lh_line", "lh_meta")
    with there.session(sql.server, role) as connection:
        for query in (*(f"select * from {{s}}.{table}" for table in tables), there.advance):
            with pytest.raises(there.refused, match="denied"):
                connection.cursor().execute(query.replace("{s}", there.schema.quoted(sql.schema)))
            connection.rollback()


def test_a_role_without_the_operators_rights(sql, there, role) -> None:
    there.run(sql.server, printed(sql, "--role", role, "--no-operator"))
    with Client(sql.url(role)) as client, client.lock("job") as lease:
        with pytest.raises(ConfigError, match="denied"):
            client.inspect()
        with pytest.raises(ConfigError, match="denied"):
            client.break_lock("job", token=lease.token)


def test_it_may_be_run_again_while_clients_work(sql, there, until) -> None:
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
        until(lambda: sql.ask("select 1 from information_schema.tables where table_schema = %s", sql.schema), 20)
    for _ in range(5):
        there.run(sql.server, there.schema.text(sql.schema))
    done.set()
    for thread in threads:
        thread.join(60)
    assert failed == []


def test_a_newer_schema_serves_this_version_while_it_has_its_procedures(sql) -> None:
    with Client(sql.url()) as client:
        lease = client.lock("job", ttl=60).acquire()
        sql.ask("update {s}.lh_meta set version = 2")
        lease.renew()
        with client.lock("other"):
            pass
        for verb in ("attempt", "release"):
            sql.forget(verb)
        with pytest.raises(ConfigError, match="newer Leasehold"):
            client.lock("other").try_acquire()
        assert not lease.release(), "owed: an upgrade of this client may still give it back"
        sql.ask("update {s}.lh_meta set version = 1")
        with client.lock("other"):  # a procedure that was lost is made again
            pass


NAMES = ('a"b', "a`b", "ünï", "with space", "x'y", "percent%s", "semi;colon", "$1", "$$", "{db}", "a.b", "UPPER")


@pytest.mark.parametrize("name", NAMES)
def test_any_name(sql, there, name, monkeypatch) -> None:
    monkeypatch.setattr(sql, "schema", name)
    quoted = there.schema.quoted(name)
    try:
        with Client(sql.url()) as client, client.lock("job") as lease:
            with there.session(sql.server, there.owner) as connection:
                inside.check(lease, connection)
            engine = sqlalchemy.create_engine(f"{there.dialect}://{there.owner}@127.0.0.1:{sql.server.port}")
            with Session(engine) as session, session.begin():
                inside.check(lease, session)
            engine.dispose()
    finally:
        there.run(sql.server, f"drop schema if exists {quoted}{there.all_of_it};")
