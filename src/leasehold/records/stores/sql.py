"""Records in a table with a unique key, in any SQL database: read and write are single statements, each one atomic.

The same statements serve two stores. `SqlStore` has its own connections, in autocommit mode; under asyncio they run on
the runtime's worker thread, because the drivers block. `TransactionStore` runs the statements in the caller's
transaction, on the caller's connection, plain or async: the record is then committed together with the work."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeVar

from leasehold import dbapi
from leasehold.dbapi import Database
from leasehold.errors import ConfigError, LeaseholdError, Unavailable
from leasehold.records.store import MAX_DATA, VERSION_LENGTH, Record, check_record
from leasehold.runtime.base import Runtime, run_sync

T = TypeVar("T")

TABLE: Final = "leasehold_records"

_MAX_IDLE: Final = 8  # connections kept for the next call
_ALWAYS_ACCEPTED: Final = 250_000  # bytes of data, with any common setting of a server
_REST_OF_STATEMENT: Final = 8192  # bytes at most: the statement without its data
_SWEEP_PROBABILITY: Final = 1 / 16  # how often the write of a new record also removes expired ones

# Connections that a forked child inherited, kept for ever: closing one would end it at the server for the parent.
_PARENT_CONNECTIONS: list[Any] = []

INSERT: Final = "insert into {table} (name, version, data, until) values (:key, :version, {blob}, {now} + :keep)"
SWEEP: Final = (
    "delete from {table} where until <= {now} and name in (select name from {table} where until <= {now} limit 100)"
)


@dataclass(frozen=True)
class StoreDialect:
    """What differs between databases. Statements name their values as `:key`, `:version`, `:data`, `:was`, `:keep`."""

    database: Database
    schema: tuple[str, ...]
    now: str  # seconds since 1970, at the moment of the statement
    is_missing_table: Callable[[Exception], bool]  # whether the error means that the table does not exist
    insert: str = INSERT + " on conflict (name) do nothing"  # of a key that may exist
    is_duplicate_key: Callable[[Exception], bool] | None = None  # whether an error means that the key exists
    sweep: str = SWEEP
    blob: str = ":data"  # the data, which `encode_data` may have made a text
    encode_data: Callable[[bytes], object] = bytes
    max_statement: str = ""  # asks how many bytes a statement may have, if more would end the session
    lock_suffix: str = ""  # makes a read see the newest row, not a snapshot, and lock it until the commit

    def render(self, statement: str) -> str:
        texts = {"now": self.now, "table": TABLE, "blob": self.blob}
        limits = {"version_length": str(VERSION_LENGTH), "max_data": str(MAX_DATA)}
        for placeholder, replacement in (texts | limits).items():
            statement = statement.replace(f"{{{placeholder}}}", replacement)
        return statement

    async def run(self, connection: Any, statement: str, values: dbapi.Values) -> dbapi.Result:
        return await dbapi.run(connection, self.database, statement, values)


# What is longer than a record, another program wrote: it is not read. With a limit of its own, a query does not have
# that of MySQL's sql_select_limit.
_READ: Final = (
    "select case when length(version) = {version_length} then version end, "
    "case when length(data) <= {max_data} then data end "
    "from {table} where name = :key and (until is null or until > {now}) limit 1"
)
_SET: Final = "update {table} set version = :version, data = {blob}, until = {now} + :keep where name = :key and "
_REPLACE: Final = _SET + "version = :was and (until is null or until > {now})"
_REVIVE: Final = _SET + "until <= {now}"


class Table:
    """Read and write on one connection."""

    def __init__(self, dialect: StoreDialect) -> None:
        self.dialect = dialect
        self._read, self._replace, self._revive = map(dialect.render, (_READ, _REPLACE, _REVIVE))
        self._locking_read = self._read + dialect.lock_suffix
        self._insert, self._sweep = dialect.render(dialect.insert), dialect.render(dialect.sweep)

    async def read(self, connection: Any, key: str, locking: bool = False) -> Record | None:
        rows, _ = await self.dialect.run(connection, self._locking_read if locking else self._read, {"key": key})
        if not rows:
            return None
        return check_record(*rows[0]) if len(rows[0]) == 2 else check_record(None, None)  # a server may send anything

    async def write(self, connection: Any, key: str, record: Record, expected_version: str, keep: float | None) -> bool:
        if self.dialect.max_statement and len(record.data) > _ALWAYS_ACCEPTED:
            ((maximum,),), _ = await self.dialect.run(connection, self.dialect.max_statement, {})
            if maximum < 2 * len(record.data) + _REST_OF_STATEMENT:  # two hex digits for each byte
                text = f"it accepts statements of at most {maximum:,} bytes (max_allowed_packet)"
                raise ConfigError(
                    f"{self.dialect.database.name} cannot keep a record of {len(record.data):,} bytes: {text}"
                )
        data = self.dialect.encode_data(record.data)
        # PostgreSQL has no operator for a float and a whole number: that of any role would fit better.
        keep = None if keep is None else float(keep)
        values = {"key": key, "version": record.version, "data": data, "keep": keep, "was": expected_version}
        if expected_version:
            return (await self.dialect.run(connection, self._replace, values)).row_count == 1
        # Insert first: an update that finds no row makes MySQL lock the gap, and so the keys that others would insert.
        return (
            await self._try_insert(connection, values)
            or (await self.dialect.run(connection, self._revive, values)).row_count == 1
        )

    async def _try_insert(self, connection: Any, values: dict[str, Any]) -> bool:
        try:
            return (await self.dialect.run(connection, self._insert, values)).row_count == 1
        except Exception as error:
            if self.dialect.is_duplicate_key is not None and self.dialect.is_duplicate_key(error):
                return False
            raise

    async def sweep(self, connection: Any) -> None:
        await self.dialect.run(connection, self._sweep, {})


class TransactionStore:
    """A store inside the caller's transaction. It never begins, commits or rolls back.

    A row that exists is locked when it is read. A missing row cannot be locked: another transaction may have written it
    after this transaction's snapshot. Then the insert is refused, and later reads of the key bypass the snapshot.
    """

    # Its row locks last until the commit: no read before the key's lock is held.
    in_caller_transaction: Final = True

    def __init__(self, table: Table, connection: Any) -> None:
        self._table, self._connection = table, connection
        self._refused_key = ""  # the key whose last write was refused

    async def read(self, key: str, seconds: float) -> Record | None:
        self._check_in_transaction()
        if self._refused_key != key and await self._table.read(self._connection, key) is None:
            return None
        return await self._table.read(self._connection, key, locking=True)

    async def write(self, key: str, record: Record, expected_version: str, keep: float | None, seconds: float) -> bool:
        self._check_in_transaction()
        written = await self._table.write(self._connection, key, record, expected_version, keep)
        self._refused_key = "" if written else key
        return written

    def _check_in_transaction(self) -> None:
        if self._table.dialect.database.is_autocommit(self._connection):
            raise ConfigError("within() needs an open transaction: this connection is in autocommit mode; begin one")


class SqlStore:
    """A store with its own connections, opened when needed and kept for the next call."""

    table: ClassVar[Table]
    max_idle: ClassVar[int] = _MAX_IDLE

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._idle: list[Any] = []
        self._pid = os.getpid()

    # Each database's module implements these three.

    def connect(self, seconds: float) -> Any:
        """A new connection in autocommit mode."""
        raise NotImplementedError

    def set_timeout(self, connection: Any, seconds: float) -> None:
        """Limit the next statement on this connection to `seconds`."""
        raise NotImplementedError

    def map_error(self, error: Exception) -> LeaseholdError | None:
        """What an error of the driver means; None: it is not the driver's."""
        raise NotImplementedError

    def is_in_step(self, connection: Any) -> bool:
        """Whether the server has sent nothing since its last reply. Else a driver could take it for the next one."""
        return True

    # ------------------------------------------------------- read and write

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
        if remaining <= 0:  # the worker thread was busy with calls that got no answer
            raise Unavailable("the store did not answer in time", engine=self.table.dialect.database.name)
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
            # An answer may still be on its way: the next call must not read it as its own.
            if connection is not None:
                with suppress(Exception):
                    connection.close()
            self.close()  # the idle ones may also date from before a restart
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
        """Create the table. If several clients do so at once, some databases refuse all but one."""
        dialect = self.table.dialect
        for statement in dialect.schema:
            with suppress(Exception):
                run_sync(self._run_with_timeout(connection, lambda conn: dialect.run(conn, statement, {}), deadline))  # noqa: B023

    def _pop_idle(self) -> Any:
        if self._pid != os.getpid():
            _PARENT_CONNECTIONS.extend(self._idle)
            self._idle, self._pid = [], os.getpid()
        with suppress(IndexError):
            while not self.is_in_step(connection := self._idle.pop()):
                with suppress(Exception):
                    connection.close()
            return connection
        return None

    def _push_idle(self, connection: Any) -> None:
        if len(self._idle) < self.max_idle:
            self._idle.append(connection)
        else:
            connection.close()
