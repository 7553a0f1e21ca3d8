"""SQL databases through the driver of the caller's choice: parameter styles, transactions, and SQLAlchemy.

For fences, for records in SQL tables, and for `leasehold.transaction`. Statements name their parameters `:name`; the
driver gets them in its own style. A driver's calls return values or awaitables, so everything here is `async def`: on a
blocking driver nothing suspends, and `run_sync` runs it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from importlib import import_module
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias, TypeVar

from leasehold.errors import ConfigError
from leasehold.runtime.base import maybe_await

T = TypeVar("T")
Values: TypeAlias = Mapping[str, Any]

# Text and names in quotes, casts, and parameters.
_LEXEME: Final = re.compile(r"""('[^']*'|"[^"]*"|`[^`]*`|::)|:([a-z]\w*)""")


class Result(NamedTuple):
    rows: list[Sequence[Any]]
    row_count: int


class Database(ABC):
    """What differs between databases. `connection` is one of a known driver, blocking or asyncio."""

    name: ClassVar[str]
    placeholder: ClassVar[str] = "%s"

    @abstractmethod
    def in_transaction(self, connection: Any) -> bool:
        """Whether this connection has statements that are neither committed nor rolled back."""

    @abstractmethod
    def is_autocommit(self, connection: Any) -> bool:
        """Whether the next statement would be a transaction of its own."""

    @abstractmethod
    def begin_statement(self, connection: Any) -> str | None:
        """The statement that begins a transaction; None if the driver or an open transaction makes it unnecessary."""

    def plain_rows(self, cursor: Any) -> None:  # noqa: B027  # PyMySQL has no such setting
        """Make the cursor return rows with all their columns, whatever the connection makes of them."""

    def matched_rows(self, cursor: Any, statement: str) -> int:  # noqa: ARG002  # MySQL needs it
        """How many rows the statement that was just executed found, also if it did not change them."""
        return int(cursor.rowcount)

    async def refresh(self, connection: Any) -> None:  # noqa: B027  # most drivers need nothing
        """Make the driver's knowledge of its transaction current, where it may be out of date."""


class _Sqlite(Database):
    name, placeholder = "sqlite", "?"

    def in_transaction(self, connection: Any) -> bool:
        # With autocommit=False, a transaction is always open, even an empty one.
        return bool(connection.in_transaction) and self._autocommit(connection) is not False

    def is_autocommit(self, connection: Any) -> bool:
        mode = self._autocommit(connection)
        begins = mode is False or (mode is not True and connection.isolation_level is not None)
        return not connection.in_transaction and not begins

    def begin_statement(self, connection: Any) -> str | None:
        return None if connection.in_transaction else "begin immediate"

    def plain_rows(self, cursor: Any) -> None:
        if hasattr(cursor, "row_factory"):
            cursor.row_factory = None

    def _autocommit(self, connection: Any) -> object:
        """Python 3.12: True, False, or LEGACY, where `isolation_level` decides. aiosqlite has no such attribute."""
        return getattr(getattr(connection, "_conn", connection), "autocommit", None)


class _Postgresql(Database):
    name = "postgresql"

    def in_transaction(self, connection: Any) -> bool:
        if getattr(getattr(connection, "pgconn", None), "pipeline_status", 0):
            # Statements are sent later and have no result yet: a check of their result would always pass.
            raise ConfigError("this connection is in pipeline mode, where no result can be checked: leave it first")
        return bool(connection.info.transaction_status)

    def is_autocommit(self, connection: Any) -> bool:
        return not self.in_transaction(connection) and bool(connection.autocommit)

    def begin_statement(self, connection: Any) -> str | None:
        return "begin" if connection.autocommit else None

    def plain_rows(self, cursor: Any) -> None:
        if hasattr(cursor, "row_factory"):  # psycopg
            cursor.row_factory = import_module("psycopg.rows").tuple_row


class _Mysql(Database):
    name = "mysql"

    _IN_TRANSACTION: Final = 1  # bits of the server status
    _AUTOCOMMIT: Final = 2

    def in_transaction(self, connection: Any) -> bool:
        return bool(connection.server_status & self._IN_TRANSACTION)

    def is_autocommit(self, connection: Any) -> bool:
        return bool(connection.server_status & self._AUTOCOMMIT) and not self.in_transaction(connection)

    def begin_statement(self, connection: Any) -> str | None:
        return "start transaction" if connection.server_status & self._AUTOCOMMIT else None

    def matched_rows(self, cursor: Any, statement: str) -> int:
        # An update counts only rows that change, unless the caller connected with the flag FOUND_ROWS. The first number
        # of its message, which is in the server's language, is that of the rows matched.
        message = getattr(getattr(cursor, "_result", None), "message", None) or b""
        matched = re.search(rb"\d+", message) if str(statement).lstrip()[:6].lower() == "update" else None
        return int(cursor.rowcount if matched is None else matched[0])

    async def refresh(self, connection: Any) -> None:
        # Drivers do not update the status when rows are read, and without autocommit a query opens a transaction.
        if not connection.server_status & self._AUTOCOMMIT:
            await maybe_await(connection.ping(reconnect=False))


SQLITE: Final = _Sqlite()
POSTGRESQL: Final = _Postgresql()
MYSQL: Final = _Mysql()

_BY_NAME: Final = {"sqlite": SQLITE, "postgresql": POSTGRESQL, "mysql": MYSQL, "mariadb": MYSQL}
DRIVERS: Final = {"sqlite3": SQLITE, "aiosqlite": SQLITE, "psycopg": POSTGRESQL, "pymysql": MYSQL, "aiomysql": MYSQL}


def database_by_name(name: str) -> Database:
    if name not in _BY_NAME:
        raise ConfigError(f"unknown SQL dialect {name!r}: use sqlite, postgresql or mysql (mariadb)")
    return _BY_NAME[name]


def database_of(connection: object) -> Database | None:
    """The database of the driver that defines the connection's class or a base class; None if it is not known."""
    return next((DRIVERS[package] for package in _packages(connection) if package in DRIVERS), None)


def _packages(thing: object) -> list[str]:
    return [base.__module__.partition(".")[0] for base in type(thing).__mro__]


@lru_cache(maxsize=256)
def render(statement: str, placeholder: str) -> tuple[str, Sequence[str]]:
    """The statement with `placeholder` instead of each `:name`, and these names in order."""
    names: list[str] = []

    def substitute(match: re.Match[str]) -> str:
        if match[2] is None:
            return match[0]
        names.append(match[2])
        return placeholder

    escaped = statement.replace("%", "%%") if placeholder == "%s" else statement
    return _LEXEME.sub(substitute, escaped), names


class Hidden(str):
    """A value that errors and logs do not show: those of SQLAlchemy have the parameters of the statement."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'...'"


async def run(connection: Any, database: Database, statement: str, values: Values) -> Result:
    """Run a statement with `:name` parameters. Rows are sequences, whatever the connection makes of them."""
    text, names = render(statement, database.placeholder)
    cursor = await maybe_await(connection.cursor())
    try:
        database.plain_rows(cursor)
        await maybe_await(cursor.execute(text, [values[name] for name in names]))
        rows = list(await maybe_await(cursor.fetchall())) if cursor.description else []
        return Result([list(row.values()) if isinstance(row, Mapping) else list(row) for row in rows], cursor.rowcount)
    finally:
        await maybe_await(cursor.close())


_IN_USE: Final[dict[int, object]] = {}  # by the id of a connection: its transaction of our own


class Connection:
    """A DB-API connection, and transactions on it."""

    def __init__(self, connection: Any, name: str | None) -> None:
        """`name`: of the database, if the driver is not known."""
        database = database_of(connection) if name is None else database_by_name(name)
        if database is None:
            raise ConfigError(
                f"unknown database driver {type(connection).__module__!r} (known: {', '.join(DRIVERS)}): "
                "pass dialect= sqlite, postgresql or mysql"
            )
        self.connection, self.database = connection, database

    @property
    def is_autocommit(self) -> bool:
        return self.database.is_autocommit(self.connection)

    async def run(self, statement: str, values: Values) -> Result:
        return await run(self.connection, self.database, statement, values)

    async def execute(self, statement: str, parameters: Any) -> Any:
        """Run the caller's statement, in the style of its driver. Returns the cursor."""
        cursor = await maybe_await(self.connection.cursor())
        # If there are parameters, even an empty list, drivers read a % as a placeholder.
        await maybe_await(cursor.execute(statement) if parameters is None else cursor.execute(statement, parameters))
        return cursor

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """A transaction of its own, so that its reads are not older than its first statement. Committed at the end of
        the block, rolled back after any error."""
        key, mine = id(self.connection), object()
        # Two tasks or threads that begin at once would share a transaction, and one would roll back the other's work.
        if _IN_USE.setdefault(key, mine) is not mine:
            raise ConfigError("another call is using this connection: use one connection for each thread or task")
        try:
            await self._refuse_open_transaction()
            try:
                if statement := self.database.begin_statement(self.connection):
                    await maybe_await((await self.execute(statement, None)).close())
                yield
                await maybe_await(self.connection.commit())
            except BaseException:  # a cancelled `begin` may have begun anyway, and would keep its locks
                with suppress(Exception):  # the connection is lost, and so the transaction: raise the first error
                    await maybe_await(self.connection.rollback())
                raise
        finally:
            del _IN_USE[key]

    async def run_in_transaction(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with self.transaction():
            return await work()

    async def _refuse_open_transaction(self) -> None:
        await self.database.refresh(self.connection)
        if self.database.in_transaction(self.connection):
            raise ConfigError(
                "this connection already has an open transaction: commit it first. To fence your own transaction, "
                "make claim(lease) its first statement"
            )


# ---------------------------------------------------------------- SQLAlchemy


def is_alchemy(connection: object) -> bool:
    """Whether it is a session or connection of SQLAlchemy, blocking or asyncio."""
    return "sqlalchemy" in _packages(connection)


async def run_alchemy(session: Any, statement: str, values: Values) -> Result:
    """Run a statement with `:name` parameters, which SQLAlchemy renders for its driver."""
    # A colon in quotes is no parameter.
    text = _LEXEME.sub(lambda match: match[0] if match[2] else match[0].replace(":", "\\:"), statement)
    result = await maybe_await(session.execute(import_module("sqlalchemy").text(text), values))
    return Result(list(result.all()), 0) if result.returns_rows else Result([], result.rowcount)


def alchemy_database(session: Any) -> Database:
    """The database of a connection, or of a session's engine."""
    dialect = getattr(session, "dialect", None) or session.get_bind().dialect
    return database_by_name(str(dialect.name))


async def is_alchemy_autocommit(session: Any) -> bool:
    """Whether each statement is a transaction of its own, by the setting of SQLAlchemy or of the driver connection."""
    connection = await maybe_await(session.connection()) if hasattr(session, "get_bind") else session
    connection = getattr(connection, "sync_connection", connection)  # an AsyncConnection has the blocking one inside
    isolation_level = connection.get_execution_options().get(
        "isolation_level", connection.dialect._on_connect_isolation_level
    )
    if isolation_level == "AUTOCOMMIT":
        return True
    driver_connection = connection.connection.driver_connection
    database = database_of(driver_connection)
    if database is None or not database.is_autocommit(driver_connection):  # None: an unknown driver
        return False
    if not connection.in_transaction():  # SQLAlchemy begins with the first statement: an event may execute BEGIN then
        await run_alchemy(session, "select 1", {})
    return database.is_autocommit(driver_connection)
