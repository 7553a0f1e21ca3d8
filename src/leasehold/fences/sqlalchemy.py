"""Fences for SQLAlchemy, Core and ORM, blocking and asyncio: they join the transaction of your session or connection.

Nothing is committed here. The highest token takes effect when you commit. After `StaleToken`, roll back;
`with Session.begin() as session:` does so automatically. Use the fence first in its transaction: at repeatable read
(MySQL's default) later queries would repeat what was read before the fence.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import BigInteger, Column, Integer, MetaData, String, Table, inspect, or_, select, update
from sqlalchemy.dialects.mysql import VARBINARY
from sqlalchemy.sql.expression import Delete, Update

from leasehold import dbapi
from leasehold.errors import ConfigError
from leasehold.fences.rules import (
    LeaseLike,
    TokenInfo,
    check_resource,
    raise_stale,
    refuse_slot,
    token_for_read,
    token_for_write,
)
from leasehold.fences.sql.column_ops import ColumnOperations
from leasehold.fences.sql.dialect import TABLE, check_identifier
from leasehold.fences.sql.row import check_and_raise
from leasehold.runtime.base import maybe_await, run_sync

T = TypeVar("T")


def fence_table(metadata: MetaData, name: str = TABLE) -> Table:
    """Adds the table of fence rows to your metadata, for `create_all` and Alembic."""
    exact = (
        String(255)
        .with_variant(String(255, collation="C"), "postgresql")
        .with_variant(VARBINARY(255), "mysql", "mariadb")
    )
    slot = Column("slot", Integer, primary_key=True, autoincrement=False)
    token = Column("token", BigInteger, nullable=False)
    columns = Column("resource", exact, primary_key=True), slot, token
    return Table(name, metadata, *columns, mysql_engine="InnoDB", mariadb_engine="InnoDB")  # has transactions


async def _refuse_autocommit(session: Any) -> None:
    if await dbapi.is_alchemy_autocommit(session):
        raise ConfigError(
            "a fence needs a transaction: with AUTOCOMMIT its lock would be released immediately, and a stale write "
            "could not be rolled back. Use another isolation level"
        )


class _BaseAlchemyFence:
    def __init__(self, session: Any, resource: str, *, table: str = TABLE) -> None:
        """`session`: a Session or Connection. `table`: create it with `fence_table()` or `sql_schema()`."""
        self.resource = check_resource(resource)
        self._session, self._table = session, check_identifier(table)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.resource}>"

    async def _claim(self, lease: LeaseLike) -> None:
        await self._check_and_raise(lease, token_for_write(lease))

    async def _check_and_raise(self, lease: LeaseLike, token_info: TokenInfo) -> None:
        await _refuse_autocommit(self._session)
        run, database = partial(dbapi.run_alchemy, self._session), dbapi.alchemy_database(self._session)
        await check_and_raise(run, database, self._table, self.resource, lease, token_info)

    async def _read(self, lease: LeaseLike, statement: Any, values: Any) -> Any:
        await self._check_and_raise(lease, token_for_read(lease))
        return await maybe_await(self._session.execute(statement, values))

    async def _write(self, lease: LeaseLike, statement: Any, values: Any) -> Any:
        await self._claim(lease)
        return await maybe_await(self._session.execute(statement, values))


class AlchemyFence(_BaseAlchemyFence):
    """Fences any statements in the transaction of a `Session` or `Connection` with a fence row."""

    def claim(self, lease: LeaseLike) -> None:
        """Raise the highest token: the rest of the transaction is fenced. All methods raise `StaleToken`."""
        run_sync(self._claim(lease))

    def read(self, lease: LeaseLike, statement: Any, values: Any = None) -> Any:
        """The result of a query, to base a write on. Older holders are refused from now on."""
        return run_sync(self._read(lease, statement, values))

    def write(self, lease: LeaseLike, statement: Any, values: Any = None) -> Any:
        """Execute a statement and return its result."""
        return run_sync(self._write(lease, statement, values))


class AsyncAlchemyFence(_BaseAlchemyFence):
    """Like `AlchemyFence`, for `AsyncSession` and `AsyncConnection`."""

    async def claim(self, lease: LeaseLike) -> None:
        """Raise the highest token: the rest of the transaction is fenced. All methods raise `StaleToken`."""
        await self._claim(lease)

    async def read(self, lease: LeaseLike, statement: Any, values: Any = None) -> Any:
        """The result of a query, to base a write on. Older holders are refused from now on."""
        return await self._read(lease, statement, values)

    async def write(self, lease: LeaseLike, statement: Any, values: Any = None) -> Any:
        """Execute a statement and return its result."""
        return await self._write(lease, statement, values)


class _BaseAlchemyColumn(ColumnOperations):
    def __init__(self, session: Any, entity: Any, *, fence: str = "fence") -> None:
        """`entity`: a mapped class or Table with one primary key column. `fence`: its column for the highest token."""
        self._session, self._entity = session, entity
        table = entity if isinstance(entity, Table) else inspect(entity).local_table
        keys = list(table.primary_key.columns)
        if len(keys) != 1:
            raise ConfigError(f"{table.name} needs a primary key of one column: use a fence row (AlchemyFence)")
        self._key, self._name, self._table = keys[0], table.name, table
        self._fence = self._column(fence)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name}>"

    def _column(self, name: str) -> Any:
        return self._entity.c[name] if isinstance(self._entity, Table) else getattr(self._entity, name)

    def resource_of(self, key: Any) -> str:
        return f"{self._name}/{key}"

    def is_fence_column(self, column: str) -> bool:
        return bool(self._column(column).key == self._fence.key)

    async def update(self, key: Any, token: int, sets: Mapping[str, Any], takes: Mapping[str, Any]) -> int:
        values = {self._column(name): value for name, value in sets.items()}
        values |= {self._column(name): self._column(name) - amount for name, amount in takes.items()}
        enough = [self._column(name) >= amount for name, amount in takes.items()]
        return await self._run_fenced(update(self._entity).where(self._key == key, *enough).values(values), token)

    async def read_locked(self, key: Any, columns: Sequence[str], shared: bool) -> Sequence[Any] | None:
        query = select(self._fence, *map(self._column, columns)).where(self._key == key).with_for_update(read=shared)
        result = await maybe_await(self._session.execute(query))
        row: Sequence[Any] | None = result.first()
        return row

    async def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work` in the session's transaction. Refuses AUTOCOMMIT before anything is written."""
        await _refuse_autocommit(self._session)
        return await work()

    async def _run_fenced(self, statement: Any, token: int) -> int:
        """Run the statement on the rows whose highest token is not above `token`. Returns the row count."""
        statement = statement.where(or_(self._fence.is_(None), self._fence <= token))
        if statement.is_update:
            statement = statement.values({self._fence: token})
        return int((await maybe_await(self._session.execute(statement))).rowcount)

    async def _execute(self, lease: LeaseLike, statement: Any) -> int:
        token_info = refuse_slot(token_for_write(lease), "a fence column")
        if (
            not isinstance(statement, Update | Delete)
            or getattr(statement.table, "fullname", "") != self._table.fullname
        ):
            raise ConfigError(f"execute() needs an update() or delete() of {self._name}")
        count = await self._run_fenced(statement, token_info.token)
        newest_query = select(self._fence).where(self._fence > token_info.token).order_by(self._fence.desc()).limit(1)
        if statement.whereclause is not None:
            newest_query = newest_query.where(statement.whereclause)
        # A locking read: a plain query on MySQL reads an older snapshot, and the stale token would go unnoticed.
        highest_token = (await maybe_await(self._session.execute(newest_query.with_for_update(read=True)))).scalar()
        if highest_token is not None:
            raise_stale(lease, token_info, int(highest_token), self._name, "sql")
        return count


class AlchemyColumn(_BaseAlchemyColumn):
    """Fences rows of a mapped class or table with a column for the highest token, in the transaction of a `Session` or
    `Connection`."""

    def claim(self, lease: LeaseLike, key: Any, /) -> None:
        """Only raise the row's highest token. Raises `StaleToken`, as all methods do, or `LookupError` if no row."""
        run_sync(self._run(lambda: self.claim_row(lease, key)))

    def read(self, lease: LeaseLike, key: Any, /, *columns: str) -> tuple[Any, ...]:
        """Columns of a row, to base a write on. Older holders are refused from now on."""
        return run_sync(self._run(lambda: self.read_row(lease, key, columns)))

    def write(self, lease: LeaseLike, key: Any, /, **values: Any) -> None:
        """Set columns of a row: `write(lease, "teapot", count=9)`."""
        run_sync(self._run(lambda: self.write_row(lease, key, values)))

    def take(self, lease: LeaseLike, key: Any, /, **amounts: Any) -> bool:
        """Subtract from columns: `take(lease, "teapot", quantity=1)`. False if not enough is left."""
        return run_sync(self._run(lambda: self.take_row(lease, key, amounts)))

    def execute(self, lease: LeaseLike, statement: Any, /) -> int:
        """Run an `update()` or `delete()` of the entity; returns the row count. Stale if any row has a higher token."""
        return run_sync(self._run(lambda: self._execute(lease, statement)))


class AsyncAlchemyColumn(_BaseAlchemyColumn):
    """Like `AlchemyColumn`, for `AsyncSession` and `AsyncConnection`."""

    async def claim(self, lease: LeaseLike, key: Any, /) -> None:
        """Only raise the row's highest token. Raises `StaleToken`, as all methods do, or `LookupError` if no row."""
        await self._run(lambda: self.claim_row(lease, key))

    async def read(self, lease: LeaseLike, key: Any, /, *columns: str) -> tuple[Any, ...]:
        """Columns of a row, to base a write on. Older holders are refused from now on."""
        return await self._run(lambda: self.read_row(lease, key, columns))

    async def write(self, lease: LeaseLike, key: Any, /, **values: Any) -> None:
        """Set columns of a row: `write(lease, "teapot", count=9)`."""
        await self._run(lambda: self.write_row(lease, key, values))

    async def take(self, lease: LeaseLike, key: Any, /, **amounts: Any) -> bool:
        """Subtract from columns: `take(lease, "teapot", quantity=1)`. False if not enough is left."""
        return await self._run(lambda: self.take_row(lease, key, amounts))

    async def execute(self, lease: LeaseLike, statement: Any, /) -> int:
        """Run an `update()` or `delete()` of the entity; returns the row count. Stale if any row has a higher token."""
        return await self._run(lambda: self._execute(lease, statement))
