"""One session with the server, over libpq's non-blocking calls: the same code for threads and event loops.

psycopg provides libpq (`psycopg.pq`). Its connections are not used: blocking ones have no deadline, and asyncio ones,
when cancelled, wait for the server's reply to the cancellation. Here every wait has the call's deadline. If anything
ends a call before its reply, even a cancellation, the session is `unanswered` and no further call uses it: so no call
reads another call's reply. Sessions are in libpq's pipeline mode, so that a release can be sent behind an attempt that
has no reply yet.
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

from leasehold.engines.postgresql.errors import ENGINE, PgServerError, no_answer
from leasehold.engines.sql.session import DatabaseServer, DrainingSocket, Row, SqlConnectionLost, SqlServerError, Value
from leasehold.errors import Unavailable
from leasehold.runtime.base import Runtime

# As integers: looking up an enum member takes longer than asking libpq.
_DONE: Final = (int(pq.ExecStatus.TUPLES_OK), int(pq.ExecStatus.COMMAND_OK), int(pq.ExecStatus.EMPTY_QUERY))
_SYNC: Final = int(pq.ExecStatus.PIPELINE_SYNC)
_OPEN: Final = int(pq.ConnStatus.OK)
_PIPELINE_OFF: Final = int(pq.PipelineStatus.OFF)


class PgSession:
    server: DatabaseServer

    def __init__(self, pg: pq.abc.PGconn, runtime: Runtime) -> None:
        self._pg, self._runtime = pg, runtime
        self._prepared: dict[bytes, bytes] = {}
        self._names = count()
        self._standby_unconfirmed = False
        self._shutdown_socket: socket.socket | None = None
        self.unanswered = False
        pg.notice_handler = self._on_notice

    @property
    def descriptor(self) -> int:
        return self._pg.socket

    def usable(self) -> bool:
        try:
            self._pg.consume_input()  # reads a last message of the server, if there is one
            self._pg.consume_input()  # fails if the server then closed the connection
        except psycopg.Error:
            return False
        return self._pg.status == _OPEN and not self.unanswered

    async def execute(self, statement: bytes, values: Sequence[Value], deadline: float) -> list[Row]:
        was_prepared = statement in self._prepared
        try:
            self.unanswered = True
            self._send(statement, values)
            return decode_rows(await self._read_result(deadline))
        except psycopg.Error as error:
            raise self._connection_lost(error) from error
        except SqlServerError:
            if not was_prepared:  # preparing it may be what failed
                self._prepared.pop(statement, None)
            raise

    async def run(self, script: str, deadline: float) -> None:
        """Run several statements, as one transaction unless they say otherwise."""
        try:
            self.unanswered = True
            self._pg.exit_pipeline_mode()
            self._pg.send_query(script.encode())
            try:
                await self._read_result(deadline)
            finally:
                if not self.unanswered and self._pg.status == _OPEN:  # replied, even if with an error
                    self._pg.enter_pipeline_mode()
        except psycopg.Error as error:
            raise self._connection_lost(error) from error

    def send_compensation(self, statement: bytes, values: Sequence[Value]) -> DrainingSocket | None:
        with suppress(psycopg.Error):
            self._send(statement, values)
            self._pg.flush()
        return self.hang_up()

    def hang_up(self) -> DrainingSocket | None:
        try:
            return DrainingSocket(self._pg.socket, self.server.identity)
        except (OSError, psycopg.Error):  # the server has already hung up
            return None
        finally:
            self.close()

    def _send(self, statement: bytes, values: Sequence[Value]) -> None:
        params = [(_ENCODERS.get(type(value)) or encode)(value) for value in values]
        if not self.server.direct:  # a pooler may send the next statement to a session that has not prepared it
            self._pg.send_query_params(statement, params)
        else:
            if (name := self._prepared.get(statement)) is None:
                name = self._prepared[statement] = b"lh%d" % next(self._names)
                self._pg.send_prepare(name, statement)  # in the same round trip as its first use
            self._pg.send_query_prepared(name, params)
        self._pg.pipeline_sync()

    def _connection_lost(self, error: psycopg.Error) -> SqlConnectionLost:
        self.close()
        self.unanswered = False
        return SqlConnectionLost(" ".join(str(error).split()))

    def notifications(self) -> list[bytes]:
        """The payloads that NOTIFY has delivered. Raises OSError if the server has closed the connection."""
        try:
            self._pg.consume_input()
        except psycopg.Error as error:
            raise ConnectionResetError(str(error)) from error
        found = []
        while (notification := self._pg.notifies()) is not None:
            found.append(notification.extra)
        return found

    def enable_shutdown(self) -> None:
        """Prepare for `shutdown` from another thread, on a duplicated descriptor: by then libpq may have closed its
        own, and another file may have its number."""
        self._shutdown_socket = socket.socket(fileno=os.dup(self._pg.socket))

    def shutdown(self) -> None:
        if self._shutdown_socket is not None:
            with suppress(OSError):
                self._shutdown_socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._pg.finish()
        if self._shutdown_socket is not None:
            self._shutdown_socket.close()

    def after_fork(self) -> None:
        if self._shutdown_socket is not None:
            self._shutdown_socket.close()
        with suppress(OSError, psycopg.Error):
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            os.dup2(null, self._pg.socket, inheritable=False)
            os.close(null)

    # ------------------------------------------------------------- answers

    async def _read_result(self, deadline: float) -> pq.abc.PGresult:
        """The result of what was sent; of several, the last one, or the first error."""
        pg, self._standby_unconfirmed = self._pg, False
        now, wait_fd = self._runtime.now, self._runtime.wait_fd
        began = now()
        while pg.flush():
            if not await wait_fd(pg.socket, deadline - now(), write=True):
                raise no_answer(deadline - began)
            pg.consume_input()
        last: pq.abc.PGresult | None = None
        pipelined = pg.pipeline_status != _PIPELINE_OFF
        while True:
            while pg.is_busy():
                if not await wait_fd(pg.socket, deadline - now()):
                    raise no_answer(deadline - began)
                pg.consume_input()
            result = pg.get_result()
            if (result is None and not pipelined) or (result is not None and result.status == _SYNC):
                break
            if result is None and pg.status != _OPEN:  # the end of the pipeline will never arrive
                raise psycopg.OperationalError("the connection is closed")
            if result is not None and (last is None or last.status in _DONE):
                last = result
        assert last is not None
        self.unanswered = False
        if last.status not in _DONE:
            if pg.status != _OPEN:
                self.close()
            raise PgServerError.from_result(last)
        if self._standby_unconfirmed:
            raise Unavailable(
                "PostgreSQL: no synchronous standby confirmed the commit; a failover may lose it", engine=ENGINE
            )
        return last

    def _on_notice(self, notice: pq.abc.PGresult) -> None:
        """Detect a commit whose wait for a synchronous standby was cancelled: it succeeds, with a warning."""
        if notice.error_field(pq.DiagnosticField.SOURCE_FUNCTION) == b"SyncRepWaitForLSN":
            self._standby_unconfirmed = True


# ------------------------------------------------------------------ values


def encode(value: Value) -> bytes | None:
    """A scalar or an array in PostgreSQL's text format."""
    if value is None:
        return None
    if isinstance(value, bool):
        return b"t" if value else b"f"
    if isinstance(value, str | int):
        return str(value).encode()
    return ("{" + ",".join(map(_encode_element, value)) + "}").encode()


# The same by exact type, without the type checks: an acquire and release pair has 24 values.
_ENCODERS: Final[dict[type, Callable[[Any], bytes]]] = {str: str.encode, int: b"%d".__mod__}


def _encode_element(value: str | int) -> str:
    return str(value) if isinstance(value, int) else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def decode_rows(result: pq.abc.PGresult) -> list[Row]:
    get, columns = result.get_value, range(result.nfields)
    return [
        tuple([None if (value := get(row, column)) is None else value.decode() for column in columns])
        for row in range(result.ntuples)
    ]
