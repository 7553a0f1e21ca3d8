"""Records in a table with a unique key, in whatever database: two verbs as single statements, each atomic by itself.

The same statements serve two stores. `SqlStore` has connections of its own, each statement committed by itself; under
asyncio they run on the runtime's worker thread, for the drivers block. `TransactionStore` runs them in a transaction of
the caller's, on the caller's connection, plain or async: the record is then committed together with the work."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

from leasehold.errors import LeaseholdError, Unavailable
from leasehold.records.store import Record
from leasehold.runtime.base import Runtime, maybe_await, run_sync

T = TypeVar("T")

TABLE: Final = "leasehold_records"

_MAX_IDLE: Final = 8  # connections kept for the next call
_SWEEP_PROBABILITY: Final = 1 / 16  # how often a new record has those that are over removed

_PARENT_CONNECTIONS: list[Any] = []  # for ever: connections of a forked process's parent, which must not see a goodbye


INSERT: Final = "insert into {table} (name, version, data, until) values (:key, :version, {blob}, {now} + :keep)"
SWEEP: Final = (
    "delete from {table} where until <= {now} and name in (select name from {table} where until <= {now} limit 100)"
)


@dataclass(frozen=True)
class StoreDialect:
    """What differs between databases. Statements name their values as `:key`, `:edition`, `:data`, `:was`, `:keep`."""

    name: str
    schema: tuple[str, ...]
    now: str  # seconds since 1970, at the moment of the statement
    paramstyle: str  # what becomes of `:key`
    is_missing_table: Callable[[Exception], bool]  # the table is not there
    insert: str = INSERT + " on conflict (name) do nothing"  # of a key that may be there
    is_duplicate_key: Callable[[Exception], bool] | None = None  # knows the error that says so, where no row count does
    sweep: str = SWEEP
    blob: str = ":data"  # the data, which `bound` may have made a text of
    encode_data: Callable[[bytes], object] = bytes
    lock_suffix: str = (
        ""  # ends a read of a row that is there: not of a snapshot, and nobody else writes until the commit
    )

    def render(self, statement: str) -> str:
        for placeholder, replacement in (("{now}", self.now), ("{table}", TABLE), ("{blob}", self.blob)):
            statement = statement.replace(placeholder, replacement)
        return re.sub(r":(\w+)", self.paramstyle, statement)


_READ: Final = "select version, data from {table} where name = :key and (until is null or until > {now})"
_SET: Final = "update {table} set version = :version, data = {blob}, until = {now} + :keep where name = :key and "
_REPLACE: Final = _SET + "version = :was and (until is null or until > {now})"
_REVIVE: Final = _SET + "until <= {now}"


class QueryResult(NamedTuple):
    rows: list[Any]
    row_count: int


async def execute(connection: Any, statement: str, values: dict[str, Any]) -> QueryResult:
    """One statement on any driver: its calls give a value, or something to be awaited."""
    cursor = await maybe_await(connection.cursor())
    try:
        await maybe_await(cursor.execute(statement, values))
        rows = list(await maybe_await(cursor.fetchall())) if cursor.description else []
        return QueryResult(
            [tuple(row.values()) if isinstance(row, dict) else tuple(row) for row in rows], cursor.rowcount
        )
    finally:
        await maybe_await(cursor.close())


class Table:
    """The two verbs on one connection."""

    def __init__(self, dialect: StoreDialect) -> None:
        self.dialect = dialect
        self._read, self._replace, self._revive = map(dialect.render, (_READ, _REPLACE, _REVIVE))
        self._locking_read = self._read + dialect.lock_suffix
        self._insert, self._sweep = dialect.render(dialect.insert), dialect.render(dialect.sweep)

    async def read(self, connection: Any, key: str, locking: bool = False) -> Record | None:
        rows, _ = await execute(connection, self._locking_read if locking else self._read, {"key": key})
        return Record(str(rows[0][0]), bytes(rows[0][1])) if rows else None

    async def write(self, connection: Any, key: str, record: Record, expected_version: str, keep: float | None) -> bool:
        data = self.dialect.encode_data(record.data)
        values = {"key": key, "version": record.version, "data": data, "keep": keep, "was": expected_version}
        if expected_version:
            return (await execute(connection, self._replace, values)).row_count == 1
        # In this order: MySQL locks the gap where a row is not found, and with it the keys that others would insert.
        return (
            await self._try_insert(connection, values)
            or (await execute(connection, self._revive, values)).row_count == 1
        )

    async def _try_insert(self, connection: Any, values: dict[str, Any]) -> bool:
        try:
            return (await execute(connection, self._insert, values)).row_count == 1
        except Exception as error:
            if self.dialect.is_duplicate_key is not None and self.dialect.is_duplicate_key(error):
                return False
            raise

    async def sweep(self, connection: Any) -> None:
        await execute(connection, self._sweep, {})


class TransactionStore:
    """A store inside the caller's transaction. Nothing is begun, committed or rolled back here.

    A row that is there is locked as it is read. One that is not there has nothing to lock: it may have been written
    after the transaction's snapshot was taken. Whoever then inserts it is refused, and from then on reads past that.
    """

    in_caller_transaction: Final = (
        True  # what it locks stays so until the commit: no look before the key's lock is held
    )

    def __init__(self, table: Table, connection: Any, check: Callable[[Any], None]) -> None:
        self._table, self._connection, self._check = table, connection, check
        self._refused_key = ""  # the key whose last write was

    async def read(self, key: str, seconds: float) -> Record | None:
        self._check(self._connection)
        if self._refused_key != key and await self._table.read(self._connection, key) is None:
            return None
        return await self._table.read(self._connection, key, locking=True)

    async def write(self, key: str, record: Record, expected_version: str, keep: float | None, seconds: float) -> bool:
        self._check(self._connection)
        written = await self._table.write(self._connection, key, record, expected_version, keep)
        self._refused_key = "" if written else key
        return written


class SqlStore:
    """A store with connections of its own, opened when needed and kept for the next call."""

    table: ClassVar[Table]
    max_idle: ClassVar[int] = _MAX_IDLE

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._idle: list[Any] = []
        self._pid = os.getpid()

    # What a database's module writes.

    def connect(self, seconds: float) -> Any:
        """A new connection on which every statement is committed by itself."""
        raise NotImplementedError

    def set_timeout(self, connection: Any, seconds: float) -> None:
        """See that whatever runs on it next ends within so many seconds."""
        raise NotImplementedError

    def map_error(self, error: Exception) -> LeaseholdError | None:
        """What an error of the driver means; None: it is none of the driver's."""
        raise NotImplementedError

    # ------------------------------------------------------------- the verbs

    async def read(self, key: str, seconds: float) -> Record | None:
        return await self._call(lambda connection: self.table.read(connection, key), seconds)

    async def write(self, key: str, record: Record, expected_version: str, keep: float | None, seconds: float) -> bool:
        async def work(connection: Any) -> bool:
            written = await self.table.write(connection, key, record, expected_version, keep)
            if written and not expected_version and self._runtime.random() < _SWEEP_PROBABILITY:
                await self.table.sweep(connection)
            return written

        return await self._call(work, seconds)

    def close(self) -> None:
        while self._idle:
            with suppress(Exception):
                self._idle.pop().close()

    # -------------------------------------------------------- one connection

    async def _call(self, work: Callable[[Any], Coroutine[Any, Any, T]], seconds: float) -> T:
        return await self._runtime.call(self._run_with_connection, work, self._runtime.now() + seconds)

    def _run_with_connection(self, work: Callable[[Any], Coroutine[Any, Any, T]], deadline: float) -> T:
        remaining = deadline - self._runtime.now()
        if remaining <= 0:  # it stood behind others, who found out the same
            raise Unavailable("the store did not answer in time", engine=self.table.dialect.name)
        connection: Any = None
        try:
            connection = self._pop_idle() or self.connect(remaining)
            try:
                result = run_sync(self._run_with_timeout(connection, work, deadline))
            except Exception as error:
                if not self.table.dialect.is_missing_table(error):
                    raise
                self._create_table(connection, deadline)
                result = run_sync(self._run_with_timeout(connection, work, deadline))
        except BaseException as error:
            # Whatever became of it, an answer may still be on its way: the next call must not read it as its own.
            if connection is not None:
                with suppress(Exception):
                    connection.close()
            self.close()  # the others may be of before a restart, too
            mapped = self.map_error(error) if isinstance(error, Exception) else None
            if mapped is None:
                raise
            raise mapped from error
        self._push_idle(connection)
        return result

    def _run_with_timeout(self, connection: Any, work: Callable[[Any], T], deadline: float) -> T:
        self.set_timeout(connection, max(deadline - self._runtime.now(), 0.001))
        return work(connection)

    def _create_table(self, connection: Any, deadline: float) -> None:
        """Make the table. Several may do so at once, and some databases then refuse all but one."""
        for statement in self.table.dialect.schema:
            with suppress(Exception):
                run_sync(self._run_with_timeout(connection, lambda conn: execute(conn, statement, {}), deadline))  # noqa: B023

    def _pop_idle(self) -> Any:
        if self._pid != os.getpid():
            _PARENT_CONNECTIONS.extend(self._idle)
            self._idle, self._pid = [], os.getpid()
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _push_idle(self, connection: Any) -> None:
        if len(self._idle) < self.max_idle:
            self._idle.append(connection)
        else:
            connection.close()
