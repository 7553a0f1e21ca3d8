"""One stream per client on which etcd tells what becomes of keys: of the one ahead in line, and of one's own.

Of the one ahead, a watch begins with the present, whenever that is: one that asks for the past, be it for the last
change alone, is served by etcd only ten times a second. When it has begun etcd says at which revision. If that is later
than the one at which its reason was read, something may have been missed, and the waiter looks for itself. The same
makes a broken stream harmless: its watches begin anew with another member. A change in the very moment that a watch
begins can still fall behind that tick: whoever is next in line looks once more, soon after.

How somebody ahead ended is history when a look finds it gone, and then the past is asked for.

A holder's own key is watched only after a moment: most locks are released before it would be worth it. That watch does
ask for the past, back to the grant. If etcd has forgotten so much, it begins where the memory does; a loss before that
is found by the next renewal.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any, Final, Literal, NamedTuple, TypeAlias
from weakref import ref

from leasehold.core.timing import backoff
from leasehold.engines.etcd import wire
from leasehold.engines.etcd.address import Address
from leasehold.engines.etcd.calls import Calls, Login
from leasehold.engines.etcd.frames import UNAUTHENTICATED, Broken, Status, Stream
from leasehold.engines.etcd.hpack import Header
from leasehold.engines.etcd.http2 import Connection
from leasehold.errors import LeaseholdError
from leasehold.runtime.base import Guard, Runtime, Signal

_log = logging.getLogger("leasehold.etcd")

_A_MOMENT: Final = 0.05
_NAP: Final = 0.1  # of the reader, while new watches are likely
_LIKELY: Final = 2.0  # seconds after the last
_CONNECT: Final = 5.0
_AGAIN: Final = 0.05
_LONGEST_AGAIN: Final = 2.0
_SOUND: Final = 5.0  # a stream that lasted so long is followed by the next at once
_SOON: Final = 0.003  # two hand-offs
_REFUSED: Final = 1.0  # without a watch, look so often
_HAS_LEADER: Final = Header(b"hasleader", b"true")  # a member cut off from the majority ends the stream


Why: TypeAlias = Literal["ahead", "own", "past"]  # it stands ahead; it is the claim's own; it stood ahead, and is gone


class Following(NamedTuple):
    number: int
    mark: str
    why: Why
    key: bytes
    end: bytes
    seen: int  # the revision at which its reason was read
    puts: bool
    near: bool  # what it is about may happen at any moment

    def request(self) -> bytes:
        filters, start = () if self.puts else (wire.NO_PUTS,), 0 if self.why == "ahead" else self.seen + 1
        return wire.encode(wire.Watch(wire.Follow(self.key, self.end, start, filters, 1, self.number)))


# What was followed, and the event. None: etcd cannot say, look for yourself, in so many seconds.
Heard: TypeAlias = "Callable[[Following, wire.Event | None, float], None]"


class Watcher:
    """Shared by the twins; its thread and connection begin with the first watch."""

    def __init__(self, address: Address, runtime: Runtime, login: Login, heard: Heard) -> None:
        self._address, self._runtime, self._login, self._heard = address, runtime, login, heard
        self.after_fork()

    def after_fork(self) -> None:
        """In a forked child: nothing is followed, and the parent's stream is let go without a word."""
        if (live := getattr(self, "_live", None)) is not None:
            live[0].drop()
        self._guard: Guard = self._runtime.guard()
        self._numbers = count(1)
        self._following: dict[int, Following] = {}
        self._by_claim: dict[str, set[int]] = {}
        self._later: dict[int, float] = {}  # not yet asked for, and when it is to be
        self._live: tuple[Connection, Stream] | None = None
        self._signal: Signal | None = None
        self._running = self._closed = False
        self._idle = False  # its thread sleeps until it is needed
        self._last = 0.0

    # ------------------------------------------------------- from any thread

    def follow(self, mark: str, key: bytes, end: bytes, seen: int, *, puts: bool, near: bool) -> None:
        """For a waiter: hear once of this key (or, with `end`, of any in the range) ending after revision `seen`.
        `puts`: or being written. `near`: its turn comes next."""
        with self._guard:
            for old in self._of(mark):
                if old.why == "ahead" and (old.key, old.end, old.puts) == (key, end, puts):
                    return
                if old.why == "ahead":
                    self._forget(old.number)
            self._say(self._enter(mark, "ahead", key, end, seen, puts, near).request())
        if self._signal is not None:
            self._signal.set()

    def recall(self, mark: str, key: bytes, seen: int) -> None:
        """For a waiter: hear how this key, which was still there at revision `seen`, has ended."""
        with self._guard:
            self._say(self._enter(mark, "past", key, b"", seen, False, False).request())
        if self._signal is not None:
            self._signal.set()

    def guard(self, mark: str, key: bytes, seen: int) -> None:
        """For a holder: hear of whatever becomes of its own key after revision `seen`, in a moment's time."""
        with self._guard:
            number = self._enter(mark, "own", key, b"", seen, True, False).number
            self._later[number] = self._last + _A_MOMENT
            idle, self._idle = self._idle, False
        if idle and self._signal is not None:  # not each time: most locks need no watch
            self._signal.set()

    def _of(self, mark: str) -> list[Following]:
        """Under the guard."""
        return [self._following[number] for number in self._by_claim.get(mark, ())]

    def _enter(self, mark: str, why: Why, key: bytes, end: bytes, seen: int, puts: bool, near: bool) -> Following:
        """Under the guard."""
        new = Following(next(self._numbers), mark, why, key, end, seen, puts, near)
        self._following[new.number] = new
        self._by_claim.setdefault(mark, set()).add(new.number)
        self._last = self._runtime.now()
        self._begin()
        return new

    def unfollow(self, mark: str) -> None:
        with self._guard:
            for old in self._of(mark):
                self._forget(old.number)

    def close(self) -> None:
        with self._guard:
            self._closed = True
            live, self._live = self._live, None
        if live is not None:
            live[0].fail("closed")
        if self._signal is not None:
            self._signal.set()

    def __del__(self) -> None:
        self._closed = True
        if (signal := getattr(self, "_signal", None)) is not None:
            signal.set()

    def _begin(self) -> None:
        if not self._running and not self._closed:
            self._running = True
            try:
                self._runtime.aside(_run(ref(self), self._address, self._login), "leasehold-etcd-watch")
            except (
                RuntimeError
            ) as error:  # no thread to be had: waiters look now and then, and the next claim tries again
                self._running = False
                _log.debug("no watch: %s", error)
            except BaseException:
                self._running = False
                raise

    def _forget(self, number: int) -> None:
        """Under the guard."""
        if (gone := self._following.pop(number, None)) is None:
            return
        others = self._by_claim[gone.mark]
        others.discard(number)
        if not others:
            del self._by_claim[gone.mark]
        if self._later.pop(number, None) is None:
            self._say(wire.encode(wire.Watch(cancel=wire.Unfollow(number))))

    def _say(self, request: bytes) -> None:
        """Under the guard. What cannot be said now is said when the stream begins anew, for all that is followed."""
        if self._live is not None:
            connection, stream = self._live
            try:
                connection.send(stream, request)
            except (Broken, LeaseholdError):
                self._live = None

    # ------------------------------------------------------- on its thread

    def _due(self) -> float | None:
        """Ask for what is due, and say when to come again."""
        now = self._runtime.now()
        if self._later:
            with self._guard:
                for number, at in list(self._later.items()):
                    if at <= now:
                        del self._later[number]
                        self._say(self._following[number].request())
        return _NAP if now < self._last + _LIKELY else None

    def _wanted(self) -> float:
        """Seconds until a stream is needed; a negative number: now."""
        with self._guard:
            now = self._runtime.now()
            if len(self._following) > len(self._later):
                return -1.0
            self._idle = not self._later
            return min(self._later.values(), default=now + 3600.0) - now

    def _opened(self, connection: Connection) -> None:
        stream = _Events(ref(self))
        metadata = [_HAS_LEADER]
        if self._login.token:
            metadata.append(Header(b"token", self._login.token.encode()))
        connection.start(stream, wire.WATCH.path, metadata, None, False)
        connection.tick = _weakly(ref(self))
        with self._guard:
            self._live = (connection, stream)
            for number, following in self._following.items():
                if number not in self._later:
                    self._say(following.request())

    def hear(self, message: bytes) -> None:
        try:
            watched = wire.decode(wire.Watched, message)
        except wire.Malformed:
            if self._live is not None:
                self._live[0].fail("an event that cannot be read")
            return
        following = self._following.get(watched.watch_id)
        if following is None:
            if watched.created and watched.canceled:
                self._refused(watched.cancel_reason)
            return
        if watched.created and following.why == "ahead" and watched.header:
            missed = watched.header.revision > following.seen
            if missed or following.near:
                self._heard(following, None, 0.0 if missed else _SOON)
        if watched.events or watched.canceled:
            self._tell(following, watched)

    def _refused(self, why: str) -> None:
        """One of the watches asked for; etcd does not say which. A login that has ended is renewed, with the stream;
        else whoever waits looks for itself, and asks anew."""
        live = self._live
        if live is not None and self._login.refused(Status(UNAUTHENTICATED, why)):
            live[0].fail(why)
            return
        with self._guard:
            ahead = [following for following in self._following.values() if following.why != "own"]
            for following in ahead:
                self._forget(following.number)
        for following in ahead:
            self._heard(following, None, _REFUSED)

    def _tell(self, following: Following, watched: wire.Watched) -> None:
        own = following.why == "own"
        if watched.canceled or not own:  # a waiter looks for itself, and follows anew if it must
            with self._guard:
                self._forget(following.number)
        if watched.canceled and own and watched.compact_revision:
            self.guard(following.mark, following.key, watched.compact_revision - 1)
        elif watched.canceled:
            self._heard(following, None, _REFUSED)
        for event in watched.events:
            self._heard(following, event, 0.0)


class _Events(Stream):
    def __init__(self, watcher: ref[Watcher]) -> None:
        super().__init__(None)
        self._watcher = watcher

    def heard(self, message: bytes) -> None:
        if (known := self._watcher()) is not None:
            known.hear(message)

    def over(self, status: Status) -> None:
        """A connection that has no other use ends with its stream."""
        if self.status is not None:
            return
        super().over(status)
        if (known := self._watcher()) is not None and (live := known._live) is not None and live[1] is self:
            live[0].fail(status.text or "the stream has ended")
            known._login.refused(status)


def _weakly(watcher: ref[Watcher]) -> Callable[[], float | None]:
    def tick() -> float | None:
        return known._due() if (known := watcher()) is not None else None

    return tick


def _run(watcher: ref[Watcher], address: Address, login: Login) -> Callable[[Runtime], Coroutine[Any, Any, None]]:
    """Holds the watcher weakly: a client nobody has any more must be able to go."""

    async def run(runtime: Runtime) -> None:
        calls, misses = Calls(address, runtime, login), 0
        signal = runtime.signal()
        while True:
            if (known := watcher()) is None or known._closed:
                return
            known._signal = signal
            if (seconds := known._wanted()) > 0:
                known = None
                await signal.wait(seconds)
                continue
            began, reader = runtime.now(), None
            try:
                connection = await calls.dial(began + _CONNECT)
                known._opened(connection)
                reader = connection.reader()
                del connection
            except (Broken, LeaseholdError) as error:
                _log.debug("no watch: %s", error)
            known = None
            if reader is not None:
                await reader(runtime)
            misses = 0 if runtime.now() > began + _SOUND else misses + 1
            await signal.wait(backoff(misses, _AGAIN, _LONGEST_AGAIN, 0.5 + runtime.fraction() / 2))

    return run
