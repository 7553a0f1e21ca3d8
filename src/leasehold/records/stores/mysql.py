"""Records in a MySQL or MariaDB table: `mysql://user:password@host:3306/database`."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import unquote, urlsplit

import pymysql
from pymysql.constants import CR, ER

from leasehold.config import EngineConfig
from leasehold.credentials import Password
from leasehold.dbapi import MYSQL
from leasehold.errors import ConfigError, LeaseholdError, Unavailable
from leasehold.records.stores.sql import INSERT, TABLE, SqlStore, StoreDialect, Table
from leasehold.runtime.base import Runtime

OPTIONS: Final = frozenset({"unix_socket", "ssl_ca", "ssl_cert", "ssl_key"})


def _code(error: Exception) -> int:
    code = error.args[0] if error.args else 0
    return code if isinstance(code, int) else 0


DIALECT: Final = StoreDialect(
    database=MYSQL,
    schema=(
        f"create table if not exists {TABLE} (name varchar(1600) character set ascii collate ascii_bin not null, "
        "version char(32) character set ascii not null, data mediumblob not null, until double, "
        f"primary key (name), key {TABLE}_until (until)) engine = InnoDB",
    ),
    now="(unix_timestamp(sysdate(6)) + 0e0)",
    # Not `insert ignore`, which also ignores values that do not fit; nor the row count, which a client flag changes.
    insert=INSERT,
    sweep="delete from {table} where until <= {now} limit 100",
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


class MysqlStore(SqlStore):
    table = Table(DIALECT)

    def __init__(self, connect_arguments: dict[str, Any], password: Password, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._connect_arguments, self._password = connect_arguments, password

    def connect(self, seconds: float) -> Any:
        timeouts = dict.fromkeys(("connect_timeout", "read_timeout", "write_timeout"), seconds)
        password = self._password.read().encode()  # PyMySQL would encode text as Latin-1
        return pymysql.connect(
            autocommit=True, charset="utf8mb4", password=password, **self._connect_arguments, **timeouts
        )

    def set_timeout(self, connection: Any, seconds: float) -> None:
        # PyMySQL applies these to its socket before every read and write; they have no public names.
        connection._read_timeout = connection._write_timeout = seconds

    def map_error(self, error: Exception) -> LeaseholdError | None:
        if not isinstance(error, pymysql.Error):
            return None
        code = _code(error)
        error_type = ConfigError if code in _CONFIG_ERRORS or code == CR.CR_AUTH_PLUGIN_CANNOT_LOAD else Unavailable
        return error_type(f"MySQL store: {error.args[-1] if error.args else 'no answer'}")


def open(config: EngineConfig, runtime: Runtime) -> MysqlStore:
    options = config.accept(**dict.fromkeys(OPTIONS, str))
    try:
        parts = urlsplit(config.url)
        port = parts.port or 3306
    except ValueError:
        raise ConfigError(f"this {config.scheme}:// URL cannot be read: is the port a number?") from None
    if not parts.path.strip("/"):
        raise ConfigError("a MySQL store needs a database: mysql://user:password@host/database")
    connect_arguments = {
        "host": parts.hostname or "localhost",
        "port": port,
        "user": unquote(parts.username or ""),
        "database": unquote(parts.path.strip("/")),
    }
    return MysqlStore({**connect_arguments, **options}, config.password_or(unquote(parts.password or "")), runtime)
