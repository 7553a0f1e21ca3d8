"""The MySQL and MariaDB engine: locks beside an application's own tables, or in a database of their own.

The safety argument is in `verbs.sql`, `alone.sql` and `line.sql`; without the right to have procedures, in `plain.sql`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from leasehold.config import EngineConfig
from leasehold.engines.mysql import schema
from leasehold.engines.mysql.connection import MyConnection
from leasehold.engines.mysql.errors import ENGINE
from leasehold.engines.mysql.listener import MyListener
from leasehold.engines.mysql.no_procedures import NoProceduresConnection
from leasehold.engines.mysql.url import MyOptions, parse_url
from leasehold.engines.registry import ClaimRegistry
from leasehold.engines.sql import TRAITS
from leasehold.engines.sql.engine import SqlEngine
from leasehold.errors import Unsupported
from leasehold.model import Busy, Claim, Grant
from leasehold.runtime.base import Runtime

TRAITS_WITH_PROCEDURES: Final = replace(TRAITS, break_notice=False)  # wake-ups bring turns, and nothing else
TRAITS_WITHOUT_PROCEDURES: Final = replace(
    TRAITS_WITH_PROCEDURES, fair=False, push=False, shared=False, max_limit=1, slots=False
)  # without procedures

_MAX_TOKENS: Final = 10_000


class MysqlEngine(SqlEngine):
    name = ENGINE

    def __init__(self, runtime: Runtime, registry: ClaimRegistry, options: MyOptions, listener: MyListener) -> None:
        connection_type, best_traits = (
            (MyConnection, TRAITS_WITH_PROCEDURES)
            if options.procedures
            else (NoProceduresConnection, TRAITS_WITHOUT_PROCEDURES)
        )
        super().__init__(runtime, registry, connection_type(options, runtime), listener, best_traits)
        self._tokens: dict[str, int] = {}  # by mark, of grants to be given back: by its key a row is found cheaper

    async def attempt(self, claim: Claim, deadline: float) -> Grant | Busy:
        reply = await super().attempt(claim, deadline)
        if isinstance(reply, Grant):
            if len(self._tokens) >= _MAX_TOKENS:  # leases that were lost are never given back
                self._tokens.clear()  # at once: other threads are here, too, and nothing that walks it would be safe
            self._tokens[claim.id_hash] = reply.token
        return reply

    def _release_args(self, claim: Claim, deadline: float) -> tuple[Any, ...]:
        return (*super()._release_args(claim, deadline), self._tokens.pop(claim.id_hash, 0))


def open(config: EngineConfig, runtime: Runtime, registry: ClaimRegistry) -> MysqlEngine:
    """`mysql://user:password@host:port/database`, with `create`, `listen`, `procedures`, `unix_socket`, and PyMySQL's
    options for TLS."""
    options = parse_url(config)
    listener = registry.shared.get(ENGINE)
    if not isinstance(listener, MyListener):  # the first of the twins
        listener = registry.shared[ENGINE] = MyListener(options, registry, runtime)
    return MysqlEngine(runtime, registry, options, listener)


def lease_check_sql(
    config: EngineConfig, placeholders: tuple[str, str, str], escape: tuple[str, str]
) -> tuple[str, str]:
    """See `leasehold.engines.lease_check_sql`."""
    options = parse_url(config)
    if not options.procedures:
        raise Unsupported("a check inside a transaction is a procedure: not with procedures=no", engine=ENGINE)
    prefix = schema.quote_identifier(options.database).replace(*escape)
    return f"call {prefix}.lh_check_v1({', '.join(placeholders)})", f"call {prefix}.lh_in_transaction_v1()"
