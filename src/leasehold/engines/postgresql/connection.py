"""The PostgreSQL connection of one engine instance: opens sessions, names each verb's function, creates the schema."""

from __future__ import annotations

import json
import logging
from typing import Final

from leasehold.engines.postgresql import connect, schema
from leasehold.engines.postgresql.errors import ENGINE, SERVER, PgServerError, schema_missing
from leasehold.engines.postgresql.session import PgSession
from leasehold.engines.postgresql.url import PgOptions
from leasehold.engines.sql import connection
from leasehold.engines.sql.session import (
    Row,
    SchemaMissing,
    SqlServerError,
    SqlSession,
    TransactionConflict,
    schema_too_new,
)
from leasehold.errors import ConfigError, Unavailable
from leasehold.runtime.base import Runtime

_log = logging.getLogger("leasehold.postgresql")

_GRACE: Final = 1.0  # seconds past the call's timeout, after which the server ends the statement
# Each verb's number of parameters.
_VERBS: Final = {
    "attempt": 18,
    "renew": 6,
    "heartbeat": 5,
    "release": 7,
    "decline": 6,
    "break": 5,
    "set_limit": 5,
}
_ROW_VERBS: Final = ("renew", "heartbeat")  # they return rows; the others one value, which is cheaper
_LISTED: Final = (  # the columns of `lh_inspect_v1`
    "name, kind, grant_limit, state, token, id_hash, label, host, pid, purpose, mode, delay, ticket, since, "
    "heartbeat_expires_at, until, slot, now"
)
_decode_json: Final = json.JSONDecoder(parse_int=str).decode  # numbers stay text, like all values from a server


class PgConnection(connection.SerialConnection):
    def __init__(self, options: PgOptions, runtime: Runtime) -> None:
        super().__init__(runtime, ENGINE, SERVER)
        self._options = options
        prefix = schema.quote_identifier(options.schema)
        self._version_query = f"select version from {prefix}.lh_meta".encode()  # noqa: S608  # quoted
        more = "" if options.durable else ", false"
        self._statements = {
            verb: f"select {rows}{prefix}.lh_{verb}_v1({_params(count)}{more}) as r".encode()  # quoted
            for verb, count in _VERBS.items()
            for rows in ["* from " * (verb in _ROW_VERBS)]
        }
        # A row as one value: reading a value from libpq takes a call.
        self._statements["inspect"] = (
            f"select pg_catalog.json_build_array({_LISTED}) from {prefix}.lh_inspect_v1({_params(3)})".encode()  # noqa: S608  # quoted
        )

    def _statement(self, verb: str) -> bytes:
        return self._statements[verb]

    def decode_reply(self, row: Row) -> Row:
        return tuple(_decode_json(row[0] or ""))

    def decode_listed(self, row: bytes) -> Row:
        columns = tuple(_decode_json(row.decode()))
        if not all(value is None or type(value) is str for value in columns):
            raise TypeError("not a row of `lh_inspect_v1`")
        return columns

    async def _open(self, deadline: float) -> PgSession:
        return await connect.open_session(
            self._options.target, self._runtime, deadline, self._options.call_timeout + _GRACE
        )

    def _schema_missing(self, why: object) -> ConfigError:
        return schema_missing(self._options.schema, why)

    async def _create_schema(self, session: SqlSession, deadline: float) -> None:
        assert isinstance(session, PgSession)  # noqa: S101  # for the type checker
        name = self._options.schema
        try:
            found = max(
                [int(version or 0) for (version,) in await session.execute(self._version_query, (), deadline)],
                default=0,
            )
        except SqlServerError as error:
            if not isinstance(error.classify(), SchemaMissing):
                raise schema_missing(name, error) from error
            found = 0
        if found > schema.VERSION:
            raise schema_too_new(f"schema {name!r}", found, schema.VERSION)
        if not self._options.create:
            raise schema_missing(name, "the URL says create=no")
        try:
            await session.run(schema.text(name), deadline)
        except PgServerError as error:
            if error.raced:
                return  # another client has just created it
            classified = error.classify()
            raise (
                classified if isinstance(classified, Unavailable | TransactionConflict) else schema_missing(name, error)
            ) from error
        _log.info("created Leasehold's tables in schema %r", name)


def _params(count: int) -> str:
    return ", ".join(f"${number + 1}" for number in range(count))
