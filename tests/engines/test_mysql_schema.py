"""The schema on MariaDB: made on first use or by its owner, under any name, with the least rights, kept when run again;
and the lease check inside a transaction of the application's own.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import aiomysql
import pymysql
import pytest
import sqlalchemy
from sqlalchemy.orm import Session

from leasehold import AsyncClient, Client, ConfigError, LeaseLost, Unavailable, inside
from leasehold.core.names import bucket
from leasehold.engines.mysql import schema


def printed(*arguments: str) -> list[str]:
    command = [sys.executable, "-m", "leasehold", "schema", "mysql", *arguments]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return list(schema.statements(found))


def test_it_is_made_on_first_use_by_many_at_once(mysql) -> None:
    failed = []

    def first() -> None:
        try:
            with Client(mysql.url(), call_timeout=30) as client, client.lock("job", wait=30):
                pass
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=first) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []
    assert mysql.ask("select version from {s}.lh_meta") == [(schema.VERSION,)]


def test_the_printed_schema_and_grants_are_all_an_account_needs(mysql, until) -> None:
    url = mysql.newcomer("app")
    with Client(url) as client, pytest.raises(ConfigError, match="--role ACCOUNT"):
        client.lock("job").try_acquire()
    mysql.server.run(*printed("--schema", mysql.schema, "--role", "app"))
    with Client(url, ttl=30) as client, Client(url) as other:
        with client.lock("job") as lease:
            lease.renew()
            with pytest.raises(TimeoutError):
                other.lock("job", wait=1).acquire()
            until(lambda: [holding.state for holding in client.inspect()] == ["held"])
            with mysql.server.connect(user="app", autocommit=False) as connection:
                inside.check(lease, connection)
        lease = client.lock("job").acquire()
        assert other.break_lock("job", token=lease.token)
        lease.release()
    with mysql.server.connect(user="app") as connection, connection.cursor() as cursor:
        for table in ("lh_grant", "lh_waiter", "lh_bucket", "lh_line", "lh_meta"):
            with pytest.raises(pymysql.OperationalError, match="denied"):
                cursor.execute(f"select * from `{mysql.schema}`.{table}")
        with pytest.raises(pymysql.OperationalError, match="denied"):
            cursor.execute(f"call `{mysql.schema}`.lh_advance_v1('', 1, '', 1, '')")


def test_an_account_without_the_operators_rights(mysql) -> None:
    url = mysql.newcomer("app")
    mysql.server.run(*printed("--schema", mysql.schema, "--role", "app@%", "--no-operator"))
    with Client(url) as client, client.lock("job") as lease:
        with pytest.raises(ConfigError, match="denied"):
            client.inspect()
        with pytest.raises(ConfigError, match="denied"):
            client.break_lock("job", token=lease.token)


def test_create_no_leaves_it_to_its_owner(mysql) -> None:
    with Client(mysql.url(create="no")) as client:
        with pytest.raises(ConfigError, match="create=no"):
            client.inspect()
        mysql.server.run(*schema.statements(schema.text(mysql.schema)))
        with client.lock("job") as lease:
            assert lease.held


def test_a_newer_schema_serves_this_version_while_it_has_its_procedures(mysql) -> None:
    with Client(mysql.url()) as client:
        lease = client.lock("job", ttl=60).acquire()
        mysql.ask("update {s}.lh_meta set version = 2")
        lease.renew()
        for verb in ("attempt", "release"):
            mysql.forget(verb)
        with pytest.raises(ConfigError, match="newer Leasehold"):
            client.lock("other").try_acquire()
        assert not lease.release(), "owed: an upgrade of this client may still give it back"
        mysql.ask("update {s}.lh_meta set version = 1")
        mysql.server.run(*schema.statements(schema.text(mysql.schema)))  # run again while a client works
        with client.lock("other", wait=10):
            pass


@pytest.mark.parametrize("name", ["a`b", "ünï", "with space", "x'y", "percent%s", "semi;colon", "{db}", "a.b", "$$"])
def test_any_database_name(mysql, name) -> None:
    mysql.schema = name
    with Client(mysql.url()) as client, client.lock("job") as lease:
        with mysql.server.connect(autocommit=False) as connection:
            inside.check(lease, connection)
        engine = sqlalchemy.create_engine(f"mysql+pymysql://root@127.0.0.1:{mysql.server.port}")
        with Session(engine) as session, session.begin():
            inside.check(lease, session)
        engine.dispose()
    with Client(mysql.url(procedures="no")) as client, client.lock("job") as lease:
        lease.renew()


# ----------------------------------------------------- the check in a transaction


@pytest.fixture
def client(mysql):
    with Client(mysql.url(), namespace="it's: %s", ttl=30, call_timeout=3) as client:
        yield client


@pytest.fixture
def connection(mysql):
    with mysql.server.connect(autocommit=False) as connection:
        yield connection


def test_a_held_lease_passes_and_an_ended_one_does_not(client, connection, mysql) -> None:
    with client.lock("job") as lease:
        connection.cursor().execute("select 1")  # in REPEATABLE READ a snapshot is from here
        lease.renew()
        inside.check(lease, connection)
        inside.check(lease, connection.cursor(pymysql.cursors.DictCursor))
        connection.commit()
        connection.cursor().execute(f"select * from `{mysql.schema}`.lh_grant")
        mysql.ask("update {s}.lh_grant set until = 1")
        with pytest.raises(LeaseLost):
            inside.check(lease, connection)
        connection.rollback()


def test_outside_a_transaction_it_is_refused(client, mysql) -> None:
    with client.lock("job") as lease, mysql.server.connect(autocommit=True) as connection:
        with pytest.raises(ConfigError, match="not in a transaction"):
            inside.check(lease, connection)
        connection.begin()
        inside.check(lease, connection)
        connection.commit()


def test_nobody_is_granted_the_name_before_the_transaction_ends(client, connection, mysql) -> None:
    """Though the lease has run out: the transaction may still commit what it wrote as the holder."""
    lease = client.lock("job", ttl=1.5).acquire()
    inside.check(lease, connection)
    with Client(mysql.url(), namespace="it's: %s", call_timeout=3) as other:
        assert lease.wait_lost(30), "not renewed while the row is kept"
        for _ in range(3):
            assert other.lock("job").try_acquire() is None
        began = time.monotonic()
        for name in [name for name in map(str, range(20_000)) if bucket(name) == bucket("job")][:5]:
            with other.lock(name):  # whoever shares the bucket is not held up
                pass
        assert time.monotonic() - began < 2.5
        connection.commit()
        assert other.lock("job", wait=20).acquire().release()
    lease.release()


def test_a_release_waits_for_the_transaction_and_is_owed_if_that_is_long(client, connection, mysql, until) -> None:
    lease = client.lock("job", ttl=30).acquire()
    inside.check(lease, connection)
    lease.renew()  # answered: the life it has
    assert not lease.release(), "unconfirmed, and repeated"
    with Client(mysql.url(), namespace="it's: %s", call_timeout=1.2) as operator:
        with pytest.raises(Unavailable):
            operator.break_lock("job", token=lease.token)
        connection.commit()
        until(lambda: not operator.inspect())


def test_sqlalchemy_and_asyncio(client, mysql) -> None:
    engine = sqlalchemy.create_engine(f"mysql+pymysql://root@127.0.0.1:{mysql.server.port}")
    with client.lock("job") as lease:
        with engine.begin() as bound:
            inside.check(lease, bound)
        alone = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        with alone as bound, pytest.raises(ConfigError, match="not in a transaction"):
            inside.check(lease, bound)
    engine.dispose()

    async def main() -> None:
        async with AsyncClient(mysql.url()) as client, client.lock("job") as lease:
            connection = await aiomysql.connect(host="127.0.0.1", port=mysql.server.port, user="root", autocommit=False)
            await inside.check_async(lease, connection)
            await connection.rollback()
            connection.close()

    asyncio.run(main())
