"""The memory engine: locks within one process, and the reference for every engine that keeps a party table.

`memory://` is private to its client; `memory://name` is shared by every client of the process, blocking and asyncio
alike. The decisions are `core/admission.py`; this module adds a guard, a clock and the delivery of wake-ups.

Between engine and store stands a `Link`. Here it is a plain call; the simulator puts a network there that loses,
repeats and delays, and everything on this side of it stays the same code.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from leasehold.book import Book, turn
from leasehold.config import EngineConfig
from leasehold.core.admission import Line
from leasehold.core.party import Counter, Moment, Word
from leasehold.core.timing import BEAT
from leasehold.errors import Mismatch, Reentered, Unavailable
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holder, Holding, Traits
from leasehold.runtime.base import Runtime, settle

T = TypeVar("T")
Mailbox: TypeAlias = Callable[[Word, str, str], None]  # what to tell, and of which namespace and name

TRAITS = Traits(
    liveness="ttl",
    clock="engine",
    fencing=True,
    fair=True,
    push=True,
    shared=True,
    max_limit=None,
    slots=True,
    outlives=True,
    told=True,
    min_ttl=0.0,
    ttl_step=0.0,
    survives="nothing",
)


class Store:
    """What all clients of one memory engine share. Every verb is one atomic step under the guard."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._guard = runtime.guard()
        self._counter = Counter()
        self.lines: dict[tuple[str, str], Line] = {}
        self._round: list[tuple[str, str]] = []  # of names: those still to be looked after
        self.mailboxes: dict[str, Mailbox] = {}  # by client; one without cannot be told, and is passed over
        self._moment = Moment(0.0, self._issue, self.mailboxes.__contains__)  # only ever used under the guard

    def attempt(self, claim: Claim, client: str) -> Grant | Busy:
        if self._guard.mine():
            raise Reentered
        key = claim[:2]
        swept: list[tuple[str, str, Word]] = []
        with self._guard:
            at = self._now()
            line = self.lines.get(key)
            if line is None:
                if self.lines:
                    swept = self._sweep(at)
                line = self.lines[key] = Line(at.now, claim.kind, claim.limit)
            try:
                reply, words = line.attempt(at, claim, client)
            except Mismatch:
                raise
            except BaseException:
                swept += self._mend(key)
                raise
            finally:
                if not line.occupiers and line.idle:
                    self.lines.pop(key, None)
                if swept:
                    self._deliver(swept)
        if words:
            self._deliver([(*key, word) for word in words])
        return reply

    def renew(self, claims: Sequence[Claim]) -> list[Alive | Gone]:
        gone: Alive | Gone = Gone()
        return [self._on_line((claim.namespace, claim.name), Line.renew, gone, claim) for claim in claims]

    def release(self, claim: Claim) -> bool:
        return self._on_line(claim[:2], Line.release, False, claim.mark, claim.min_hold, bool(claim.id))

    def break_(self, namespace: str, name: str, token: int) -> bool:
        return self._on_line((namespace, name), Line.break_, False, token)

    def inspect(self, namespace: str, prefix: str, exact: bool) -> list[Holding]:
        if self._guard.mine():
            raise Reentered
        with self._guard:
            if exact:
                keys = [(namespace, prefix)] if (namespace, prefix) in self.lines else []
            else:
                keys = sorted(key for key in self.lines if key[0] == namespace and key[1].startswith(prefix))
            at = self._now()
            words = [word for key in keys for word in self._look(at, key)]
            found = [h for key in keys if key in self.lines for h in self.lines[key].holdings(*key, at.now)]
        self._deliver(words)
        return found

    def after_fork(self) -> None:
        """The child's copy holds only what the parent holds: in here nobody does. Tokens go on from where they were."""
        self._guard = self._runtime.guard()
        self.lines.clear()
        self._round.clear()
        self.mailboxes.clear()

    def _on_line(self, key: tuple[str, str], verb: Callable[..., tuple[T, list[Word]]], absent: T, *args: object) -> T:
        if self._guard.mine():
            raise Reentered
        torn: list[tuple[str, str, Word]] = []
        with self._guard:
            line = self.lines.get(key)
            if line is None:
                return absent
            try:
                answer, words = verb(line, self._now(), *args)
            except BaseException:
                torn = self._mend(key)
                raise
            finally:
                if line.idle:
                    self.lines.pop(key, None)
                if torn:
                    self._deliver(torn)
        if words:
            self._deliver([(*key, word) for word in words])
        return answer

    def _mend(self, key: tuple[str, str]) -> list[tuple[str, str, Word]]:
        return [(*key, word) for word in self.lines[key].mend(self._now())]

    def _now(self) -> Moment:
        at = self._moment
        at.now = self._runtime.now()
        return at

    def _issue(self) -> int:
        # The wall clock is only a floor: a fence that outlives this process, or this boot, still sees tokens rise.
        return self._counter.next(int(self._runtime.wall() * 1_000_000))

    def _sweep(self, at: Moment) -> list[tuple[str, str, Word]]:
        """Each new name looks after two others, in rounds: lapsed leases nobody asks about leave nothing."""
        words = []
        for _ in range(2):
            if not self._round:  # kept apart: a dictionary whose first entries come and go is slow to begin
                self._round = list(self.lines)
            if self._round and (key := self._round.pop()) in self.lines:
                words += self._look(at, key)
        return words

    def _look(self, at: Moment, key: tuple[str, str]) -> list[tuple[str, str, Word]]:
        line = self.lines[key]
        try:
            words = line.look(at)
        except BaseException:
            line.mend(at)
            raise
        if line.idle:
            del self.lines[key]
        return [(*key, word) for word in words]

    def _deliver(self, words: list[tuple[str, str, Word]]) -> None:
        """A wake-up only notes and signals; it never calls the store."""
        for namespace, name, word in words:
            if mailbox := self.mailboxes.get(word.client):
                mailbox(word, namespace, name)


class Link(Protocol):
    """How requests reach the store."""

    def call(self, verb: str, args: tuple[Any, ...], deadline: float) -> Any | Awaitable[Any]:
        """Ask, and give the answer; `Unavailable` when there is none by the deadline."""

    def post(self, verb: str, args: tuple[Any, ...]) -> bool:
        """Send without waiting. True: done and answered already."""

    def listen(self, client: str, mailbox: Mailbox) -> None:
        """Have wake-ups for this client delivered, from any thread."""

    def close(self, client: str) -> None: ...


class Direct:
    """The link inside one process: a call."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def call(self, verb: str, args: tuple[Any, ...], deadline: float) -> Any:
        return getattr(self.store, verb)(*args)

    def post(self, verb: str, args: tuple[Any, ...]) -> bool:
        try:
            getattr(self.store, verb)(*args)
        except Reentered:
            return False
        return True

    def listen(self, client: str, mailbox: Mailbox) -> None:
        self.store.mailboxes[client] = mailbox

    def close(self, client: str) -> None:
        self.store.mailboxes.pop(client, None)


class MemoryEngine:
    """The six verbs over a link."""

    traits = TRAITS

    def __init__(self, runtime: Runtime, book: Book, link: Link) -> None:
        self._runtime, self._book, self._link = runtime, book, link

    @property
    def listening(self) -> bool:
        return "contended" in self._book.shelf

    async def attempt(self, claim: Claim, deadline: float) -> Grant | Busy:
        if "mailbox" not in self._book.shelf:
            self._link.listen(self._book.client, self._heard)
            self._book.shelf["mailbox"] = True  # only now: torn between, it would be deaf for ever
        if claim.queue:
            self._book.shelf["contended"] = True
            self._book.enter(claim, self._runtime)  # before asking (E4)
        reply = self._link.call("attempt", (claim, self._book.client), deadline)
        if isinstance(reply, (Grant, Busy)):  # inside one process: what `settle` would find out is known already
            return reply
        answer: Grant | Busy = await reply
        return answer

    async def wait(self, claim: Claim, busy: Busy, seconds: float) -> None:
        if waiter := self._book.waiting.get(claim.mark):
            await turn(self._runtime, waiter, busy, seconds)

    async def renew(self, claims: Sequence[Claim], deadline: float) -> Sequence[Alive | Gone | Unavailable]:
        try:
            replies: list[Alive | Gone] = await settle(self._link.call("renew", (claims,), deadline))
        except Unavailable as silence:
            return [silence] * len(claims)
        return replies

    async def release(self, claim: Claim, deadline: float) -> bool:
        self._book.leave(claim.mark)
        done = self._link.call("release", (claim,), deadline)
        return done if isinstance(done, bool) else bool(await done)

    async def break_(self, namespace: str, name: str, token: int, deadline: float) -> bool:
        return bool(await settle(self._link.call("break_", (namespace, name, token), deadline)))

    async def inspect(self, namespace: str, prefix: str, exact: bool, deadline: float) -> Sequence[Holding]:
        found: list[Holding] = await settle(self._link.call("inspect", (namespace, prefix, exact), deadline))
        return found

    async def ping(self, deadline: float) -> None:
        await settle(self._link.call("inspect", ("", "", True), deadline))

    def forget(self, claim: Claim) -> None:
        self._book.owe(claim)  # first: torn between, it is still owed
        self._book.leave(claim.mark)
        if self._link.post("release", (claim,)):
            self._book.owed.pop(claim.mark, None)

    def after_fork(self) -> None:
        self._book.shelf.pop("mailbox", None)
        if isinstance(self._link, Direct):
            self._link.store.after_fork()

    async def close(self) -> None:
        self._link.close(self._book.client)

    def _heard(self, word: Word, namespace: str, name: str) -> None:
        stray = Claim(namespace, name, "", word.mark, Holder("stray"), BEAT)
        self._book.deliver(word.kind, word.mark, word.seconds, stray)


_SHARED: dict[str, Store] = {}  # kept for ever: a store's counter must outlive its clients (E3)


def open(config: EngineConfig, runtime: Runtime, book: Book) -> MemoryEngine:
    """`memory://` or `memory://name`; no options."""
    config.accept()
    if config.target:
        store = _SHARED.setdefault(config.target, Store(runtime))
    else:
        private = book.shelf.setdefault("store", Store(runtime))
        assert isinstance(private, Store)
        store = private
    return MemoryEngine(runtime, book, Direct(store))
