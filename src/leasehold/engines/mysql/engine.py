"""The MySQL and MariaDB engine: locks beside an application's own tables, or in a database of their own.

The safety argument is in `verbs.sql`, `alone.sql` and `line.sql`; without the right to have procedures, in `plain.sql`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from leasehold.book import Book
from leasehold.config import EngineConfig
from leasehold.engines.mysql import schema
from leasehold.engines.mysql.ear import Ear
from leasehold.engines.mysql.lane import Lane
from leasehold.engines.mysql.meaning import ENGINE
from leasehold.engines.mysql.plain import PlainLane
from leasehold.engines.mysql.url import Options, parsed
from leasehold.engines.sql import TRAITS
from leasehold.engines.sql.engine import SqlEngine
from leasehold.errors import Unsupported
from leasehold.model import Busy, Claim, Grant
from leasehold.runtime.base import Runtime

BEST: Final = replace(TRAITS, told=False)  # wake-ups bring turns, and nothing else
PLAIN: Final = replace(BEST, fair=False, push=False, shared=False, max_limit=1, slots=False)  # without procedures

_MOST_TOKENS: Final = 10_000


class MysqlEngine(SqlEngine):
    name = ENGINE

    def __init__(self, runtime: Runtime, book: Book, options: Options, ear: Ear) -> None:
        lane, best = (Lane, BEST) if options.procedures else (PlainLane, PLAIN)
        super().__init__(runtime, book, lane(options, runtime), ear, best)
        self._tokens: dict[str, int] = {}  # by mark, of grants to be given back: by its key a row is found cheaper

    async def attempt(self, claim: Claim, deadline: float) -> Grant | Busy:
        reply = await super().attempt(claim, deadline)
        if isinstance(reply, Grant):
            if len(self._tokens) >= _MOST_TOKENS:  # leases that were lost are never given back
                self._tokens.clear()  # at once: other threads are here, too, and nothing that walks it would be safe
            self._tokens[claim.mark] = reply.token
        return reply

    def _giving_up(self, claim: Claim, deadline: float) -> tuple[Any, ...]:
        return (*super()._giving_up(claim, deadline), self._tokens.pop(claim.mark, 0))


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
