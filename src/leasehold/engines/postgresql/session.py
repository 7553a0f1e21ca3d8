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
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any, Final

import psycopg
from psycopg import pq

from leasehold.core.texts import server_text
from leasehold.engines.postgresql.errors import ENGINE, SERVER, PgServerError, no_answer
from leasehold.engines.postgresql.relay import MIN_LEFT, Relay
from leasehold.engines.sql.session import (
    BUSY,
    CLOSED,
    IDLE,
    Decoding,
    DrainingSocket,
    Listing,
    Row,
    SqlConnectionLost,
    SqlServerError,
    SqlSession,
    Value,
    Values,
)
from leasehold.errors import ListingTooLong, Unavailable
from leasehold.runtime.base import Runtime

# As integers: looking up an enum member takes longer than asking libpq.
_DONE: Final = (int(pq.ExecStatus.TUPLES_OK), int(pq.ExecStatus.COMMAND_OK), int(pq.ExecStatus.EMPTY_QUERY))
_SYNC: Final = int(pq.ExecStatus.PIPELINE_SYNC)
_ROW: Final = int(pq.ExecStatus.SINGLE_TUPLE)
_COPIES: Final = (int(pq.ExecStatus.COPY_OUT), int(pq.ExecStatus.COPY_IN), int(pq.ExecStatus.COPY_BOTH))
_OPEN: Final = int(pq.ConnStatus.OK)
_DECODING: Final = Decoding(SERVER, ENGINE)
_PIPELINE_OFF: Final = int(pq.PipelineStatus.OFF)

# The smallest sizes of messages, in bytes.
_ROW_SIZE: Final = 7
_VALUE_SIZE: Final = 4
_COLUMN_SIZE: Final = 19
_REPLY_SIZE: Final = 7 + 6 + 6  # the description of the rows without its columns, and two messages at the end
_ONE_VALUE_SIZE: Final = _REPLY_SIZE + _COLUMN_SIZE + _ROW_SIZE + _VALUE_SIZE
_NOTIFICATION_SIZE: Final = 11


class PgSession(SqlSession):
    def __init__(self, pg: pq.abc.PGconn, runtime: Runtime) -> None:
        super().__init__()
        self._pg, self._runtime = pg, runtime
        self.relay = Relay(pg)
        self._prepared: dict[bytes, bytes] = {}
        self._names = count()
        self._standby_unconfirmed = False
        self._shutdown_socket: socket.socket | None = None
        pg.notice_handler = self._on_notice

    def tls_options(self) -> dict[str, str] | None:
        """libpq's `sslmode` and `sslrootcert`, wherever they were set. None: the session does not use TLS."""
        if not self._pg.ssl_in_use:
            return None
        known = (b"sslmode", b"sslrootcert")
        return {each.keyword.decode(): os.fsdecode(each.val or b"") for each in self._pg.info if each.keyword in known}

    def usable(self) -> bool:
        relay = self.relay
        return self.state is IDLE and self._pg.status == _OPEN and relay.bytes_left > MIN_LEFT and relay.is_in_step()

    async def execute(self, statement: bytes, values: Values, deadline: float) -> list[Row]:
        was_prepared = statement in self._prepared
        try:
            self.transition(BUSY)
            self._send(statement, values)
            result = await self._read_result(deadline)
        except (psycopg.Error, OSError) as error:
            raise self._connection_lost(error) from error
        except SqlServerError:
            if not was_prepared:  # preparing it may be what failed
                self._prepared.pop(statement, None)
            raise
        with _DECODING:
            return self._take_rows(result)

    async def list_rows(self, statement: bytes, values: Values, deadline: float) -> list[bytes]:
        listing = Listing(ENGINE)
        try:
            self.transition(BUSY)
            self._pg.send_query_params(statement, [encode(value) for value in values])
            self._pg.set_single_row_mode()  # libpq would keep all rows, in four times as much memory
            self._pg.pipeline_sync()
            await self._read_result(deadline, listing)
        except ListingTooLong:
            self.close()
            raise
        except (psycopg.Error, OSError) as error:
            raise self._connection_lost(error) from error
        return listing.rows

    async def run(self, script: str, deadline: float) -> None:
        """Run several statements, as one transaction unless they say otherwise."""
        try:
            self.transition(BUSY)
            self._pg.exit_pipeline_mode()
            self._pg.send_query(script.encode())
            try:
                await self._read_result(deadline)
            finally:
                if self.state is IDLE and self._pg.status == _OPEN:  # replied, even if with an error
                    self._pg.enter_pipeline_mode()
        except (psycopg.Error, OSError) as error:
            raise self._connection_lost(error) from error

    def _send_last(self, statement: bytes, values: Values) -> None:
        with suppress(psycopg.Error):
            self._send(statement, values)
            self._pg.flush()
            self.relay.send()

    def _close_our_side(self) -> DrainingSocket | None:
        try:
            return DrainingSocket(self.relay.server.fileno())
        except OSError:  # the server has already hung up
            return None
        finally:
            self._finish()

    def _send(self, statement: bytes, values: Values) -> None:
        params = [(_ENCODERS.get(type(value)) or encode)(value) for value in values]
        if not self.server.direct:  # a pooler may send the next statement to a session that has not prepared it
            self._pg.send_query_params(statement, params)
        else:
            if (name := self._prepared.get(statement)) is None:
                name = self._prepared[statement] = b"lh%d" % next(self._names)
                self._pg.send_prepare(name, statement)  # in the same round trip as its first use
            self._pg.send_query_prepared(name, params)
        self._pg.pipeline_sync()

    def _connection_lost(self, error: Exception) -> SqlConnectionLost:
        self.close()
        return SqlConnectionLost(server_text(error))

    async def next_notifications(self, seconds: float) -> list[bytes]:
        """The payloads that NOTIFY delivers next, perhaps none. Raises OSError if the connection is lost."""
        if found := self._take_notifications():  # received with an earlier reply
            return found
        try:
            if not self.relay.has_unread():  # libpq reads TLS record by record, and an earlier reply ended with one
                await self._runtime.wait_fd(self.relay.server.fileno(), seconds)
                self.relay.receive()
                self._pg.consume_input()
            while self.relay.has_unread():
                self._pg.consume_input()
        except psycopg.Error as error:
            raise ConnectionResetError(server_text(error)) from error
        found = self._take_notifications()
        if self._pg.status != _OPEN:  # libpq could not make sense of what it received
            raise ConnectionResetError("the connection is closed")
        if self.relay.bytes_left < MIN_LEFT:
            raise ConnectionResetError("the server sent much that is no notification")
        return found

    def _take_notifications(self) -> list[bytes]:
        found = []
        while (notification := self._pg.notifies()) is not None:
            found.append(notification.extra)
            self.relay.bytes_left += _NOTIFICATION_SIZE + len(notification.relname) + len(notification.extra)
        return found

    def set_runtime(self, runtime: Runtime) -> None:
        """Hand the session over to the thread that reads it from now on."""
        self._runtime = runtime

    def enable_shutdown(self) -> None:
        """Prepare for `shutdown` from another thread, on a duplicated descriptor: by then libpq may have closed its
        own, and another file may have its number."""
        self._shutdown_socket = socket.socket(fileno=os.dup(self.relay.server.fileno()))

    def shutdown(self) -> None:
        if self._shutdown_socket is not None:
            with suppress(OSError):
                self._shutdown_socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._finish()
        self.transition(CLOSED)

    def _finish(self) -> None:
        self._pg.finish()
        if self.relay.attached:
            self.relay.send()  # libpq's last message
        self.relay.close()
        if self._shutdown_socket is not None:
            self._shutdown_socket.close()

    def after_fork(self) -> None:
        self.transition(CLOSED)
        self.relay.close()
        if self._shutdown_socket is not None:
            self._shutdown_socket.close()
        with suppress(OSError, psycopg.Error):
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            os.dup2(null, self._pg.socket, inheritable=False)
            os.close(null)

    # ------------------------------------------------------------- answers

    async def _read_result(self, deadline: float, listing: Listing | None = None) -> pq.abc.PGresult:
        """The result of what was sent; of several, the last one, or the first error. Rows go to the listing."""
        pg, self._standby_unconfirmed = self._pg, False
        now, wait_fd = self._runtime.now, self._runtime.wait_fd
        began = now()
        while (pg.flush(), self.relay.send()) != (0, True):
            if not await wait_fd(self.relay.server.fileno(), deadline - now(), read=False, write=True):
                raise no_answer(deadline - began)
        last, received = None, False
        pipelined = pg.pipeline_status != _PIPELINE_OFF
        while True:
            while pg.is_busy():
                if received and now() >= deadline:  # a server may send without end
                    raise no_answer(deadline - began)
                if received and self.relay.has_unread():  # asked only of a reply in several pieces
                    pg.consume_input()
                    continue
                if not await wait_fd(self.relay.server.fileno(), deadline - now()):
                    raise no_answer(deadline - began)
                self.relay.receive()
                pg.consume_input()
                received = True
            result = pg.get_result()
            if result is None:
                if not pipelined:
                    break
                if pg.status != _OPEN:  # the end of the pipeline will never arrive
                    raise psycopg.OperationalError("the connection is closed")
                continue
            if (status := result.status) == _SYNC:
                break
            if status == _ROW and listing is not None:
                self._list_row(result, listing)
            elif status in _COPIES:  # libpq gives this result again and again
                raise psycopg.OperationalError("the server sent a copy")
            elif last is None or last.status in _DONE:
                last = result
        if last is None:
            raise psycopg.OperationalError("the server sent no result")
        self.transition(IDLE)
        if last.status not in _DONE:
            if pg.status != _OPEN:
                self.close()
            raise PgServerError.from_result(last)
        if self._standby_unconfirmed:
            raise Unavailable(
                "PostgreSQL: no synchronous standby confirmed the commit; a failover may lose it", engine=ENGINE
            )
        return last

    def _list_row(self, result: pq.abc.PGresult, listing: Listing) -> None:
        if result.nfields != 1:
            raise psycopg.OperationalError("the server sent rows of other columns")
        value = result.get_value(0, 0) or b""
        listing.add(value)
        self.relay.bytes_left += _ROW_SIZE + _VALUE_SIZE + len(value)

    def _take_rows(self, result: pq.abc.PGresult) -> list[Row]:
        """Gives back no more bytes than a server needs to send the rows."""
        get, count, columns = result.get_value, result.ntuples, result.nfields
        if count == 1 == columns and (value := get(0, 0)) is not None:  # most replies
            self.relay.bytes_left += _ONE_VALUE_SIZE + len(value)
            return [(value.decode(),)]
        if columns:
            self.relay.bytes_left += _REPLY_SIZE + _COLUMN_SIZE * columns
        rows: list[Row] = []
        for row in range(count):
            values = [get(row, column) for column in range(columns)]
            self.relay.bytes_left += _ROW_SIZE + _VALUE_SIZE * columns + sum(map(len, filter(None, values)))
            rows.append(tuple([None if value is None else value.decode() for value in values]))
        return rows

    def _on_notice(self, notice: pq.abc.PGresult) -> None:
        """Detect a commit whose wait for a synchronous standby was cancelled: it succeeds, with a warning."""
        self.relay.on_notice(notice.error_field(pq.DiagnosticField.SQLSTATE))
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
