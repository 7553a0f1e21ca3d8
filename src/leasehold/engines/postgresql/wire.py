"""One session with the server, by libpq's calls that never block: the same code for threads and event loops.

psycopg brings libpq (`psycopg.pq`); its connections are not used, because blocking ones know no deadline, and asyncio
ones, when cancelled, wait for the server's word on it. Here every wait has the call's deadline, and whatever ends a
call before its answer, a cancellation too, sets the session adrift: nobody reads another call's answer. Sessions are in
libpq's pipeline mode, so that a release can be sent behind an attempt that is still on its way.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Final

import psycopg
from psycopg import pq

from leasehold.engines.postgresql.meaning import ENGINE, PgFailed, silent
from leasehold.engines.sql.wire import Failed, Lost, Row, Server, Tail, Value
from leasehold.errors import Unavailable
from leasehold.runtime.base import Runtime

# As numbers: to look up a member of an enumeration takes longer than to ask libpq.
_DONE: Final = (int(pq.ExecStatus.TUPLES_OK), int(pq.ExecStatus.COMMAND_OK), int(pq.ExecStatus.EMPTY_QUERY))
_SYNC: Final = int(pq.ExecStatus.PIPELINE_SYNC)
_OPEN: Final = int(pq.ConnStatus.OK)
_ONE_BY_ONE: Final = int(pq.PipelineStatus.OFF)


class PgSession:
    server: Server

    def __init__(self, pg: pq.abc.PGconn, runtime: Runtime) -> None:
        self._pg, self._runtime = pg, runtime
        self._prepared: dict[bytes, bytes] = {}
        self._names = count()
        self._doubt = False
        self._tap: socket.socket | None = None
        self.adrift = False  # something was sent, and its answer not read: of no more use but to `regret`
        pg.notice_handler = self._noticed

    @property
    def descriptor(self) -> int:
        return self._pg.socket

    def usable(self) -> bool:
        try:
            self._pg.consume_input()  # its last words, if any
            self._pg.consume_input()  # and then nothing more
        except psycopg.Error:
            return False
        return self._pg.status == _OPEN and not self.adrift

    async def ask(self, statement: bytes, values: Sequence[Value], deadline: float) -> list[Row]:
        known = statement in self._prepared
        try:
            self.adrift = True
            self._send(statement, values)
            return rows(await self._answer(deadline))
        except psycopg.Error as error:
            raise self._lost(error) from error
        except Failed:
            if not known:  # perhaps it could not even be prepared
                self._prepared.pop(statement, None)
            raise

    async def run(self, script: str, deadline: float) -> None:
        """Several statements, as one transaction unless they say otherwise."""
        try:
            self.adrift = True
            self._pg.exit_pipeline_mode()
            self._pg.send_query(script.encode())
            try:
                await self._answer(deadline)
            finally:
                if not self.adrift and self._pg.status == _OPEN:  # answered, be it by an error
                    self._pg.enter_pipeline_mode()
        except psycopg.Error as error:
            raise self._lost(error) from error

    def regret(self, statement: bytes, values: Sequence[Value]) -> Tail | None:
        with suppress(psycopg.Error):
            self._send(statement, values)
            self._pg.flush()
        return self.leave()

    def leave(self) -> Tail | None:
        try:
            return Tail(self._pg.socket, self.server.place)
        except (OSError, psycopg.Error):  # it has
            return None
        finally:
            self.close()

    def _send(self, statement: bytes, values: Sequence[Value]) -> None:
        params = [(_ENCODED.get(type(value)) or encoded)(value) for value in values]
        if not self.server.direct:  # the next statement may be on another session, which was never told
            self._pg.send_query_params(statement, params)
        else:
            if (name := self._prepared.get(statement)) is None:
                name = self._prepared[statement] = b"lh%d" % next(self._names)
                self._pg.send_prepare(name, statement)  # along with its first use
            self._pg.send_query_prepared(name, params)
        self._pg.pipeline_sync()

    def _lost(self, error: psycopg.Error) -> Lost:
        self.close()
        self.adrift = False
        return Lost(" ".join(str(error).split()))

    def notes(self) -> list[bytes]:
        """What NOTIFY has brought. Raises OSError when the server has hung up."""
        try:
            self._pg.consume_input()
        except psycopg.Error as error:
            raise ConnectionResetError(str(error)) from error
        found = []
        while (note := self._pg.notifies()) is not None:
            found.append(note.extra)
        return found

    def tap(self) -> None:
        """Make ready for `shut`, by a handle of our own: by then the descriptor's number may be somebody else's."""
        self._tap = socket.socket(fileno=os.dup(self._pg.socket))

    def shut(self) -> None:
        if self._tap is not None:
            with suppress(OSError):
                self._tap.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._pg.finish()
        if self._tap is not None:
            self._tap.close()

    def abandon(self) -> None:
        if self._tap is not None:
            self._tap.close()
        with suppress(OSError, psycopg.Error):
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            os.dup2(null, self._pg.socket, inheritable=False)
            os.close(null)

    # ------------------------------------------------------------- answers

    async def _answer(self, deadline: float) -> pq.abc.PGresult:
        """The result of what was sent; of several, the last, or the first that is an error."""
        pg, self._doubt = self._pg, False
        now, ready = self._runtime.now, self._runtime.ready
        began = now()
        while pg.flush():
            if not await ready(pg.socket, deadline - now(), write=True):
                raise silent(deadline - began)
            pg.consume_input()
        last: pq.abc.PGresult | None = None
        pipelined = pg.pipeline_status != _ONE_BY_ONE
        while True:
            while pg.is_busy():
                if not await ready(pg.socket, deadline - now()):
                    raise silent(deadline - began)
                pg.consume_input()
            result = pg.get_result()
            if (result is None and not pipelined) or (result is not None and result.status == _SYNC):
                break
            if result is None and pg.status != _OPEN:  # there is nothing more to come, and no end
                raise psycopg.OperationalError("the connection is closed")
            if result is not None and (last is None or last.status in _DONE):
                last = result
        assert last is not None
        self.adrift = False
        if last.status not in _DONE:
            if pg.status != _OPEN:
                self.close()
            raise PgFailed.of(last)
        if self._doubt:
            raise Unavailable("PostgreSQL: it is not known whether a standby has what was committed", engine=ENGINE)
        return last

    def _noticed(self, notice: pq.abc.PGresult) -> None:
        """A commit whose wait for a synchronous standby was cancelled is answered as a success, with a warning."""
        if notice.error_field(pq.DiagnosticField.SOURCE_FUNCTION) == b"SyncRepWaitForLSN":
            self._doubt = True


# ------------------------------------------------------------------ values


def encoded(value: Value) -> bytes | None:
    """As PostgreSQL reads it: a scalar, or an array of them."""
    if value is None:
        return None
    if isinstance(value, bool):
        return b"t" if value else b"f"
    if isinstance(value, str | int):
        return str(value).encode()
    return ("{" + ",".join(map(_element, value)) + "}").encode()


# By exact type, the same: of 24 values in a pair, each is known at a glance.
_ENCODED: Final[dict[type, Callable[[Any], bytes]]] = {str: str.encode, int: b"%d".__mod__}


def _element(value: str | int) -> str:
    return str(value) if isinstance(value, int) else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def rows(result: pq.abc.PGresult) -> list[Row]:
    get, columns = result.get_value, range(result.nfields)
    return [
        tuple([None if (value := get(row, column)) is None else value.decode() for column in columns])
        for row in range(result.ntuples)
    ]
