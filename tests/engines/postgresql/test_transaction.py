"""The lease check inside the application's transaction: "still the holder" and the write commit together."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
import sqlalchemy
from psycopg.rows import dict_row
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from leasehold import AsyncClient, Client, ConfigError, LeaseLost, Unsupported, transaction
from leasehold.core.names import bucket
from leasehold.engines.postgresql import schema as postgresql_schema
from tests.support import probe
from tests.support.timing import check_elapsed


@pytest.fixture
def client(database):
    with Client(database.url(), namespace="it's: %s", ttl=30) as client:
        yield client


@pytest.fixture
def connection(database):
    with psycopg.connect(database.server.url()) as connection:
        yield connection


def assert_granted(client: Client, name: str) -> None:
    assert client.lock(name, wait=20).acquire().release()


def test_check_passes_for_a_held_lease(client, connection) -> None:
    with client.lock("job") as lease:
        with connection.transaction():
            transaction.check(lease, connection)
            transaction.check(lease, connection.cursor())
            transaction.check(lease, connection.cursor(row_factory=dict_row))
        lease.renew()


def test_check_of_a_broken_lease_is_refused(client, connection) -> None:
    lease = client.lock("job", ttl=300).acquire()
    other = Client(probe.config(client).url, namespace=probe.core(client).options.namespace)
    with other, connection.transaction():
        assert other.break_lock("job", token=lease.token)
        with pytest.raises(LeaseLost):
            transaction.check(lease, connection)
    assert not lease.release()


def test_check_of_an_expired_lease_is_refused_though_the_name_is_free(client, connection, database) -> None:
    lease = client.lock("job", ttl=300).acquire()
    database.ask("update {s}.lh_grant set until = 1")
    with connection.transaction(), pytest.raises(LeaseLost):
        transaction.check(lease, connection)
    lease.release()


def test_check_outside_a_transaction_is_refused(client, database) -> None:
    with client.lock("job") as lease, psycopg.connect(database.server.url(), autocommit=True) as connection:
        with pytest.raises(ConfigError, match="not in a transaction"):
            transaction.check(lease, connection)
        with connection.transaction():
            transaction.check(lease, connection)


def test_name_is_not_granted_before_the_transaction_ends(client, connection, database) -> None:
    """This holds even if the lease has expired: the transaction may still commit what it wrote as the holder."""
    lease = client.lock("job", ttl=300).acquire()
    with Client(database.url(), namespace="it's: %s", call_timeout=2) as other:
        with connection.transaction():
            transaction.check(lease, connection)
            database.ask("update {s}.lh_grant set until = 1")  # as if the lease had expired
            for _ in range(3):
                assert other.lock("job").try_acquire() is None
            began = time.monotonic()
            for number in range(5):  # claims on other names are not blocked
                with other.lock(f"else-{number}"):
                    pass
            check_elapsed(began, 2)
        assert_granted(other, "job")
    lease.release()


def test_released_name_is_granted_once_the_transaction_ends(client, connection, database) -> None:
    lease = client.lock("job", ttl=300).acquire()
    with Client(database.url(), namespace="it's: %s") as other, connection.transaction():
        transaction.check(lease, connection)
        assert lease.release(), "the holder is done, but its transaction is not"
        with pytest.raises(TimeoutError):
            other.lock("job", wait=0.4).acquire()
    with Client(database.url(), namespace="it's: %s") as other:
        assert_granted(other, "job")
    assert not client.inspect()


def test_renewals_continue_while_the_transaction_is_open(client, connection) -> None:
    with client.lock("job", ttl=30) as lease, connection.transaction():
        transaction.check(lease, connection)
        lease.renew(ttl=60)
        assert lease.remaining > 50
        transaction.check(lease, connection)


@pytest.mark.parametrize("level", ["REPEATABLE_READ", "SERIALIZABLE"])
def test_release_on_commit_needs_read_committed(client, connection, level) -> None:
    connection.isolation_level = psycopg.IsolationLevel[level]
    with client.lock("job") as lease:
        with connection.transaction(), pytest.raises(ConfigError, match="READ COMMITTED"):
            transaction.release_on_commit(lease, connection)
        lease.verify()


def test_snapshot_older_than_the_lease_is_not_a_loss(client, connection) -> None:
    connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    with connection.transaction():
        connection.execute("select 1")  # takes the snapshot
        with client.lock("job") as lease:
            with pytest.raises(ConfigError, match="began before the lock"):
                transaction.check(lease, connection)
            assert lease.held


@pytest.mark.parametrize("call", [transaction.check, transaction.release_on_commit])
def test_other_database_with_the_same_schema_is_refused(client, database, call) -> None:
    database.server.ask("create database other_database")
    try:
        with psycopg.connect(database.server.url(), dbname="other_database") as elsewhere:
            elsewhere.execute(postgresql_schema.text(database.schema).encode())
            elsewhere.commit()
            with client.lock("job") as lease:
                with pytest.raises(ConfigError, match="another database"):
                    call(lease, elsewhere)
                lease.verify()
    finally:
        database.server.ask("drop database other_database")


def test_commit_of_a_release_does_not_wait_for_renewals(client, connection, database) -> None:
    """The commit locks the rows of all its leases, and a renewal those of its batch: each may have one the other needs.
    Here the renewal is a transaction that has one row, and then takes the other."""
    first, second = client.lock("first").acquire(), client.lock("second").acquire()
    transaction.release_on_commit(second, connection)
    transaction.release_on_commit(first, connection)
    renew = f'update "{database.schema}".lh_grant set until = until + 1 where name = %s'
    with database.server.connect() as renewal, ThreadPoolExecutor() as pool:
        with renewal.transaction():
            renewal.execute(renew, ("first",))
            committed = pool.submit(connection.commit)
            with pytest.raises(TimeoutError):
                committed.result(0.2)
            renewal.execute("set local lock_timeout = '20s'")
            renewal.execute(renew, ("second",))
        committed.result(60)
    assert not client.inspect()
    assert not first.release()
    assert not second.release()


def test_commit_locks_the_buckets_of_its_leases_in_order(client, connection, database, wait_until) -> None:
    """Otherwise two commits could each have a bucket that the other needs."""
    names = sorted(map(str, range(8)), key=bucket, reverse=True)
    leases = [client.lock(name).acquire() for name in names]
    for lease in leases:
        transaction.release_on_commit(lease, connection)
    buckets = f'select 1 from "{database.schema}".lh_bucket where bucket = %s for update nowait'
    backend = connection.info.backend_pid
    waiting = "select 1 from pg_stat_activity where pid = %s and wait_event_type = 'Lock'"
    with database.server.connect() as session, ThreadPoolExecutor() as pool:
        with session.transaction():
            session.execute(buckets, (bucket(names[-1]),))
            committed = pool.submit(connection.commit)
            wait_until(lambda: database.ask(waiting, backend))
            for name in names[:-1]:
                session.execute(buckets, (bucket(name),))
        committed.result(60)
    assert not client.inspect()
    for lease in leases:
        lease.release()


@pytest.mark.parametrize("renewed", [False, True])
@pytest.mark.parametrize("level", ["REPEATABLE_READ", "SERIALIZABLE"])
def test_old_snapshot_does_not_revive_an_ended_lease(client, connection, database, level, renewed) -> None:
    connection.isolation_level = psycopg.IsolationLevel[level]
    lease = client.lock("job", ttl=300).acquire()
    with connection.transaction():
        connection.execute("select 1")  # takes the snapshot
        lease.renew()
        transaction.check(lease, connection)
    with pytest.raises((LeaseLost, psycopg.errors.SerializationFailure)), connection.transaction():
        connection.execute("select 1")
        if renewed:
            lease.renew()
        database.ask("select {s}.lh_break_v1(%s, %s, 'job', %s, 1000)", "it's: %s", bucket("job"), lease.token)
        with client.lock("job", reentrant=True):
            transaction.check(lease, connection)
    lease.release()


def test_check_function_can_be_used_in_a_where_clause(client, database) -> None:
    with client.lock("job") as lease:
        ask = "select 1 where {s}.lh_check_v1(%s, 'job', %s)"
        assert database.ask(ask, "it's: %s", lease.token) == [(1,)]
        assert database.ask(ask, "it's: %s", lease.token - 1) == []


def test_check_works_with_sqlalchemy(client, database) -> None:
    engine = sqlalchemy.create_engine(database.server.url().replace("postgresql", "postgresql+psycopg"))
    try:
        lease = client.lock("job").acquire()
        with Session(engine) as session, session.begin():
            transaction.check(lease, session)
        with engine.begin() as connection:
            transaction.check(lease, connection)
        autocommit = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        with autocommit as connection, pytest.raises(ConfigError, match="not in a transaction"):
            transaction.check(lease, connection)
        database.ask("update {s}.lh_grant set until = 1")
        with Session(engine) as session, session.begin(), pytest.raises(LeaseLost):
            transaction.check(lease, session)
        lease.release()
    finally:
        engine.dispose()


def test_check_works_with_asyncio(database) -> None:
    async def main() -> None:
        engine = create_async_engine(database.server.url().replace("postgresql", "postgresql+psycopg"))
        async with AsyncClient(database.url()) as client:
            lease = await client.lock("job").acquire()
            connected = await psycopg.AsyncConnection.connect(database.server.url())
            async with connected as connection, connection.transaction():
                await transaction.check_async(lease, connection)
                await transaction.check_async(lease, connection.cursor())
            async with AsyncSession(engine) as session, session.begin():
                await transaction.check_async(lease, session)
            async with engine.begin() as bound:
                await transaction.check_async(lease, bound)
            database.ask("update {s}.lh_grant set until = 1")
            async with AsyncSession(engine) as session, session.begin():
                with pytest.raises(LeaseLost):
                    await transaction.check_async(lease, session)
        await engine.dispose()

    asyncio.run(main())


def test_check_of_a_lease_on_another_engine_is_refused(connection) -> None:
    with Client("memory://") as client, client.lock("job") as lease, pytest.raises(Unsupported, match="memory://"):
        transaction.check(lease, connection)
