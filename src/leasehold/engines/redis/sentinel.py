"""`redis+sentinel://`: the one server that is primary now, as the sentinels say.

Which server that is has an epoch: every fail-over has a higher one. A majority of the sentinels is asked, if so many
answer, and the highest epoch counts; nobody who is behind leads back to where the primary was. What cannot be asked
about is checked: a server is used only if it says itself, on each new connection, that it is a primary.

A fail-over is told by a sentinel (`+switch-master`); besides, they are asked every few seconds. Then every connection
to the old primary is dropped, calls under way are asked again at the new one, and every lease is renewed at once: one
whose grant the new primary does not have is lost, and its holder told, as soon as that can be.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal, NamedTuple
from weakref import WeakSet, ref

from leasehold.book import Book
from leasehold.engines.redis.doors import Around, Door, Together, ask_around, place
from leasehold.engines.redis.listener import Listener
from leasehold.engines.redis.scripts import Publishing
from leasehold.engines.redis.server import Server, pack, says
from leasehold.engines.redis.settings import Refused, Unreached
from leasehold.engines.redis.topology import ELSEWHERE, Rejected, found_again, wire_to
from leasehold.engines.redis.wire import Wire
from leasehold.errors import ConfigError, LeaseholdError, Unavailable
from leasehold.runtime.base import Runtime
from leasehold.runtime.loopstream import LoopStream
from leasehold.runtime.streams import Address, SocketStream

_log = logging.getLogger("leasehold.redis")

_SWITCH: Final = "+switch-master"


class Known(NamedTuple):
    """Who is primary. The higher epoch is the later."""

    epoch: int
    address: Address


class Sentinels:
    """What they said. Shared by the twins of a client and the threads that listen."""

    def __init__(self, doors: list[Door], service: str, serve: Callable[[Address], Server], runtime: Runtime) -> None:
        self.doors, self.service, self._serve, self._runtime = doors, service, serve, runtime
        self._known: Known | None = None
        self.server: Server | None = None  # the primary, as last known
        self.doubted = True  # they are to be asked before that is used
        self.wires: WeakSet[Wire] = WeakSet()  # to whatever is primary
        self.switched: list[Callable[[str], None]] = []  # told of a fail-over
        self.after_fork()

    def after_fork(self) -> None:
        self.guard = self._runtime.guard()

    async def find(self, runtime: Runtime, deadline: float) -> Server:
        """The primary, by as many sentinels as it takes. Raises Unreached with what each of them said."""
        before = self._known
        request = pack("SENTINEL", "MASTER", self.service), 1
        found = await ask_around(self.doors, request, self._read, self._enough, runtime, deadline)
        if not found:
            raise self._nobody(found)
        latest = max(found)
        if before is not None and latest.epoch < before.epoch and len(found) < len(self.doors):
            raise Unreached(
                f"those sentinels of {self.service!r} that answer are behind: {found.why()}", engine="redis"
            )
        return self._learn(latest, before)  # all of them count lower: they were set up anew

    async def look(self, door: Door, runtime: Runtime, deadline: float) -> None:
        """Ask one that has just told of a fail-over. The others may not know of it for a moment."""
        self._learn(self._read(door, await door.ask(pack("SENTINEL", "MASTER", self.service), 1, runtime, deadline)))

    def _enough(self, found: list[Known]) -> bool:
        known = self._known
        return 2 * len(found) > len(self.doors) and (known is None or max(found).epoch >= known.epoch)

    def _read(self, door: Door, replies: list[Any]) -> Known:
        (reply,) = replies
        if says(reply, "ERR No such master"):
            raise ConfigError(f"{door} knows no service {self.service!r}")
        if isinstance(reply, Exception):
            raise door.refusal(reply)
        try:
            facts = dict(zip(reply[::2], reply[1::2], strict=True))
            return Known(int(facts[b"config-epoch"]), place(facts[b"ip"].decode(), facts[b"port"]))
        except (TypeError, ValueError, KeyError, AttributeError) as bad:
            raise Unreached(f"{door} answered what no sentinel answers", engine="redis") from bad

    def _nobody(self, found: Around[Known]) -> LeaseholdError:
        text = f"no sentinel says who is primary of {self.service!r}: {found.why()}"
        if found.refusals == len(self.doors):
            return Refused(text)
        return Unreached(text, engine="redis")

    def _learn(self, latest: Known, instead_of: Known | None = None) -> Server:
        """Never back to an earlier epoch, but instead of the very one that was known when they were asked."""
        with self.guard:
            before, server = self._known, self.server
            if server is not None and before is not None and latest.epoch < before.epoch and before is not instead_of:
                return server
            if server is None or before is None or before.address != latest.address:
                server = self._serve(latest.address)
            self._known, self.server, self.doubted = latest, server, False
            wires = list(self.wires)
        if before is not None and before.address != latest.address:
            text = f"fail-over of {self.service!r} from {before.address} to {latest.address}"
            _log.info("%s", text)
            for wire in wires:
                if wire.server is not server:
                    wire.abandon()
            for tell in self.switched:
                tell(text)
        return server

    # ------------------------------------------- where the listener connects

    async def open(self, runtime: Runtime, deadline: float) -> SocketStream | LoopStream:
        server = self.server
        if server is None or self.doubted:
            server = await self.find(runtime, deadline)
        try:
            return await server.open(runtime, deadline)
        except Unreached:
            self.doubted = True
            raise

    def refusal(self, error: Exception) -> LeaseholdError:
        return Unavailable(str(error), engine="redis") if self.server is None else self.server.refusal(error)


class Sentinel:
    """The topology: one server for all, another one after each fail-over."""

    follows = True
    survives: Literal["nothing"] = "nothing"  # the replica that is promoted need not have the last grant

    def __init__(self, sentinels: Sentinels, runtime: Runtime) -> None:
        self.publishing = Publishing()
        self._sentinels, self._runtime, self._together = sentinels, runtime, Together(runtime)
        self._wire: Wire | None = None

    def wire(self, tag: str) -> Wire | None:
        sentinels = self._sentinels
        if sentinels.doubted or sentinels.server is None:
            return None
        wire = self._wire
        return wire if wire is not None and wire.server is sentinels.server else self._anew()

    def _anew(self) -> Wire | None:
        with self._sentinels.guard:  # one for all threads, and a fail-over learned meanwhile does not miss it
            before, server = self._wire, self._sentinels.server
            if server is None or (before is not None and before.server is server):
                return before
            self._wire = wire = wire_to(server, self._runtime)
            self._sentinels.wires.add(wire)
        if before is not None:
            before.close()
        return wire

    async def find(self, deadline: float) -> None:
        await self._together.ask(lambda: self._sentinels.find(self._runtime, deadline), deadline)

    async def wires(self, deadline: float) -> Iterable[Wire]:
        while (wire := self.wire("")) is None:  # another may have asked for this one, in vain
            await self.find(deadline)
        return (wire,)

    async def elsewhere(self, tag: str, rejected: Rejected, turn: int, deadline: float) -> Wire | None:
        if not rejected.follows:
            return None
        wire = self._wire
        if (
            wire is not None
            and wire is rejected.wire
            and not self._sentinels.doubted
            and says(rejected.error, ELSEWHERE)
        ):
            wire.hang_up()  # it is no primary any more, and says so on each new connection
        self._sentinels.doubted = True
        return await found_again(self, self._runtime, tag, rejected, turn, deadline)

    def doubt(self, wire: Wire) -> None:
        if wire is self._wire:
            self._sentinels.doubted = True

    def replaced(self, wire: Wire) -> bool:
        return wire.server is not self._sentinels.server

    def close(self) -> None:
        if self._wire is not None:
            self._wire.close()

    def after_fork(self) -> None:
        self._together = Together(self._runtime)
        if self._wire is not None:
            self._wire.after_fork()


class Watch(Listener):
    """Hears of fail-overs, from one sentinel after the other."""

    def __init__(self, sentinels: Sentinels, runtime: Runtime, book: Book, patience: float) -> None:
        self._sentinels, self._door = sentinels, -1
        super().__init__(sentinels, Publishing(), runtime, book, patience)

    async def _open(self, runtime: Runtime) -> SocketStream | LoopStream:
        self._door = (self._door + 1) % len(self._sentinels.doors)
        return await self._sentinels.doors[self._door].open(runtime, runtime.now() + self._patience)

    def _wishes(self, client: str) -> bytes:
        return pack("SUBSCRIBE", _SWITCH)

    async def _hear(self, said: Any, runtime: Runtime) -> None:
        match said:
            case [b"subscribe", *_]:
                await self._idle(runtime)  # what was said meanwhile is lost
                self.on = self._heard = True  # not before: one that knows nobody is not worth coming back to at once
            case [b"message", _, bytes(message)] if message.startswith(f"{self._sentinels.service} ".encode()):
                door = self._sentinels.doors[self._door]
                await self._sentinels.look(door, runtime, runtime.now() + self._patience)

    async def _idle(self, runtime: Runtime) -> None:
        await self._sentinels.find(runtime, runtime.now() + self._patience)


class Guided(Listener):
    """Listens to the primary, wherever that is, and to the sentinels."""

    def __init__(self, sentinels: Sentinels, runtime: Runtime, book: Book, patience: float) -> None:
        self._sentinels, self._watch = sentinels, Watch(sentinels, runtime, book, patience)
        super().__init__(sentinels, Publishing(), runtime, book, patience)
        mine, known = ref(self), ref(book)

        def switched(text: str) -> None:
            if (listener := mine()) is not None and (book := known()) is not None:
                listener.shut()
                book.doubt(text)

        sentinels.switched.append(switched)

    def start(self) -> None:
        super().start()
        self._watch.start()

    def close(self) -> None:
        super().close()
        self._watch.close()

    def after_fork(self) -> None:
        super().after_fork()
        self._watch.after_fork()
        self._sentinels.after_fork()
