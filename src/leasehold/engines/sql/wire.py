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


class Missing(Exception):
    """The schema is not there, or not this version of it. Never leaves the engine."""


class Again(Exception):
    """The server undid the whole call, for it met another: it may be sent again. Never leaves the engine."""


class Lost(Exception):
    """The connection broke before the answer came. Never leaves the engine."""


class Failed(Exception):
    """The server answered with an error; the session may go on. Never leaves the engine."""

    def meaning(self) -> LeaseholdError | Missing | Again:
        raise NotImplementedError


def silent(server: str, engine: str, seconds: float) -> Unavailable:
    return Unavailable(f"{server} did not answer within {max(seconds, 0.0):.2f} s", engine=engine, seconds=seconds)


@dataclass(frozen=True, slots=True)
class Server:
    """What a session says of the other side."""

    direct: bool  # nothing between that hands our calls to other sessions: this one is ours for as long as it lives
    place: str  # the same for two sessions with one database of one running server
    durable: bool


class Session(Protocol):
    server: Server
    adrift: bool  # something was sent, and its answer not read: of no more use but to `regret`

    def usable(self) -> bool:
        """False once the server has hung up. Asks nobody: what is found is what has arrived."""

    async def ask(self, statement: bytes, values: Sequence[Value], deadline: float) -> list[Row]:
        """All rows of one statement. Raises `Failed` for an error of the server's, `Lost` when it hung up; whatever is
        raised else, there was no answer, and this session is adrift."""

    def regret(self, statement: bytes, values: Sequence[Value]) -> Tail | None:
        """Send one more statement behind what was not answered, and hang up. Never waits. The server carries out what
        it received in order, so what takes a call back cannot overtake it."""

    def leave(self) -> Tail | None:
        """Hang up, but see when the server has, too: it carries out what it was sent, for as long as that takes."""

    def shut(self) -> None:
        """Wake whoever waits for this session on another thread: that one closes it."""

    def close(self) -> None: ...

    def abandon(self) -> None:
        """In a forked child: not a byte of goodbye may go out on what is the parent's connection."""


class Tail:
    """What is left of a session we have hung up, until the server has as well."""

    def __init__(self, descriptor: int, place: str) -> None:
        self._line, self.place = socket.socket(fileno=os.dup(descriptor)), place
        self.descriptor = self._line.fileno()

    def close(self) -> None:
        self._line.close()

    __del__ = close

    def gone(self) -> bool:
        try:
            while self._line.recv(65536, socket.MSG_DONTWAIT):
                continue
        except BlockingIOError:
            return False
        except OSError:
            pass
        self.close()
        return True
