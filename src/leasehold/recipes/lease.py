"""What a caller holds: a grant, and how long to trust it.

The state is computed when it is read, from the clock: nothing has to run for a lease to be over. All a watchdog, a
break or a failed renewal can do is move `_valid_until` forward, or end the lease earlier; never bring it back.
"""

from __future__ import annotations

import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Coroutine
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

from leasehold.config import check_ttl
from leasehold.core import timing
from leasehold.errors import ConfigError, LeaseLost, StaleToken, Unavailable
from leasehold.model import Alive, Claim, Gone, Grant, Reason
from leasehold.recipes.acquiring import bare
from leasehold.recipes.losing import wait_lost

if TYPE_CHECKING:
    from leasehold.recipes.desk import Desk
    from leasehold.recipes.entries import Entry
    from leasehold.runtime.base import Interrupt, Signal


class LeaseState(StrEnum):
    """Where a lease stands. It only ever goes down this list, but for AT_RISK, which a renewal makes HELD again."""

    HELD = "HELD"  # trusted
    AT_RISK = "AT_RISK"  # trusted, but a renewal failed or is overdue
    LOST = "LOST"  # stop: another holder may exist
    RELEASED = "RELEASED"  # given up


# Module names, because reading a member of an enum costs more than the whole comparison.
HELD: Final = LeaseState.HELD
AT_RISK: Final = LeaseState.AT_RISK
LOST: Final = LeaseState.LOST
RELEASED: Final = LeaseState.RELEASED

_STILL_THERE: Final = frozenset({"unreachable", "stalled", "max_hold"})  # lost here, perhaps not yet at the engine


class BaseLease:
    """The lease of both faces; they add the calls that wait. Belongs to no thread: hand it to another freely."""

    __slots__ = (
        "__weakref__",
        "_asked",
        "_callbacks",
        "_cap",
        "_claim",
        "_depth",
        "_desk",
        "_due",
        "_end_plan",
        "_ended",
        "_granted_at",
        "_interrupt",
        "_kept",
        "_missed",
        "_plan",
        "_reason",
        "_returned",
        "_signals",
        "_tried",
        "_valid_until",
        "slot",
        "token",
        "ttl",
    )

    def __init__(
        self, desk: Desk, claim: Claim, grant: Grant, asked: float, valid_until: float, max_hold: float | None
    ) -> None:
        self._desk, self._claim = desk, claim
        self.token, self.slot, self.ttl = grant.token, grant.slot, grant.ttl
        self._granted_at = self._asked = asked
        # From now, not from when it was asked for: an answer that took longer would hand out what is over.
        self._cap = timing.NEVER if max_hold is None else desk.runtime.now() + max_hold
        self._valid_until = valid_until if valid_until < self._cap else self._cap
        self._due = timing.renew_at(asked, grant.ttl, desk.runtime.fraction())
        self._ended: LeaseState | None = None
        self._reason: Reason | None = None
        self._missed = self._tried = self._returned = False
        self._depth = 1
        self._plan = self._end_plan = -1  # the watchdog's newest appointments for it; older ones are void
        self._callbacks: list[Callable[[Self], object]] | None = None
        self._signals: list[Signal] | None = None
        self._interrupt: Interrupt | None = None
        self._kept: Claim | None = None  # with which it is renewed

    # ------------------------------------------------------- reading, no I/O

    @property
    def name(self) -> str:
        """What is locked."""
        return self._claim.name

    @property
    def holder(self) -> str:
        """Who holds it, in words for people."""
        return self._claim.holder.label

    @property
    def fingerprint(self) -> str:
        """What may be shown of the secret id: 16 hex digits of its hash."""
        return self._claim.fingerprint

    @property
    def shared(self) -> bool:
        """Whether others may read beside this lease: it is of the read side of an rwlock."""
        return self._claim.mode == "shared"

    @property
    def state(self) -> LeaseState:
        """HELD, AT_RISK, LOST or RELEASED, by the clock at this very moment."""
        if self._ended is not None:
            return self._ended
        now = self._desk.runtime.now()
        if now >= self._valid_until:
            return LOST
        if self._missed or now >= timing.overdue_at(self._asked, self.ttl):
            return AT_RISK
        return HELD

    @property
    def held(self) -> bool:
        """True while the work may go on: HELD or AT_RISK."""
        return self._ended is None and self._desk.runtime.now() < self._valid_until

    @property
    def remaining(self) -> float:
        """Seconds the lease can be trusted if no renewal succeeds any more; never more than the truth."""
        return max(0.0, self._valid_until - self._desk.runtime.now()) if self._ended is None else 0.0

    @property
    def lost_reason(self) -> Reason | None:
        """Why the lease is LOST; None while it is not."""
        return self._lost_by(self._desk.runtime.now())

    def check(self) -> None:
        """Raise `LeaseLost` once the lease cannot be trusted. No I/O: call it before every step that matters."""
        if not self.held:
            self._raise_lost()

    def on_lost(self, callback: Callable[[Self], object]) -> None:
        """Call `callback(lease)` once when the lease is lost, on a thread of its own; at once if it is lost already.

        Not promised: that it runs before the next holder begins, if this process is paused. `check()` is.
        """
        if not callable(callback) or inspect.iscoroutinefunction(callback):
            raise ConfigError("on_lost takes a plain function of one argument, the lease; it runs on its own thread")
        with self._desk.guard:
            if self._ended is None:
                self._callbacks = [*(self._callbacks or ()), callback]
                return
        if self._ended is LOST:
            self._desk.teller.tell(callback, self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} token={self.token} {self.state} {self.remaining:.1f} s>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a lease cannot be pickled: it is held by this process. Send lease.token, and check that")

    # --------------------------------------------------------- ending it

    def _lose(self, reason: Reason) -> bool:
        """End it as LOST, once, and tell everybody who asked. From any thread; False: it had ended already."""
        desk = self._desk
        with desk.guard:
            if self._ended is not None:
                return False
            self._ended, self._reason = LOST, reason
        desk.book.held.pop(self._claim.mark, None)
        self._wake()
        if self._interrupt is not None:
            self._interrupt.fire()
        for callback in self._callbacks or ():
            desk.teller.tell(callback, self)
        desk.lost(self, reason)
        return True

    def _again(self) -> bool:
        """Count one more hold of a reentrant lock, if there is still something to hold."""
        with self._desk.guard:
            if not self.held:
                return False
            self._depth += 1
            return True

    def _abandon(self) -> None:
        """Give it up without waiting: the `with` that held it was torn apart."""
        with self._desk.guard:
            if not self._end_unsent():
                return
        self._desk.dog.dropped(self._claim)

    def _forgo(self, entry: Entry) -> None:
        """Give up this hold without waiting, never having worked under it: nothing is kept for min_hold. May be
        repeated: whoever is interrupted in here starts again."""
        desk = self._desk
        try:
            with desk.guard:
                if entry.spent:
                    return
                entry.spent = True
                if not self._end_unsent():
                    return
            desk.dog.drop(self._claim.mark)
            desk.forget(bare(self._claim))
        except BaseException:
            if self._returned:
                desk.forget(bare(self._claim))
            raise
        desk.emit("released", self._claim, token=self.token, since=self._granted_at)

    def _end_unsent(self) -> bool:
        """Under the guard: one hold less. True: the last one of a live lease, whose release is now the caller's."""
        self._depth -= 1
        if self._depth > 0 or self._ended is not None:
            return False
        self._ended, self._returned = RELEASED, True
        return True

    def _disown(self, reason: Reason) -> None:
        """End it as LOST without a word to anyone: it never was this process's, or this client's, to lose."""
        self._ended, self._reason = LOST, reason

    async def _release(self) -> bool:
        """Give it up. True: a live lease ended by this call, confirmed. Renewal stops before the release is sent."""
        desk = self._desk
        now = desk.runtime.now()
        verdict = self._lost_by(now)  # before anything is sent
        if verdict is not None:
            self._lose(verdict)
        try:
            with desk.guard:
                if self._depth > 1:  # an inner hold of a reentrant lock
                    self._depth -= 1
                    return True
                if self._returned or (self._ended is LOST and self._reason not in _STILL_THERE):
                    return False
                self._returned = True
                if self._ended is None:
                    self._ended = RELEASED
            desk.under_way.add(self._claim.mark)  # before it leaves the book: close() finds it in one of the two
            desk.dog.drop(self._claim.mark)
            if self._signals:
                self._wake()
            try:
                confirmed = await desk.give_back(self._claim, now)
            except Unavailable as silence:
                desk.owe(self._claim, silence)
                confirmed = False
        except BaseException:  # cancelled, Ctrl-C: the outcome is unknown, the release still due
            if self._returned:
                desk.forget(self._claim)
            raise
        finally:
            desk.under_way.discard(self._claim.mark)
        if desk.options.on_event is not None:
            desk.emit("released", self._claim, token=self.token, since=self._granted_at)
        return confirmed and verdict is None

    def _release_by_hand(self) -> Coroutine[Any, Any, bool]:
        self._desk.entries.spend(self)
        return self._release()

    def _refused(self, stale: StaleToken) -> None:
        """A fence has seen a newer token. Told, and no more: the fence may be shared by locks that are not this one."""
        self._desk.emit("stale_token", self._claim, token=self.token, reason=str(stale))

    def _wake(self) -> None:
        for signal in self._signals or ():
            signal.set()

    def _lost_by(self, now: float) -> Reason | None:
        if self._ended is not None:
            return self._reason if self._ended is LOST else None
        return None if now < self._valid_until else self._reason_by_clock()

    def _reason_by_clock(self) -> Reason:
        if self._valid_until >= self._cap:
            return "max_hold"
        return "unreachable" if self._tried else "stalled"

    def _raise_lost(self) -> NoReturn:
        reason = "released" if self._ended is RELEASED else self.lost_reason or "unknown"
        raise LeaseLost(self.name, reason=reason, token=self.token)

    def __del__(self) -> None:
        # A program that ends is not a leak: nothing is released at exit, a thread may still be working.
        try:
            ended = self._ended
        except AttributeError:  # torn while it was made
            return
        if ended is None and not sys.is_finalizing():
            self._ended = RELEASED  # somebody may still reach it, by the warning or from the same cycle
            # Only steps that are safe inside a finaliser, which may interrupt a thread that holds the guard.
            self._desk.dog.dropped(self._claim)
            warnings.warn(
                f"{self.name} (token {self.token}) was dropped without release(); it is released now. "
                "Use `with`, or keep the lease",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )

    # -------------------------------------------------------- renewing it

    async def _renew(self, ttl: float | None) -> None:
        """Ask the engine to let it live `ttl` seconds from now. Raises `LeaseLost` or `Unavailable`."""
        if ttl is not None:
            check_ttl(ttl)
        self.check()
        desk = self._desk
        asked, claim = desk.runtime.now(), self._renewal(ttl)
        deadline = asked + min(desk.options.call_timeout, self.remaining)
        self._tried = True
        (reply,) = await desk.engine().renew([claim], deadline)
        self._answered(asked, claim, reply, by_hand=True)
        if isinstance(reply, Unavailable):
            raise reply
        self.check()
        desk.dog.watch(self)  # the next renewal may be due sooner than planned

    def _renewal(self, ttl: float | None = None) -> Claim:
        """The claim to send: with its token, so that only this very grant is renewed. The same one each time: an engine
        may keep what it made of it."""
        kept, asks = self._kept, self._claim.ttl if ttl is None else ttl
        if kept is None or kept.ttl != asks:
            kept = self._kept = self._claim._replace(token=self.token, ttl=asks)
        return kept

    def _answered(self, asked: float, claim: Claim, reply: Alive | Gone | Unavailable, by_hand: bool = False) -> None:
        """Take the engine's answer to a renewal; one for a lease that ended meanwhile is dropped. Another ttl than it
        has is only ever asked for by hand: the watchdog's own question was then overtaken by that."""
        desk = self._desk
        if isinstance(reply, Gone):
            self._lose(reply.reason)
            return
        if desk.runtime.now() >= self._valid_until:  # somebody may have read LOST: it does not come back
            self._lose(self._reason_by_clock())
            return
        with desk.guard:
            if self._ended is not None:
                return
            if isinstance(reply, Unavailable):
                newly, self._missed = not self._missed, True
            elif asked >= self._asked if claim.ttl == self._claim.ttl else by_hand:  # else it says nothing new
                if claim.ttl != self._claim.ttl:
                    self._claim = self._claim._replace(ttl=claim.ttl)
                life = reply.ttl
                if life > claim.ttl:  # what an engine makes of a ttl is never less
                    life = min(life, timing.granted_ttl(claim.ttl, desk.traits.min_ttl, desk.traits.ttl_step))
                self._asked, self.ttl = asked, life
                self._valid_until = min(timing.valid_until(asked, self.ttl), self._cap)
                self._due = timing.renew_at(asked, self.ttl, desk.runtime.fraction())
                self._missed = self._tried = False
        if isinstance(reply, Alive):
            if desk.options.on_event is not None:
                desk.emit("renewed", claim, token=self.token, since=asked, aside=True)
            return
        now = desk.runtime.now()
        self._due = timing.retry_at(now, self._valid_until, desk.runtime.fraction())
        desk.emit("renew_failed", claim, token=self.token, since=asked, reason=str(reply), aside=True)
        if newly:
            desk.at_risk(self, reply)

    def _doubt(self, why: str) -> None:
        """The engine lost its connection: at risk from now on, and renewed as soon as that can be."""
        desk = self._desk
        with desk.guard:
            if self._ended is not None or self._missed:
                return
            self._missed = True
        self._due = desk.runtime.now()
        desk.at_risk(self, Unavailable(why, engine=desk.name))
        desk.dog.watch(self)

    async def _wait_lost(self, seconds: float | None) -> bool:
        """Wait until the lease is lost, at most `seconds`. False: it is not, or was released."""
        return await wait_lost([self], seconds)


LeaseRef = weakref.ref[BaseLease]
