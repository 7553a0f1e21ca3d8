"""The PostgreSQL engine: locks in the application's own database or in a separate one.

The safety argument is in `attempt.sql`, `verbs.sql`, `lock_state.sql` and `hand_off.sql`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from leasehold.config import EngineConfig
from leasehold.engines.postgresql import schema
from leasehold.engines.postgresql.connection import PgConnection
from leasehold.engines.postgresql.errors import ENGINE
from leasehold.engines.postgresql.listener import PgListener
from leasehold.engines.postgresql.url import parse_url
from leasehold.engines.registry import ClaimRegistry
from leasehold.engines.sql import TRAITS
from leasehold.engines.sql.engine import SWEEP_EVERY, SqlEngine
from leasehold.runtime.base import Runtime

_SWEEP_ROUNDS: Final = 2**20
_TRAITS_NOT_DURABLE: Final = TRAITS._replace(survives="nothing")


class PostgresqlEngine(SqlEngine):
    name = ENGINE

    def _sweep_round(self) -> int:
        """0, or the number of this sweep, which selects the blocks to read (`lh_sweep_v1`). Each client starts at a
        random number, so that clients sweep different blocks, and short-lived clients sweep too."""
        if not self._attempts:
            self._attempts = int(self._runtime.random() * SWEEP_EVERY * _SWEEP_ROUNDS)
        return super()._sweep_round() and self._attempts // SWEEP_EVERY


def open(config: EngineConfig, runtime: Runtime, registry: ClaimRegistry) -> PostgresqlEngine:
    """`postgresql://user:password@host:port/database`, with the options `schema`, `create`, `durable`, `listen`,
    `listen_url` and those of libpq."""
    options = parse_url(config)
    listener = registry.shared.get(ENGINE)
    if not isinstance(listener, PgListener):  # the client's first engine instance
        listener = registry.shared[ENGINE] = PgListener(options.listen, registry, runtime)
    best_traits = TRAITS if options.durable else _TRAITS_NOT_DURABLE
    return PostgresqlEngine(runtime, registry, PgConnection(options, runtime), listener, best_traits)


def lease_check_sql(config: EngineConfig) -> tuple[str, str]:
    """See `leasehold.engines.lease_check_sql`. The row lock of the first statement assigns its transaction an id; the
    second checks that there is one."""
    held = f"select 1 where {schema.quote_identifier(parse_url(config).schema)}.lh_check_v1(:namespace, :name, :token)"
    return held, "select 1 where pg_catalog.pg_current_xact_id_if_assigned() is not null"


def release_on_commit_sql(config: EngineConfig) -> Sequence[str]:
    """See `leasehold.engines.release_on_commit_sql`. The first statement gives the transaction a number, by which the
    second recognizes that it is not a transaction of its own."""
    prefix = schema.quote_identifier(parse_url(config).schema)
    return (
        "select pg_catalog.pg_current_xact_id()",
        f"select {prefix}.lh_release_on_commit_v1(:namespace, :name, :token, :id_hash)",
    )
