"""Records in a table with a unique key, in whatever database: two verbs as single statements, each atomic by itself.

The same statements serve two stores. `SqlStore` has connections of its own, each statement committed by itself; under
asyncio they run on the runtime's worker thread, for the drivers block. `Within` runs them in a transaction of the
caller's, on the caller's connection, plain or async: the record is then committed together with the work.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

from leasehold.errors import LeaseholdError, Unavailable
from leasehold.runtime.base import Runtime, settle, step
from leasehold.store import Record

T = TypeVar("T")

TABLE: Final = "leasehold_records"

_IDLE: Final = 8  # connections kept for the next call
_SWEEP: Final = 1 / 16  # how often a new record has those that are over removed

_KEPT: list[Any] = []  # for ever: connections of a forked process's parent, which must not see a goodbye


INSERT: Final = "insert into {table} (name, edition, data, until) values (:key, :edition, {blob}, {now} + :keep)"
SWEEP: Final = (
    "delete from {table} where until <= {now} and name in (select name from {table} where until <= {now} limit 100)"
)


@dataclass(frozen=True)
class Dialect:
    """What differs between databases. Statements name their values as `:key`, `:edition`, `:data`, `:was`, `:keep`."""

    name: str
    schema: tuple[str, ...]
    now: str  # seconds since 1970, at the moment of the statement
    paramstyle: str  # what becomes of `:key`
    absent: Callable[[Exception], bool]  # the table is not there
    insert: str = INSERT + " on conflict (name) do nothing"  # of a key that may be there
    taken: Callable[[Exception], bool] | None = None  # knows the error that says so, where no row count does
    sweep: str = SWEEP
    blob: str = ":data"  # the data, which `bound` may have made a text of
    bound: Callable[[bytes], object] = bytes
    lock: str = ""  # ends a read of a row that is there: not of a snapshot, and nobody else writes until the commit

    def text(self, statement: str) -> str:
        for word, meant in (("{now}", self.now), ("{table}", TABLE), ("{blob}", self.blob)):
            statement = statement.replace(word, meant)
        return re.sub(r":(\w+)", self.paramstyle, statement)


_READ: Final = "select edition, data from {table} where name = :key and (until is null or until > {now})"
_SET: Final = "update {table} set edition = :edition, data = {blob}, until = {now} + :keep where name = :key and "
_REPLACE: Final = _SET + "edition = :was and (until is null or until > {now})"
_REVIVE: Final = _SET + "until <= {now}"


class Answer(NamedTuple):
    rows: list[Any]
    changed: int


async def ask(connection: Any, statement: str, values: dict[str, Any]) -> Answer:
    """One statement on any driver: its calls give a value, or something to be awaited."""
    cursor = await settle(connection.cursor())
    try:
        await settle(cursor.execute(statement, values))
        rows = list(await settle(cursor.fetchall())) if cursor.description else []
        return Answer([tuple(row.values()) if isinstance(row, dict) else tuple(row) for row in rows], cursor.rowcount)
    finally:
        await settle(cursor.close())


class Table:
    """The two verbs on one connection."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self._read, self._replace, self._revive = map(dialect.text, (_READ, _REPLACE, _REVIVE))
        self._locking_read = self._read + dialect.lock
        self._insert, self._sweep = dialect.text(dialect.insert), dialect.text(dialect.sweep)

    async def read(self, connection: Any, key: str, locking: bool = False) -> Record | None:
        rows, _ = await ask(connection, self._locking_read if locking else self._read, {"key": key})
        return Record(str(rows[0][0]), bytes(rows[0][1])) if rows else None

    async def write(self, connection: Any, key: str, record: Record, was: str, keep: float | None) -> bool:
        data = self.dialect.bound(record.data)
        values = {"key": key, "edition": record.edition, "data": data, "keep": keep, "was": was}
        if was:
            return (await ask(connection, self._replace, values)).changed == 1
        # In this order: MySQL locks the gap where a row is not found, and with it the keys that others would insert.
        return await self._inserted(connection, values) or (await ask(connection, self._revive, values)).changed == 1

    async def _inserted(self, connection: Any, values: dict[str, Any]) -> bool:
        try:
            return (await ask(connection, self._insert, values)).changed == 1
        except Exception as error:
            if self.dialect.taken is not None and self.dialect.taken(error):
                return False
            raise

    async def sweep(self, connection: Any) -> None:
        await ask(connection, self._sweep, {})


class Within:
    """A store inside the caller's transaction. Nothing is begun, committed or rolled back here.

    A row that is there is locked as it is read. One that is not there has nothing to lock: it may have been written
    after the transaction's snapshot was taken. Whoever then inserts it is refused, and from then on reads past that.
    """

    joined: Final = True  # what it locks stays so until the commit: no look before the key's lock is held

    def __init__(self, table: Table, connection: Any, check: Callable[[Any], None]) -> None:
        self._table, self._connection, self._check = table, connection, check
        self._refused = ""  # the key whose last write was

    async def read(self, key: str, seconds: float) -> Record | None:
        self._check(self._connection)
        if self._refused != key and await self._table.read(self._connection, key) is None:
            return None
        return await self._table.read(self._connection, key, locking=True)

    async def write(self, key: str, record: Record, was: str, keep: float | None, seconds: float) -> bool:
        self._check(self._connection)
        written = await self._table.write(self._connection, key, record, was, keep)
        self._refused = "" if written else key
        return written


class SqlStore:
    """A store with connections of its own, opened when needed and kept for the next call."""

    table: ClassVar[Table]
    idle: ClassVar[int] = _IDLE

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._idle: list[Any] = []
        self._pid = os.getpid()

    # What a database's module writes.

    def connect(self, seconds: float) -> Any:
        """A new connection on which every statement is committed by itself."""
        raise NotImplementedError

    def bound(self, connection: Any, seconds: float) -> None:
        """See that whatever runs on it next ends within so many seconds."""
        raise NotImplementedError

    def meaning(self, error: Exception) -> LeaseholdError | None:
        """What an error of the driver means; None: it is none of the driver's."""
        raise NotImplementedError

    # ------------------------------------------------------------- the verbs

    async def read(self, key: str, seconds: float) -> Record | None:
        return await self._call(lambda connection: self.table.read(connection, key), seconds)

    async def write(self, key: str, record: Record, was: str, keep: float | None, seconds: float) -> bool:
        async def work(connection: Any) -> bool:
            written = await self.table.write(connection, key, record, was, keep)
            if written and not was and self._runtime.fraction() < _SWEEP:
                await self.table.sweep(connection)
            return written

        return await self._call(work, seconds)

    def close(self) -> None:
        while self._idle:
            with suppress(Exception):
                self._idle.pop().close()

    # -------------------------------------------------------- one connection

    async def _call(self, work: Callable[[Any], Coroutine[Any, Any, T]], seconds: float) -> T:
        return await self._runtime.call(self._job, work, self._runtime.now() + seconds)

    def _job(self, work: Callable[[Any], Coroutine[Any, Any, T]], deadline: float) -> T:
        left = deadline - self._runtime.now()
        if left <= 0:  # it stood behind others, who found out the same
            raise Unavailable("the store did not answer in time", engine=self.table.dialect.name)
        connection: Any = None
        try:
            connection = self._taken() or self.connect(left)
            try:
                result = step(self._bounded(connection, work, deadline))
            except Exception as error:
                if not self.table.dialect.absent(error):
                    raise
                self._make(connection, deadline)
                result = step(self._bounded(connection, work, deadline))
        except BaseException as error:
            # Whatever became of it, an answer may still be on its way: the next call must not read it as its own.
            if connection is not None:
                with suppress(Exception):
                    connection.close()
            self.close()  # the others may be of before a restart, too
            meaning = self.meaning(error) if isinstance(error, Exception) else None
            if meaning is None:
                raise
            raise meaning from error
        self._give_back(connection)
        return result

    def _bounded(self, connection: Any, work: Callable[[Any], T], deadline: float) -> T:
        self.bound(connection, max(deadline - self._runtime.now(), 0.001))
        return work(connection)

    def _make(self, connection: Any, deadline: float) -> None:
        """Make the table. Several may do so at once, and some databases then refuse all but one."""
        for statement in self.table.dialect.schema:
            with suppress(Exception):
                step(self._bounded(connection, lambda each: ask(each, statement, {}), deadline))  # noqa: B023

    def _taken(self) -> Any:
        if self._pid != os.getpid():
            _KEPT.extend(self._idle)
            self._idle, self._pid = [], os.getpid()
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _give_back(self, connection: Any) -> None:
        if len(self._idle) < self.idle:
            self._idle.append(connection)
        else:
            connection.close()
