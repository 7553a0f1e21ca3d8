"""What a lane needs of a session with a server, whichever protocol it speaks; and what is left of one given up."""

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
    """The schema is not there, or not this version of it. Never leaves the engine."""


class TransactionConflict(Exception):
    """The server undid the whole call, for it met another: it may be sent again. Never leaves the engine."""


class SqlConnectionLost(Exception):
    """The connection broke before the answer came. Never leaves the engine."""


class SqlServerError(Exception):
    """The server answered with an error; the session may go on. Never leaves the engine."""

    def classify(self) -> LeaseholdError | SchemaMissing | TransactionConflict:
        raise NotImplementedError


def no_answer(server: str, engine: str, seconds: float) -> Unavailable:
    return Unavailable(f"{server} did not answer within {max(seconds, 0.0):.2f} s", engine=engine, seconds=seconds)


@dataclass(frozen=True, slots=True)
class DatabaseServer:
    """What a session says of the other side."""

    direct: bool  # nothing between that hands our calls to other sessions: this one is ours for as long as it lives
    identity: str  # the same for two sessions with one database of one running server
    durable: bool


class SqlSession(Protocol):
    server: DatabaseServer
    unanswered: bool  # something was sent, and its answer not read: of no more use but to `send_compensation`

    def usable(self) -> bool:
        """False once the server has hung up. Asks nobody: what is found is what has arrived."""

    async def execute(self, statement: bytes, values: Sequence[Value], deadline: float) -> list[Row]:
        """All rows of one statement. Raises `SqlServerError` for an error of the server's, `SqlConnectionLost` when it
        hung up; whatever is raised else, there was no answer, and this session is adrift."""

    def send_compensation(self, statement: bytes, values: Sequence[Value]) -> DrainingSocket | None:
        """Send one more statement behind what was not answered, and hang up. Never waits. The server carries out what
        it received in order, so what takes a call back cannot overtake it."""

    def hang_up(self) -> DrainingSocket | None:
        """Hang up, but see when the server has, too: it carries out what it was sent, for as long as that takes."""

    def shutdown(self) -> None:
        """Wake whoever waits for this session on another thread: that one closes it."""

    def close(self) -> None: ...

    def after_fork(self) -> None:
        """In a forked child: not a byte of goodbye may go out on what is the parent's connection."""


class DrainingSocket:
    """What is left of a session we have hung up, until the server has as well."""

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
