"""Where records are kept: URL scheme to store, and a store within your own transaction.

    client.once("invoice-42", send)                                    # next to the client's own locks
    client.once("invoice-42", send, store="postgresql://host/shop")    # in a database
    client.once("invoice-42", send, store=stores.within(connection))   # committed with what `send` does

A module is imported on first use, so a driver that is not needed is never loaded.

memory.py  sqlite.py  postgresql.py  mysql.py  redis.py  etcd.py  zookeeper.py     one store each
sql.py           the statements that all SQL databases share
engine_store.py  stores on the connections of an engine: Redis, etcd, ZooKeeper
"""

from __future__ import annotations

from collections.abc import Awaitable
from importlib import import_module
from typing import Any, Final, Protocol, cast

from leasehold import dbapi
from leasehold.client.base import BaseClient
from leasehold.config import EngineConfig
from leasehold.errors import ConfigError
from leasehold.records.store import Record, Store
from leasehold.records.stores.sql import Table, TransactionStore

__all__ = ["BUILT_IN", "Record", "Store", "open_store", "schema", "within"]

BUILT_IN: Final[dict[str, str]] = {
    "memory": "leasehold.records.stores.memory",
    "sqlite": "leasehold.records.stores.sqlite",
    "redis": "leasehold.records.stores.redis",
    "rediss": "leasehold.records.stores.redis",
    "redis+unix": "leasehold.records.stores.redis",
    "redis+sentinel": "leasehold.records.stores.redis",
    "redis+cluster": "leasehold.records.stores.redis",
    "etcd": "leasehold.records.stores.etcd",
    "etcds": "leasehold.records.stores.etcd",
    "zk": "leasehold.records.stores.zookeeper",
    "zookeeper": "leasehold.records.stores.zookeeper",
    "postgresql": "leasehold.records.stores.postgresql",
    "mysql": "leasehold.records.stores.mysql",
    "mariadb": "leasehold.records.stores.mysql",
}

# The module of a store that needs a driver -> the extra that installs it.
EXTRAS: Final[dict[str, str]] = {
    "leasehold.records.stores.redis": "redis",
    "leasehold.records.stores.postgresql": "postgresql",
    "leasehold.records.stores.mysql": "mysql",
    "leasehold.records.stores.zookeeper": "zookeeper",
}


class ClosableStore(Store, Protocol):
    """A store with its own connections."""

    def close(self) -> Awaitable[None] | None:
        """Close the connections."""


def open_store(client: BaseClient, url: str | None) -> ClosableStore:
    """The store that a URL names, for this client. None: at the client's own URL, whose other options are ignored."""
    core = client._core
    config = core.config if url is None else EngineConfig.parse(url, core.options.call_timeout)
    module = _module(config)
    if hasattr(module, "open_on_engine"):
        return cast(ClosableStore, module.open_on_engine(client, url))
    if url is not None:
        return cast(ClosableStore, module.open(config, core.runtime))
    config = config.replace(options={name: text for name, text in config.options.items() if name in module.OPTIONS})
    return cast(ClosableStore, getattr(module, "open_for_engine", module.open)(config, core.runtime))


def _module(config: EngineConfig) -> Any:
    name = BUILT_IN.get(config.scheme)
    if name is None:
        known = ", ".join(f"{scheme}://" for scheme in sorted(BUILT_IN))
        raise ConfigError(
            f'{config.scheme}:// keeps no records: pass store="postgresql://host/database", or another URL of {known}; '
            "or a store of your own"
        )
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if name not in EXTRAS or (error.name or "").startswith("leasehold"):
            raise
        hint = f'pip install "leasehold[{EXTRAS[name]}]"'
        raise ConfigError(f"a {config.scheme}:// store needs {error.name}, which is not installed: {hint}") from error


def within(connection: object) -> Store:
    """A store inside the open transaction of your connection: the record is committed together with everything else in
    that transaction, or not at all.

    Takes connections of sqlite3, psycopg (blocking and async) and PyMySQL, in asyncio also of aiosqlite and aiomysql.
    With SQLAlchemy, pass `session.connection().connection.driver_connection`. The table must already exist: see
    `schema`. Errors of your driver are raised unchanged, not as errors of Leasehold. A call without an open transaction
    raises `ConfigError`.
    """
    if (database := dbapi.database_of(connection)) is None:
        raise ConfigError(f"within() takes connections of {', '.join(dbapi.DRIVERS)}, not {type(connection).__name__}")
    dialect = import_module(f"leasehold.records.stores.{database.name}").DIALECT
    return TransactionStore(Table(dialect), connection)


def schema(dialect: str) -> str:
    """The SQL statements that create the table, for `sqlite`, `postgresql` or `mysql`. Repeating them is harmless."""
    if dialect not in ("sqlite", "postgresql", "mysql"):
        raise ConfigError(f"dialect must be sqlite, postgresql or mysql, not {dialect!r}")
    return ";\n".join(import_module(f"leasehold.records.stores.{dialect}").DIALECT.schema) + ";\n"
