"""One twin's connection to PostgreSQL: how it is opened, which functions the verbs are, how the schema is made."""

from __future__ import annotations

import json
import logging
from typing import Final

from leasehold.engines.postgresql import reach, schema
from leasehold.engines.postgresql.meaning import ENGINE, SERVER, too_new, unmade
from leasehold.engines.postgresql.url import Options
from leasehold.engines.postgresql.wire import PgSession
from leasehold.engines.sql import lane
from leasehold.engines.sql.wire import Again, Failed, Missing, Row, Session
from leasehold.errors import ConfigError, Unavailable
from leasehold.runtime.base import Runtime

_log = logging.getLogger("leasehold.postgresql")

_GRACE: Final = 1.0  # seconds after which the server ends a call that nobody waits for any more
_VERBS: Final = {"attempt": 17, "renew": 6, "beat": 5, "release": 7, "break": 5, "inspect": 3}  # and their parameters
_TABLES: Final = ("renew", "beat", "inspect")  # these answer by rows; the others by one value, which is cheaper
_decoded: Final = json.JSONDecoder(parse_int=str).decode  # as text, like all that comes from a server


class Lane(lane.Lane):
    def __init__(self, options: Options, runtime: Runtime) -> None:
        super().__init__(runtime, ENGINE, SERVER)
        self._options = options
        prefix = schema.quoted(options.schema)
        self._version = f"select version from {prefix}.lh_meta".encode()
        self._statements = {
            verb: f"select {'* from ' * (verb in _TABLES)}{prefix}.lh_{verb}_v1({_params(count)})".encode()
            for verb, count in _VERBS.items()
        }

    def _statement(self, verb: str) -> bytes:
        return self._statements[verb]

    def reply(self, row: Row) -> Row:
        return tuple(_decoded(row[0] or ""))

    async def _open(self, deadline: float) -> PgSession:
        return await reach.opened(self._options.target, self._runtime, deadline, self._options.call_timeout + _GRACE)

    def _unmade(self, why: object) -> ConfigError:
        return unmade(self._options.schema, why)

    async def _make(self, session: Session, deadline: float) -> None:
        assert isinstance(session, PgSession)
        name = self._options.schema
        try:
            found = max([int(version or 0) for (version,) in await session.ask(self._version, (), deadline)], default=0)
        except Failed as error:
            if not isinstance(error.meaning(), Missing):
                raise unmade(name, error) from error
            found = 0
        if found > schema.VERSION:
            raise too_new(name, found)
        if not self._options.create:
            raise unmade(name, "the URL says create=no")
        try:
            await session.run(schema.text(name), deadline)
        except Failed as error:
            meaning = error.meaning()
            raise (meaning if isinstance(meaning, Unavailable | Again) else unmade(name, error)) from error
        _log.info("made the tables of Leasehold in schema %r", name)


def _params(count: int) -> str:
    return ", ".join(f"${number + 1}" for number in range(count))
