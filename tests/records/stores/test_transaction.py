"""A record in the caller's transaction: record and effect commit together or not at all."""

import asyncio
import contextlib
import sqlite3
import threading

import pytest

import leasehold
from leasehold import ConfigError
from leasehold.records import stores


@pytest.fixture(params=["sqlite", "postgresql", "mysql"])
def database(request, database_of):
    return database_of(request.param)


@pytest.fixture
def client():
    with leasehold.Client("memory://") as client:
        yield client


def test_effect_and_record_are_committed_together(client, database, key):
    def pay(connection):
        connection.cursor().execute(database.insert(), (key,))
        return {"paid": key}

    for wanted in (1, 1, 1):
        with contextlib.closing(database.connect()) as connection:
            assert client.once(key, pay, connection, store=stores.within(connection)) == {"paid": key}
            connection.commit()
        assert database.paid(key) == wanted


def test_effect_and_record_are_rolled_back_together(client, database, key):
    with contextlib.closing(database.connect()) as connection:
        done = client.once(key, lambda: connection.cursor().execute(database.insert(), (key,)) and None,
                           store=stores.within(connection))  # fmt: skip
        assert done is None
        connection.rollback()
    assert database.paid(key) == 0
    with contextlib.closing(database.connect()) as connection:
        assert client.outcome(key, store=stores.within(connection)) is None
        assert client.once(key, lambda: "second", store=stores.within(connection)) == "second"
        connection.commit()


def test_failed_run_rolls_back_its_effect(client, database, key):
    def pay(connection):
        connection.cursor().execute(database.insert(), (key,))
        raise RuntimeError("card refused")

    with contextlib.closing(database.connect()) as connection:
        with pytest.raises(RuntimeError, match="card refused"):
            client.once(key, pay, connection, store=stores.within(connection))
        connection.rollback()
    assert database.paid(key) == 0


def test_second_transaction_waits_for_first_and_gets_its_result(client, database, key):
    """The lock is free as soon as `once` returns, but the first caller has not committed yet: the unique key
    excludes."""
    first, results = database.connect(), []
    first.cursor().execute("begin immediate" if database.kind == "sqlite" else "select 1")
    assert client.once(key, lambda: "first", store=stores.within(first)) == "first"

    def other() -> None:
        with contextlib.closing(database.connect()) as connection:
            if database.kind == "sqlite":
                connection.execute("begin immediate")
            results.append(client.once(key, lambda: "second", store=stores.within(connection)))
            connection.commit()

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(0.3)
    assert results == [], "the second caller must wait for the first transaction to end"
    first.commit()
    thread.join(30)
    first.close()
    assert results == ["first"]


def test_autocommit_connection_is_refused(client, database, key):
    with contextlib.closing(database.connect()) as connection:
        if database.kind == "sqlite":
            connection.isolation_level = None
        elif database.kind == "postgresql":
            connection.autocommit = True
        else:
            connection.autocommit(True)
        with pytest.raises(ConfigError, match="needs an open transaction"):
            client.once(key, lambda: 1, store=stores.within(connection))
        connection.cursor().execute("begin")
        assert client.once(key, lambda: 1, store=stores.within(connection)) == 1
        connection.rollback()


@pytest.mark.parametrize("which", ["postgresql", "mysql"])
def test_async_connections_commit_effect_and_record_together(which, database_of, key):
    database = database_of(which)

    async def main() -> None:
        async with leasehold.AsyncClient("memory://") as client:
            for commits in (False, True, True):
                connection = await database.connect_async()
                cursor = connection.cursor() if which == "postgresql" else await connection.cursor()

                async def pay(cursor=cursor):
                    await cursor.execute(database.insert(), (key,))
                    return "done"

                assert await client.once(key, pay, store=stores.within(connection)) == "done"
                await (connection.commit() if commits else connection.rollback())
                await cursor.close()
                closing = connection.close()
                if closing is not None:
                    await closing

    asyncio.run(main())
    assert database.paid(key) == 1


def test_store_reads_rows_given_as_dictionaries(client, database_of, key):
    psycopg, pymysql = pytest.importorskip("psycopg"), pytest.importorskip("pymysql")
    from psycopg.rows import dict_row

    for which in ("postgresql", "mysql", "sqlite"):
        database = database_of(which)
        if which == "postgresql":
            connection = psycopg.connect(database.url, row_factory=dict_row)
        elif which == "mysql":
            connection = pymysql.connect(**database.mysql, cursorclass=pymysql.cursors.DictCursor)
        else:
            connection = database.connect()
            connection.row_factory = sqlite3.Row
        with contextlib.closing(connection):
            for _ in range(2):
                assert client.once(f"{key}{which}", lambda: 5, store=stores.within(connection)) == 5
            connection.commit()


def test_connection_of_sqlalchemy_session_can_be_used(client, database_of, key):
    sqlalchemy = pytest.importorskip("sqlalchemy")
    from sqlalchemy.orm import Session

    database = database_of("postgresql")
    engine = sqlalchemy.create_engine(database.url.replace("postgresql://", "postgresql+psycopg://"))
    for _ in range(2):
        with Session(engine) as session, session.begin():

            def pay(session=session):
                session.execute(sqlalchemy.text("insert into paid values (:name)"), {"name": key})
                return True

            connection = session.connection().connection.driver_connection
            assert client.once(key, pay, store=stores.within(connection)) is True
    engine.dispose()
    assert database.paid(key) == 1


def test_object_that_is_not_a_connection_is_refused():
    with pytest.raises(ConfigError, match="takes connections of sqlite3"):
        stores.within(object())
