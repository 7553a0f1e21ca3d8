"""The PostgreSQL engine: locks beside an application's own tables, or in a database of their own.

The safety argument is in `attempt.sql`, `verbs.sql` and `line.sql`.
"""

from __future__ import annotations

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


class PostgresqlEngine(SqlEngine):
    name = ENGINE

    def _sweep_round(self) -> int:
        """0, or which turn at sweeping this is (`lh_sweep_v1`). Where a client begins is left to chance: so all look
        elsewhere, and those that do not live long look, too."""
        if not self._attempts:
            self._attempts = int(self._runtime.random() * SWEEP_EVERY * _SWEEP_ROUNDS)
        return super()._sweep_round() and self._attempts // SWEEP_EVERY


def open(config: EngineConfig, runtime: Runtime, registry: ClaimRegistry) -> PostgresqlEngine:
    """`postgresql://user:password@host:port/database`, with `schema`, `create`, `listen`, `listen_url` and whatever
    libpq knows as options."""
    options = parse_url(config)
    listener = registry.shared.get(ENGINE)
    if not isinstance(listener, PgListener):  # the first of the twins
        listener = registry.shared[ENGINE] = PgListener(options.listen, registry, runtime)
    return PostgresqlEngine(runtime, registry, PgConnection(options, runtime), listener, TRAITS)


def lease_check_sql(
    config: EngineConfig, placeholders: tuple[str, str, str], escape: tuple[str, str]
) -> tuple[str, str]:
    """See `leasehold.engines.lease_check_sql`. The row lock of the first has given its transaction a number."""
    prefix = schema.quote_identifier(parse_url(config).schema).replace(*escape)
    held = f"select 1 where {prefix}.lh_check_v1({', '.join(placeholders)})"
    return held, "select 1 where pg_current_xact_id_if_assigned() is not null"
