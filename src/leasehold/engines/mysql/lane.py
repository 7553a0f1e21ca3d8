"""One twin's connection to MySQL: how it is opened, which procedures the verbs are, how the schema is made."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from hashlib import sha256
from typing import Final

from leasehold.engines.mysql import reach, schema
from leasehold.engines.mysql.meaning import ENGINE, SERVER, MyFailed, too_new, unmade
from leasehold.engines.mysql.url import Options
from leasehold.engines.mysql.wire import MySession
from leasehold.engines.sql import lane
from leasehold.engines.sql.wire import Failed, Missing, Session
from leasehold.errors import ConfigError, Unavailable
from leasehold.runtime.base import Runtime

_log = logging.getLogger("leasehold.mysql")

_GRACE: Final = 1.0  # seconds after which the server ends a call that nobody waits for any more


class Lane(lane.Lane):
    def __init__(self, options: Options, runtime: Runtime) -> None:
        super().__init__(runtime, ENGINE, SERVER)
        self._options = options
        self._prefix = schema.quoted(options.database)

    def _statement(self, verb: str) -> bytes:
        return f"call {self._prefix}.lh_{verb}_v1".encode()

    async def _open(self, deadline: float) -> MySession:
        return await reach.opened(self._options.target, self._runtime, deadline, self._options.call_timeout + _GRACE)

    def _unmade(self, why: object) -> ConfigError:
        return unmade(self._options.database, why)

    async def _make(self, session: Session, deadline: float) -> None:
        name, exists, found = self._options.database, True, 0
        try:
            await session.ask(f"use {self._prefix}".encode(), (), deadline)
            versions = await session.ask(b"select version from lh_meta", (), deadline)
            found = max([int(version or 0) for (version,) in versions], default=0)
        except MyFailed as error:
            if not isinstance(error.meaning(), Missing):
                raise self._unmade(error) from error
            exists = not error.no_database
        if found > schema.VERSION:
            raise too_new(name, found)
        if not self._options.create:
            raise self._unmade("the URL says create=no")
        script = list(schema.statements(schema.text(name, procedures=self._options.procedures)))
        # Whoever may use a database that is there need not have the right to make one.
        await self._run(session, script[1:] if exists else script, deadline)
        _log.info("made the tables of Leasehold in database %r", name)

    async def _run(self, session: Session, script: Sequence[str], deadline: float) -> None:
        """One at a time: the second finds all that the first has made. Each statement commits by itself; whoever is
        stopped halfway leaves what the next one completes."""
        name = "lh.make." + sha256(self._prefix.encode()).hexdigest()[:40]
        patience = max(1, int(deadline - self._runtime.now()))
        try:
            await session.ask(f"do get_lock('{name}', {patience})".encode(), (), deadline)
            for statement in script:
                await session.ask(statement.encode(), (), deadline)
            await session.ask(f"do release_lock('{name}')".encode(), (), deadline)
        except Failed as error:
            session.close()  # and with it the lock
            meaning = error.meaning()
            raise (meaning if isinstance(meaning, Unavailable) else self._unmade(error)) from error
