"""The SQL fences, over every driver and at every isolation level."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from typing import Any, ClassVar

from leasehold import fences
from tests.support.fence_kinds import Number, end, kind


def connected(database: str, spec: dict[str, Any]) -> Any:
    if database == "sqlite":
        return sqlite3.connect(spec["path"], timeout=60)
    if database == "postgresql":
        import psycopg

        return psycopg.connect(f"host=127.0.0.1 port={spec['postgresql']} user=postgres dbname=postgres")
    import pymysql

    return pymysql.connect(host="127.0.0.1", port=spec["mysql"], user="root", database="test")


async def connect_async(database: str, spec: dict[str, Any]) -> Any:
    if database == "sqlite":
        import aiosqlite

        return await aiosqlite.connect(spec["path"], timeout=60)
    if database == "postgresql":
        import psycopg

        conninfo = f"host=127.0.0.1 port={spec['postgresql']} user=postgres dbname=postgres"
        return await psycopg.AsyncConnection.connect(conninfo)
    import aiomysql

    return await aiomysql.connect(host="127.0.0.1", port=spec["mysql"], user="root", db="test")


class SQLNumber(Number):
    """Each test has its own table `acct_<run>` with one row."""

    def __init__(self, spec: dict[str, Any], database: str) -> None:
        self.database, self.table = database, f"acct_{spec['run']}"
        self.fence_table = f"fence_{spec['run']}"
        self.placeholder = "?" if database == "sqlite" else "%s"
        super().__init__(spec)

    def open(self) -> None:
        self.connection = connected(self.database, self.spec)

    def make(self) -> None:
        cursor = self.connection.cursor()
        cursor.execute(f"create table {self.table} (id integer primary key, v integer not null, fence bigint)")
        cursor.execute(f"insert into {self.table} values (1, 0, null)")
        cursor.execute(fences.sql_schema(self.database, self.fence_table))
        self.connection.commit()

    def peek(self) -> int:
        value: int = self.read_column("v")
        return value

    def read_column(self, column: str) -> Any:
        cursor = self.connection.cursor()
        cursor.execute(f"select {column} from {self.table} where id = 1")
        (value,) = cursor.fetchone()
        self.connection.commit()
        return value

    def close(self) -> None:
        self.connection.close()


class Row(SQLNumber):
    def open(self) -> None:
        super().open()
        self.fence = fences.SQLFence(self.connection, "acct/1", table=self.fence_table)

    def write(self, lease: Any, value: int) -> None:
        self.fence.write(lease, f"update {self.table} set v = {self.placeholder} where id = 1", (value,))

    def read(self, lease: Any) -> int:
        return self.fence.read(lease, f"select v from {self.table} where id = {self.placeholder}", (1,))[0][0]


class Transaction(Row):
    """Several statements under one claim, with the caller's own commit."""

    def write(self, lease: Any, value: int) -> None:
        with self.fence.transaction(lease) as cursor:
            cursor.execute(f"update {self.table} set v = -1 where id = 1")
            cursor.execute(f"update {self.table} set v = {self.placeholder} where id = 1", (value,))


class Column(SQLNumber):
    def open(self) -> None:
        super().open()
        self.fence = fences.SQLColumn(self.connection, self.table)

    def write(self, lease: Any, value: int) -> None:
        self.fence.write(lease, 1, v=value)

    def read(self, lease: Any) -> int:
        return self.fence.read(lease, 1, "v")[0]


class AsyncSQL(SQLNumber):
    def __init__(self, spec: dict[str, Any], database: str, form: str) -> None:
        self.form, self.loop = form, asyncio.new_event_loop()
        super().__init__(spec, database)

    def open(self) -> None:
        super().open()
        self.other = self.loop.run_until_complete(connect_async(self.database, self.spec))
        if self.form == "row":
            self.fence = fences.AsyncSQLFence(self.other, "acct/1", table=self.fence_table)
        else:
            self.fence = fences.AsyncSQLColumn(self.other, self.table)

    def write(self, lease: Any, value: int) -> None:
        if self.form == "column":
            self.loop.run_until_complete(self.fence.write(lease, 1, v=value))
        else:
            statement = f"update {self.table} set v = {self.placeholder} where id = 1"
            self.loop.run_until_complete(self.fence.write(lease, statement, (value,)))

    def read(self, lease: Any) -> int:
        if self.form == "column":
            return self.loop.run_until_complete(self.fence.read(lease, 1, "v"))[0]
        return self.loop.run_until_complete(self.fence.read(lease, f"select v from {self.table} where id = 1"))[0][0]

    def close(self) -> None:
        super().close()
        close_connection = self.other.ensure_closed if self.database == "mysql" else self.other.close
        end(self.loop, close_connection())


class Alchemy(SQLNumber):
    """An ORM class on the same table."""

    urls: ClassVar = {
        "sqlite": "sqlite:///{path}?timeout=60",
        "postgresql": "postgresql+psycopg://postgres@127.0.0.1:{postgresql}/postgres",
        "mysql": "mysql+pymysql://root@127.0.0.1:{mysql}/test",
    }

    def __init__(self, spec: dict[str, Any], database: str, form: str) -> None:
        self.form = form
        super().__init__(spec, database)

    def open(self) -> None:
        super().open()
        import sqlalchemy as sa
        from sqlalchemy.orm import declarative_base

        self.sa = sa

        class Acct(declarative_base()):  # type: ignore[misc]
            __tablename__ = self.table
            id = sa.Column(sa.Integer, primary_key=True)
            v = sa.Column(sa.Integer, nullable=False)
            fence = sa.Column(sa.BigInteger)

        self.acct = Acct
        self.engine = self.create_engine()

    def create_engine(self) -> Any:
        return self.sa.create_engine(self.urls[self.database].format(**self.spec))

    def write(self, lease: Any, value: int) -> None:
        from sqlalchemy.orm import Session

        with Session(self.engine) as session, session.begin():
            if self.form == "column":
                fences.AlchemyColumn(session, self.acct).write(lease, 1, v=value)
            elif self.form == "core":
                statement = self.sa.update(self.acct).where(self.acct.id == 1).values(v=value)
                fences.AlchemyFence(session, "acct/1", table=self.fence_table).write(lease, statement)
            else:
                fences.AlchemyFence(session, "acct/1", table=self.fence_table).claim(lease)
                session.get_one(self.acct, 1).v = value

    def read(self, lease: Any) -> int:
        from sqlalchemy.orm import Session

        with Session(self.engine) as session, session.begin():
            if self.form == "column":
                return fences.AlchemyColumn(session, self.acct).read(lease, 1, "v")[0]
            query = self.sa.select(self.acct.v).where(self.acct.id == 1)
            return fences.AlchemyFence(session, "acct/1", table=self.fence_table).read(lease, query).scalar_one()

    def close(self) -> None:
        super().close()
        self.engine.dispose()


class AsyncAlchemy(Alchemy):
    urls: ClassVar = {
        "sqlite": "sqlite+aiosqlite:///{path}?timeout=60",
        "postgresql": "postgresql+psycopg://postgres@127.0.0.1:{postgresql}/postgres",
        "mysql": "mysql+aiomysql://root@127.0.0.1:{mysql}/test",
    }

    def create_engine(self) -> Any:
        from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

        self.loop, self.session = asyncio.new_event_loop(), AsyncSession
        return create_async_engine(self.urls[self.database].format(**self.spec))

    def write(self, lease: Any, value: int) -> None:
        async def work() -> None:
            async with self.session(self.engine) as session, session.begin():
                if self.form == "column":
                    await fences.AsyncAlchemyColumn(session, self.acct).write(lease, 1, v=value)
                else:
                    await fences.AsyncAlchemyFence(session, "acct/1", table=self.fence_table).claim(lease)
                    (await session.get_one(self.acct, 1)).v = value

        self.loop.run_until_complete(work())

    def read(self, lease: Any) -> int:
        async def work() -> int:
            async with self.session(self.engine) as session, session.begin():
                if self.form == "column":
                    return (await fences.AsyncAlchemyColumn(session, self.acct).read(lease, 1, "v"))[0]
                query = self.sa.select(self.acct.v).where(self.acct.id == 1)
                fence = fences.AsyncAlchemyFence(session, "acct/1", table=self.fence_table)
                return (await fence.read(lease, query)).scalar_one()

        return self.loop.run_until_complete(work())

    def close(self) -> None:
        SQLNumber.close(self)
        end(self.loop, self.engine.dispose())


for database_name in ("sqlite", "postgresql", "mysql"):
    kind(f"{database_name}-row", database_name)(Row)
    kind(f"{database_name}-transaction", database_name)(Transaction)
    kind(f"{database_name}-column", database_name)(Column)
    kind(f"{database_name}-row-async", database_name, "row")(AsyncSQL)
    kind(f"{database_name}-column-async", database_name, "column")(AsyncSQL)
    for form in ("orm", "core", "column"):
        kind(f"alchemy-{database_name}-{form}", database_name, form)(Alchemy)
    for form in ("orm", "column"):
        kind(f"alchemy-{database_name}-{form}-async", database_name, form)(AsyncAlchemy)


# ------------------------------------------------------------------ isolation levels

LEVELS = ("read committed", "repeatable read", "serializable")


class _IsolationLevel(SQLNumber):
    """Connections at a given isolation level. The caller retries if the database reports a serialization failure."""

    def __init__(self, spec: dict[str, Any], database: str, level: str) -> None:
        self.level = level
        super().__init__(spec, database)

    def open(self) -> None:
        super().open()
        cursor = self.connection.cursor()
        if self.database == "mysql":
            import pymysql

            self.conflicts: Any = pymysql.err.OperationalError
            cursor.execute(f"set session transaction isolation level {self.level}")
        else:
            import psycopg

            self.conflicts = (psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected)
            cursor.execute(f"set session characteristics as transaction isolation level {self.level}")
        self.connection.commit()

    def retry_on_conflict(self, work: Callable[[], Any]) -> Any:
        while True:
            try:
                return work()
            except self.conflicts as conflict:
                if self.database == "mysql" and conflict.args[0] != 1213:  # a deadlock: MySQL rolled back everything
                    raise

    def write(self, lease: Any, value: int) -> None:
        self.retry_on_conflict(lambda: super(_IsolationLevel, self).write(lease, value))

    def read(self, lease: Any) -> int:
        found: int = self.retry_on_conflict(lambda: super(_IsolationLevel, self).read(lease))
        return found


class RowAtLevel(_IsolationLevel, Row): ...


class TransactionAtLevel(_IsolationLevel, Transaction): ...


class ColumnAtLevel(_IsolationLevel, Column): ...


for database_name in ("postgresql", "mysql"):
    for level in LEVELS:
        suffix = level.replace(" ", "-")
        kind(f"{database_name}-row-at-{suffix}", database_name, level)(RowAtLevel)
        kind(f"{database_name}-transaction-at-{suffix}", database_name, level)(TransactionAtLevel)
        kind(f"{database_name}-column-at-{suffix}", database_name, level)(ColumnAtLevel)
