"""The PostgreSQL engine: locks beside an application's own tables, or in a database of their own.

The safety argument is in the SQL: `verbs.sql` says what each verb does under the lock of its bucket's row, `line.sql`
is the state machine. This module says how a client is told, and what the server as met promises.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from leasehold.book import Book
from leasehold.config import EngineConfig
from leasehold.engines.postgresql import schema
from leasehold.engines.postgresql.ear import Ear
from leasehold.engines.postgresql.lane import Lane
from leasehold.engines.postgresql.meaning import ENGINE
from leasehold.engines.postgresql.url import Options, parsed
from leasehold.engines.sql.engine import SqlEngine
from leasehold.model import Traits
from leasehold.runtime.base import Runtime

TRAITS: Final = Traits(
    liveness="ttl",
    clock="engine",
    fencing=True,
    fair=True,
    push=True,
    shared=True,
    max_limit=None,
    slots=True,
    outlives=True,
    told=True,
    min_ttl=0.0,
    ttl_step=0.0,
    survives="restart",
)

_FOR_THE_EAR: Final = 0.5  # of a call's time: what is left must do for the call itself


class PostgresqlEngine(SqlEngine):
    name = ENGINE

    def __init__(self, runtime: Runtime, book: Book, options: Options, ear: Ear) -> None:
        self._postgresql = Lane(options, runtime)
        super().__init__(runtime, book, self._postgresql)
        self._options, self._ear = options, ear
        ear.twins.add(self)

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Durability is the server's setting, known after the first call; wake-ups may have turned out impossible."""
        server, push = self._postgresql.server, not self._ear.deaf
        if push and (server is None or server.durable):
            return TRAITS
        return replace(
            TRAITS, push=push, told=push, survives="restart" if server is None or server.durable else "nothing"
        )

    async def _address(self, queue: bool, deadline: float) -> str:
        self._ear.follow(self._postgresql.server)
        if self._ear.address:
            return self._ear.address
        met = await self._postgresql.meet(deadline)
        now = self._runtime.now()
        return await self._ear.ready(self._runtime, now + (deadline - now) * _FOR_THE_EAR, met)

    async def ping(self, deadline: float) -> None:
        await super().ping(deadline)
        await self._address(False, deadline)

    def after_fork(self) -> None:
        super().after_fork()
        self._ear.after_fork()

    async def close(self) -> None:
        await super().close()
        self._ear.twins.discard(self)
        if not self._ear.twins:  # the watchdog's twin comes and goes
            self._ear.close()


def open(config: EngineConfig, runtime: Runtime, book: Book) -> PostgresqlEngine:
    """`postgresql://user:password@host:port/database`, with `schema`, `create`, `listen`, `listen_url` and whatever
    libpq knows as options."""
    options = parsed(config)
    ear = book.shelf.get(ENGINE)
    if not isinstance(ear, Ear):  # the first of the twins
        ear = book.shelf[ENGINE] = Ear(options.listen, book, runtime)
    return PostgresqlEngine(runtime, book, options, ear)


def inside(config: EngineConfig, marks: tuple[str, str, str], escape: tuple[str, str]) -> tuple[str, str]:
    """See `leasehold.engines.inside`. The row lock of the first has given its transaction a number."""
    prefix = schema.quoted(parsed(config).schema).replace(*escape)
    held = f"select 1 where {prefix}.lh_check_v1({', '.join(marks)})"
    return held, "select 1 where pg_current_xact_id_if_assigned() is not null"
