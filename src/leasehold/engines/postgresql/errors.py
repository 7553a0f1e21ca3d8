"""The one mapping of what PostgreSQL and libpq say to what Leasehold raises (E9).

What waiting or another try can mend is `Unavailable`; what somebody has to mend is `ConfigError`. Where the outcome is
unknown it is always `Unavailable`. No text of libpq holds a password; parameters are never shown.
"""

from __future__ import annotations

from typing import Final

from psycopg import pq

from leasehold.engines.postgresql import schema
from leasehold.engines.sql.session import SchemaMissing, SqlServerError, TransactionConflict
from leasehold.engines.sql.session import no_answer as _no_answer
from leasehold.errors import ConfigError, LeaseholdError, Unavailable

ENGINE: Final = "postgresql"
SERVER: Final = "PostgreSQL"

_MISSING: Final = frozenset({"42883", "3F000", "42P01"})  # a function, schema or table that is not there
_READ_ONLY: Final = "25006"
_DENIED: Final = "42501"
_ISOLATION: Final = "LH001"
_CALL_CONFLICT: Final = "LH002"  # a release, another call
_LOCK_TIMEOUT: Final = "55P03"  # until the deadline; or a release for a moment, which then has to go another way

# libpq tells no SQLSTATE of a connection that was refused. These are the server's English texts; in another language
# such a refusal is `Unavailable`.
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
    """The server answered with an error; the session goes on unless it was fatal."""

    def __init__(self, sqlstate: str, text: str) -> None:
        self.sqlstate = sqlstate
        super().__init__(text)

    @classmethod
    def from_result(cls, result: pq.abc.PGresult) -> PgServerError:
        sqlstate = result.error_field(pq.DiagnosticField.SQLSTATE) or b""
        primary = result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or result.error_message
        return cls(sqlstate.decode(), primary.decode(errors="replace").strip())

    def classify(self) -> LeaseholdError | SchemaMissing | TransactionConflict:
        if self.sqlstate in _MISSING:
            return SchemaMissing(str(self))
        if self.sqlstate == _DENIED:
            return ConfigError(
                f"PostgreSQL: {self}; grant this role what `leasehold schema postgresql --role ROLE` prints"
            )
        if self.sqlstate == _ISOLATION:
            return ConfigError(
                "behind this pooler transactions are not READ COMMITTED by default, which locks need: "
                "alter role ... set default_transaction_isolation = 'read committed'"
            )
        if self.sqlstate == _READ_ONLY:
            return Unavailable(f"PostgreSQL: {self}: a standby, perhaps in the midst of a fail-over", engine=ENGINE)
        if self.sqlstate in (_LOCK_TIMEOUT, _CALL_CONFLICT):
            return TransactionConflict("other transactions kept this name until the deadline")
        if self.sqlstate.startswith("22"):
            return ConfigError(f"PostgreSQL cannot store what was asked for: {self}")
        return Unavailable(f"PostgreSQL: {self}", engine=ENGINE)


def connection_refused(text: str) -> LeaseholdError:
    """Why a connection could not be made."""
    lines = [line for line in text.strip().splitlines() if line]
    text = "; ".join(lines) or "no connection"
    if any(phrase in text for phrase in _REFUSED) and "could not translate" not in text:
        return ConfigError(f"PostgreSQL: {text}")
    return Unavailable(f"PostgreSQL: {text}", engine=ENGINE)


def no_answer(seconds: float) -> Unavailable:
    return _no_answer(SERVER, ENGINE, seconds)


def schema_missing(name: str, why: object) -> ConfigError:
    return ConfigError(
        f"the tables of Leasehold are not in schema {name!r} of this database, and could not be made ({why}): have "
        "their owner run what `leasehold schema postgresql` prints"
    )


def schema_too_new(name: str, found: int) -> ConfigError:
    return ConfigError(
        f"schema {name!r} was made by a newer Leasehold (schema version {found}, this one knows {schema.VERSION}), "
        "which no longer serves this one: upgrade"
    )
