"""Connections on which every statement is its own transaction: a fence refuses them before it writes anything, or
begins a transaction of its own."""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from leasehold import ConfigError, StaleToken, fences

DATABASES = ("sqlite", "postgresql", "mysql")


each_database = pytest.mark.parametrize("database", DATABASES)


def connect_autocommit(database: str, spec: dict[str, Any], kinds: Any) -> Any:
    """A connection on which every statement is its own transaction."""
    if database == "sqlite":
        return sqlite3.connect(spec["path"], isolation_level=None)
    connection = kinds.connected(database, spec)
    connection.autocommit(True) if database == "mysql" else connection.set_autocommit(True)
    return connection


@each_database
def test_claim_outside_of_transaction_is_refused(database, resource, kinds):
    """The claim would end before the next statement: check and write would not be atomic."""
    number = resource(f"{database}-row")
    connection = connect_autocommit(database, number.spec, kinds)
    fence = fences.SQLFence(connection, "acct/1", table=number.fence_table)
    with pytest.raises(ConfigError, match="transaction"):
        fence.claim(5)
    cursor = connection.cursor()
    cursor.execute("begin")
    fence.claim(5)
    cursor.execute(f"update {number.table} set v = 1")
    cursor.execute("commit")
    assert number.peek() == 1
    with pytest.raises(StaleToken):
        fence.write(4, f"update {number.table} set v = 2")
    connection.close()


@each_database
def test_async_claim_outside_of_transaction_is_refused(database, resource, kinds):
    number = resource(f"{database}-row-async")

    async def main() -> None:
        if database == "sqlite":
            import aiosqlite

            await number.other.close()
            number.other = await aiosqlite.connect(number.spec["path"], isolation_level=None)
            number.fence = fences.AsyncSQLFence(number.other, "acct/1", table=number.fence_table)
        elif database == "postgresql":
            await number.other.set_autocommit(True)
        else:
            await number.other.autocommit(True)
        with pytest.raises(ConfigError, match="transaction"):
            await number.fence.claim(5)
        await number.fence.write(5, f"update {number.table} set v = 1")

    number.loop.run_until_complete(main())
    assert number.peek() == 1


def test_sql_fences_work_on_autocommit_connections(resource):
    import psycopg
    import pymysql

    for database in DATABASES:
        number = resource(f"{database}-row")
        if database == "sqlite":
            connection = sqlite3.connect(number.spec["path"], isolation_level=None)
        elif database == "postgresql":
            conninfo = f"host=127.0.0.1 port={number.spec['postgresql']} user=postgres dbname=postgres"
            connection = psycopg.connect(conninfo, autocommit=True, row_factory=psycopg.rows.dict_row)
        else:
            connection = pymysql.connect(
                host="127.0.0.1", port=number.spec["mysql"], user="root", database="test",
                autocommit=True, cursorclass=pymysql.cursors.DictCursor,
            )  # fmt: skip
        fence = fences.SQLFence(connection, "acct/1", table=number.fence_table)
        fence.write(5, f"update {number.table} set v = 1")
        with pytest.raises(RuntimeError), fence.transaction(5) as cursor:
            cursor.execute(f"update {number.table} set v = 2")
            raise RuntimeError
        assert number.peek() == 1
        with pytest.raises(StaleToken):
            fence.write(4, f"update {number.table} set v = 3")
        column = fences.SQLColumn(connection, number.table)
        column.write(5, 1, v=4)
        assert column.read(5, 1, "v") == (4,)
        connection.close()


@each_database
def test_alchemy_claim_under_autocommit_is_refused(database, resource):
    number = resource(f"alchemy-{database}-core")
    engine = number.engine.execution_options(isolation_level="AUTOCOMMIT")
    statement = sa.update(number.acct).values(v=7)
    with engine.connect() as connection:
        fence = fences.AlchemyFence(connection, "acct/1", table=number.fence_table)
        for call in (lambda: fence.claim(5), lambda: fence.write(5, statement)):
            with pytest.raises(ConfigError, match="AUTOCOMMIT"):
                call()
    with Session(engine) as session, pytest.raises(ConfigError, match="AUTOCOMMIT"):
        fences.AlchemyFence(session, "acct/1", table=number.fence_table).claim(5)
    assert number.peek() == 0


def test_async_alchemy_claim_under_autocommit_is_refused(resource):
    from sqlalchemy.ext.asyncio import AsyncSession

    number = resource("alchemy-postgresql-orm-async")
    engine = number.engine.execution_options(isolation_level="AUTOCOMMIT")

    async def main() -> None:
        async with AsyncSession(engine) as session:
            with pytest.raises(ConfigError, match="AUTOCOMMIT"):
                await fences.AsyncAlchemyFence(session, "acct/1", table=number.fence_table).claim(5)
        async with engine.connect() as connection:
            with pytest.raises(ConfigError, match="AUTOCOMMIT"):
                await fences.AsyncAlchemyFence(connection, "acct/1", table=number.fence_table).claim(5)

    number.loop.run_until_complete(main())


def autocommit_engines(number: Any) -> list[Any]:
    """SQLAlchemy's ways to ask for autocommit: for some connections, or for the whole engine."""
    return [
        number.engine.execution_options(isolation_level="AUTOCOMMIT"),
        sa.create_engine(number.engine.url, isolation_level="AUTOCOMMIT"),
    ]


@each_database
def test_alchemy_column_refuses_autocommit_before_it_writes(database, resource):
    """`execute` once wrote the rows with lower tokens and then raised StaleToken."""
    number = resource(f"alchemy-{database}-column")
    acct = number.acct
    with Session(number.engine) as session, session.begin():
        session.add(acct(id=2, v=10, fence=20))
    calls = (
        lambda column: column.execute(8, sa.update(acct).values(v=99)),  # row 1 has a lower token, row 2 a higher one
        lambda column: column.execute(8, sa.delete(acct)),
        lambda column: column.write(8, 1, v=99),
        lambda column: column.take(8, 1, v=0),
        lambda column: column.claim(8, 1),
        lambda column: column.read(8, 1, "v"),
    )
    for engine in autocommit_engines(number):
        for call in calls:
            with engine.connect() as connection, pytest.raises(ConfigError, match="AUTOCOMMIT"):
                call(fences.AlchemyColumn(connection, acct.__table__))
            with Session(engine) as session, pytest.raises(ConfigError, match="AUTOCOMMIT"):
                call(fences.AlchemyColumn(session, acct))
        engine.dispose()
    with number.engine.connect() as connection:
        rows = connection.execute(sa.select(acct.id, acct.v, acct.fence).order_by(acct.id)).all()
    assert rows == [(1, 0, None), (2, 10, 20)]


@each_database
def test_async_alchemy_column_refuses_autocommit_before_it_writes(database, resource):
    from sqlalchemy.ext.asyncio import AsyncSession

    number = resource(f"alchemy-{database}-column-async")
    acct = number.acct
    engine = number.engine.execution_options(isolation_level="AUTOCOMMIT")

    async def main() -> None:
        async with AsyncSession(engine) as session:
            with pytest.raises(ConfigError, match="AUTOCOMMIT"):
                await fences.AsyncAlchemyColumn(session, acct).execute(8, sa.update(acct).values(v=99))
        async with engine.connect() as connection:
            column = fences.AsyncAlchemyColumn(connection, acct.__table__)
            for call in (
                lambda: column.execute(8, sa.update(acct).values(v=99)),
                lambda: column.write(8, 1, v=99),
                lambda: column.take(8, 1, v=0),
                lambda: column.claim(8, 1),
                lambda: column.read(8, 1, "v"),
            ):
                with pytest.raises(ConfigError, match="AUTOCOMMIT"):
                    await call()

    number.loop.run_until_complete(main())
    assert number.peek() == 0


def test_alchemy_fences_accept_sqlite_that_begins_by_event(resource):
    """SQLAlchemy's recipe for SQLite: the driver never begins by itself, an event of SQLAlchemy does."""
    number = resource("alchemy-sqlite-column")

    @sa.event.listens_for(number.engine, "connect")
    def connect(connection: Any, record: Any) -> None:
        connection.isolation_level = None

    @sa.event.listens_for(number.engine, "begin")
    def begin(connection: Any) -> None:
        connection.exec_driver_sql("begin immediate")

    with number.engine.connect() as connection:
        fences.AlchemyColumn(connection, number.acct.__table__).write(5, 1, v=7)
        connection.commit()
    with number.engine.connect() as connection:
        fences.AlchemyFence(connection, "acct/1", table=number.fence_table).claim(5)
        connection.rollback()
    assert number.peek() == 7
