"""What all leases of one client share: engine, watchdog, teller, book. It outlives the client while a lease lives."""

from __future__ import annotations

import logging
import os
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any
from weakref import ref

from leasehold.book import Book, every
from leasehold.config import ClientOptions, EngineConfig, check_required, default_holder
from leasehold.core import timing
from leasehold.core.names import owner
from leasehold.engine import Engine, Opener
from leasehold.errors import ConfigError, Reentered, Unavailable
from leasehold.events import Event, EventKind, safely
from leasehold.model import Claim, Holder, Reason, Traits
from leasehold.recipes.entries import Entries
from leasehold.recipes.teller import Teller
from leasehold.recipes.watchdog import Watchdog
from leasehold.runtime.base import Runtime

if TYPE_CHECKING:
    from leasehold.recipes.lease import BaseLease

_log = logging.getLogger("leasehold")

_LOOK = 0.005  # between looks, in close(), whether the others have left
_CLOSED = "this client is closed: make a new one"


class Desk:
    def __init__(self, options: ClientOptions, config: EngineConfig, opener: Opener, runtime: Runtime) -> None:
        self.options, self.config, self.runtime = options, config, runtime
        self._opener = opener
        self.guard = runtime.guard()
        self.book = Book(runtime, runtime.entropy(8).hex())
        self.teller = Teller(runtime)
        self.entries = Entries(runtime)
        self.dog = Watchdog(runtime, self.book, self._open, options.call_timeout, self.teller.tell)
        self.closed = self._shut = False
        self.under_way: set[str] = set()  # marks of what others acquire or release: close() waits for them
        self._settings_known = False
        self._engine = self._open(runtime)
        self._describe()

    def _open(self, runtime: Runtime) -> Engine:
        return self._opener(self.config, runtime, self.book)

    def _describe(self) -> None:
        self._host, self._pid = os.uname().nodename if hasattr(os, "uname") else "", os.getpid()
        self._label = self.options.holder or default_holder()
        self._holder = Holder(self._label, self._host, self._pid)

    @property
    def name(self) -> str:
        """What the engine is called in events and errors: its scheme, never its address."""
        return self.config.scheme

    @property
    def traits(self) -> Traits:
        return self._engine.traits

    def engine(self) -> Engine:
        """The engine, for use now and from here."""
        if not self.runtime.bind():
            self.move()
        return self.ready()

    def ready(self) -> Engine:
        """The same, for somebody who has just come from `bind`."""
        if self.closed:
            raise ConfigError(_CLOSED)
        return self._engine

    async def meet(self, words: frozenset[str]) -> None:
        """Before the first grant: check what a lock requires against what the server's settings turned out to be."""
        if not self._settings_known:
            await self.engine().ping(self.deadline())
            self._settings_known = True
        check_required(words, self.traits, self.name)

    def move(self) -> None:
        """The event loop of before is closed: its tasks are gone, and so are the connections that lived in it."""
        for _, waiter in every(self.book.waiting):
            self.book.leave(waiter.claim.mark)
            self.book.owe(waiter.claim)
        self.under_way.clear()
        self._engine = self._open(self.runtime)

    def deadline(self) -> float:
        return self.runtime.now() + self.options.call_timeout

    def holder(self, label: str | None, purpose: str | None) -> Holder:
        if label is None and purpose is None:
            return self._holder
        return Holder(label or self._label, self._host, self._pid, purpose or "")

    def admit(self, lease: BaseLease, doubted: object) -> None:
        """Look after a new lease. It is known as held before it stops being known as waiting: a late wake-up for a
        claim nobody knows would release it. `doubted`: what the book had there when it was asked for."""
        book, mark = self.book, lease._claim.mark
        book.held[mark] = held = ref(lease)
        self.dog.watch(lease, held)
        book.leave(mark)
        if book.doubted is not doubted:  # before the lease could be met in the book
            lease._doubt("the engine lost its way while this was granted")
        if self.closed:  # meanwhile: either close() saw the lease just entered, or this sees that it is closed
            self.dog.drop(mark)
            lease._disown("released")
            raise ConfigError(_CLOSED)

    def give_back(self, claim: Claim, now: float) -> Coroutine[Any, Any, bool]:
        """Release at the engine; if that does not answer, the caller has it owed."""
        return self._engine.release(claim, timing.call_deadline(now, self.options.call_timeout, claim.ttl))

    def owe(self, claim: Claim, silence: Unavailable) -> None:
        self.book.owe(claim)
        _log.warning("the release of %s could not be confirmed and is repeated: %s", claim.name, silence)
        self.emit("owed", claim, reason=str(silence))

    def forget(self, claim: Claim) -> None:
        self._engine.forget(claim)

    # ------------------------------------------------------------ telling

    def emit(
        self,
        kind: EventKind,
        claim: Claim,
        *,
        token: int | None = None,
        since: float | None = None,
        reason: str | None = None,
        aside: bool = False,
    ) -> None:
        """Hand an event to the client's hook; `aside`: made by the watchdog, told on the teller's thread."""
        hook = self.options.on_event
        if hook is None:
            return
        event = Event(
            kind=kind,
            engine=self.name,
            namespace=claim.namespace,
            name=claim.name,
            at=self.runtime.wall(),
            token=token,
            fingerprint=claim.fingerprint or None,
            holder=claim.holder.label,
            seconds=None if since is None else self.runtime.now() - since,
            reason=reason,
        )
        if aside:
            self.teller.tell(safely, hook, event)
        else:
            safely(hook, event)

    def lost(self, lease: BaseLease, reason: Reason) -> None:
        level = logging.INFO if reason == "max_hold" else logging.WARNING
        text = "the lease of %s (token %d, %s) is lost: %s"
        self.teller.tell(_log.log, level, text, lease.name, lease.token, lease.fingerprint, reason)
        self.emit("lost", lease._claim, token=lease.token, since=lease._granted_at, reason=reason, aside=True)

    def at_risk(self, lease: BaseLease, error: Unavailable) -> None:
        self.teller.tell(_log.warning, "the lease of %s (token %d) is at risk: %s", lease.name, lease.token, error)
        self.emit("at_risk", lease._claim, token=lease.token, since=lease._asked, reason=str(error), aside=True)

    # ------------------------------------------------------ lives of a client

    def leases(self) -> list[BaseLease]:
        found = [held() for _, held in every(self.book.held)]
        return [lease for lease in found if lease is not None]  # type: ignore[misc]

    async def close(self) -> None:
        """Release what is held, settle what is owed, all within `call_timeout`; let go of the engine.

        Interrupted, it can be repeated: what it has not done yet is done then.
        """
        if self._shut:
            return
        if not self.runtime.bind():
            self.move()
        self.closed = True
        until = self.deadline()
        for lease in self.leases():
            lease._depth = 1
            if self.book.owed:  # an engine that did not answer for one is not asked for each of the others
                lease._abandon()
            else:
                await lease._release()
        await self._end_others(until)
        await self._settle_owed(until)
        await self.dog.stop(max(until - self.runtime.now(), 0.1))
        self.teller.retire()
        self.book.over = True
        await self._engine.close()
        self.runtime.close()
        self._shut = True

    async def _end_others(self, until: float) -> None:
        """Have the others who acquire leave the line, and wait for them: a grant still on its way, or a place in line,
        is given up by whoever asked for it, and nobody could do that once the engine is let go. So with their releases:
        what `close()` found in nobody's hands must not be held any more when it returns."""
        me = self.runtime.owner_mark()  # a signal handler may close the client inside a call of its own thread
        while True:
            for _, waiter in every(self.book.waiting):  # they find the client closed
                waiter.over = True
                waiter.signal.set()
            if all(owner(mark) == me for mark in self.under_way.copy()) or self.runtime.now() >= until:
                return
            await self.runtime.sleep(_LOOK)

    async def _settle_owed(self, until: float) -> None:
        self.dog.owe_dropped()
        while self.book.owed and self.runtime.now() < until:
            for mark, owed in every(self.book.owed):
                try:
                    await self._engine.release(owed.claim, until)
                except Reentered:
                    return  # nothing can be answered before this very call has returned
                except Unavailable:
                    await self.runtime.sleep(0.05)
                    break
                self.book.owed.pop(mark, None)
        for _, left in every(self.book.owed):
            _log.warning("the release of %s was not confirmed before close(); it lapses", left.claim.name)

    def retire(self) -> None:
        """The client object is gone. What its leases need stays until they are."""
        self.dog.retire()
        self.teller.retire()

    def after_fork(self) -> None:
        """In a forked child: nothing here is held, renewed or released; the client itself can be used again."""
        inherited = self.leases()
        self.runtime.after_fork()
        self.guard = self.runtime.guard()
        self.entries.after_fork()
        self.under_way.clear()
        self.book.waiting.clear()
        self.book.owed.clear()
        self.book.held.clear()
        self.book.client = self.runtime.entropy(8).hex()
        self.teller.after_fork()
        self.dog.after_fork()
        self._engine.after_fork()
        self._describe()
        for lease in inherited:
            lease._disown("forked")
