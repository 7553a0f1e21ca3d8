"""The one mapping from errors of MySQL, MariaDB and PyMySQL to what Leasehold raises (E9).

An error that waiting or a retry can resolve is `Unavailable`; one that needs a person is `ConfigError`. If the outcome
is unknown, it is always `Unavailable`. Their texts contain no password; values are never shown.
"""

from __future__ import annotations

import ssl
import struct
from typing import Final

import pymysql
from pymysql.constants import CR, ER

from leasehold.core.texts import server_text
from leasehold.engines.sql.session import SchemaMissing, SqlServerError, TransactionConflict
from leasehold.engines.sql.session import no_answer as _no_answer
from leasehold.errors import AccessDenied, ConfigError, LeaseholdError, Unavailable

ENGINE: Final = "mysql"
SERVER: Final = "MySQL"

# PROCACCESS_DENIED_ERROR: an account without grants gets it even for a procedure that does not exist.
_MISSING: Final = frozenset({ER.SP_DOES_NOT_EXIST, ER.BAD_DB_ERROR, ER.NO_SUCH_TABLE, ER.PROCACCESS_DENIED_ERROR})
_DENIED: Final = frozenset(
    {
        ER.DBACCESS_DENIED_ERROR,
        ER.ACCESS_DENIED_ERROR,
        ER.TABLEACCESS_DENIED_ERROR,
        ER.COLUMNACCESS_DENIED_ERROR,
        ER.SPECIFIC_ACCESS_DENIED_ERROR,
    }
)
_DEFINER_GONE: Final = 1449
_UNSTORABLE: Final = frozenset({ER.DATA_TOO_LONG, ER.WARN_DATA_OUT_OF_RANGE, ER.TRUNCATED_WRONG_VALUE_FOR_FIELD, 1690})
_STATEMENT_LOG: Final = 1665  # binlog_format=STATEMENT, which cannot log a READ COMMITTED transaction
_DEADLOCK: Final = ER.LOCK_DEADLOCK
_LOCK_TIMEOUT: Final = ER.LOCK_WAIT_TIMEOUT
_READ_ONLY: Final = frozenset({1792, 1836})
_FORBIDDEN_BY_OPTION: Final = 1290  # a start-up option of the server forbids it; read_only is one such option

# Errors of a handshake that waiting does not resolve.
_REFUSED: Final = frozenset(
    {
        *(ER.ACCESS_DENIED_ERROR, ER.DBACCESS_DENIED_ERROR, ER.HOST_NOT_PRIVILEGED, ER.NOT_SUPPORTED_AUTH_MODE),
        *(1698, 1820, 1862, 3118, 3159, 4151),  # no password, an expired one, a locked account, no TLS
        *(CR.CR_SSL_CONNECTION_ERROR, CR.CR_AUTH_PLUGIN_CANNOT_LOAD),
    }
)

_INTERRUPTED: Final[int] = ER.QUERY_INTERRUPTED
_NO_DATABASE: Final[int] = ER.BAD_DB_ERROR
_SESSION_REUSABLE: Final = _MISSING | {_DEADLOCK}


class MyServerError(SqlServerError):
    """The server replied with an error."""

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        super().__init__(server_text(text))

    @property
    def session_reusable(self) -> bool:
        """Whether the session can be used again. After most errors a transaction may still be open in it."""
        return self.code in _SESSION_REUSABLE

    @property
    def no_database(self) -> bool:
        return self.code == _NO_DATABASE

    @property
    def interrupted(self) -> bool:
        """KILL QUERY ended this statement."""
        return self.code == _INTERRUPTED

    def classify(self) -> LeaseholdError | SchemaMissing | TransactionConflict:
        if self.code in _MISSING:
            return SchemaMissing(str(self))
        if self.code == _DEADLOCK:
            return TransactionConflict(str(self))
        if self.code in _DENIED:
            return AccessDenied(
                f"MySQL: {self}; grant this account what `leasehold schema mysql --role ACCOUNT` prints"
            )
        if self.code == _DEFINER_GONE:
            return ConfigError(
                f"MySQL: {self}: the account that created Leasehold's procedures no longer exists; "
                "create them again from another account"
            )
        if self.code == _STATEMENT_LOG:
            return ConfigError("MySQL: locks need binlog_format=ROW or MIXED; this server has STATEMENT")
        if self.code in _UNSTORABLE:
            return ConfigError(f"MySQL cannot store one of the values: {self}")
        if self.code in _READ_ONLY or (self.code == _FORBIDDEN_BY_OPTION and "read-only" in str(self)):
            return Unavailable(f"MySQL: {self}: the server is a replica, perhaps during a failover", engine=ENGINE)
        if self.code == _LOCK_TIMEOUT:
            return Unavailable("MySQL: other transactions kept this name locked until the deadline", engine=ENGINE)
        return Unavailable(f"MySQL: {self}", engine=ENGINE)


def connection_refused(error: Exception, address: str) -> LeaseholdError:
    """The error for a connection that failed."""
    code = error.args[0] if isinstance(error, pymysql.Error) and error.args else 0
    original = getattr(error, "original_exception", error)
    text = server_text(error.args[1] if isinstance(code, int) and len(error.args) > 1 else error)
    if code in _REFUSED or isinstance(original, ssl.SSLCertVerificationError):
        return ConfigError(f"MySQL at {address}: {text}")
    if isinstance(error, RuntimeError | FileNotFoundError):  # a missing package or file
        return ConfigError(f"MySQL: {text}")
    if isinstance(error, LookupError | TypeError | ValueError | struct.error):
        return Unavailable(f"MySQL at {address}: the server sent an invalid handshake ({text})", engine=ENGINE)
    return Unavailable(f"MySQL at {address}: {text}", engine=ENGINE)


def no_answer(seconds: float, address: str = "") -> Unavailable:
    return _no_answer(f"{SERVER} at {address}" if address else SERVER, ENGINE, seconds)


def schema_missing(name: str, why: object) -> ConfigError:
    denied = isinstance(why, MyServerError) and why.code in _DENIED | {ER.PROCACCESS_DENIED_ERROR}
    return (AccessDenied if denied else ConfigError)(
        f"Leasehold's tables and procedures are missing from database {name!r} or not granted to this account, and "
        f"could not be created ({why}); run what `leasehold schema mysql --role ACCOUNT` prints, as the database's "
        "owner. For an account that may create tables but no procedures, pass procedures=no (locks only)"
    )
