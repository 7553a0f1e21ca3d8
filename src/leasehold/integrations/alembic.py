"""Alembic: one process migrates, the others wait, find the database at its head, and go on.

with locked(context):  # in env.py, around the migrations
    run_migrations_online()
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from configparser import InterpolationError
from contextlib import contextmanager
from typing import Any, Final, Protocol

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from leasehold.blocking import Client, Lease
from leasehold.config import Duration
from leasehold.errors import ConfigError

_ENGINES: Final = {"postgresql": "postgresql", "mysql": "mysql", "mariadb": "mysql"}  # by the name of the dialect


class AlembicContext(Protocol):
    """What is used of `alembic.context`."""

    @property
    def config(self) -> Any: ...

    def is_offline_mode(self) -> bool: ...


@contextmanager
def locked(
    context: AlembicContext,
    *,
    url: str | None = None,
    name: str = "alembic",
    ttl: Duration = 60.0,
    wait: Duration | None = 600.0,
) -> Iterator[Lease | None]:
    """Hold the lock of the migrations. Enter it before the migrations read the version of the database.

    url   the engine of the lock (default: `leasehold.url` of alembic.ini, then `$LEASEHOLD_URL`, then the database that
          is migrated if it is PostgreSQL or MySQL; for SQLite, the file of locks of this user and machine)
    name  the name of the lock: give databases that share an engine one each
    ttl   seconds after which the next process goes on if the migrating one dies
    wait  seconds to wait for the migrations of another process (None: for ever)

    Offline (`--sql`), nothing is locked, and the lease is None. Raises `NotAcquired` if another process still migrates
    when `wait` is over, `Unavailable` if the engine does not answer: the migrations did not begin. `LeaseLost`: the
    lease was lost while they ran, and another process may have begun.
    """
    if context.is_offline_mode():
        yield None
        return
    with (
        Client(_lock_url(context, url)) as client,
        client.lock(name, ttl=ttl, wait=wait, purpose="migrations") as lease,
    ):
        yield lease


def _option(context: AlembicContext, name: str) -> str | None:
    try:
        found: str | None = context.config.get_main_option(name)
    except InterpolationError:
        # Without the parser's text, which shows the URL from that % on, the rest of the password among it.
        raise ConfigError(f"the {name} of alembic.ini has a single %: write %% for each, such as %%40 for @") from None
    return found


def _parse(database: str | None) -> URL | None:
    try:
        return make_url(database) if database else None
    except (ArgumentError, ValueError):
        # Without SQLAlchemy's text, which shows parts of the URL, a password among them.
        raise ConfigError(
            "the sqlalchemy.url of alembic.ini cannot be parsed: percent-encode its password, such as %%40 for @"
        ) from None


def _lock_url(context: AlembicContext, url: str | None) -> str | None:
    if given := url or _option(context, "leasehold.url") or os.environ.get("LEASEHOLD_URL"):
        return str(given)
    database = _parse(_option(context, "sqlalchemy.url"))
    dialect = database.get_backend_name() if database else "alembic.ini, which has no sqlalchemy.url,"
    if dialect == "sqlite":
        return None  # a file of this machine, as the lock's
    if database and (scheme := _ENGINES.get(dialect)):
        return database.set(drivername=scheme).render_as_string(hide_password=False)
    raise ConfigError(
        f"{dialect} does not say where to keep the lock of the migrations: set leasehold.url in alembic.ini, or "
        "LEASEHOLD_URL, to an engine that all processes share"
    )
