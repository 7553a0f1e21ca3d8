"""The rig of the memory engine: a shared store behind links that can be cut, paused and killed, and a clock that jumps.

The store, the engine and everything above are the real ones; only the link between them is ours.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, ClassVar

from leasehold.book import Book
from leasehold.config import EngineConfig
from leasehold.core.party import Word
from leasehold.engines.memory import Mailbox, MemoryEngine, Store
from leasehold.errors import LeaseholdError, Unavailable
from leasehold.runtime.base import Runtime, Signal
from leasehold.runtime.threads import Threads, boot_clock
from leasehold.testing.rig import Machine, Rig


class MemoryRig(Rig):
    scheme = "memory"
    ttl: ClassVar[float] = 10.0  # travelled, not waited for: no stall of the machine can use it up
    can_cut = can_pause = can_kill = can_travel = can_count = True

    def __init__(self) -> None:
        super().__init__()
        self._offset = 0.0
        self.paused = False
        self.letters: list[Letter] = []
        self.store = Store(Threads(self.clock))

    def machine(self) -> Machine:
        return MemoryMachine(self)

    def clock(self) -> float:
        return boot_clock() + self._offset

    def travel(self, seconds: float) -> None:
        self._offset += seconds
        for _, machine in self._machines:
            assert isinstance(machine, MemoryMachine)
            machine.stir()

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        while self.letters:
            self.letters.pop(0).open(self.store)

    def residue(self, namespace: str) -> int:
        return sum(key[0] == namespace for key in self.store.lines)


class MemoryMachine(Machine):
    """All links of one client: the caller's and the watchdog's."""

    def __init__(self, rig: MemoryRig) -> None:
        super().__init__("memory://rig", self._open)
        self.rig = rig
        self.severed = self.killed = False
        self._books: list[Book] = []
        self._mailboxes: dict[str, Mailbox] = {}

    def _open(self, config: EngineConfig, runtime: Runtime, book: Book) -> MemoryEngine:
        if book not in self._books:
            self._books.append(book)
        return MemoryEngine(runtime, book, BreakableLink(self, runtime))

    def cut(self) -> None:
        self.severed = True

    def mend(self) -> None:
        self.severed = False

    def kill_session(self) -> None:
        self.killed = True
        for client in self._mailboxes:
            self.rig.store.mailboxes.pop(client, None)

    def stir(self) -> None:
        """The clock has jumped: whoever sleeps on it looks at it again."""
        for book in self._books:
            book.stir(0.0)
            for waiter in list(book.waiting.values()):
                waiter.signal.set()

    def listen(self, client: str, mailbox: Mailbox) -> None:
        def heard(word: Word, namespace: str, name: str) -> None:
            if not self.severed and not self.rig.paused:
                mailbox(word, namespace, name)

        self._mailboxes[client] = self.rig.store.mailboxes[client] = heard

    def hang_up(self, client: str) -> None:
        self._mailboxes.pop(client, None)
        self.rig.store.mailboxes.pop(client, None)

    def reconnect(self) -> None:
        """After a kill, at the next call: be told again, and have all waiters ask, who may have missed their turn."""
        if self.killed:
            self.killed = False
            self.rig.store.mailboxes.update(self._mailboxes)
            for book in self._books:
                for mark in list(book.waiting):
                    book.deliver("head", mark, 0.0, None)


@dataclass(eq=False)
class Letter:
    """A request sent to a paused engine: carried out when it goes on, though nobody may be waiting any more."""

    verb: str
    args: tuple[Any, ...]
    signal: Signal | None
    answer: Any = None

    def open(self, store: Store) -> None:
        try:
            self.answer = getattr(store, self.verb)(*self.args)
        except LeaseholdError as refusal:
            self.answer = refusal
        if self.signal is not None:
            self.signal.set()


class BreakableLink:
    """How one twin of an engine reaches the store, or does not."""

    def __init__(self, machine: MemoryMachine, runtime: Runtime) -> None:
        self._machine, self._rig, self._runtime = machine, machine.rig, runtime

    def call(self, verb: str, args: tuple[Any, ...], deadline: float) -> Any | Awaitable[Any]:
        if self._machine.severed or self._rig.paused:
            return self._silence(verb, args, deadline)
        self._machine.reconnect()
        return getattr(self._rig.store, verb)(*args)

    async def _silence(self, verb: str, args: tuple[Any, ...], deadline: float) -> Any:
        letter = Letter(verb, args, self._runtime.signal())
        if not self._machine.severed:
            self._rig.letters.append(letter)
        began = self._runtime.now()
        assert letter.signal is not None
        if not await letter.signal.wait(deadline - began):
            raise Unavailable("the memory rig does not answer", engine="memory", seconds=self._runtime.now() - began)
        if isinstance(letter.answer, LeaseholdError):
            raise letter.answer
        return letter.answer

    def post(self, verb: str, args: tuple[Any, ...]) -> bool:
        if self._machine.severed:
            return False
        if self._rig.paused:
            self._rig.letters.append(Letter(verb, args, None))
            return False
        getattr(self._rig.store, verb)(*args)
        return True

    def listen(self, client: str, mailbox: Mailbox) -> None:
        self._machine.listen(client, mailbox)

    def close(self, client: str) -> None:
        self._machine.hang_up(client)
