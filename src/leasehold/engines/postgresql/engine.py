"""The PostgreSQL engine: locks beside an application's own tables, or in a database of their own.

The safety argument is in `attempt.sql`, `verbs.sql` and `line.sql`.
"""

from __future__ import annotations

from typing import Final

from leasehold.book import Book
from leasehold.config import EngineConfig
from leasehold.engines.postgresql import schema
from leasehold.engines.postgresql.ear import Ear
from leasehold.engines.postgresql.lane import Lane
from leasehold.engines.postgresql.meaning import ENGINE
from leasehold.engines.postgresql.url import parsed
from leasehold.engines.sql import TRAITS
from leasehold.engines.sql.engine import SWEEP_EVERY, SqlEngine
from leasehold.runtime.base import Runtime

_TURNS: Final = 2**20


class PostgresqlEngine(SqlEngine):
    name = ENGINE

    def _sweeps(self) -> int:
        """0, or which turn at sweeping this is (`lh_sweep_v1`). Where a client begins is left to chance: so all look
        elsewhere, and those that do not live long look, too."""
        if not self._attempts:
            self._attempts = int(self._runtime.fraction() * SWEEP_EVERY * _TURNS)
        return super()._sweeps() and self._attempts // SWEEP_EVERY


def open(config: EngineConfig, runtime: Runtime, book: Book) -> PostgresqlEngine:
    """`postgresql://user:password@host:port/database`, with `schema`, `create`, `listen`, `listen_url` and whatever
    libpq knows as options."""
    options = parsed(config)
    ear = book.shelf.get(ENGINE)
    if not isinstance(ear, Ear):  # the first of the twins
        ear = book.shelf[ENGINE] = Ear(options.listen, book, runtime)
    return PostgresqlEngine(runtime, book, Lane(options, runtime), ear, TRAITS)


def inside(config: EngineConfig, marks: tuple[str, str, str], escape: tuple[str, str]) -> tuple[str, str]:
    """See `leasehold.engines.inside`. The row lock of the first has given its transaction a number."""
    prefix = schema.quoted(parsed(config).schema).replace(*escape)
    held = f"select 1 where {prefix}.lh_check_v1({', '.join(marks)})"
    return held, "select 1 where pg_current_xact_id_if_assigned() is not null"
