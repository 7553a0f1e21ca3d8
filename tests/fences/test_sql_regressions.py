"""Attacks on SQL fences: lowered tokens, claims that guard nothing, isolation levels, implicit commits."""

from __future__ import annotations

import asyncio
import sqlite3
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from leasehold import ConfigError, StaleToken, fences

DATABASES = ("sqlite", "postgresql", "mysql")
each_database = pytest.mark.parametrize("database", DATABASES)


def read_column(number: Any, column: str) -> Any:
    cursor = number.connection.cursor()
    cursor.execute(f"select {column} from {number.table} where id = 1")
    (found,) = cursor.fetchone()
    number.connection.commit()
    return found


# ---------------------------------------------------------------------------------- lowered tokens


@each_database
@pytest.mark.parametrize("name", ["fence", "FENCE", "Fence"])
def test_sql_column_refuses_to_write_the_fence_column(database, name, resource):
    """If a column is set twice, the last value counts, which would lower the highest token."""
    number = resource(f"{database}-column")
    number.write(9, 1)
    for call in (
        lambda: number.fence.write(10, 1, **{"v": 2, name: 1}),
        lambda: number.fence.write(10, 1, **{name: 0}),
        lambda: number.fence.take(10, 1, **{name: 5}),
    ):
        with pytest.raises(ConfigError, match="fence column"):
            call()
    assert (read_column(number, "fence"), read_column(number, "v")) == (9, 1)


@each_database
def test_alchemy_column_never_lowers_the_fence_column(database, resource):
    number = resource(f"alchemy-{database}-column")
    number.write(9, 1)
    acct = number.acct
    for call in (
        lambda column: column.write(10, 1, v=2, fence=1),
        lambda column: column.take(10, 1, fence=5),
    ):
        with pytest.raises(ConfigError, match="fence column"), Session(number.engine) as session, session.begin():
            call(fences.AlchemyColumn(session, acct))
    assert (read_column(number, "fence"), read_column(number, "v")) == (9, 1)
    for token, values in enumerate(({"v": 2, "fence": 1}, {acct.fence: 1}, {"fence": acct.fence - 5}), 10):
        with Session(number.engine) as session, session.begin():
            assert fences.AlchemyColumn(session, acct).execute(token, sa.update(acct).values(values)) == 1
        assert read_column(number, "fence") == token  # the value given for it is ignored


@each_database
def test_alchemy_column_executes_only_updates_and_deletes_of_its_entity(database, resource):
    number = resource(f"alchemy-{database}-column")
    other = sa.Table("other", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True))
    for statement in (
        sa.insert(number.acct).values(id=2, v=1),
        sa.select(number.acct),
        sa.text(f"update {number.table} set v = 9"),
        sa.update(other).values(id=1),
    ):
        with pytest.raises(ConfigError, match=r"update\(\) or delete\(\)"), Session(number.engine) as session:
            fences.AlchemyColumn(session, number.acct).execute(9, statement)
    assert number.peek() == 0


@each_database
@pytest.mark.parametrize("name", ["v = 9 --", "v, id", "v;drop table x", 'v"', "v`", "v\n", "(select 1)", "\uff56", ""])
def test_sql_fences_refuse_names_that_are_not_identifiers(database, name, resource):
    number = resource(f"{database}-column")
    for call in (
        lambda: number.fence.write(9, 1, **{name: 1}),
        lambda: number.fence.take(9, 1, **{name: 1}),
        lambda: number.fence.read(9, 1, name),
        lambda: fences.SQLColumn(number.connection, number.table, key=name),
        lambda: fences.SQLColumn(number.connection, number.table, fence=name),
        lambda: fences.sql_schema(database, name),
    ):
        with pytest.raises(ConfigError, match="not a plain"):
            call()
    with pytest.raises(ConfigError):
        fences.SQLColumn(number.connection, None)  # type: ignore[arg-type]
    assert (read_column(number, "v"), read_column(number, "fence")) == (0, None)


@each_database
def test_keys_and_resource_names_are_never_interpreted_as_sql(database, resource):
    number = resource(f"{database}-column")
    for key in ("1 or 1=1", "'; drop table x; --", "%s", "?", ":token"):
        with pytest.raises(Exception, match=r".+") as refused:  # PostgreSQL raises a type error
            number.fence.write(9, key, v=7)
        assert not isinstance(refused.value, StaleToken)
        number.connection.rollback()
        number.fence = fences.SQLColumn(number.connection, number.table)
    row = fences.SQLFence(number.connection, "'; drop table x; -- %s ? :slot", table=number.fence_table)
    row.write(9, f"update {number.table} set v = v")
    with pytest.raises(StaleToken):
        row.write(8, f"update {number.table} set v = 7")
    number.write(9, 1)
    assert number.peek() == 1


@each_database
def test_take_of_zero_succeeds(database, resource):
    """MySQL does not count rows whose values stay the same."""
    number = resource(f"{database}-column")
    number.write(9, 3)
    assert number.fence.take(9, 1, v=0)
    assert number.fence.take(9, 1, v=0)
    assert not number.fence.take(9, 1, v=4)
    assert number.fence.take(9, 1, v=3)
    assert number.fence.take(9, 1, v=0)


# ------------------------------------------------------------------------ claims that guard nothing


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


def test_mysql_write_inside_open_transaction_is_refused(resource, kinds):
    """A SELECT ... FOR UPDATE opens a transaction, which `start transaction` would commit."""
    number = resource("mysql-row")
    number.connection.cursor().execute(f"select v from {number.table} where id = 1 for update")
    with pytest.raises(ConfigError, match="already has an open transaction"):
        number.write(5, 1)
    number.connection.rollback()
    number.write(5, 1)


def test_mysql_fence_table_uses_innodb(resource):
    number = resource("mysql-row")
    cursor = number.connection.cursor()
    cursor.execute("set session default_storage_engine = MyISAM")
    row = fences.SQLFence(number.connection, "a", table=f"own_{number.spec['run']}")
    number.connection.commit()
    row.create()
    metadata = sa.MetaData()
    fences.fence_table(metadata, f"meta_{number.spec['run']}")
    engine = sa.create_engine("mysql+pymysql://", creator=lambda: number.connection)
    metadata.create_all(engine)
    cursor.execute(
        "select table_name, engine from information_schema.tables where table_name in (%s, %s)",
        (f"own_{number.spec['run']}", f"meta_{number.spec['run']}"),
    )
    assert {engine for _, engine in cursor.fetchall()} == {"InnoDB"}


# ---------------------------------------------------------------------------------- isolation levels


def test_alchemy_column_refuses_stale_token_despite_old_mysql_snapshot(resource):
    """At repeatable read a plain query shows the old token: the update matches no row, without any error."""
    number = resource("alchemy-mysql-column")
    acct = number.acct
    number.write(5, 1)
    with Session(number.engine) as session, session.begin():
        assert session.get_one(acct, 1).fence == 5  # the snapshot
        number.write(9, 2)
        with pytest.raises(StaleToken):
            fences.AlchemyColumn(session, acct).execute(8, sa.update(acct).where(acct.id == 1).values(v=99))
    assert number.peek() == 2


def test_cancelled_write_leaves_connection_outside_of_transaction(resource):
    """After any interruption the connection is outside of the transaction, and the next call is not affected."""
    number = resource("sqlite-row-async")

    async def main() -> None:
        async def write(value: int) -> None:
            await number.fence.write(5, f"update {number.table} set v = {value}")

        for pause in range(12):
            task = asyncio.create_task(write(pause))
            for _ in range(pause):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await write(100)

    number.loop.run_until_complete(main())
    assert number.peek() == 100
