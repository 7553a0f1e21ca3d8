"""Where records are kept: URL scheme to store, and a store within a transaction of your own.

    client.once("invoice-42", send)                                    # beside the client's own locks
    client.once("invoice-42", send, store="postgresql://host/shop")    # in a database
    client.once("invoice-42", send, store=stores.within(connection))   # committed with what `send` does

A module is imported on first use, so a driver nobody asked for is never loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any, Final, Protocol, cast

from leasehold.config import EngineConfig
from leasehold.errors import ConfigError
from leasehold.runtime.base import Runtime
from leasehold.store import Record, Store

__all__ = ["BUILT_IN", "Record", "Store", "opened", "schema", "within"]

BUILT_IN: Final[dict[str, str]] = {
    "memory": "leasehold.stores.memory",
    "sqlite": "leasehold.stores.sqlite",
    "redis": "leasehold.stores.redis",
    "rediss": "leasehold.stores.redis",
    "redis+unix": "leasehold.stores.redis",
    "postgresql": "leasehold.stores.postgresql",
    "postgres": "leasehold.stores.postgresql",
    "mysql": "leasehold.stores.mysql",
    "mariadb": "leasehold.stores.mysql",
}

# The module of a store that needs a driver -> the extra that brings it.
EXTRAS: Final[dict[str, str]] = {
    "leasehold.stores.redis": "redis",
    "leasehold.stores.postgresql": "postgresql",
    "leasehold.stores.mysql": "mysql",
}

# The package of a database driver -> the module that knows its statements.
_DRIVERS: Final[dict[str, str]] = {
    "sqlite3": "leasehold.stores.sqlite",
    "aiosqlite": "leasehold.stores.sqlite",
    "psycopg": "leasehold.stores.postgresql",
    "pymysql": "leasehold.stores.mysql",
    "aiomysql": "leasehold.stores.mysql",
}


class OpenStore(Store, Protocol):
    """A store with connections of its own."""

    def close(self) -> None:
        """Let connections go."""


def opened(config: EngineConfig, runtime: Runtime, *, beside: bool) -> OpenStore:
    """The store that a URL names. `beside`: the URL is that of an engine, whose other options are none of ours."""
    module = _module(config)
    if not beside:
        return cast(OpenStore, module.open(config, runtime))
    config = replace(config, options={name: text for name, text in config.options.items() if name in module.OPTIONS})
    return cast(OpenStore, getattr(module, "beside", module.open)(config, runtime))


def _module(config: EngineConfig) -> Any:
    name = BUILT_IN.get(config.scheme)
    if name is None:
        known = ", ".join(f"{scheme}://" for scheme in sorted(BUILT_IN))
        raise ConfigError(f"{config.scheme}:// keeps no records: pass store= one of {known}, or a store of your own")
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if name not in EXTRAS or (error.name or "").startswith("leasehold"):
            raise
        way = f'pip install "leasehold[{EXTRAS[name]}]"'
        raise ConfigError(f"a store at {config.scheme}:// needs {error.name}, not installed: {way}") from error


def within(connection: object) -> Store:
    """A store on a connection of yours, inside the transaction it is in: the record is written when you commit,
    together with all else you did, or not at all.

    For connections of sqlite3, psycopg (both kinds), PyMySQL, and in asyncio aiosqlite and aiomysql. Of SQLAlchemy,
    pass `session.connection().connection.driver_connection`. The table must be there: see `schema`. Errors of your
    driver stay its own: they are not turned into errors of Leasehold.
    """
    package = type(connection).__module__.partition(".")[0]
    if package not in _DRIVERS:
        raise ConfigError(f"within() knows connections of {', '.join(_DRIVERS)}; not {type(connection).__name__}")
    bound: Callable[[object], Store] = import_module(_DRIVERS[package]).within
    return bound(connection)


def schema(dialect: str) -> str:
    """The statements that make the table: `sqlite`, `postgresql` or `mysql`. Repeating them is harmless."""
    if dialect not in ("sqlite", "postgresql", "mysql"):
        raise ConfigError(f"there is a schema for sqlite, postgresql and mysql, not for {dialect!r}")
    return ";\n".join(import_module(f"leasehold.stores.{dialect}").DIALECT.schema) + ";\n"
