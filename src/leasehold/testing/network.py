"""A network between client and server that loses, repeats and delays, for the simulated runtime.

`Server` is the memory engine's store in a process of its own; `NetworkLink` carries requests, answers and wake-ups to
and from it as messages. All above the link is the code that also runs for real. A link is one connection: a restart of
the server ends it together with everything under way, and the client connects and registers anew, then has all its
waiters ask once more, since it cannot know which wake-ups it missed.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from leasehold.book import Book
from leasehold.config import EngineConfig
from leasehold.core.party import Word
from leasehold.engine import Opener
from leasehold.engines.memory import Mailbox, MemoryEngine, Store
from leasehold.errors import LeaseholdError, Unavailable
from leasehold.runtime.base import Runtime
from leasehold.runtime.simulated import Process, Promise, World

RECONNECT: Final = 0.25  # between tries to register again


@dataclass(frozen=True, slots=True)
class Weather:
    """How bad the network is. Shares are chances per message; `late` ones come up to `late_by` seconds late."""

    latency: float = 0.002
    loss: float = 0.0
    duplication: float = 0.0
    late: float = 0.0
    late_by: float = 5.0
    deaf: float = 0.0  # wake-ups are lost by this chance, besides
    ordered: bool = True  # a connection keeps its order


CALM: Final = Weather()


class Observer:
    """Whoever looks over everybody's shoulder. Sees each message where it leaves and where it arrives."""

    def sent(self, link: NetworkLink, verb: str, args: tuple[Any, ...]) -> None:
        """A client sent a request."""

    def answered(self, verb: str, args: tuple[Any, ...], answer: Any) -> None:
        """The server carried one out."""

    def delivered(self, link: NetworkLink, verb: str, args: tuple[Any, ...], answer: Any) -> None:
        """An answer reached a call that still waited for it."""

    def heard(self, link: NetworkLink, word: Word) -> None:
        """A wake-up reached its client."""


class Server:
    """A store in a process of its own. Durable: a restart keeps the data, and only the data."""

    def __init__(self, world: World, weather: Weather = CALM) -> None:
        self.world, self.weather = world, weather
        self.process = Process(world, "server")
        self.store = Store(self.process)
        self.up = True
        self.generation = 0  # of connections: one more at each restart
        self.observer = Observer()
        self.cut_off: dict[Process, None] = {}
        self.links: list[NetworkLink] = []

    def opener(self) -> Opener:
        """What a client is given as its engine."""

        def open_(_config: EngineConfig, runtime: Runtime, book: Book) -> MemoryEngine:
            assert isinstance(runtime, Process)
            return MemoryEngine(runtime, book, NetworkLink(runtime, self, book))

        return open_

    # --------------------------------------------------------- what befalls it

    def stop(self) -> None:
        """Go down: connections, mailboxes and all messages under way are lost."""
        self.up = False
        self.generation += 1
        self.store.mailboxes.clear()
        for link in self.links:
            self._reset(link)

    def start(self) -> None:
        self.up = True

    def cut(self, process: Process) -> None:
        """Part a client from the server: both ways silent, and to the server it looks as reachable as before."""
        self.cut_off[process] = None

    def heal(self, process: Process) -> None:
        self.cut_off.pop(process, None)
        for link in self.links:
            if link.process is process:
                if process.dead:
                    self._hung_up(link)
                elif link.generation != self.generation:
                    self._reset(link)

    # -------------------------------------------------------------- connections

    def connect(self, link: NetworkLink) -> None:
        self.links.append(link)
        link.process.when_dead.append(partial(self._hung_up, link))

    def carry(self, link: NetworkLink, fn: Callable[[], object], *, up: bool) -> None:
        """Send a message along a link: `fn` is what its arrival does. May lose it, repeat it, or take its time."""
        if link.process in self.cut_off or (up and link.process.dead):
            return
        weather, random = self.weather, self.world.random
        if weather.loss and random.random() < weather.loss:
            return
        self._travel(link, fn, up)
        if weather.duplication and random.random() < weather.duplication:
            self._travel(link, fn, up)

    def _travel(self, link: NetworkLink, fn: Callable[[], object], up: bool) -> None:
        weather, random, now = self.weather, self.world.random, self.world.time
        arrival = now + random.expovariate(1 / weather.latency)
        if weather.late and random.random() < weather.late:
            arrival += random.uniform(0, weather.late_by)
        if weather.ordered:
            arrival = max(arrival, link.arrivals[up])
            link.arrivals[up] = arrival
        self.world.after(arrival - now, partial(self._arrive, link, fn), self.process if up else link.process)

    def _arrive(self, link: NetworkLink, fn: Callable[[], object]) -> None:
        if link.process not in self.cut_off:
            fn()

    def _reset(self, link: NetworkLink) -> None:
        """Tell a client that its connection is closed. No weather loses this: a closed socket shows sooner or later."""
        if link.process not in self.cut_off and not link.process.dead:
            self.world.after(
                self.world.random.expovariate(1 / self.weather.latency),
                partial(self._arrive, link, partial(link.reset, self.generation)),
                link.process,
            )

    def _hung_up(self, link: NetworkLink) -> None:
        """The client's process died: its socket closes, and it can be told nothing any more."""
        if link.client is not None and link.process not in self.cut_off:
            delay = self.world.random.expovariate(1 / self.weather.latency)
            self.world.after(delay, partial(self._unlisted, link.client), self.process)

    def _unlisted(self, client: str) -> bool:
        return self.store.mailboxes.pop(client, None) is not None

    # ----------------------------------------------------------------- requests

    def receive(self, link: NetworkLink, generation: int, number: int, verb: str, args: tuple[Any, ...]) -> None:
        if not self.up or generation != self.generation:
            self._reset(link)
            return
        if link.client is not None and not link.closed and not link.process.dead:
            self.store.mailboxes[link.client] = partial(self._tell, link, generation)
        if verb == "listen":
            answer: Any = True
        elif verb == "close":
            answer = self._unlisted(*args)
        else:
            answer = self._do(verb, args)
        self.carry(link, partial(link.answered, generation, number, answer), up=False)

    def _do(self, verb: str, args: tuple[Any, ...]) -> Any:
        try:
            answer = getattr(self.store, verb)(*args)
        except LeaseholdError as refusal:
            answer = refusal
        self.observer.answered(verb, args, answer)
        return answer

    def _tell(self, link: NetworkLink, generation: int, word: Word, namespace: str, name: str) -> None:
        if link.process.dead:
            self._hung_up(link)
        if self.weather.deaf and self.world.random.random() < self.weather.deaf:
            return
        self.carry(link, partial(link.heard, generation, word, namespace, name), up=False)


class Call(NamedTuple):
    """A request that still waits for its answer."""

    promise: Promise[Any]
    verb: str
    args: tuple[Any, ...]


class NetworkLink:
    """One connection of a client. Every request carries the client's address, so asking is registering."""

    def __init__(self, process: Process, server: Server, book: Book) -> None:
        self.process, self._server, self.book = process, server, book
        self.generation = server.generation
        self.client: str | None = None
        self.closed = False
        self.arrivals = {True: 0.0, False: 0.0}  # when the last message of each direction arrives
        self._mailbox: Mailbox | None = None
        self._number = 0
        self._registered = server.generation
        self.open: dict[int, Call] = {}
        server.connect(self)

    # ------------------------------------------------------------------ as a link

    def call(self, verb: str, args: tuple[Any, ...], deadline: float) -> Coroutine[Any, Any, Any]:
        return self._ask(verb, args, deadline)

    async def _ask(self, verb: str, args: tuple[Any, ...], deadline: float) -> Any:
        seconds = deadline - self.process.now()
        silence = Unavailable(f"the simulated server did not answer within {seconds:.3f} s", engine="simulated")
        if seconds <= 0:
            raise silence
        promise: Promise[Any] = Promise(self.process)
        timer = self.process.later(seconds, lambda: promise.fail(silence))
        number = self._send(verb, args)
        self.open[number] = Call(promise, verb, args)
        try:
            answer = await promise
        finally:
            timer.cancel()
            del self.open[number]
        if isinstance(answer, LeaseholdError):
            raise answer
        return answer

    def post(self, verb: str, args: tuple[Any, ...]) -> bool:
        self._send(verb, args)
        return False

    def listen(self, client: str, mailbox: Mailbox) -> None:
        self.client, self._mailbox = client, mailbox

    def close(self, client: str) -> None:
        if self.client == client:
            self.closed = True
            self._send("close", (client,))

    def _send(self, verb: str, args: tuple[Any, ...]) -> int:
        self._number += 1
        request = partial(self._server.receive, self, self.generation, self._number, verb, args)
        self._server.carry(self, request, up=True)
        self._server.observer.sent(self, verb, args)
        return self._number

    # ------------------------------------------------------------- what comes back

    def answered(self, generation: int, number: int, answer: Any) -> None:
        if generation != self.generation:
            return
        if self._registered != generation:
            self._registered = generation
            self._look_again()
        if (call := self.open.get(number)) and not call.promise.kept:
            call.promise.keep(answer)
            self._server.observer.delivered(self, call.verb, call.args, answer)

    def heard(self, generation: int, word: Word, namespace: str, name: str) -> None:
        if self._mailbox is not None and not self.closed and generation == self.generation:
            self._mailbox(word, namespace, name)
            self._server.observer.heard(self, word)

    def reset(self, generation: int) -> None:
        """The connection is gone, and with it every request under way; the next one is of the server's new life."""
        for call in list(self.open.values()):
            call.promise.fail(Unavailable("the connection to the simulated server was lost", engine="simulated"))
        if generation != self.generation:
            self.generation = generation
            self._register()

    def _register(self) -> None:
        if self.client is not None and not self.closed and self._registered != self.generation:
            self._send("listen", (self.client,))
            self.process.later(RECONNECT, self._register)

    def _look_again(self) -> None:
        for mark in list(self.book.waiting):
            self.book.deliver("head", mark, 0.0, None)
