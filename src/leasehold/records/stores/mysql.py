"""Records in a MySQL or MariaDB table: `mysql://user:password@host:3306/database`."""

from __future__ import annotations

import struct
import time
from typing import Any, Final

import pymysql
from pymysql.constants import ER

from leasehold.config import EngineConfig
from leasehold.core.texts import server_text
from leasehold.dbapi import MYSQL
from leasehold.engines.mysql.driver import SafeConnection, connect_socket, new_socket
from leasehold.engines.mysql.errors import connection_refused
from leasehold.engines.mysql.url import TARGET_OPTIONS, MyTarget, parse_target
from leasehold.errors import ConfigError, LeaseholdError, Unavailable
from leasehold.records.store import MAX_DATA
from leasehold.records.stores.sql import INSERT, TABLE, SqlStore, StoreDialect, Table
from leasehold.runtime.base import Runtime
from leasehold.runtime.net import host_names

OPTIONS: Final = frozenset(TARGET_OPTIONS)


def _code(error: Exception) -> int:
    code = error.args[0] if error.args else 0
    return code if isinstance(code, int) else 0


# When the statement began, which no time zone affects, and how long it has run since, as it may have waited for a lock.
# The second is less than a quarter of an hour, also if the clock is set back meanwhile: a local time that is put
# forward or back by half an hour or an hour changes nothing.
_NOW: Final = (
    "((timestampdiff(microsecond, '1970-01-01', utc_timestamp(6)) "
    "+ mod(timestampdiff(microsecond, now(6), sysdate(6)) + 4500000000, 1800000000) - 900000000) / 1e6)"
)

DIALECT: Final = StoreDialect(
    database=MYSQL,
    schema=(
        f"create table if not exists {TABLE} (name varchar(1600) character set ascii collate ascii_bin not null, "
        "version char(32) character set ascii not null, data mediumblob not null, until double, "
        f"primary key (name), key {TABLE}_until (until)) engine = InnoDB",
    ),
    now=_NOW,
    # Not `insert ignore`, which also ignores values that do not fit; nor the row count, which a client flag changes.
    insert=INSERT,
    sweep="delete from {table} where until <= {now} limit 100",
    max_statement="select @@max_allowed_packet",
    lock_suffix=" for update",
    blob="unhex(:data)",  # hex, because some drivers cannot escape bytes
    encode_data=bytes.hex,
    is_duplicate_key=lambda error: isinstance(error, pymysql.IntegrityError) and _code(error) == ER.DUP_ENTRY,
    is_missing_table=lambda error: isinstance(error, pymysql.ProgrammingError) and _code(error) == ER.NO_SUCH_TABLE,
)
_CONFIG_ERRORS: Final = frozenset(
    {
        ER.ACCESS_DENIED_ERROR,
        ER.BAD_DB_ERROR,
        ER.DATA_TOO_LONG,
        ER.DBACCESS_DENIED_ERROR,
        ER.NET_PACKET_TOO_LARGE,
        ER.NO_DB_ERROR,
        ER.TABLEACCESS_DENIED_ERROR,
    }
)
# MySQL's own default, whatever that of this server is: a read must not show what another transaction may still roll
# back. With READ COMMITTED no server could write that logs statements.
_ISOLATION: Final = "set session transaction isolation level repeatable read, read write"
_INVALID_REPLY: Final = (AssertionError, LookupError, RuntimeError, TypeError, ValueError, struct.error)  # of PyMySQL
_MAX_REPLY: Final = MAX_DATA + (1 << 20)  # bytes


class MysqlStore(SqlStore):
    table = Table(DIALECT)

    def __init__(self, target: MyTarget, database: str, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._target = target
        own = {"database": database, "autocommit": True, "client_flag": 0, "defer_connect": True}
        own["init_command"] = _ISOLATION
        self._arguments = {**target.arguments, **own}

    def connect(self, seconds: float) -> SafeConnection:
        """Connect to the first address that accepts; each gets an equal share of the time left."""
        target, deadline = self._target, time.monotonic() + seconds
        password = target.password.read().encode()  # PyMySQL would encode text as Latin-1
        try:
            addresses = [""] if target.path else host_names.addresses_blocking(target.host, seconds)
        except OSError as error:
            raise Unavailable(f"MySQL store: cannot resolve host {target.host}: {error.strerror}") from error
        for addresses_left in range(len(addresses), 0, -1):
            try:
                share = (deadline - time.monotonic()) / addresses_left
                return self._connect_address(addresses[-addresses_left], password, share)
            except Exception as error:
                known = self.map_error(error) if _code(error) in _CONFIG_ERRORS else None
                refused = known or connection_refused(error, target.address)
                if addresses_left == 1 or not isinstance(refused, Unavailable):
                    raise refused from error
        raise AssertionError("a host has at least one address")

    def _connect_address(self, address: str, password: bytes, seconds: float) -> SafeConnection:
        deadline = time.monotonic() + seconds
        sock = new_socket(self._target, address)
        try:
            connect_socket(sock, self._target, address, seconds)
            connection = SafeConnection(**self._arguments, password=password)
            connection.allow(deadline - time.monotonic())
            connection.connect(sock)
        except BaseException:
            sock.close()
            raise
        return connection

    def set_timeout(self, connection: Any, seconds: float) -> None:
        connection.allow(seconds, _MAX_REPLY)

    def is_in_step(self, connection: Any) -> bool:
        return bool(connection.is_in_step())

    def map_error(self, error: Exception) -> LeaseholdError | None:
        if isinstance(error, LeaseholdError):
            return None
        if isinstance(error, pymysql.Error):
            code = _code(error)
            error_type = ConfigError if code in _CONFIG_ERRORS else Unavailable
            return error_type(f"MySQL store: {server_text(error.args[-1] if error.args else 'no answer')}")
        if isinstance(error, _INVALID_REPLY):
            return Unavailable(f"MySQL store: the server sent an invalid reply ({server_text(error)})")
        return None


def open(config: EngineConfig, runtime: Runtime) -> MysqlStore:
    target, database = parse_target(config, config.accept(**TARGET_OPTIONS))
    if not database:
        raise ConfigError("a MySQL store needs a database: mysql://user:password@host/database")
    return MysqlStore(target, database, runtime)
