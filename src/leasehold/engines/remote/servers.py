"""The servers of a URL, which of them a client uses, and how a call reaches one that answers.

A client keeps to one server, chosen by its client id: its calls and its stream of wake-ups go there, because a server
wakes only the clients whose stream it has. Every verb except `break` may be repeated, at the same server or at another:
the engine behind the servers knows a claim by its id (E2, E6). So `Failover.ask` tries the servers in turn:

| what happens                                    | next                                                              |
|-------------------------------------------------|-------------------------------------------------------------------|
| an answer                                       | return it; if another server gave it, the client moves there      |
| no connection, or it broke, or no valid answer  | the next server, at once; the client moves. If the connection was |
|                                                 | idle before, or there is one server only: once more there         |
| silence                                         | the next server, after this one's share of the deadline, which is |
|                                                 | longer if the last answer took long (`server_share`); moves       |
| refused because of a limit, `done: false`       | the next server, at once, but a waiter only after several         |
|                                                 | refusals: another server cannot wake it. The client stays: a move |
|                                                 | takes all its waiters along. If all servers refuse: `Overloaded`  |
| refused otherwise, `done: false`: the engine    | the next server, at once                                          |
| was not asked                                   |                                                                   |
| any other `Unavailable`, also inside a renewal  | the next server, once a second: that server alone may have lost   |
|                                                 | its engine. Else raise: all servers ask the same engine           |
| access denied                                   | the same server once more, if the API key is another one by now   |
| another error                                   | raise it: the engine, or the server, has decided                  |

When all servers have failed, a waiter starts again after a pause, until its `wait` or the deadline ends. If the last
one was silent, the next call begins with the second server of this one, which then gets the larger share. A `break`
goes to the next server only if it was not sent. Errors are `NotSent` if no server can have carried out the call.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final, NamedTuple, Protocol

from leasehold import tracing
from leasehold.core.texts import server_text
from leasehold.core.timing import backoff, server_share
from leasehold.engines.remote import wire
from leasehold.engines.remote.url import RemoteUrl, read_api_key
from leasehold.engines.remote.wire import Json
from leasehold.errors import AccessDenied, ConfigError, LeaseholdError, NotSent, Overloaded, Unavailable
from leasehold.model import Traits
from leasehold.runtime.base import Runtime
from leasehold.runtime.net.blocking import SocketAddress

# Until a server has said what the engine behind it promises. A lock that needs more is refused by the server.
BEST_TRAITS: Final = Traits(survives="minority")
_MOVE_INTERVAL: Final = 1.0  # seconds between two moves away from servers whose engine does not answer them


class NotConnected(OSError):
    """No connection could be opened, so the request was not sent."""


class StaleConnection(ConnectionError):
    """A connection that was used before broke. That says nothing about the server, which may close idle ones."""


class Server:
    """One server of the URL."""

    def __init__(self, index: int, address: SocketAddress, servers: Servers) -> None:
        self.index, self.address, self.tls = index, address, servers.url.tls
        self._servers = servers
        self._host = str(address)

    def __str__(self) -> str:
        return f"the Leasehold server at {self._host}"

    def calls_request(self, client_id: str, calls: list[Json], within: float) -> bytes:
        body = wire.encode(calls)
        head = self._head("POST", "calls", client_id)
        parents = {call.get(tracing.HEADER) for call in calls}
        if len(parents) == 1 and (parent := parents.pop()):
            head += f"{tracing.HEADER}: {parent}\r\n"  # for proxies on the way; a proxy may put its own span there
        return (
            f"{head}Leasehold-Within: {max(within, 0.001):.3f}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode() + body

    def stream_request(self, client_id: str) -> bytes:
        return f"{self._head('GET', 'stream', client_id)}Accept: text/event-stream\r\n\r\n".encode()

    def _head(self, method: str, path: str, client_id: str) -> str:
        servers = self._servers
        return (
            f"{method} {servers.url.base}/v1/{path} HTTP/1.1\r\nHost: {self._host}\r\n{servers.authorization}"
            f"Leasehold-Client: {client_id}\r\n"
        )


class Servers:
    """All servers of a URL, and the one in use. Shared by the client's engine instances and its listener."""

    def __init__(self, url: RemoteUrl, client_id: str = "") -> None:
        self.url = url
        self.traits = BEST_TRAITS
        self.last_answer = 0.0  # seconds that it took
        self.on_move: Callable[[], None] = lambda: None
        self.authorization = _authorization(read_api_key(url))
        self._moved_at = float("-inf")
        self.all = [Server(index, address, self) for index, address in enumerate(url.addresses)]
        self._index = int(client_id[:8] or "0", 16) % len(self.all)  # the clients of a URL spread over its servers

    @property
    def current(self) -> Server:
        return self.all[self._index]

    def leave(self, server: Server) -> None:
        """The server does not answer, or is shutting down: continue at the next one, unless that has happened."""
        if server is self.current:
            self._move_to(self.all[(server.index + 1) % len(self.all)])

    def prefer(self, server: Server) -> None:
        """The server answered when another did not."""
        if server is not self.current:
            self._move_to(server)

    def begin_behind(self, first: Server) -> None:
        """After a call that no server answered, and whose first server had most of the time: the next call begins with
        the second. Otherwise it may begin with the same silent server, and leave the others too little time again."""
        self._move_to(self.all[(first.index + 1) % len(self.all)])

    def leave_without_engine(self, server: Server, now: float) -> bool:
        """The engine does not answer this server: leave it, though not more than once a second, because the engine may
        answer no server. False: stay."""
        if len(self.all) == 1 or now < self._moved_at + _MOVE_INTERVAL:
            return False
        self._moved_at = now
        self.leave(server)
        return True

    def _move_to(self, server: Server) -> None:
        if self._index != server.index:
            self._index = server.index
            self.on_move()

    def reload_api_key(self, refused: str) -> bool:
        """Read the API key again: it may have been replaced. True: it is another one than in the `authorization` that
        was refused. Another thread may have read it meanwhile."""
        if self.url.api_key_file is not None or self.url.api_key is not None:
            with suppress(ConfigError, Unavailable):
                self.authorization = _authorization(read_api_key(self.url))
        return self.authorization != refused


def _authorization(api_key: str) -> str:
    return f"Authorization: Bearer {api_key}\r\n" if api_key else ""


class Connections(Protocol):
    """The connections of one engine instance."""

    async def call(self, server: Server, call: Json, deadline: float, reuse: bool = True) -> Json:
        """The answer to one call, from this server. `reuse=False`: on a new connection. Raises OSError (`NotConnected`,
        `StaleConnection`, TimeoutError), `Malformed`, and the error with which the server refused the request."""

    def close(self) -> None: ...

    def after_fork(self) -> None: ...


class Call(NamedTuple):
    body: Json
    deadline: float
    repeatable: bool = True
    retry_until: Callable[[], float] | None = None  # of a waiter: when its `wait` is over
    stays: bool = False  # an overloaded server is not left for the next one


class Reply(NamedTuple):
    answer: Json
    repeated: bool  # a request sent before this one may have been carried out


class NextTry(Enum):
    """Where to send a call after a try that failed."""

    SAME_SERVER = auto()
    NEXT_SERVER = auto()
    NONE = auto()


@dataclass(slots=True)
class Tries:
    """What has become of one call so far."""

    first: Server  # the one in use when the call began
    tried: set[Server] = field(default_factory=set)  # in this round
    rounds: int = 0  # in which all servers failed
    broke_before: bool = False  # in this round, a broken connection was repeated at the same server
    may_have_arrived: bool = False  # a server may have carried the call out
    failure: tuple[Server, Exception] | None = None  # the last one
    overloaded: tuple[Server, Overloaded] | None = None  # in this round
    fallback: Json | None = None  # a renewal that one server could answer in part
    read_key_again: bool = False  # after a server had refused it; only once, as a function may give another each time


class Failover:
    """Asks the servers until one answers: see the table at the top."""

    def __init__(self, servers: Servers, connections: Connections, runtime: Runtime, engine: str) -> None:
        self._servers, self._connections, self._runtime, self._engine = servers, connections, runtime, engine

    async def ask(self, call: Call) -> Reply:
        servers, now, tries = self._servers, self._runtime.now, Tries(self._servers.current)
        while True:
            server = self._next(tries.tried)
            if server is None:
                if not await self._begin_round(call, tries):
                    break
                continue
            left, authorization = call.deadline - now(), servers.authorization
            if left <= 0:
                break
            try:
                began, untried = now(), len(servers.all) - len(tries.tried)
                share = server_share(left, untried, servers.last_answer) if call.repeatable else left
                answer = await self._connections.call(server, call.body, began + share, reuse=call.repeatable)
                servers.last_answer = now() - began
                self._raise_problem(answer)
                is_partial = self._has_unavailable(answer)
            except (OSError, wire.Malformed, Unavailable) as error:  # a timeout too
                tries.failure = (server, error)
                next_try = self._next_try(call, tries, server, error)
                if next_try is NextTry.NONE:
                    break
                if next_try is NextTry.SAME_SERVER:
                    continue
            except AccessDenied as denied:
                if tries.read_key_again or not servers.reload_api_key(authorization):
                    denied._nothing_done = not tries.may_have_arrived
                    raise
                tries.read_key_again = True
                continue
            else:
                if tries.overloaded is None:
                    servers.prefer(server)
                if not is_partial or not servers.leave_without_engine(server, now()):
                    return Reply(answer, tries.may_have_arrived)
                tries.fallback = answer
            tries.tried.add(server)
        if tries.fallback is not None:
            return Reply(tries.fallback, repeated=True)
        all_tried = len(tries.tried) == len(servers.all)
        if all_tried and tries.failure is not None and isinstance(tries.failure[1], TimeoutError):
            servers.begin_behind(tries.first)
        raise self._no_answer(tries.failure, tries.may_have_arrived)

    def _next_try(self, call: Call, tries: Tries, server: Server, error: Exception) -> NextTry:
        """The table at the top, for a try that failed."""
        servers = self._servers
        if isinstance(error, NotConnected):
            servers.leave(server)
        elif isinstance(error, Overloaded):
            tries.overloaded = (server, error)
            if call.stays and not tries.may_have_arrived:
                return NextTry.NONE
        elif isinstance(error, NotSent):
            servers.leave_without_engine(server, self._runtime.now())
        elif isinstance(error, Unavailable):
            tries.may_have_arrived = True
            if not call.repeatable or not servers.leave_without_engine(server, self._runtime.now()):
                return NextTry.NONE
        else:  # no connection any more, silence, or no valid answer
            tries.may_have_arrived = True
            if not call.repeatable:
                return NextTry.NONE
            if not tries.broke_before and self._is_worth_repeating(error):
                tries.broke_before = True
                return NextTry.SAME_SERVER
            servers.leave(server)
        return NextTry.NEXT_SERVER

    async def _begin_round(self, call: Call, tries: Tries) -> bool:
        """All servers have failed: pause, and try them again, if the call is a waiter's and its time is not over."""
        overloaded, retry_in = tries.overloaded, 0.0
        if overloaded is not None:
            tries.failure = overloaded  # more than a server that cannot be reached, it says when to try again
            if not tries.may_have_arrived:
                return False  # the caller pauses, for longer than here
            retry_in = overloaded[1].retry_in or 0.0
        if tries.fallback is not None or not await self._pause(call, tries.rounds, retry_in):
            return False
        tries.rounds, tries.broke_before, tries.overloaded = tries.rounds + 1, False, None
        tries.tried.clear()
        return True

    def _next(self, tried: set[Server]) -> Server | None:
        """The server in use; if it was tried, the next one that was not."""
        servers = self._servers
        first = servers.current.index
        in_turn = (servers.all[(first + offset) % len(servers.all)] for offset in range(len(servers.all)))
        return next((server for server in in_turn if server not in tried), None)

    def _is_worth_repeating(self, error: Exception) -> bool:
        """Whether the same server is asked once more: it may have closed an idle connection; and one address may be
        that of a balancer, behind which another server answers."""
        only_one = len(self._servers.all) == 1
        return isinstance(error, StaleConnection) or (only_one and isinstance(error, ConnectionError))

    async def _pause(self, call: Call, rounds: int, retry_in: float) -> bool:
        """Wait before a waiter tries all servers again. False: its time would be over."""
        if call.retry_until is None:
            return False
        pause = retry_in + backoff(rounds, 0.02, 0.3, 0.5 + self._runtime.random() / 2)
        if self._runtime.now() + pause >= min(call.deadline, call.retry_until()):
            return False
        await self._runtime.sleep(pause)
        return True

    def _raise_problem(self, answer: Json) -> None:
        if "problem" in answer:
            raise wire.error_from_problem(answer["problem"], self._engine)

    def _has_unavailable(self, answer: Json) -> bool:
        """Whether the server could not renew some of the claims, because its engine did not answer it. Other problems,
        such as a missing right, are the same at every server."""
        renewed = answer.get("renewed")
        return isinstance(renewed, list) and any(
            isinstance(wire.error_from_problem(each["problem"], self._engine), Unavailable)
            for each in renewed
            if isinstance(each, dict) and "problem" in each
        )

    def _no_answer(self, failure: tuple[Server, Exception] | None, may_have_arrived: bool) -> Unavailable:
        if failure is None:
            return NotSent("the deadline passed before the call was sent", engine=self._engine)
        server, cause = failure
        kind = Unavailable if may_have_arrived else Overloaded if isinstance(cause, Overloaded) else NotSent
        retry_in, no_majority = (cause.retry_in, cause.no_majority) if isinstance(cause, Unavailable) else (None, False)
        error = kind(f"{server} {_describe(cause)}", engine=self._engine, retry_in=retry_in, no_majority=no_majority)
        error.__cause__ = cause
        return error


def _describe(error: Exception) -> str:
    if isinstance(error, LeaseholdError) and not isinstance(error, wire.Malformed):
        return f"refused the call: {error}"
    reason = server_text(getattr(error, "strerror", None) or error) or type(error).__name__
    if isinstance(error, NotConnected):
        return f"cannot be reached: {reason}"
    return f"did not answer: {reason}"


def read_answers(status: int, body: bytes, count: int, engine: str) -> list[Json]:
    """The answers of a response, one per call. Raises the error with which the server refused the whole request, or
    `Malformed`."""
    try:
        found: Any = wire.decode(body)
    except wire.Malformed:
        found = None
    if status == 200 and isinstance(found, list) and len(found) == count and all(isinstance(x, dict) for x in found):
        return found
    if status != 200 and isinstance(found, dict) and "type" in found:
        raise wire.error_from_problem(found, engine)
    raise wire.Malformed(
        f"it sent a response with status {status} that is not one of a Leasehold server: check the URL"
    )
