"""How much a server admits at once, and what it refuses first.

Under load the server refuses, in this order: new attempts, then `inspect` and events, then releases. It never refuses a
renewal, because a lease may depend on it: a refused attempt costs its caller a retry, a refused renewal a lock.

Bulkheads keep one API key, one namespace or one name from using up the whole server: attempts and reads, and waiters,
are counted for each of them. Renewals and releases are not; but those of one key never use up what all keys share.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from math import ceil
from typing import Final, Literal, TypeAlias, TypeVar

from leasehold.server.auth import Caller
from leasehold.server.problems import Problem, ServerOverloaded, TooMany
from leasehold.server.settings import LimitSettings

T = TypeVar("T")
Class: TypeAlias = Literal["attempt", "read", "release", "renew"]

CONNECTION: Final = "leasehold.connection"  # in the extensions of an ASGI scope
# The share of `limits.calls` above which calls of a class are refused.
SHARES: Final[dict[Class, float]] = {"attempt": 0.8, "read": 0.9, "release": 1.0}
MAX_LISTS: Final = 2  # lists of locks that one caller's requests make at a time
MAX_BEGUN: Final = 64  # requests, and claims of batches, of one caller in one turn of the event loop
# Claims in batches of one caller that have begun and have no answer: each takes fifty times the memory of its request.
MAX_UNDER_WAY: Final = 2048
LARGE: Final = 1000  # claims of a list that is made on a thread: it takes too long for the event loop
_IN_BULKHEADS: Final = frozenset({"attempt", "read"})


class Limits:
    """The counters of one worker. Every method is for the event loop's thread."""

    def __init__(self, settings: LimitSettings) -> None:
        self.settings = settings
        self.calls = 0  # under way
        self._shared = Shares(settings.calls_per_key)  # of these, those that count for `limits.calls`
        self.waiters = 0
        self.refused: dict[str, int] = {}  # limit -> refusals, for metrics
        self._connections: dict[str, int] = {}  # open connections of each key
        self._resized: dict[str, set[tuple[str, str]]] = {}  # names whose limit each key has set, with their namespaces
        self._lists, self._batches = Turns(MAX_LISTS), Turns(1)
        self._begun: dict[str, int] = {}  # requests and claims of each caller, in this turn of the event loop
        self._under_way: dict[str, int] = {}  # claims in batches of each caller that have begun
        self._fewer: dict[str, asyncio.Future[None]] = {}  # of callers whose next batch waits for that
        self._most = {kind: ceil(settings.calls * share) for kind, share in SHARES.items()}
        self._calls = Bulkheads(
            "calls", settings.calls_per_key, settings.calls_per_namespace, settings.calls_per_name, self.refused
        )
        self._waiters = Bulkheads(
            "waiters", settings.waiters_per_key, settings.waiters_per_namespace, settings.waiters_per_name, self.refused
        )

    def connection(self, caller: Caller, connection: CountedConnection) -> bool:
        """Count an open connection for the key that uses it now. False: this key has too many, so this one still counts
        for the key that used it before, if any, and must be closed after its answer."""
        connection.identify(caller)
        most = self.settings.connections_per_key
        if most and caller.limited and connection.who != caller.who:
            if self._connections.get(caller.who, 0) >= most:
                self.refused["connections_per_key"] = self.refused.get("connections_per_key", 0) + 1
                return False
            connection.end()
            connection.begin(caller.who, self._connections)
        connection.is_admitted = True
        return True

    def call(self, caller: Caller, kind: Class, namespace: str | None = None, name: str = "") -> Admitted:
        """A call of the engine, until the `with` ends. Raises ServerOverloaded or TooMany before anything is sent.
        `namespace` is None for a call that is about no namespace."""
        most = self._most.get(kind)  # None: never refused
        if most is not None and self._shared.total >= most:
            raise self._refuse("calls", ServerOverloaded(f"{self.calls} calls are under way at this server: retry"))
        counted = self._calls.enter(caller, namespace, name) if kind in _IN_BULKHEADS else ()
        self.calls += 1
        who = caller.who if caller.limited else ""
        self._shared.enter(who)
        return Admitted(self, "calls", self._calls, counted, partial(self._shared.leave, who))

    def waiter(self, caller: Caller, namespace: str = "", name: str = "") -> Admitted:
        """A waiter in a queue, until the `with` ends. Raises TooMany (this key has too many) or ServerOverloaded."""
        counted = self._waiters.enter(caller, namespace, name)
        if self.waiters >= self.settings.waiters:
            self._waiters.leave(counted)
            raise self._refuse("waiters", ServerOverloaded(f"{self.waiters} waiters are queued at this server: retry"))
        self.waiters += 1
        return Admitted(self, "waiters", self._waiters, counted)

    def lease(self, caller: Caller, held: int) -> None:
        """Raise TooMany if this caller, who has so many leases, may have no further one: each takes memory."""
        most = self.settings.leases_per_key
        if most and held >= most and caller.limited:
            raise self._refuse(
                "leases_per_key",
                TooMany(f"{caller.who} has {held} leases at this server, which is its limit: release some"),
            )

    @contextmanager
    def resizing(self, caller: Caller, namespace: str, name: str, limit: int | None) -> Iterator[None]:
        """The change of a semaphore's limit, which the engine keeps until it is removed. Raises TooMany if this caller
        has set the limits of as many names as it may have leases."""
        names, key = self._resized.get(caller.who, set()), (namespace, name)
        most = self.settings.leases_per_key
        if most and caller.limited and limit is not None and len(names) >= most and key not in names:
            detail = f"{caller.who} has set the limits of {len(names)} names, as many as it may: remove some"
            raise self._refuse("resized_per_key", TooMany(detail))
        yield
        if limit is not None and caller.limited:
            self._resized.setdefault(caller.who, set()).add(key)
        elif (names := self._resized.get(caller.who, set())) and names == {key}:
            del self._resized[caller.who]
        else:
            names.discard(key)

    @asynccontextmanager
    async def listing(self, caller: Caller, seconds: float) -> AsyncIterator[None]:
        """A list of locks, which costs time in proportion to the locks. The requests of one caller make two at a time,
        so that the renewals of others get their turn in between. Raises TooMany if it does not begin in time."""
        try:
            async with self._lists.take(caller.who, seconds):
                await asyncio.sleep(0)  # else a list that waits for nothing is made at once, and so are all others
                yield
        except TurnMissed:
            detail = f"{caller.who} may have {MAX_LISTS} lists in progress at this server, and others were ahead: retry"
            raise self._refuse("lists_per_key", TooMany(detail)) from None

    @asynccontextmanager
    async def batch(self, caller: Caller, seconds: float | None) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
        """The start of a batch of calls. Its value is awaited before each call, with the number of claims of that call.
        Few calls of one caller begin in one turn of the event loop, and its batches start one after the other: the
        renewals of other callers are answered in between. Raises TooMany if it does not begin in time, and so does its
        value: its sender has given up, and may have released what an attempt in it would take (E6)."""
        who = caller.who
        until = None if seconds is None else asyncio.get_running_loop().time() + seconds

        def too_late() -> Problem:
            detail = f"batches of {who} that came earlier have not all begun at this server: retry"
            return self._refuse("batches_per_key", TooMany(detail))

        async def begin(claims: int) -> None:
            if self._begun.get(who, 0) >= MAX_BEGUN:
                await asyncio.sleep(0)
            while caller.limited and self._under_way.get(who, 0) >= MAX_UNDER_WAY:
                self._fewer[who] = asyncio.get_running_loop().create_future()
                try:
                    async with asyncio.timeout_at(until):
                        await self._fewer[who]
                except TimeoutError:
                    raise too_late() from None
                finally:
                    del self._fewer[who]
            self._count_begun(who, claims)

        try:
            async with self._batches.take(who, seconds):
                yield begin
        except TurnMissed:
            raise too_late() from None

    def begun(self, caller: Caller, claims: int) -> None:
        """So many claims of a batch have begun: `ended` must follow."""
        self._under_way[caller.who] = self._under_way.get(caller.who, 0) + claims

    def ended(self, caller: Caller, claims: int) -> None:
        who = caller.who
        self._under_way[who] -= claims
        fewer = self._fewer.get(who)
        if fewer is not None and not fewer.done() and self._under_way[who] < MAX_UNDER_WAY:
            fewer.set_result(None)
        if not self._under_way[who]:
            del self._under_way[who]

    async def begin(self, caller: Caller, seconds: float | None = None) -> None:
        """Wait until a request of this caller may begin: like a batch of one call, behind those that came before it, so
        that a release does not overtake an attempt (E6). Raises TooMany if it does not begin in time."""
        who = caller.who
        if who not in self._batches and self._begun.get(who, 0) < MAX_BEGUN:
            self._count_begun(who, 1)
            return
        async with self.batch(caller, seconds) as begin:
            await begin(1)

    def _count_begun(self, who: str, claims: int) -> None:
        if not self._begun:
            asyncio.get_running_loop().call_soon(self._begun.clear)  # in the next turn
        self._begun[who] = self._begun.get(who, 0) + claims

    def _refuse(self, limit: str, problem: Problem) -> Problem:
        self.refused[limit] = self.refused.get(limit, 0) + 1
        return problem


class TurnMissed(Exception):
    """It did not come in time."""


class Turns:
    """Each caller has so many at a time, in the order in which its requests ask for them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._turns: dict[str, asyncio.Semaphore] = {}  # of callers that have or want one
        self._requests: dict[str, int] = {}  # of each

    def __contains__(self, who: str) -> bool:
        return who in self._turns

    @asynccontextmanager
    async def take(self, who: str, seconds: float | None) -> AsyncIterator[None]:
        """Raises TurnMissed if it does not come in time."""
        turns = self._turns.setdefault(who, asyncio.Semaphore(self._most))
        self._requests[who] = self._requests.get(who, 0) + 1
        try:
            try:
                async with asyncio.timeout(seconds):
                    await turns.acquire()
            except TimeoutError:
                raise TurnMissed from None
            try:
                yield
            finally:
                turns.release()
        finally:
            self._requests[who] -= 1
            if not self._requests[who]:
                del self._requests[who], self._turns[who]


async def make_list(size: int, make: Callable[[], T]) -> T:
    """What `make` returns, for this number of claims. Other requests are served meanwhile if it takes long."""
    return await asyncio.to_thread(make) if size > LARGE else make()


class Bodies:
    """The bytes of all bodies that are in memory: many callers with a large body each must not use it up. One caller,
    and several that belong together, must leave room for the renewals of others: each has some room of its own.
    Requests without a key have theirs together."""

    def __init__(
        self,
        most: int = 128 * 1024 * 1024,
        most_per_caller: int = 32 * 1024 * 1024,
        least_per_caller: int = 256 * 1024,
    ) -> None:
        self._most, self._most_per_caller, self._least_per_caller = most, most_per_caller, least_per_caller
        self.bytes = 0
        self._of: dict[str, int] = {}  # caller -> bytes; those of callers that are not known yet are together

    def has_room(self, who: str | None, size: int) -> bool:
        """`who` is empty for a caller that is not known yet, and None for one without limits of its own."""
        if who is None:
            return self.bytes + size <= self._most
        own = self._of.get(who, 0) + size
        if self.bytes + size <= self._most or not who:
            return own <= self._most_per_caller
        return own <= self._least_per_caller

    def add(self, who: str | None, size: int) -> None:
        self.bytes += size
        if who is not None:
            self._of[who] = self._of.get(who, 0) + size
            if not self._of[who]:
                del self._of[who]


class CountedConnection:
    """An open connection, counted for the key that has used it last until `end`, with the bodies that it has sent."""

    __slots__ = ("_bodies", "_counts", "_in_memory", "caller", "is_admitted", "who")

    def __init__(self, bodies: Bodies | None = None) -> None:
        self.who = ""  # empty: it is not counted
        self.is_admitted = False  # a caller has used it that had room for it: it is not closed to make room for others
        self._counts: dict[str, int] = {}
        self._bodies = bodies or Bodies()
        # Whose bodies these are. Empty: not known yet; None: one without limits of its own.
        self.caller: str | None = ""
        self._in_memory = 0

    def begin(self, who: str, counts: dict[str, int]) -> None:
        self.who, self._counts = who, counts
        counts[who] = counts.get(who, 0) + 1

    def end(self) -> None:
        if self.who:
            self._counts[self.who] -= 1
            if not self._counts[self.who]:
                del self._counts[self.who]
            self.who = ""

    def identify(self, caller: Caller) -> None:
        """From now on the bodies of this connection count for this caller."""
        who = caller.who if caller.limited else None
        if who != self.caller:
            size = self._in_memory
            self.drop_bodies()
            self.caller = who
            self.keep_body(size)

    def has_room(self, size: int) -> bool:
        """Whether a part of a body with this size may be kept."""
        return self._bodies.has_room(self.caller, size)

    def keep_body(self, size: int) -> None:
        self._in_memory += size
        self._bodies.add(self.caller, size)

    def drop_bodies(self) -> None:
        """All requests are answered."""
        self._bodies.add(self.caller, -self._in_memory)
        self._in_memory = 0


class Admitted:
    """A call or waiter that is counted until `end`, which `with` calls. Calling it again is harmless."""

    __slots__ = ("_bulkheads", "_counted", "_limits", "_on_end", "_what")

    def __init__(
        self,
        limits: Limits,
        what: Literal["calls", "waiters"],
        bulkheads: Bulkheads,
        counted: tuple[Hashable, ...],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._limits: Limits | None = limits
        self._what, self._bulkheads, self._counted, self._on_end = what, bulkheads, counted, on_end

    def end(self) -> None:
        limits, self._limits = self._limits, None
        if limits is not None:
            setattr(limits, self._what, getattr(limits, self._what) - 1)
            self._bulkheads.leave(self._counted)
            self._on_end()

    def __enter__(self) -> Admitted:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class Shares:
    """How many calls all keys have together. Those of one key count only up to its limit: a key may have more, such as
    renewals, and must not have the attempts and releases of all others refused with them."""

    def __init__(self, most_per_key: int) -> None:
        self.total = 0
        self._most_per_key = most_per_key  # 0: no limit
        self._calls: dict[str, int] = {}  # of each key

    def enter(self, who: str) -> None:
        """`who` is empty for a caller without limits of its own."""
        calls = self._calls[who] = self._calls.get(who, 0) + 1
        self.total += self._counts(who, calls)

    def leave(self, who: str) -> None:
        calls = self._calls.pop(who)
        self.total -= self._counts(who, calls)
        if calls > 1:
            self._calls[who] = calls - 1

    def _counts(self, who: str, calls: int) -> bool:
        return not who or not self._most_per_key or calls <= self._most_per_key


class Bulkheads:
    """How many calls or waiters each key, namespace and name has. What has none is not kept."""

    def __init__(self, what: str, per_key: int, per_namespace: int, per_name: int, refused: dict[str, int]) -> None:
        self._what, self._refused = what, refused
        self._per_key, self._per_namespace, self._per_name = per_key, per_namespace, per_name
        self._counts: dict[Hashable, int] = {}

    def enter(self, caller: Caller, namespace: str | None, name: str) -> tuple[Hashable, ...]:
        """Count one more, and return what `leave` takes. Raises TooMany or ServerOverloaded, then counts nothing."""
        counts = self._counts
        entered: list[Hashable] = []
        if self._per_key and caller.limited:
            who = caller.who
            if counts.get(who, 0) >= self._per_key:
                self._note("key")
                raise TooMany(f"{who} has {self._per_key} {self._what} at this server, which is its limit: retry")
            entered.append(who)
        if self._per_namespace and namespace is not None:
            if counts.get((namespace,), 0) >= self._per_namespace:
                self._note("namespace")
                raise ServerOverloaded(f"this namespace has {self._per_namespace} {self._what} at this server: retry")
            entered.append((namespace,))
        if self._per_name and name:
            if counts.get((namespace, name), 0) >= self._per_name:
                self._note("name")
                raise ServerOverloaded(f"this name has {self._per_name} {self._what} at this server: retry")
            entered.append((namespace, name))
        for each in entered:
            counts[each] = counts.get(each, 0) + 1
        return tuple(entered)

    def leave(self, counted: tuple[Hashable, ...]) -> None:
        for each in counted:
            if self._counts[each] > 1:
                self._counts[each] -= 1
            else:
                del self._counts[each]

    def __len__(self) -> int:
        return len(self._counts)

    def _note(self, per: str) -> None:
        limit = f"{self._what}_per_{per}"
        self._refused[limit] = self._refused.get(limit, 0) + 1
