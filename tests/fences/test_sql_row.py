"""Fence rows: transactions of the caller and of the fence, snapshots, and the fence table."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from leasehold import ConfigError, StaleToken, fences
from leasehold.fences import TokenInfo
from leasehold.runtime.base import maybe_await, run_sync
from tests.support import probe_fences

DATABASES = ("sqlite", "postgresql", "mysql")


each_database = pytest.mark.parametrize("database", DATABASES)


def connect_again(number, resource_kinds):
    """Open another connection to the same database."""
    return resource_kinds.connected(number.database, number.spec)


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


def test_mysql_connections_with_other_character_sets_share_a_row(stock, kinds):
    number = stock("mysql")
    fences.SQLFence(number.connection, "Bestände", table=number.fence_table).write(5, "select 1")
    other = connect_again(number, kinds)
    other.set_character_set("latin1")
    with pytest.raises(StaleToken):
        fences.SQLFence(other, "Bestände", table=number.fence_table).claim(4)
    other.close()


def test_postgresql_connections_with_other_encodings_share_a_row(stock):
    """A database in SQL_ASCII stores the bytes that each client sends."""
    import psycopg

    number = stock("postgresql")
    name = f"bytes_{number.spec['run']}"
    number.connection.autocommit = True
    number.connection.execute(f"create database {name} template template0 encoding 'SQL_ASCII' locale 'C'")
    where = {"host": "127.0.0.1", "port": number.spec["postgresql"], "user": "postgres", "dbname": name}
    try:
        with (
            psycopg.connect(**where, client_encoding="utf8") as first,
            psycopg.connect(**where, client_encoding="latin1") as other,
        ):
            fence = fences.SQLFence(first, "Bestände")
            fence.create()
            fence.write(5, "select 1")
            with pytest.raises(StaleToken):
                fences.SQLFence(other, "Bestände").claim(4)
            other.rollback()
    finally:
        number.connection.execute(f"drop database {name} with (force)")


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


def test_mysql_write_inside_open_transaction_is_refused(resource, kinds):
    """A SELECT ... FOR UPDATE opens a transaction, which `start transaction` would commit."""
    number = resource("mysql-row")
    number.connection.cursor().execute(f"select v from {number.table} where id = 1 for update")
    with pytest.raises(ConfigError, match="already has an open transaction"):
        number.write(5, 1)
    number.connection.rollback()
    number.write(5, 1)


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


def test_advisory_lock_of_a_stranger_does_not_stop_create(stock, kinds):
    number = stock("postgresql")
    stranger = connect_again(number, kinds)
    stranger.execute(f"select pg_advisory_lock({int.from_bytes(b'lhfence')})")  # which `create` once took
    number.connection.execute("set lock_timeout = '5s'")
    number.connection.commit()
    fences.SQLFence(number.connection, "stock", table=f"new_{number.fence_table}").create()
    stranger.close()


def test_write_is_refused_if_its_token_cannot_be_read_back(stock):
    number = stock("postgresql")
    number.connection.execute(
        f"create function {number.fence_table}_drop() returns trigger language plpgsql as $$ begin return null; end $$"
    )
    number.connection.execute(
        f"create trigger hides before insert on {number.fence_table} "
        f"for each row execute function {number.fence_table}_drop()"
    )
    number.connection.commit()
    with pytest.raises(ConfigError, match="does not show the token"):
        fences.SQLFence(number.connection, "stock", table=number.fence_table).write(5, "select 1")


def test_stale_token_is_refused_if_mysql_limits_the_rows_of_queries(stock):
    number = stock("mysql")
    number.connection.cursor().execute("set session sql_select_limit = 0")
    fence = fences.SQLFence(number.connection, "stock", table=number.fence_table)
    fence.write(9, f"update {number.stock} set quantity = 1")
    with pytest.raises(StaleToken):
        fence.write(5, f"update {number.stock} set quantity = 2")


@pytest.mark.parametrize(
    "database", ["postgresql", *(pytest.param(name, marks=pytest.mark.extended) for name in ("sqlite", "mysql"))]
)
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


# ------------------------------------------------------------------------- unusual connections


def cursor_classes(number: Any, connection: Any) -> Iterator[None]:
    """Make the connection use each cursor class of its driver in turn."""
    if number.database == "postgresql":
        import psycopg

        is_async = isinstance(connection, psycopg.AsyncConnection)
        for factory in (
            (psycopg.AsyncClientCursor, psycopg.AsyncCursor) if is_async else (psycopg.ClientCursor, psycopg.Cursor)
        ):
            connection.cursor_factory = factory
            yield
    elif number.database == "mysql":
        import aiomysql
        import pymysql

        module: Any = aiomysql if isinstance(connection, aiomysql.Connection) else pymysql.cursors
        for name in ("DictCursor", "SSCursor", "Cursor"):
            probe_fences.use_cursor_class(connection, getattr(module, name))
            yield
    else:
        yield


@each_database
@pytest.mark.parametrize("mode", ["", "-async"])
@pytest.mark.parametrize("autocommit", [False, True])
def test_stale_token_writes_with_no_cursor_class_or_parameter_style(database, mode, autocommit, resource):
    number = resource(f"{database}-row{mode}")
    connection = number.other if mode else number.connection
    styles = ("?", ":v") if database == "sqlite" else ("%s", "%(v)s")

    async def call(method: Any, *arguments: Any) -> Any:
        return await maybe_await(method(*arguments))

    async def main() -> None:
        if autocommit and database == "postgresql":
            await call(connection.set_autocommit, True)
        elif autocommit and database == "mysql":
            await call(connection.autocommit, True)
        elif autocommit and mode:
            await probe_fences.set_isolation_level(connection, None)  # in the connection's thread
        elif autocommit:
            connection.isolation_level = None
        for _ in cursor_classes(number, connection):
            for style in styles:
                update, current, stale = f"update {number.table} set v = {style}", (7,), (99,)
                values = (current, stale) if style in ("?", "%s") else ({"v": 7}, {"v": 99})
                assert await call(number.fence.write, 9, update, values[0]) == 1
                with pytest.raises(StaleToken):
                    await call(number.fence.write, 8, update, values[1])
            with pytest.raises(StaleToken):
                await call(number.fence.write, 8, f"update {number.table} set v = 99")
            with pytest.raises(StaleToken):
                await call(number.fence.read, 8, f"select v from {number.table}")
            with pytest.raises(ConfigError if autocommit else StaleToken):
                await call(number.fence.claim, 8)
            await call(connection.rollback)

    number.loop.run_until_complete(main()) if mode else run_sync(main())
    assert number.peek() == 7


@pytest.mark.parametrize("kind", ["sqlite-row", "sqlite-column", "postgresql-row", "postgresql-column"])
@pytest.mark.parametrize("mode", ["", "-async"])
def test_fence_works_whatever_the_connection_makes_of_rows(kind, mode, resource):
    """The connection returns the first column instead of a row: the check raised TypeError, not StaleToken."""
    from psycopg.rows import scalar_row, tuple_row

    number = resource(kind + mode)
    connection = number.other if mode else number.connection
    connection.row_factory = scalar_row if "postgresql" in kind else lambda cursor, row: row[0]
    number.write(9, 1)
    with pytest.raises(StaleToken):
        number.write(8, 2)
    if "column" in kind:
        read = number.fence.read(TokenInfo(9, shared=True), 1, "v", "fence")
        assert (number.loop.run_until_complete(read) if mode else read) == (1, 9)
    else:
        with pytest.raises(StaleToken):
            number.read(TokenInfo(8, shared=True))
    connection.row_factory = None if "sqlite" in kind else tuple_row


@each_database
@pytest.mark.parametrize("form", ["row", "column"])
def test_concurrent_tasks_on_one_connection_do_not_undo_each_other(database, form, resource):
    """With aiosqlite both begin at once. The one that failed to begin rolled back the transaction of the other."""
    number = resource(f"{database}-{form}-async")
    update = f"update {number.table} set v = v + 1"

    async def write(token: int) -> bool:
        try:
            if form == "row":
                await number.fence.write(token, update)
            else:
                await number.fence.write(token, 1, v=token)
        except ConfigError:  # another task uses the connection
            return False
        return True

    async def main() -> list[bool]:
        return await asyncio.gather(*(write(token) for token in range(5, 10)))

    for _ in range(5):
        number.loop.run_until_complete(number.other.rollback())
        before = number.peek()
        accepted = number.loop.run_until_complete(main())
        assert any(accepted)
        if form == "row":
            assert number.peek() == before + sum(accepted)
        with pytest.raises(StaleToken):  # the highest token was committed with the write
            number.write(4, 99)


def test_threads_on_one_connection_do_not_undo_each_other(resource):
    """A connection of psycopg may be used by several threads."""
    number = resource("postgresql-row")
    accepted: list[int] = []

    def write(token: int) -> None:
        for _ in range(20):
            try:
                number.fence.write(token, f"update {number.table} set v = v + 1")
                accepted.append(token)
            except (ConfigError, StaleToken):
                continue

    threads = [threading.Thread(target=write, args=[token]) for token in (5, 6, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert number.peek() == len(accepted) > 0


@pytest.mark.parametrize("kind", ["postgresql-row", "postgresql-column"])
def test_postgresql_pipeline_mode_is_refused(kind, resource):
    """In pipeline mode a statement has no result yet: it looked as if no token had ever been stored."""
    number = resource(kind)
    number.write(9, 1)
    calls = [lambda: number.write(5, 99), lambda: number.write(10, 99), lambda: number.read(5)]
    for call in [*calls, lambda: number.fence.claim(5)] if kind == "postgresql-row" else calls:
        with pytest.raises(ConfigError, match="pipeline mode"), number.connection.pipeline():
            call()
        number.connection.rollback()
    assert number.peek() == 1
    number.write(9, 2)


@pytest.mark.parametrize("kind", ["postgresql-row-async", "postgresql-column-async"])
def test_async_postgresql_pipeline_mode_is_refused(kind, resource):
    number = resource(kind)
    number.write(9, 1)

    async def main() -> None:
        arguments = (5, f"update {number.table} set v = 99") if "row" in kind else (5, 1)
        with pytest.raises(ConfigError, match="pipeline mode"):
            async with number.other.pipeline():
                await (number.fence.write(*arguments) if "row" in kind else number.fence.write(*arguments, v=99))
        await number.other.rollback()

    number.loop.run_until_complete(main())
    assert number.peek() == 1
