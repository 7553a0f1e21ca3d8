"""The life of a session with a server, whatever its protocol.

IDLE        the next call may use it
BUSY        a call was sent, and its caller waits for the reply
UNANSWERED  the caller gave up. The reply may still come, so no other call may use the session; but a release can be
            sent behind the call, and the server executes what it receives in order
DRAINING    the client has closed its side. The server first executes what it was sent, however long that takes
CLOSED      both sides have closed it, or nothing is to be expected from it any more
"""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, TypeAlias

from leasehold.core.listing import ListingBudget
from leasehold.errors import ConfigError, LeaseholdError, Unavailable

_DECODING_ERRORS: Final = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_MAX_LISTING: Final = 10 << 20  # bytes of memory: of more claims than a list may have
_MAX_ROW: Final = 1 << 16  # bytes
_ROW_COST: Final = 64  # bytes of memory that a row takes beside its text

Row: TypeAlias = "tuple[str | None, ...]"
Value: TypeAlias = "str | int | bool | Sequence[str] | Sequence[int] | None"
Values: TypeAlias = "Sequence[Value]"


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


def schema_too_new(place: str, found: int, supported: int) -> ConfigError:
    return ConfigError(
        f"{place} was created by a newer Leasehold (schema version {found}; this one supports {supported}) and no "
        "longer works with this version: upgrade Leasehold"
    )


class Decoding:
    """Around the code that decodes a reply: one that Leasehold's procedures do not give says nothing about the claim
    (E5), so it is `Unavailable`. A class and not a generator, which would take longer than the decoding itself."""

    __slots__ = ("_engine", "_server")

    def __init__(self, server: str, engine: str) -> None:
        self._server, self._engine = server, engine

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, _DECODING_ERRORS) and not isinstance(error, LeaseholdError):
            raise Unavailable(
                f"{self._server} sent a reply that is not Leasehold's; check that the URL leads to {self._server} "
                "itself, and that Leasehold's procedures were not replaced",
                engine=self._engine,
            ) from error


class Listing:
    """The rows of a reply that may have many, as they were received: decoded, they take several times as much memory,
    and short values much more."""

    def __init__(self, engine: str) -> None:
        self._budget = ListingBudget(engine, _MAX_LISTING)
        self.rows: list[bytes] = []

    def add(self, row: bytes) -> None:
        """Raises ListingTooLong, and OSError if Leasehold's procedures give no such row."""
        if len(row) > _MAX_ROW:
            raise ConnectionAbortedError("the server sent too long a row")
        self._budget.spend_bytes(_ROW_COST + len(row))
        self.rows.append(row)


@dataclass(frozen=True, slots=True)
class DatabaseServer:
    """What a session knows about its server."""

    direct: bool  # no pooler or proxy in between hands calls to other sessions
    identity: str  # equal for two sessions with the same database of the same running server
    durable: bool


class SessionState(Enum):
    IDLE = auto()
    BUSY = auto()
    UNANSWERED = auto()
    DRAINING = auto()
    CLOSED = auto()

    __hash__ = object.__hash__  # Enum's own is a Python function, called four times per request


IDLE, BUSY, UNANSWERED, DRAINING, CLOSED = SessionState

# IDLE -> UNANSWERED: the client was closed during the call, so the answered attempt has to be released as well.
_NEXT: Final = {
    IDLE: {BUSY, UNANSWERED, DRAINING, CLOSED},
    BUSY: {IDLE, UNANSWERED, DRAINING, CLOSED},
    UNANSWERED: {DRAINING, CLOSED},
    DRAINING: {CLOSED},
}


class SqlSession(ABC):
    """A session. Subclasses know one protocol."""

    def __init__(self) -> None:
        self.server = DatabaseServer(False, "", True)
        self.state = IDLE
        self._draining: DrainingSocket | None = None

    def transition(self, state: SessionState) -> None:
        if state is not self.state and self.state is not CLOSED:  # final: another thread may have closed it
            assert state in _NEXT[self.state], f"a session cannot become {state.name} after {self.state.name}"  # noqa: S101  # a bug of ours
            self.state = state

    @abstractmethod
    def usable(self) -> bool:
        """Whether it is idle, and the server has not closed the connection. Sends nothing: it only checks what has
        arrived."""

    @abstractmethod
    async def execute(self, statement: bytes, values: Values, deadline: float) -> list[Row]:
        """All rows of one statement. A reply of more than 256 KiB may break the connection, one of 1.3 MiB does.

        Raises `SqlServerError` if the server replied with an error, `SqlConnectionLost` if the connection broke. After
        any other exception the reply was not read, and the session is still busy."""

    @abstractmethod
    async def list_rows(self, statement: bytes, values: Values, deadline: float) -> list[bytes]:
        """The same of a statement that may have many rows, still encoded. The bound is for what is not a row. Raises
        ListingTooLong, which breaks the connection as well."""

    @abstractmethod
    def _send_last(self, statement: bytes, values: Values) -> None:
        """Send one more statement behind the unanswered one. Never waits, and raises nothing."""

    @abstractmethod
    def _close_our_side(self) -> DrainingSocket | None:
        """Close our side. The result shows when the server has closed its side; None: it already has."""

    @abstractmethod
    def shutdown(self) -> None:
        """Wake the thread that waits for this session; that thread closes it."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def after_fork(self) -> None:
        """In a forked child: drop the session without sending a byte, because the connection is the parent's."""

    def send_compensation(self, statement: bytes, values: Values) -> None:
        """Send a release behind the unanswered attempt, which it cannot overtake, and hang up."""
        self._send_last(statement, values)
        self.disconnect()

    def disconnect(self) -> None:
        """Close our side, without waiting."""
        self._draining = self._close_our_side()
        self.transition(CLOSED if self._draining is None else DRAINING)

    def is_drained(self) -> bool:
        """Whether the server has closed its side, too."""
        if self._draining is not None and self._draining.is_drained():
            self.stop_draining()
        return self._draining is None

    def stop_draining(self) -> None:
        if self._draining is not None:
            self._draining.close()
            self._draining = None
            self.transition(CLOSED)

    @property
    def draining_descriptor(self) -> int:
        assert self._draining is not None  # noqa: S101  # for the type checker
        return self._draining.descriptor


class DrainingSocket:
    """The socket of a session that the client has closed and the server has not."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=os.dup(descriptor))
        self.descriptor = self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    __del__ = close

    def is_drained(self) -> bool:
        try:
            if self._socket.recv(65536, socket.MSG_DONTWAIT):
                return False
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True
