"""Behaviour specific to SQL fences: transactions of the caller and of the fence, snapshots, taking from a stock."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from leasehold import ConfigError, StaleToken, fences

DATABASES = ("sqlite", "postgresql", "mysql")
each_database = pytest.mark.parametrize("database", DATABASES)


@pytest.fixture
def stock(resource):
    """A table `stock` for each number, and a way to open more connections."""

    def make(database: str):
        number = resource(f"{database}-row")
        number.stock = f"stock_{number.spec['run']}"
        cursor = number.connection.cursor()
        cursor.execute(
            f"create table {number.stock} (item varchar(50) primary key, quantity integer not null, "
            "fence bigint not null default 0)"
        )
        cursor.execute(f"insert into {number.stock} (item, quantity) values ('teapot', 3)")
        number.connection.commit()
        return number

    return make


def connect_again(number, resource_kinds):
    """Open another connection to the same database."""
    return resource_kinds.connected(number.database, number.spec)


# --------------------------------------------------------------------------- stock


@each_database
def test_take_never_oversells(database, stock):
    number = stock(database)
    fence = fences.SQLColumn(number.connection, number.stock, key="item")
    assert fence.take(5, "teapot", quantity=2)
    assert not fence.take(5, "teapot", quantity=2)  # one is left
    with pytest.raises(StaleToken, match=r"stock_\w+/teapot refused token 4: it has seen 5"):
        fence.take(4, "teapot", quantity=1)
    assert fence.take(6, "teapot", quantity=1)
    assert fence.read(6, "teapot", "quantity", "fence") == (0, 6)


@each_database
def test_failed_take_raises_the_highest_token(database, stock):
    number = stock(database)
    fence = fences.SQLColumn(number.connection, number.stock, key="item")
    assert not fence.take(9, "teapot", quantity=4)
    with pytest.raises(StaleToken):
        fence.write(8, "teapot", quantity=100)


@each_database
def test_sql_column_raises_lookup_error_for_missing_row(database, stock):
    number = stock(database)
    fence = fences.SQLColumn(number.connection, number.stock, key="item")
    for call in (
        lambda: fence.write(5, "cup", quantity=1),
        lambda: fence.read(5, "cup", "quantity"),
        lambda: fence.take(5, "cup", quantity=1),
        lambda: fence.claim(5, "cup"),
    ):
        with pytest.raises(LookupError, match=r"stock_\w+/cup does not exist"):
            call()


@each_database
def test_write_of_unchanged_value_succeeds(database, stock):
    """MySQL does not count rows whose values stay the same."""
    number = stock(database)
    fence = fences.SQLColumn(number.connection, number.stock, key="item")
    fence.write(5, "teapot", quantity=3)
    fence.write(5, "teapot", quantity=3)
    fence.claim(5, "teapot")
    fence.claim(5, "teapot")
    assert fence.read(5, "teapot", "quantity") == (3,)


def test_table_and_column_names_must_be_identifiers(resource):
    connection = resource("sqlite-row").connection
    for bad in ("stock; drop table x", "a b", "", "1a", "a.b.c", 'a"'):
        with pytest.raises(ConfigError, match="not a plain"):
            fences.SQLColumn(connection, bad)
        with pytest.raises(ConfigError, match="not a plain"):
            fences.SQLFence(connection, "a", table=bad)
    with pytest.raises(ConfigError, match="not a plain"):
        fences.SQLColumn(connection, "acct").write(5, 1, **{"v = 1 --": 2})
    with pytest.raises(ConfigError, match="columns"):
        fences.SQLColumn(connection, "acct").write(5, 1)


# -------------------------------------------------------------------- transactions


@each_database
def test_failed_fence_transaction_is_rolled_back_with_its_token(database, stock):
    number = stock(database)
    fence = fences.SQLFence(number.connection, "stock", table=number.fence_table)
    fence.claim(9)
    number.connection.commit()
    with pytest.raises(StaleToken), fence.transaction(8):
        pytest.fail("the body of a stale transaction never runs")
    with pytest.raises(ZeroDivisionError), fence.transaction(10) as cursor:
        cursor.execute(f"update {number.stock} set quantity = 0")
        1 / 0  # noqa: B018
    assert fence.read(9, f"select quantity from {number.stock}")[0][0] == 3  # the highest token was not raised either
    with fence.transaction(10) as cursor:
        cursor.execute(f"update {number.stock} set quantity = 2")
        cursor.execute(f"update {number.stock} set quantity = quantity - 1")
    assert fence.read(10, f"select quantity from {number.stock}")[0][0] == 1


@each_database
def test_fence_refuses_connection_with_open_transaction(database, stock):
    number = stock(database)
    fence = fences.SQLFence(number.connection, "stock", table=number.fence_table)
    number.connection.cursor().execute(f"update {number.stock} set quantity = 7")
    for call in (
        lambda: fence.write(5, f"update {number.stock} set quantity = 1"),
        lambda: fence.read(5, f"select quantity from {number.stock}"),
        lambda: fence.transaction(5).__enter__(),
        lambda: fences.SQLColumn(number.connection, number.stock, key="item").take(5, "teapot", quantity=1),
    ):
        with pytest.raises(ConfigError, match="already has an open transaction"):
            call()
    number.connection.rollback()
    assert fence.read(5, f"select quantity from {number.stock}")[0][0] == 3


@each_database
def test_claim_is_undone_when_transaction_of_caller_rolls_back(database, stock):
    number = stock(database)
    fence = fences.SQLFence(number.connection, "stock", table=number.fence_table)
    fence.claim(9)
    number.connection.rollback()
    fence.claim(5)  # the claim of 9 was never committed
    number.connection.commit()
    with pytest.raises(StaleToken):
        fence.claim(4)
    number.connection.rollback()


@each_database
def test_newer_holder_waits_for_transaction_of_older_holder(database, stock, kinds):
    """No holder can come between check and commit: the older holder's write is complete before the newer one reads."""
    number = stock(database)
    order = []
    fence = fences.SQLFence(number.connection, "stock", table=number.fence_table)
    fence.write(4, f"update {number.stock} set quantity = quantity")

    def newer():
        other = connect_again(number, kinds)
        newer_fence = fences.SQLFence(other, "stock", table=number.fence_table)
        order.append(("read", newer_fence.read(6, f"select quantity from {number.stock}")[0][0]))
        other.close()

    thread = threading.Thread(target=newer)
    with fence.transaction(5) as cursor:
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        order.append("written")
        cursor.execute(f"update {number.stock} set quantity = 1")
    thread.join(30)
    assert order == ["written", ("read", 1)]
    with pytest.raises(StaleToken):
        fence.write(5, f"update {number.stock} set quantity = 99")


def test_mysql_claim_sees_newer_token_despite_old_snapshot(stock, kinds):
    """At repeatable read, MySQL's default, a transaction keeps seeing the token of its first query."""
    number = stock("mysql")
    other = connect_again(number, kinds)
    fence = fences.SQLFence(number.connection, "stock", table=number.fence_table)
    fence.write(5, f"update {number.stock} set quantity = 2")
    cursor = number.connection.cursor()
    cursor.execute(f"select token from {number.fence_table}")
    assert cursor.fetchone() == (5,)
    fences.SQLFence(other, "stock", table=number.fence_table).write(9, f"update {number.stock} set quantity = 1")
    cursor.execute(f"select token from {number.fence_table}")
    assert cursor.fetchone() == (5,)  # the old snapshot
    with pytest.raises(StaleToken) as refused:
        fence.claim(6)
    assert refused.value.highest == 9
    number.connection.rollback()
    other.close()


def test_postgresql_claim_in_old_snapshot_is_serialization_failure(stock, kinds):
    import psycopg

    number = stock("postgresql")
    other = connect_again(number, kinds)
    number.connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    fence = fences.SQLFence(number.connection, "stock", table=number.fence_table)
    fence.write(5, f"update {number.stock} set quantity = 2")
    number.connection.execute(f"select * from {number.stock}")
    fences.SQLFence(other, "stock", table=number.fence_table).write(9, f"update {number.stock} set quantity = 1")
    with pytest.raises(psycopg.errors.SerializationFailure):
        fence.claim(10)
    number.connection.rollback()
    fence.claim(10)
    number.connection.rollback()
    other.close()


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


def test_statement_without_parameters_may_contain_percent_sign(resource):
    for database in DATABASES:
        number = resource(f"{database}-row")
        assert number.fence.read(5, f"select v from {number.table} where 'a%' like 'a%'")[0][0] == 0
        assert number.fence.write(5, f"update {number.table} set v = 1 where 'a%' like 'a%'") == 1


def test_create_fence_table_twice_is_harmless(resource):
    for database in DATABASES:
        number = resource(f"{database}-row")
        fence = fences.SQLFence(number.connection, "a", table=f"own_{number.spec['run']}")
        fence.create()
        fence.create()
        fence.claim(5)
        number.connection.commit()


@each_database
def test_processes_create_the_fence_table_at_the_same_time(database, resource, child):
    """On PostgreSQL `create table if not exists` fails for some, with UniqueViolation or DuplicateObject."""
    number = resource(f"{database}-row")
    children = [child("create", f"{database}-row", json.dumps(number.spec), 10) for _ in range(5)]
    assert [process.hear() for process in children] == ["ready"] * 5
    for _ in range(10):
        for process in children:
            process.send_newline()
        assert [process.hear() for process in children] == ["created"] * 5


@each_database
@pytest.mark.parametrize("mode", ["", "-async"])
def test_sql_fence_write_counts_matched_rows(database, mode, resource):
    """MySQL counts only rows that change: a write of the same value looked as if the row was missing."""
    number = resource(f"{database}-row{mode}")

    def write(statement: str, *parameters: Any) -> int:
        count = number.fence.write(5, statement, parameters or None)
        return number.loop.run_until_complete(count) if mode else count

    update = f"update {number.table} set v = {number.placeholder} where id = {number.placeholder}"
    assert [write(update, 7, 1), write(update, 7, 1), write(update, 7, 2)] == [1, 1, 0]
    assert write(f"  UPDATE {number.table} set v = 7") == 1
    assert write(f"insert into {number.table} (id, v) values (2, 7), (3, 7)") == 2
    assert write(f"update {number.table} set v = 7") == 3
    assert write(f"delete from {number.table} where id > 1") == 2


def test_resource_names_are_compared_byte_by_byte(resource):
    for database in DATABASES:
        number = resource(f"{database}-row")
        for index, name in enumerate(("a", "A", "a ", "é", "e\u0301", "x" * 255)):
            fence = fences.SQLFence(number.connection, name, table=number.fence_table)
            fence.write(100 - index, f"update {number.table} set v = 1")  # StaleToken if two names were the same


def test_unknown_driver_requires_dialect():
    class Connection:
        pass

    with pytest.raises(ConfigError, match="pass dialect="):
        fences.SQLFence(Connection(), "a")
    with pytest.raises(ConfigError, match="unknown SQL dialect 'oracle'"):
        fences.SQLFence(Connection(), "a", dialect="oracle")


# ---------------------------------------------------------------------- asyncio


@each_database
def test_cancelled_async_transaction_is_rolled_back(database, resource):
    number = resource(f"{database}-row-async")

    async def work(entered: asyncio.Event) -> None:
        async with number.fence.transaction(9) as cursor:
            await cursor.execute(f"update {number.table} set v = 7")
            entered.set()
            await asyncio.sleep(60)

    async def main() -> None:
        entered = asyncio.Event()
        task = asyncio.create_task(work(entered))
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with number.fence.transaction(5) as cursor:
            await cursor.execute(f"update {number.table} set v = v + 1")

    number.loop.run_until_complete(main())
    assert number.peek() == 1


# ------------------------------------------------------------------- SQLAlchemy


@each_database
def test_alchemy_column_executes_updates_and_deletes_if_token_is_current(database, resource):
    number = resource(f"alchemy-{database}-column")
    acct = number.acct
    with Session(number.engine) as session, session.begin():
        session.add_all([acct(id=2, v=10, fence=20), acct(id=3, v=10, fence=0)])
    with Session(number.engine) as session, session.begin():
        column = fences.AlchemyColumn(session, acct)
        account = session.get_one(acct, 3)
        assert column.execute(7, sa.update(acct).where(acct.id == 3, acct.v >= 4).values(v=acct.v - 4)) == 1
        assert column.execute(7, sa.update(acct).where(acct.id == 3, acct.v >= 100).values(v=0)) == 0
        assert (account.v, account.fence) == (6, 7)  # the session's objects are updated
        assert column.take(7, 3, v=6)
        assert not column.take(7, 3, v=1)
    with pytest.raises(StaleToken) as refused, Session(number.engine) as session, session.begin():
        fences.AlchemyColumn(session, acct).execute(8, sa.update(acct).values(v=99))  # one of three rows has seen 20
    assert refused.value.highest == 20
    with Session(number.engine) as session, session.begin():
        assert session.scalars(sa.select(acct.v).order_by(acct.id)).all() == [0, 10, 0]
        column = fences.AlchemyColumn(session, acct)
        with pytest.raises(StaleToken):
            column.execute(8, sa.delete(acct).where(acct.id == 2))
        assert column.execute(21, sa.delete(acct).where(acct.id == 2)) == 1
        with pytest.raises(LookupError):
            column.write(21, 2, v=1)


@each_database
def test_alchemy_fences_work_with_core_tables_and_connections(database, resource):
    number = resource(f"alchemy-{database}-core")
    table = number.acct.__table__
    with number.engine.begin() as connection:
        column = fences.AlchemyColumn(connection, table)
        column.write(5, 1, v=4)
        assert column.read(5, 1, "v", "fence") == (4, 5)
        assert column.take(5, 1, v=3)
        row = fences.AlchemyFence(connection, "other", table=number.fence_table)
        row.claim(5)
        assert row.write(5, sa.update(table).values(v=9)).rowcount == 1
    with pytest.raises(StaleToken), number.engine.begin() as connection:
        fences.AlchemyFence(connection, "other", table=number.fence_table).write(4, sa.update(table).values(v=0))
    assert number.peek() == 9


@each_database
def test_fence_table_can_be_created_from_metadata(database, resource):
    number = resource(f"alchemy-{database}-core")
    metadata = sa.MetaData()
    fences.fence_table(metadata, f"meta_{number.spec['run']}")
    metadata.create_all(number.engine)
    with number.engine.begin() as connection:
        for index, name in enumerate(("a", "A", "a ")):
            fences.AlchemyFence(connection, name, table=f"meta_{number.spec['run']}").claim(9 - index)
    with pytest.raises(StaleToken), number.engine.begin() as connection:
        fences.AlchemyFence(connection, "a", table=f"meta_{number.spec['run']}").claim(8)


def test_alchemy_column_refuses_composite_primary_key():
    metadata = sa.MetaData()
    table = sa.Table("t", metadata, sa.Column("a", sa.Integer, primary_key=True), sa.Column("b", sa.Integer))
    fences.AlchemyColumn(None, table, fence="b")
    composite = sa.Table("u", metadata, *(sa.Column(name, sa.Integer, primary_key=True) for name in "ab"))
    with pytest.raises(ConfigError, match="one column"):
        fences.AlchemyColumn(None, composite)
