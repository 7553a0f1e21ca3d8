"""The schema: made on first use or by its owner, under any name, with the least rights, upgraded while clients work."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import suppress

import psycopg
import pytest

from leasehold import Client, ConfigError, inside
from leasehold.engines.postgresql import schema
from leasehold.testing.servers.postgresql import PostgreSQL


@pytest.fixture
def role(database):
    """A role that may connect, and nothing else."""
    name = f"app {database.schema}"
    database.ask(f'create role "{name}" login')
    yield name
    database.ask("drop schema if exists {s} cascade")
    database.ask(f'drop owned by "{name}"')
    database.ask(f'drop role "{name}"')


def url_of(database, role: str, **options: str) -> str:
    return database.url(user=role.replace(" ", "%20"), **options)


def printed(*arguments: str) -> str:
    command = [sys.executable, "-m", "leasehold", "schema", "postgresql", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_it_is_made_on_first_use_by_many_at_once(database) -> None:
    failed = []

    def first() -> None:
        try:
            with Client(database.url(), call_timeout=20) as client, client.lock("job", wait=20):
                pass
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=first) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []
    assert database.ask("select version from {s}.lh_meta") == [(schema.VERSION,)]


def test_a_role_that_may_not_make_it_is_told_how(database, role) -> None:
    database.ask(f'revoke create on database postgres from "{role}"')
    with Client(url_of(database, role)) as client, pytest.raises(ConfigError, match="leasehold schema postgresql"):
        client.lock("job").try_acquire()


def test_create_no_leaves_it_to_its_owner(database) -> None:
    with Client(database.url(create="no")) as client:
        with pytest.raises(ConfigError, match="create=no"):
            client.inspect()
        database.ask(schema.text(database.schema).replace("%", "%%"))
        with client.lock("job") as lease:
            assert lease.held


def test_the_printed_schema_and_grants_are_all_a_role_needs(database, role, until) -> None:
    database.ask(printed("--schema", database.schema, "--role", role).replace("%", "%%"))
    with Client(url_of(database, role), ttl=30) as client, Client(url_of(database, role)) as other:
        with client.lock("job") as lease:
            lease.renew()
            with pytest.raises(TimeoutError):
                other.lock("job", wait=0.2).acquire()
            until(lambda: [holding.state for holding in client.inspect()] == ["held"])
            with psycopg.connect(database.server.url(user=role.replace(" ", "%20"))) as connection:
                inside.check(lease, connection)
        lease = client.lock("job").acquire()
        assert other.break_lock("job", token=lease.token)
        lease.release()
    with psycopg.connect(database.server.url(user=role.replace(" ", "%20")), autocommit=True) as connection:
        for table in ("lh_grant", "lh_waiter", "lh_bucket", "lh_line", "lh_meta"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(f'select * from "{database.schema}".{table}')
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute(f"""select "{database.schema}".lh_advance_v1('', 1, '', 1, '')""")


def test_a_role_without_the_operators_rights(database, role) -> None:
    database.ask(printed("--schema", database.schema, "--role", role, "--no-operator").replace("%", "%%"))
    with Client(url_of(database, role)) as client, client.lock("job") as lease:
        with pytest.raises(ConfigError, match="permission denied"):
            client.inspect()
        with pytest.raises(ConfigError, match="permission denied"):
            client.break_lock("job", token=lease.token)


def test_a_role_without_grants_is_told_which(database, role) -> None:
    database.ask(schema.text(database.schema).replace("%", "%%"))
    database.ask(f'grant usage on schema {{s}} to "{role}"')
    with Client(url_of(database, role)) as client, pytest.raises(ConfigError, match="--role ROLE"):
        client.lock("job").try_acquire()


def test_it_may_be_run_again_while_clients_work(database, until) -> None:
    done, failed = threading.Event(), []

    def work() -> None:
        try:
            with Client(database.url(), call_timeout=20) as client:
                while not done.is_set():
                    with client.lock("job", wait=20):
                        pass
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    with suppress(AssertionError):
        until(lambda: database.ask("select 1 from pg_namespace where nspname = %s", database.schema), 20)
    for _ in range(5):
        database.ask(schema.text(database.schema).replace("%", "%%"))
    done.set()
    for thread in threads:
        thread.join(60)
    assert failed == []


def test_a_newer_schema_serves_this_version_while_it_has_its_functions(database) -> None:
    with Client(database.url()) as client:
        lease = client.lock("job", ttl=60).acquire()
        database.ask("update {s}.lh_meta set version = 2")
        lease.renew()
        with client.lock("other"):
            pass
        for function in ("attempt", "release"):
            ((signature,),) = database.ask(
                "select oid::regprocedure::text from pg_proc where proname = %s and pronamespace = %s::regnamespace",
                f"lh_{function}_v1",
                f'"{database.schema}"',
            )
            database.ask(f"drop function {signature}")
        with pytest.raises(ConfigError, match="newer Leasehold"):
            client.lock("other").try_acquire()
        assert not lease.release(), "owed: an upgrade of this client may still give it back"
        database.ask("update {s}.lh_meta set version = 1")
        with client.lock("other"):  # a function that was lost is made again
            pass


@pytest.mark.parametrize("name", ['a"b', "ünï", "with space", "x'y", "percent%s", "semi;colon", "$1", "UPPER"])
def test_any_schema_name(database, name) -> None:
    quoted = schema.quoted(name)
    url = database.url().replace(f"schema={database.schema}", f"schema={name.replace('%', '%25').replace(';', '%3B')}")
    try:
        connected = psycopg.connect(database.server.url())
        with Client(url) as client, client.lock("job") as lease, connected as connection:
            inside.check(lease, connection)
        assert database.server.ask(f"select count(*) from {quoted.replace('%', '%%')}.lh_grant") == [(0,)]
    finally:
        database.server.ask(f"drop schema if exists {quoted.replace('%', '%%')} cascade")


def test_a_database_in_another_encoding_is_refused(database) -> None:
    server: PostgreSQL = database.server
    server.ask("create database latin encoding latin1 template template0 locale 'C'")
    try:
        with Client(server.url("latin")) as client, pytest.raises(ConfigError, match="UTF8"):
            client.ping()
    finally:
        server.ask("drop database latin with (force)")


def test_a_database_that_does_not_exist(database) -> None:
    with Client(database.server.url("nowhere")) as client, pytest.raises(ConfigError, match="does not exist"):
        client.ping()
