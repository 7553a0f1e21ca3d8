"""The MySQL and MariaDB engine: locks beside an application's own tables, or in a database of their own.

The safety argument is in the SQL: `verbs.sql` says what each verb does under the lock of its bucket's row, `line.sql`
is the state machine. This module says how a client is told, and what the server as met promises.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from leasehold.book import Book
from leasehold.config import EngineConfig
from leasehold.engines.mysql import schema
from leasehold.engines.mysql.ear import Ear
from leasehold.engines.mysql.lane import Lane
from leasehold.engines.mysql.meaning import ENGINE
from leasehold.engines.mysql.plain import PlainLane
from leasehold.engines.mysql.url import Options, parsed
from leasehold.engines.sql.engine import SqlEngine
from leasehold.errors import Unsupported
from leasehold.model import Alive, Claim, Gone, Traits
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
    told=False,
    min_ttl=0.0,
    ttl_step=0.0,
    survives="restart",
)

PLAIN: Final = replace(TRAITS, fair=False, push=False, shared=False, max_limit=1, slots=False)  # without procedures

_FOR_THE_EAR: Final = 0.5  # of a call's time: what is left must do for the call itself


class MysqlEngine(SqlEngine):
    name = ENGINE

    def __init__(self, runtime: Runtime, book: Book, options: Options, ear: Ear) -> None:
        self._mysql = (Lane if options.procedures else PlainLane)(options, runtime)
        super().__init__(runtime, book, self._mysql)
        self._options, self._ear = options, ear
        ear.twins.add(self)

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Durability is the server's setting, known after the first call; wake-ups may have turned out impossible."""
        server, push = self._mysql.server, not self._ear.deaf
        if push and (server is None or server.durable):
            return TRAITS
        traits = TRAITS if self._options.procedures else PLAIN
        return replace(traits, push=push, survives="restart" if server is None or server.durable else "nothing")

    async def _address(self, queue: bool, deadline: float) -> str:
        self._ear.follow(self._mysql.server)
        if self._ear.address or not queue:  # who does not wait need not be told
            return self._ear.address
        met = await self._mysql.meet(deadline)
        now = self._runtime.now()
        return await self._ear.ready(self._runtime, now + (deadline - now) * _FOR_THE_EAR, met)

    async def _beat(self, claims: list[Claim], deadline: float) -> list[Alive | Gone]:
        if self._options.procedures:
            return await super()._beat(claims, deadline)
        return [Gone()] * len(claims)  # there is no line

    def after_fork(self) -> None:
        super().after_fork()
        self._ear.after_fork()

    async def close(self) -> None:
        await super().close()
        self._ear.twins.discard(self)
        if not self._ear.twins:  # the watchdog's twin comes and goes
            self._ear.close()


def open(config: EngineConfig, runtime: Runtime, book: Book) -> MysqlEngine:
    """`mysql://user:password@host:port/database`, with `create`, `listen`, `procedures`, `unix_socket`, and PyMySQL's
    options for TLS."""
    options = parsed(config)
    ear = book.shelf.get(ENGINE)
    if not isinstance(ear, Ear):  # the first of the twins
        ear = book.shelf[ENGINE] = Ear(options, book, runtime)
    return MysqlEngine(runtime, book, options, ear)


def inside(config: EngineConfig, marks: tuple[str, str, str], escape: tuple[str, str]) -> tuple[str, str]:
    """See `leasehold.engines.inside`."""
    options = parsed(config)
    if not options.procedures:
        raise Unsupported("a check inside a transaction is a procedure: not with procedures=no", engine=ENGINE)
    prefix = schema.quoted(options.database).replace(*escape)
    return f"call {prefix}.lh_check_v1({', '.join(marks)})", f"call {prefix}.lh_open_v1()"
