"""The MySQL connection of one engine instance: opens sessions, names each verb's procedure, creates the schema."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from hashlib import sha256
from typing import Final

from leasehold.engines.mysql import connect, schema
from leasehold.engines.mysql.errors import ENGINE, SERVER, MyServerError, schema_missing
from leasehold.engines.mysql.session import MySession, decode_row
from leasehold.engines.mysql.url import MyOptions
from leasehold.engines.sql import connection
from leasehold.engines.sql.session import Row, SchemaMissing, SqlServerError, SqlSession, schema_too_new
from leasehold.errors import ConfigError, Unavailable
from leasehold.runtime.base import Runtime

_log = logging.getLogger("leasehold.mysql")

_PROCEDURES_QUERY: Final = b"select routine_name from information_schema.routines where routine_schema = database()"
_GRACE: Final = 1.0  # seconds past the call's timeout, after which the server ends the call


class MyConnection(connection.SerialConnection):
    def __init__(self, options: MyOptions, runtime: Runtime) -> None:
        super().__init__(runtime, ENGINE, SERVER)
        self._options = options
        self._prefix = schema.quote_identifier(options.database)

    def _statement(self, verb: str) -> bytes:
        return f"call {self._prefix}.lh_{verb}_v1".encode()

    def decode_listed(self, row: bytes) -> Row:
        try:
            return decode_row(row)
        except ConnectionAbortedError as error:
            raise ValueError(*error.args) from error

    async def _open(self, deadline: float) -> MySession:
        return await connect.open_session(
            self._options.target, self._runtime, deadline, self._options.call_timeout + _GRACE
        )

    def _schema_missing(self, why: object) -> ConfigError:
        return schema_missing(self._options.database, why)

    async def _create_schema(self, session: SqlSession, deadline: float) -> None:
        name, exists, found = self._options.database, True, 0
        try:
            await session.execute(f"use {self._prefix}".encode(), (), deadline)
            versions = await session.execute(b"select version from lh_meta", (), deadline)
            found = max([int(version or 0) for (version,) in versions], default=0)
        except MyServerError as error:
            if not isinstance(error.classify(), SchemaMissing):
                raise self._schema_missing(error) from error
            exists = not error.no_database
        if found > schema.VERSION:
            raise schema_too_new(f"database {name!r}", found, schema.VERSION)
        if not self._options.create:
            raise self._schema_missing("the URL says create=no")
        script = list(schema.statements(schema.text(name, procedures=self._options.procedures)))
        # An account that may use an existing database may lack the right to create one.
        await self._run_script(session, script[1:] if exists else script, deadline)
        _log.info("created Leasehold's tables in database %r", name)

    async def _run_script(self, session: SqlSession, script: Sequence[str], deadline: float) -> None:
        """Run the script under a user lock: the second client finds everything that the first has created. Each
        statement commits on its own; if a client stops halfway, the next one completes the schema. It leaves out the
        procedures that exist: on a slow disk many clients with short deadlines would hardly get ahead otherwise."""
        name = "lh.make." + sha256(self._prefix.encode()).hexdigest()[:40]
        # Every account of the server can keep this lock: then half of the time is left to go on without it.
        lock_seconds = max(0.0, deadline - self._runtime.now()) / 2
        try:
            await session.execute(f"do get_lock('{name}', {lock_seconds:.3f})".encode(), (), deadline)
            existing: set[str | None] | None = None
            for statement in script:
                if procedure := schema.procedure_of(statement):
                    if existing is None:
                        existing = {found for (found,) in await session.execute(_PROCEDURES_QUERY, (), deadline)}
                    if procedure in existing:
                        continue
                await session.execute(statement.encode(), (), deadline)
            await session.execute(f"do release_lock('{name}')".encode(), (), deadline)
        except SqlServerError as error:
            session.close()  # which also releases the user lock
            classified = error.classify()
            raise (classified if isinstance(classified, Unavailable) else self._schema_missing(error)) from error
