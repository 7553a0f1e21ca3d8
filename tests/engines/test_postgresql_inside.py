"""The lease check inside a transaction of the application's own: "still the holder" and the write commit together."""

from __future__ import annotations

import asyncio
import time

import psycopg
import pytest
import sqlalchemy
from psycopg.rows import dict_row
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from leasehold import AsyncClient, Client, ConfigError, LeaseLost, Unsupported, inside
from leasehold.core.names import bucket


@pytest.fixture
def client(database):
    with Client(database.url(), namespace="it's: %s", ttl=30) as client:
        yield client


@pytest.fixture
def connection(database):
    with psycopg.connect(database.server.url()) as connection:
        yield connection


def granted_soon(client: Client, name: str) -> None:
    assert client.lock(name, wait=20).acquire().release()


def test_a_held_lease_passes_and_the_write_commits(client, connection) -> None:
    with client.lock("job") as lease:
        with connection.transaction():
            inside.check(lease, connection)
            inside.check(lease, connection.cursor())
            inside.check(lease, connection.cursor(row_factory=dict_row))
        lease.renew()


def test_a_broken_lease_is_refused(client, connection) -> None:
    lease = client.lock("job", ttl=300).acquire()
    other = Client(client._desk.config.url, namespace=client._desk.options.namespace)
    with other, connection.transaction():
        assert other.break_lock("job", token=lease.token)
        with pytest.raises(LeaseLost):
            inside.check(lease, connection)
    assert not lease.release()


def test_a_lapsed_lease_is_refused_though_nobody_else_has_it(client, connection, database) -> None:
    lease = client.lock("job", ttl=300).acquire()
    database.ask("update {s}.lh_grant set until = 1")
    with connection.transaction(), pytest.raises(LeaseLost):
        inside.check(lease, connection)
    lease.release()


def test_outside_a_transaction_it_is_refused(client, database) -> None:
    with client.lock("job") as lease, psycopg.connect(database.server.url(), autocommit=True) as connection:
        with pytest.raises(ConfigError, match="not in a transaction"):
            inside.check(lease, connection)
        with connection.transaction():
            inside.check(lease, connection)


def test_nobody_is_granted_the_name_before_the_transaction_ends(client, connection, database) -> None:
    """Though the lease has run out: the transaction may still commit what it wrote as the holder."""
    lease = client.lock("job", ttl=300).acquire()
    with Client(database.url(), namespace="it's: %s", call_timeout=2) as other:
        with connection.transaction():
            inside.check(lease, connection)
            database.ask("update {s}.lh_grant set until = 1")  # as if the time had passed
            for _ in range(3):
                assert other.lock("job").try_acquire() is None
            began = time.monotonic()
            for number in range(5):  # and whoever else shares the bucket is not held up
                with other.lock(f"else-{number}"):
                    pass
            assert time.monotonic() - began < 2
        granted_soon(other, "job")
    lease.release()


def test_a_waiter_has_its_turn_once_the_transaction_ends(client, connection, database) -> None:
    lease = client.lock("job", ttl=300).acquire()
    with Client(database.url(), namespace="it's: %s") as other, connection.transaction():
        inside.check(lease, connection)
        assert lease.release(), "the holder is done, but its transaction is not"
        with pytest.raises(TimeoutError):
            other.lock("job", wait=0.4).acquire()
    with Client(database.url(), namespace="it's: %s") as other:
        granted_soon(other, "job")
    assert not client.inspect()


def test_renewals_go_on_while_the_transaction_is_open(client, connection) -> None:
    with client.lock("job", ttl=5) as lease, connection.transaction():
        inside.check(lease, connection)
        lease.renew(ttl=60)
        assert lease.remaining > 50
        inside.check(lease, connection)


@pytest.mark.parametrize("renewed", [False, True])
@pytest.mark.parametrize("level", ["REPEATABLE_READ", "SERIALIZABLE"])
def test_a_snapshot_from_before_does_not_bring_back_an_ended_lease(
    client, connection, database, level, renewed
) -> None:
    connection.isolation_level = psycopg.IsolationLevel[level]
    lease = client.lock("job", ttl=300).acquire()
    with connection.transaction():
        connection.execute("select 1")  # the snapshot is from here
        lease.renew()
        inside.check(lease, connection)
    with pytest.raises((LeaseLost, psycopg.errors.SerializationFailure)), connection.transaction():
        connection.execute("select 1")
        if renewed:
            lease.renew()
        database.ask("select {s}.lh_break_v1(%s, %s, 'job', %s, 1000)", "it's: %s", bucket("job"), lease.token)
        with client.lock("job", reentrant=True):
            inside.check(lease, connection)
    lease.release()


def test_one_statement_may_check_and_write(client, database) -> None:
    with client.lock("job") as lease:
        ask = "select 1 where {s}.lh_check_v1(%s, 'job', %s)"
        assert database.ask(ask, "it's: %s", lease.token) == [(1,)]
        assert database.ask(ask, "it's: %s", lease.token - 1) == []


def test_sqlalchemy(client, database) -> None:
    engine = sqlalchemy.create_engine(database.server.url().replace("postgresql", "postgresql+psycopg"))
    try:
        with client.lock("job") as lease:
            with Session(engine) as session, session.begin():
                inside.check(lease, session)
            with engine.begin() as connection:
                inside.check(lease, connection)
            alone = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            with alone as connection, pytest.raises(ConfigError, match="not in a transaction"):
                inside.check(lease, connection)
            database.ask("update {s}.lh_grant set until = 1")
            with Session(engine) as session, session.begin(), pytest.raises(LeaseLost):
                inside.check(lease, session)
    finally:
        engine.dispose()


def test_asyncio(database) -> None:
    async def main() -> None:
        engine = create_async_engine(database.server.url().replace("postgresql", "postgresql+psycopg"))
        async with AsyncClient(database.url()) as client:
            lease = await client.lock("job").acquire()
            connected = await psycopg.AsyncConnection.connect(database.server.url())
            async with connected as connection, connection.transaction():
                await inside.check_async(lease, connection)
                await inside.check_async(lease, connection.cursor())
            async with AsyncSession(engine) as session, session.begin():
                await inside.check_async(lease, session)
            async with engine.begin() as bound:
                await inside.check_async(lease, bound)
            database.ask("update {s}.lh_grant set until = 1")
            async with AsyncSession(engine) as session, session.begin():
                with pytest.raises(LeaseLost):
                    await inside.check_async(lease, session)
        await engine.dispose()

    asyncio.run(main())


def test_an_engine_elsewhere_is_refused(connection) -> None:
    with Client("memory://") as client, client.lock("job") as lease, pytest.raises(Unsupported, match="memory://"):
        inside.check(lease, connection)
