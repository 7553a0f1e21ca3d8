"""The one mapping from errors of PostgreSQL and libpq to what Leasehold raises (E9).

An error that waiting or a retry can resolve is `Unavailable`; one that needs a person is `ConfigError`. If the outcome
is unknown, it is always `Unavailable`. libpq's texts contain no password; parameters are never shown.
"""

from __future__ import annotations

from typing import Final

from psycopg import pq

from leasehold.core.texts import server_text
from leasehold.engines.sql.session import SchemaMissing, SqlServerError, TransactionConflict
from leasehold.engines.sql.session import no_answer as _no_answer
from leasehold.errors import AccessDenied, ConfigError, LeaseholdError, Unavailable

ENGINE: Final = "postgresql"
SERVER: Final = "PostgreSQL"

_MISSING: Final = frozenset({"42883", "3F000", "42P01"})  # a function, schema or table that does not exist
_READ_ONLY: Final = "25006"
_DENIED: Final = "42501"
_ISOLATION: Final = "LH001"
_CALL_CONFLICT: Final = "LH002"  # a release collided with another call
# Another transaction has just created the same schema, table, type or index; or function, for which there is no code.
_RACED: Final = frozenset({"23505", "42710", "42P07"})
_FUNCTION_RACED: Final = "tuple concurrently updated"  # in every language of the server
_LOCK_TIMEOUT: Final = "55P03"  # waited until the deadline; or 100 ms in a release, which is then retried

# libpq gives no SQLSTATE for a refused connection. These are the server's English texts; in another language such a
# refusal is `Unavailable`.
_REFUSED: Final = (
    "authentication failed",
    "no password supplied",
    "no pg_hba.conf entry",
    "does not exist",
    "is not permitted to log in",
    "permission denied for database",
    "SSL was required",
    "does not support SSL",
    "certificate",
    "invalid connection option",
    "invalid sslmode",
    "unsupported startup parameter",
)


class PgServerError(SqlServerError):
    """The server replied with an error; the session stays usable unless the error was fatal."""

    def __init__(self, sqlstate: str, text: str) -> None:
        self.sqlstate = sqlstate
        super().__init__(text)

    @classmethod
    def from_result(cls, result: pq.abc.PGresult) -> PgServerError:
        sqlstate = result.error_field(pq.DiagnosticField.SQLSTATE) or b""
        primary = result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or result.error_message
        error = cls(sqlstate.decode(errors="replace"), server_text(primary))
        result.clear()  # its text may be long, and the traceback keeps it
        return error

    @property
    def raced(self) -> bool:
        """Whether a statement of the schema failed because another client has committed the same."""
        return self.sqlstate in _RACED or _FUNCTION_RACED in str(self)

    def classify(self) -> LeaseholdError | SchemaMissing | TransactionConflict:
        if self.sqlstate in _MISSING:
            return SchemaMissing(str(self))
        if self.sqlstate == _DENIED:
            return AccessDenied(
                f"PostgreSQL: {self}; grant this role what `leasehold schema postgresql --role ROLE` prints"
            )
        if self.sqlstate == _ISOLATION:
            return ConfigError(
                "PostgreSQL: locks need READ COMMITTED, which is not the default behind this pooler; run: "
                "alter role ... set default_transaction_isolation = 'read committed'"
            )
        if self.sqlstate == _READ_ONLY:
            return Unavailable(f"PostgreSQL: {self}: the server is a standby, perhaps during a failover", engine=ENGINE)
        if self.sqlstate in (_LOCK_TIMEOUT, _CALL_CONFLICT):
            return TransactionConflict("other transactions kept this name locked until the deadline")
        if self.sqlstate.startswith("22"):
            return ConfigError(f"PostgreSQL cannot store one of the values: {self}")
        return Unavailable(f"PostgreSQL: {self}", engine=ENGINE)


def connection_refused(text: str) -> LeaseholdError:
    """The error for a connection that failed."""
    lines = [line.strip() for line in text.strip().splitlines() if line]
    shown = server_text("; ".join(lines)) or "the connection failed"
    if any(phrase in text for phrase in _REFUSED) and "could not translate" not in text:
        return ConfigError(f"PostgreSQL: {shown}")
    return Unavailable(f"PostgreSQL: {shown}", engine=ENGINE)


def no_answer(seconds: float, address: str = "") -> Unavailable:
    return _no_answer(f"{SERVER} at {address}" if address else SERVER, ENGINE, seconds)


def schema_missing(name: str, why: object) -> ConfigError:
    return ConfigError(
        f"Leasehold's tables are missing from schema {name!r} of this database and could not be created ({why}); "
        "run what `leasehold schema postgresql` prints, as their owner"
    )
