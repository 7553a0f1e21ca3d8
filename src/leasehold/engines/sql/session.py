"""What a `SerialConnection` needs of a session, whatever its protocol; and sockets of given-up sessions."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from leasehold.errors import LeaseholdError, Unavailable

Row: TypeAlias = "tuple[str | None, ...]"
Value: TypeAlias = "str | int | bool | Sequence[str] | Sequence[int] | None"


class SchemaMissing(Exception):
    """The schema does not exist, or not in this version. Never leaves the engine."""


class TransactionConflict(Exception):
    """The server rolled the call back because it conflicted with another: it may be retried. Never leaves the
    engine."""


class SqlConnectionLost(Exception):
    """The connection broke before the reply arrived. Never leaves the engine."""


class SqlServerError(Exception):
    """The server replied with an error; the session may still be usable. Never leaves the engine."""

    def classify(self) -> LeaseholdError | SchemaMissing | TransactionConflict:
        raise NotImplementedError


def no_answer(server: str, engine: str, seconds: float) -> Unavailable:
    within = f"within {seconds:.1f} s" if seconds >= 0.05 else "before the deadline"
    return Unavailable(f"{server} did not answer {within}", engine=engine, seconds=seconds)


@dataclass(frozen=True, slots=True)
class DatabaseServer:
    """What a session knows about its server."""

    direct: bool  # no pooler or proxy in between hands calls to other sessions
    identity: str  # equal for two sessions with the same database of the same running server
    durable: bool


class SqlSession(Protocol):
    server: DatabaseServer
    unanswered: bool  # a request was sent and its reply not read: only `send_compensation` and `hang_up` may follow

    def usable(self) -> bool:
        """False once the server has closed the connection. Sends nothing: it only checks what has arrived."""

    async def execute(self, statement: bytes, values: Sequence[Value], deadline: float) -> list[Row]:
        """All rows of one statement. Raises `SqlServerError` if the server replied with an error, `SqlConnectionLost`
        if the connection broke. After any other exception the reply was not read, and the session is `unanswered`."""

    def send_compensation(self, statement: bytes, values: Sequence[Value]) -> DrainingSocket | None:
        """Send one more statement behind the unanswered one, and hang up. Never waits. The server executes what it
        receives in order, so a compensation cannot overtake its attempt."""

    def hang_up(self) -> DrainingSocket | None:
        """Close our side. The result shows when the server has closed its side: it first executes what it was sent,
        however long that takes."""

    def shutdown(self) -> None:
        """Wake the thread that waits for this session; that thread closes it."""

    def close(self) -> None: ...

    def after_fork(self) -> None:
        """In a forked child: drop the session without sending a byte, because the connection is the parent's."""


class DrainingSocket:
    """The socket of a session that the client has closed and the server has not."""

    def __init__(self, descriptor: int, server_identity: str) -> None:
        self._socket, self.server_identity = socket.socket(fileno=os.dup(descriptor)), server_identity
        self.descriptor = self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    __del__ = close

    def is_drained(self) -> bool:
        try:
            while self._socket.recv(65536, socket.MSG_DONTWAIT):
                continue
        except BlockingIOError:
            return False
        except OSError:
            pass
        self.close()
        return True
