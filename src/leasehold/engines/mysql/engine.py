"""The MySQL and MariaDB engine: locks in the application's own database or in a separate one.

The safety argument is in `verbs.sql`, `fast_path.sql`, `hand_off.sql` and `lock_state.sql`; with procedures=no, in
`no_procedures.sql`.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, Final

from leasehold.config import EngineConfig
from leasehold.core.names import bucket
from leasehold.engines.mysql import schema
from leasehold.engines.mysql.connection import MyConnection
from leasehold.engines.mysql.errors import ENGINE
from leasehold.engines.mysql.listener import MyListener
from leasehold.engines.mysql.no_procedures import NoProceduresConnection
from leasehold.engines.mysql.url import MyOptions, parse_url
from leasehold.engines.registry import ClaimRegistry
from leasehold.engines.sql import TRAITS
from leasehold.engines.sql.engine import SqlEngine
from leasehold.errors import ConfigError, TransactionOpen, Unavailable, Unsupported
from leasehold.model import Busy, Claim, Grant
from leasehold.runtime.base import Runtime

TRAITS_WITH_PROCEDURES: Final = TRAITS._replace(break_notice=False)  # wake-ups only reach waiters
TRAITS_WITHOUT_PROCEDURES: Final = TRAITS_WITH_PROCEDURES._replace(
    fair=False, push=False, shared=False, max_limit=1, slots=False, resizable=False
)

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
        self._tokens: dict[str, int] = {}  # by id hash: with the token, a release finds its row by the primary key

    async def attempt(self, claim: Claim, deadline: float) -> Grant | Busy:
        reply = await super().attempt(claim, deadline)
        if isinstance(reply, Grant):
            if len(self._tokens) >= _MAX_TOKENS:  # lost leases are never released, and leave their tokens here
                self._tokens.clear()  # all at once: iterating is not safe while other threads change the dictionary
            self._tokens[claim.id_hash] = reply.token
        return reply

    def _renewal_columns(self, claims: list[Claim]) -> list[list[Any]]:
        return [*super()._renewal_columns(claims), [bucket(c.name) for c in claims]]

    def release(self, claim: Claim, deadline: float) -> Coroutine[Any, Any, bool]:
        if claim.id_hash in self._registry.released_on_commit:
            return self._release_unless_locked(claim, deadline)
        return super().release(claim, deadline)

    async def _release_unless_locked(self, claim: Claim, deadline: float) -> bool:
        """Release a claim that a transaction of the caller releases when it commits. That transaction has the row
        locked, and the caller may be the thread that is to commit it: so wait for nothing, and let the watchdog
        retry."""
        try:
            args = self._release_args(claim, deadline)
            rows = await self._connection.call("release_unless_locked", args, deadline, first=True)
        except ConfigError as error:  # as in `SqlEngine.release`
            raise Unavailable(str(error), engine=ENGINE) from error
        with self._decoding:
            ended = rows[0][0]
        if ended == "o":
            raise TransactionOpen(f"the transaction that releases {claim.name} is still open", engine=ENGINE)
        self._registry.released_on_commit.discard(claim.id_hash)
        return ended == "t"

    def _release_args(self, claim: Claim, deadline: float) -> tuple[Any, ...]:
        return (*super()._release_args(claim, deadline), self._tokens.pop(claim.id_hash, 0))


def open(config: EngineConfig, runtime: Runtime, registry: ClaimRegistry) -> MysqlEngine:
    """`mysql://user:password@host:port/database`, with the options `create`, `listen`, `procedures`, `unix_socket` and
    PyMySQL's options for TLS."""
    options = parse_url(config)
    listener = registry.shared.get(ENGINE)
    if not isinstance(listener, MyListener):  # the client's first engine instance
        listener = registry.shared[ENGINE] = MyListener(options, registry, runtime)
    return MysqlEngine(runtime, registry, options, listener)


def lease_check_sql(config: EngineConfig) -> tuple[str, str]:
    """See `leasehold.engines.lease_check_sql`. In hex, because the procedures take bytes: those of a text depend on the
    character set of the caller's connection."""
    prefix = _procedures_prefix(config, "check")
    return (
        f"call {prefix}.lh_check_v1(unhex(:namespace_hex), unhex(:name_hex), :token)",
        f"call {prefix}.lh_in_transaction_v1()",
    )


def release_on_commit_sql(config: EngineConfig) -> Sequence[str]:
    """See `leasehold.engines.release_on_commit_sql`."""
    prefix = _procedures_prefix(config, "release")
    return (f"call {prefix}.lh_release_on_commit_v1(unhex(:namespace_hex), unhex(:name_hex), :token, :id_hash)",)


def _procedures_prefix(config: EngineConfig, what: str) -> str:
    options = parse_url(config)
    if not options.procedures:
        raise Unsupported(
            f"mysql:// with procedures=no cannot {what} a lease inside your transaction: the {what} is a procedure",
            engine=ENGINE,
        )
    return schema.quote_identifier(options.database)
