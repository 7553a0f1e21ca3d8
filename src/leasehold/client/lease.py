"""What a caller holds: a grant, and how long to trust it.

The state is computed from the clock when it is read, so nothing has to run for a lease to end. A renewal moves
its local deadline; a break or a loss ends the lease earlier. Nothing brings an ended lease back.

Where each decision is:

- trusted, at risk or lost: `BaseLease.state`, `held` and `check`; lost for another reason than the clock: `_end_lost`
- what a renewal's answer changes: `_on_renewal`
- what a release means, and whether it is sent: `_release`; what its answer says: `_after_release`
- a release when no work was done, or the `with` was interrupted: `_rollback`, `_release_nowait`
"""

from __future__ import annotations

import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Coroutine, Iterable, Sequence
from enum import StrEnum
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, Self

from leasehold.client.acquire import without_min_hold
from leasehold.client.callbacks import check_callback
from leasehold.config import Duration, check_seconds, check_ttl
from leasehold.core import timing
from leasehold.errors import ConfigError, LeaseLost, StaleToken, Unavailable, for_caller
from leasehold.events import FenceKind, Hook
from leasehold.model import Alive, Claim, Gone, Grant, Reason, fast_tuple

if TYPE_CHECKING:
    from leasehold.client.core import ClientCore
    from leasehold.client.held_locks import HeldLock
    from leasehold.runtime.base import Interrupt, Signal

_log = logging.getLogger("leasehold")


class LeaseState(StrEnum):
    """The state of a lease. HELD and AT_RISK alternate; LOST is final. RELEASED is final once the engine has answered:
    if it answers that the grant was already gone, the lease is LOST."""

    HELD = "HELD"  # trusted
    AT_RISK = "AT_RISK"  # trusted, but a renewal failed or is overdue
    LOST = "LOST"  # stop: another holder may exist
    RELEASED = "RELEASED"  # released by its holder


# Module constants, because reading a member of an enum costs more than the whole comparison.
HELD: Final = LeaseState.HELD
AT_RISK: Final = LeaseState.AT_RISK
LOST: Final = LeaseState.LOST
RELEASED: Final = LeaseState.RELEASED

# Reasons given by the local clock: at the engine the grant may still live.
BY_LOCAL_CLOCK: Final = frozenset({"unreachable", "stalled", "max_hold"})
_NOT_AFTER_DEADLINE: Final = frozenset({"broken", "unknown"})  # reasons that the local deadline rules out


class Validity(NamedTuple):
    """How long the lease is trusted. Replaced as a whole, so that no reader on another thread mixes two answers."""

    asked_at: float  # when the request was sent whose answer this is (E8)
    ttl: float  # the life that the engine granted
    # The local deadline: `asked_at` plus the ttl, less drift; or when `max_hold` is over; or, if the lease is strict,
    # when its renewal is overdue.
    valid_until: float


class Renewal(NamedTuple):
    """A renewal that was sent, and the engine's answer."""

    asked_at: float
    claim: Claim
    reply: Alive | Gone | Unavailable
    explicit: bool = False  # by the holder, who may change the ttl; else by the watchdog
    only_extends: bool = False  # by `ensure`: applied only if the lease then lives longer


class BaseLease:
    """What `Lease` and `AsyncLease` share; they add the calls that wait. Belongs to no thread: pass it on freely."""

    __slots__ = (
        "__weakref__", "_at_risk_callbacks", "_callbacks", "_claim", "_core", "_depth", "_expiry_entry_id",
        "_final_state", "_grant_asked_at", "_interrupt", "_lost_reason", "_max_hold_at", "_release_on_commit",
        "_release_started", "_renew_at", "_renewal_attempted", "_renewal_claim", "_renewal_entry_id",
        "_renewal_failed", "_reports_release", "_signals", "_strict", "_token", "_validity", "slot",
    )  # fmt: skip

    def __init__(
        self,
        core: ClientCore,
        claim: Claim,
        grant: Grant,
        asked_at: float,
        valid_until: float,
        max_hold: float | None,
        strict: bool = False,
    ) -> None:
        self._core, self._claim, self._strict = core, claim, strict
        self._token: int | None  # None: not granted by the engine
        self._token, ttl, self.slot = grant
        self._grant_asked_at = asked_at
        # `max_hold` counts from now, not from `asked_at`: otherwise a grant that took longer than `max_hold` to arrive
        # would be lost at once.
        self._max_hold_at = timing.NEVER if max_hold is None else core.runtime.now() + max_hold
        if valid_until > self._max_hold_at:
            valid_until = self._max_hold_at
        self._validity = fast_tuple(Validity, (asked_at, ttl, valid_until))
        self._renew_at = timing.renew_at(asked_at, ttl, core.runtime.random())
        self._final_state: LeaseState | None = None
        self._lost_reason: Reason | None = None
        self._renewal_failed = self._renewal_attempted = self._release_started = False
        self._reports_release = False  # whether its grant was reported, to a hook or to the log at DEBUG
        self._release_on_commit = False  # a transaction of the caller releases it, if it commits
        self._depth = 1
        # Its newest entries in the watchdog's heaps; older ones are void.
        self._renewal_entry_id = self._expiry_entry_id = -1
        self._callbacks: list[Callable[[Self], object]] | None = None
        self._at_risk_callbacks: list[Callable[[Self], object]] | None = None
        self._signals: list[Signal] | None = None
        self._interrupt: Interrupt | None = None
        self._renewal_claim: Claim | None = None  # the claim that renewals send

    # ------------------------------------------------------- reading, no I/O

    @property
    def name(self) -> str:
        """The name that is held."""
        return self._claim.name

    @property
    def guaranteed(self) -> bool:
        """Whether the engine granted it. False: the engine did not answer, and the lock's `on_unavailable="run"` let
        the work run without any protection."""
        return self._token is not None

    @property
    def token(self) -> int:
        """The fencing token. Raises `Unavailable` if the lease is not `guaranteed`: any number could pass a fence."""
        if self._token is None:
            raise self._unguaranteed("it has no token for a fence")
        return self._token

    @property
    def holder(self) -> str:
        """The holder's label, for display only."""
        return self._claim.holder.label

    @property
    def fingerprint(self) -> str:
        """16 hex digits that identify the claim in logs and in `inspect`. Not a secret."""
        return self._claim.fingerprint

    @property
    def ttl(self) -> float:
        """Seconds it lives after a renewal."""
        return self._validity.ttl

    @property
    def shared(self) -> bool:
        """Whether this is a read lock of an rwlock, which other readers may hold too."""
        return self._claim.mode == "shared"

    @property
    def state(self) -> LeaseState:
        """HELD, AT_RISK, LOST or RELEASED, computed from the clock when read."""
        if self._final_state is not None:
            return self._final_state
        now, validity = self._core.runtime.now(), self._validity
        if now >= validity.valid_until:
            return LOST
        if self._renewal_failed or now >= timing.overdue_at(validity.asked_at, validity.ttl):
            return AT_RISK
        return HELD

    @property
    def held(self) -> bool:
        """Whether the work may continue: HELD or AT_RISK."""
        return self._final_state is None and self._core.runtime.now() < self._validity.valid_until

    @property
    def remaining(self) -> float:
        """Seconds the lease can be trusted if no further renewal succeeds. Never an overestimate: 0 if it is not
        `guaranteed`."""
        return self._until_deadline() if self.guaranteed else 0.0

    def _until_deadline(self) -> float:
        return max(0.0, self._validity.valid_until - self._core.runtime.now()) if self._final_state is None else 0.0

    def _left(self, validity: Validity, now: float) -> float:
        """Seconds that the engine surely keeps the grant unless it is renewed. For events without `max_hold`: how late
        renewals are answered is what `left` shows, and the end that a caller has set says nothing about that."""
        return timing.valid_until(validity.asked_at, validity.ttl, self._core.options.drift) - now

    def _until_engine_deadline(self) -> float:
        """Seconds until the work must have ended. A strict lease is lost before that."""
        now = self._core.runtime.now()
        return max(0.0, min(self._left(self._validity, now), self._max_hold_at - now))

    @property
    def lost_reason(self) -> Reason | None:
        """Why the lease is LOST; None if it is not LOST."""
        return self._lost_reason_at(self._core.runtime.now())

    def check(self) -> None:
        """Raise `LeaseLost` unless the lease is held. No I/O: call it before every step that matters."""
        if not self.held:
            self._raise_lost()

    def on_lost(self, callback: Callable[[Self], object]) -> None:
        """Call `callback(lease)` once when the lease is lost, on the client's callback thread; at once if it is already
        lost. A release is not a loss.

        Not promised: if this process is paused, the next holder may start before the callback runs. `check()` depends
        on no thread: it compares the clock.
        """
        check_callback("on_lost", callback)
        self._call_when_lost(callback)

    def _call_when_lost(self, callback: Callable[[Self], object]) -> None:
        with self._core.mutex:
            if self._final_state is None:
                self._callbacks = [*(self._callbacks or ()), callback]
                return
        if self._final_state is LOST:
            self._core.callbacks.submit(callback, self)

    def on_at_risk(self, callback: Callable[[Self], object]) -> None:
        """Call `callback(lease)` each time the lease becomes AT_RISK because a renewal failed or the connection to the
        engine was lost: once until a renewal has succeeded again, and never after the lease has ended. On the client's
        callback thread; at once if that has happened already, and no renewal has succeeded since. A lease of a strict
        lock is lost instead if a renewal fails.

        Not promised: that it runs as soon as `state` is AT_RISK. While a renewal is overdue and not yet given up, only
        `state` says so.
        """
        check_callback("on_at_risk", callback)
        with self._core.mutex:
            if self._final_state is not None:
                return
            self._at_risk_callbacks = [*(self._at_risk_callbacks or ()), callback]
            is_reported = self._renewal_failed
        if is_reported:
            self._call_at_risk([callback])

    def __repr__(self) -> str:
        token = f"token={self._token}" if self.guaranteed else "not guaranteed"
        return f"<{type(self).__name__} {self.name} {token} {self.state} {self.remaining:.1f} s>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a lease cannot be pickled: this process holds it. Send lease.token and check that instead")

    def _mark_unguaranteed(self) -> None:
        """Make this new lease one that the engine did not grant: without a token, AT_RISK, never renewed."""
        self._token, self._renew_at, self._renewal_failed = None, timing.NEVER, True

    def _unguaranteed(self, consequence: str) -> Unavailable:
        return Unavailable(
            f"the lease of {self.name} is not guaranteed, because the engine did not answer and on_unavailable is "
            f'"run": {consequence}; test lease.guaranteed first',
            engine=self._core.engine_name,
        )

    # --------------------------------------------------------- ending it

    def _end_lost(self, reason: Reason) -> bool:
        """End it as LOST, once, and notify the callers of `wait_lost`, the callbacks and the event hook. From any
        thread. False: it had already ended."""
        core = self._core
        with core.mutex:
            if self._final_state is not None:
                return False
            # After the local deadline a missing grant proves no break: the engine ends an expired grant by itself.
            if reason in _NOT_AFTER_DEADLINE and core.runtime.now() >= self._validity.valid_until:
                reason = self._expiry_reason()
            self._final_state, self._lost_reason = LOST, reason
        core.registry.held.pop(self._claim.id_hash, None)
        self._set_signals()
        if self._interrupt is not None:
            self._interrupt.fire()
        self._report_lost(reason)
        return True

    def _report_lost(self, reason: Reason) -> None:
        for callback in self._callbacks or ():
            self._core.callbacks.submit(callback, self)
        self._core.report_lost(self, reason)

    def _reenter(self, held_lock: HeldLock) -> bool:
        """Count one more hold of a reentrant lock. False: the lease has ended."""
        with self._core.mutex:
            if not self.held:
                return False
            held_lock.reentered = True  # no call until the depth has changed, too: Ctrl-C cannot come in between
            self._depth += 1
            return True

    def _release_nowait(self, held_lock: HeldLock | None = None) -> None:
        """Release it without waiting: the `with` that held it was interrupted."""
        with self._core.mutex:
            if not self._drop_hold(held_lock):
                return
        self._core.watchdog.release_soon(self._claim, self.token)

    def _rollback(self, held_lock: HeldLock) -> None:
        """Release this hold without waiting, when no work was done under it: `min_hold` does not apply. If it is
        interrupted, it can be called again."""
        core = self._core
        try:
            with core.mutex:
                if held_lock.released or not self._drop_hold(held_lock):
                    return
            core.watchdog.unwatch(self._claim.id_hash)
            core.forget(without_min_hold(self._claim))
        except BaseException:
            if self._release_started:
                core.forget(without_min_hold(self._claim))
            raise
        core.emit("released", self._claim, self._token, self._grant_asked_at, self.slot)

    def _drop_hold(self, held_lock: HeldLock | None) -> bool:
        """Under the mutex: one hold less. True: it was the last hold of a live lease; the caller must release it."""
        if held_lock is not None:
            held_lock.released = True  # no call until the depth has changed, too: Ctrl-C cannot come in between
        self._depth -= 1
        if self._depth > 0 or self._final_state is not None:
            return False
        self._final_state, self._release_started = RELEASED, True
        if self._token is None:  # nothing to release
            self._core.registry.held.pop(self._claim.id_hash, None)
            return False
        return True

    def _end_committed(self) -> bool:
        """The engine has no such grant any more: end it as RELEASED if a transaction was to release it when it commits.
        False: none was, or it has already ended. After the local deadline the ttl may have ended the grant."""
        if not self._release_on_commit or not self._end_released("committed", on_callback_thread=True):
            return False
        self._core.registry.retry_release(self._claim)  # the commit may not have woken the next waiter
        return True

    def _end_released(self, reason: str, on_callback_thread: bool = False) -> bool:
        core = self._core
        with core.mutex:
            if not self.held:
                return False
            self._final_state, self._release_started = RELEASED, True
        self._report_released(reason, on_callback_thread)
        return True

    def _report_released(self, reason: str, on_callback_thread: bool = False) -> None:
        """After it has ended as RELEASED without a release."""
        core = self._core
        core.watchdog.unwatch(self._claim.id_hash)
        self._set_signals()
        about = (self._claim, self._token, self._grant_asked_at, self.slot)
        core.emit("released", *about, reason=reason, on_callback_thread=on_callback_thread)

    def _invalidate(self, reason: Reason) -> None:
        """End it as LOST without any notification: this process or client no longer has a say over the grant."""
        self._final_state, self._lost_reason = LOST, reason

    async def _release(self, held_lock: HeldLock | None = None) -> bool:
        """Release it. True: this call ended a live lease, and the engine confirmed it. Renewal stops before the release
        is sent. `held_lock` is marked as released as soon as nothing can keep the release from being sent."""
        if self._token is None:
            return self._end_unguaranteed(held_lock)
        core, id_hash, now = self._core, self._claim.id_hash, self._core.runtime.now()
        if now >= self._validity.valid_until:
            self._end_lost(self._expiry_reason())  # unless it has ended already
        live = sends = False
        try:
            with core.mutex:  # no call in here: Ctrl-C cannot come between the marks and what they say
                if held_lock is not None:
                    held_lock.released = True
                if self._depth > 1:  # an inner hold of a reentrant lock
                    self._depth -= 1
                    return True
                live = self._final_state is None
                if not live and (self._release_started or self._lost_reason not in BY_LOCAL_CLOCK):
                    return False  # it was released before, or the engine has ended the grant
                self._release_started, self._final_state = True, self._final_state or RELEASED
            sends = True
            core.in_flight.add(id_hash)  # before unwatch(): close() finds it here or in the registry
            core.watchdog.unwatch(id_hash)
            if self._signals:
                self._set_signals()
            try:
                ended = await core.send_release(self._claim, now)
            except Unavailable as error:
                core.retry_release(self._claim, error)
                ended = live = False  # it may have ended the grant or not
        except BaseException:  # cancelled, Ctrl-C: the outcome is unknown, so release it again
            if self._release_started:
                core.forget(self._claim)
            raise
        finally:
            if sends:  # else another call may have sent the release, and close() waits for that one
                core.in_flight.discard(id_hash)
        if ended and not self._reports_release:
            return live
        return self._after_release(ended, live)

    def _after_release(self, ended: bool | None, live: bool) -> bool:
        """What the engine's answer to a release says. `live`: the lease was not lost, and the engine did answer."""
        if live and not ended:
            self._on_missing_grant(ended)
        if self._final_state is RELEASED:
            self._core.emit("released", self._claim, self._token, self._grant_asked_at, self.slot)
        return live and bool(ended)

    def _end_unguaranteed(self, held_lock: HeldLock | None) -> bool:
        """End a lease that the engine did not grant: there is nothing to release."""
        if reason := self.lost_reason:
            self._end_lost(reason)
        with self._core.mutex:
            self._drop_hold(held_lock)
        if self._final_state is not None:
            self._core.watchdog.unwatch(self._claim.id_hash)
            self._set_signals()
        return False

    def _on_missing_grant(self, ended: bool | None) -> None:
        """The engine answered a release: it had no such grant any more. Before the local deadline that proves a loss,
        unless the answer is to a repeated request (None): the request sent before may have ended the grant."""
        core = self._core
        if self._release_on_commit:  # then the commit has ended it
            return
        if ended is None or core.runtime.now() >= self._validity.valid_until:
            cause = "the first of several requests" if ended is None else "its ttl"
            text = "%s (token %d) was over when its release arrived: ended by %s, or lost before that"
            core.callbacks.submit(_log.warning, text, self.name, self.token, cause)
            return
        with core.mutex:
            self._final_state, self._lost_reason = LOST, "unknown"
        self._report_lost("unknown")

    def _release_explicitly(self) -> Coroutine[Any, Any, bool]:
        self._core.held_locks.mark_released(self)
        return self._release()

    def _report_stale_token(self, stale: StaleToken, fence: FenceKind) -> Hook | None:
        """A fence has seen a newer token. Only reported: other locks may share the fence. Returns the client's hook."""
        self._core.report_refusal(self._claim, self.token, stale, fence, self.slot)
        return self._core.options.on_event

    def _set_signals(self) -> None:
        for signal in self._signals or ():
            signal.set()

    def _lost_reason_at(self, now: float) -> Reason | None:
        if self._final_state is not None:
            return self._lost_reason if self._final_state is LOST else None
        return None if now < self._validity.valid_until else self._expiry_reason()

    def _expiry_reason(self) -> Reason:
        if self._validity.valid_until >= self._max_hold_at:
            return "max_hold"
        return "unreachable" if self._renewal_attempted else "stalled"

    def _raise_lost(self) -> NoReturn:
        reason = "released" if self._final_state is RELEASED else self.lost_reason or "unknown"
        raise LeaseLost(self.name, reason=reason, token=self._token)

    def __del__(self) -> None:
        # The end of the program is not a leak: release nothing, because a thread may still be working.
        try:
            ended = self._final_state
        except AttributeError:  # interrupted in __init__
            return
        if ended is None and not sys.is_finalizing():
            self._final_state = RELEASED  # a warning filter, or an object in the same reference cycle, may still use it
            if not self.guaranteed:  # nothing to release
                self._core.registry.held.pop(self._claim.id_hash, None)
                return
            # Only steps that are safe inside a finaliser, which may interrupt a thread that holds the mutex.
            self._core.watchdog.release_soon(self._claim, self.token, dropped=True)
            warnings.warn(
                f"{self.name} (token {self.token}) was dropped without release(); the watchdog releases it now. "
                "Keep it in a variable (lease = lock.acquire()), or use `with lock as lease:`",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )

    # -------------------------------------------------------- renewing it

    async def _ensure(self, seconds: Duration) -> None:
        """Renew it unless it can be trusted for `seconds` more."""
        wanted = check_seconds("seconds", seconds)
        core = self._core
        while True:
            self.check()
            now = core.runtime.now()
            if now + wanted > self._max_hold_at:
                left = self._max_hold_at - now
                raise ConfigError(f"{self.name} cannot last {wanted:g} s more: its max_hold ends it in {left:.1f} s")
            if self.remaining >= wanted and self.guaranteed:
                return
            # An answer comes within `call_timeout`, or the renewal has failed.
            margin = min(core.options.call_timeout, self.remaining)
            ttl = timing.ttl_to_last(wanted + margin, core.options.drift, self._strict)
            if ttl > core.options.max_ttl:
                raise ConfigError(
                    f"{self.name} cannot last {wanted:g} s more: with the time of a call and the drift, that takes a "
                    f"ttl of {ttl:.4g} s, and the client allows {core.options.max_ttl:.15g} s; pass max_ttl= to it"
                )
            granted = await self._renew(max(ttl, self._claim.ttl), only_extends=True)
            if granted.valid_until - granted.asked_at < wanted and granted.valid_until < self._max_hold_at:
                raise ConfigError(
                    f"{self.name} cannot last {wanted:g} s more: {core.engine_name} grants it for at most "
                    f"{granted.ttl:.4g} s at a time, however long the ttl is"
                )

    async def _renew(self, ttl: Duration | None, only_extends: bool = False) -> Validity:
        """Renew it for `ttl` seconds from now. Raises `LeaseLost` or `Unavailable`. Returns what the engine granted."""
        if ttl is not None:
            ttl = check_ttl(ttl, self._core.options.max_ttl)
        self.check()
        if not self.guaranteed:
            raise self._unguaranteed("there is nothing to renew or verify")
        core = self._core
        asked_at, claim = core.runtime.now(), self._claim_for_renewal(ttl)
        deadline = asked_at + min(core.options.call_timeout, self.remaining)
        self._renewal_attempted = True
        (reply,) = await core.engine().renew([claim], deadline)
        renewal = Renewal(asked_at, claim, reply, True, only_extends)
        self._on_renewal(renewal)
        if isinstance(reply, Unavailable):
            if self._strict:  # then it is lost
                self.check()
            raise for_caller(reply)
        self.check()
        core.watchdog.watch(self)  # the next renewal may be due sooner than planned
        return self._validity if isinstance(reply, Gone) else self._validity_from(renewal, reply)

    def _claim_for_renewal(self, ttl: float | None = None) -> Claim:
        """The claim to send, with its token, so that only this very grant is renewed. The same object each time: an
        engine may cache what it encodes from it."""
        renewal_claim, wanted_ttl = self._renewal_claim, self._claim.ttl if ttl is None else ttl
        if renewal_claim is None or renewal_claim.ttl != wanted_ttl:
            renewal_claim = self._renewal_claim = self._claim._replace(token=self.token, ttl=wanted_ttl)
        return renewal_claim

    def _on_renewal(self, renewal: Renewal) -> None:
        """Apply the engine's answer to a renewal, unless the lease has ended meanwhile."""
        if isinstance(renewal.reply, Gone):
            if renewal.reply.reason != "unknown" or not self._end_committed():
                self._end_lost(renewal.reply.reason)
        elif isinstance(renewal.reply, Alive):
            self._on_renewed(renewal, renewal.reply)
        else:
            self._on_renewal_failed(renewal, renewal.reply)

    def _on_renewed(self, renewal: Renewal, reply: Alive) -> None:
        core, claim = self._core, renewal.claim
        with core.mutex:
            if self._final_state is not None:
                return
            previous, now = self._validity, core.runtime.now()
            in_time = now < previous.valid_until
            validity = self._validity_from(renewal, reply)
            if in_time and not self._is_outdated(renewal, validity):
                if claim.ttl != self._claim.ttl:
                    self._claim = self._claim._replace(ttl=claim.ttl)
                self._validity = validity
                self._renew_at = timing.renew_at(renewal.asked_at, self._validity.ttl, core.runtime.random())
                self._renewal_failed = self._renewal_attempted = False
        if not in_time:  # a caller may have read LOST already: it must not change back
            self._end_lost(self._expiry_reason())
        elif core.reports():
            core.emit(
                "renewed",
                claim,
                token=self.token,
                since=renewal.asked_at,
                ttl=previous.ttl,
                left=self._left(previous, now),
                slot=self.slot,
                on_callback_thread=True,
            )

    def _is_outdated(self, renewal: Renewal, validity: Validity) -> bool:
        """Whether a later answer was applied already. Only an explicit renewal changes the ttl: one by the watchdog
        with another ttl than the lease's was sent before the change."""
        if renewal.only_extends:
            return validity.valid_until <= self._validity.valid_until
        changes_ttl = renewal.claim.ttl != self._claim.ttl
        sent_before_latest = renewal.asked_at < self._validity.asked_at
        return not renewal.explicit if changes_ttl else sent_before_latest

    def _validity_from(self, renewal: Renewal, reply: Alive) -> Validity:
        life, wanted = reply.ttl, renewal.claim.ttl
        if life > wanted:  # the engine may round the ttl up; more life than that is left of an earlier, longer ttl
            traits = self._core.traits
            life = min(life, timing.granted_ttl(wanted, traits.min_ttl, traits.ttl_step))
        valid_until = timing.trusted_until(renewal.asked_at, life, self._core.options.drift, self._strict)
        return Validity(renewal.asked_at, life, min(valid_until, self._max_hold_at))

    def _on_renewal_failed(self, renewal: Renewal, error: Unavailable) -> None:
        core = self._core
        with core.mutex:
            if self._final_state is not None:
                return
            validity, now = self._validity, core.runtime.now()
            in_time = now < validity.valid_until
            newly_at_risk = in_time and not self._renewal_failed and not self._strict
            if in_time:
                self._renewal_failed = True
                self._renew_at = timing.retry_at(now, self._validity.valid_until, core.runtime.random())
            callbacks = self._at_risk_callbacks  # one registered from here on finds the failure itself
        if not in_time:
            self._end_lost(self._expiry_reason())
            return
        core.emit(
            "renew_failed",
            renewal.claim,
            token=self.token,
            since=renewal.asked_at,
            reason=str(error),
            error="Unavailable",
            ttl=validity.ttl,
            left=self._left(validity, now),
            slot=self.slot,
            on_callback_thread=True,
        )
        if self._strict:
            self._end_lost("unreachable")
        elif newly_at_risk:
            self._call_at_risk(callbacks or ())
            core.report_at_risk(self, error)

    def _call_at_risk(self, callbacks: Iterable[Callable[[Any], object]]) -> None:
        """Submit them to the callback thread, which skips those whose lease has ended before it gets to them."""
        for callback in callbacks:

            @wraps(callback)  # the log names the callback if it fails
            def call_while_held(callback: Callable[[Any], object] = callback) -> None:
                if self.held:
                    callback(self)

            self._core.callbacks.submit(call_while_held)

    def _mark_at_risk(self, why: str) -> None:
        """The engine lost its connection: the lease is at risk, and the watchdog renews it as soon as possible."""
        core = self._core
        with core.mutex:
            if self._final_state is not None or self._renewal_failed:
                return
            self._renewal_failed, callbacks = True, self._at_risk_callbacks
        self._renew_at = core.runtime.now()
        self._call_at_risk(callbacks or ())
        core.report_at_risk(self, Unavailable(why, engine=core.engine_name))
        core.watchdog.watch(self)

    async def _wait_lost(self, seconds: Duration | None) -> bool:
        """Wait until the lease is lost, at most `seconds`. False: it is not, or was released."""
        return await wait_lost([self], seconds)


LeaseRef = weakref.ref[BaseLease]


def is_group_of_losses(error: BaseException | None) -> bool:
    """Whether it is what a TaskGroup raises if nothing but `check()` failed in its tasks."""
    return isinstance(error, BaseExceptionGroup) and error.split(LeaseLost)[1] is None


async def wait_lost(
    leases: Sequence[BaseLease], seconds: Duration | None, should_stop: Callable[[], bool] = lambda: False
) -> bool:
    """Wait until one of the leases ends, or `should_stop()` returns True, at most `seconds`. Code that changes what
    `should_stop` returns must also call `_set_signals`, or the change is noticed late. False: none is lost."""
    runtime = leases[0]._core.runtime
    end = timing.NEVER if seconds is None else runtime.now() + check_seconds("seconds", seconds)
    signal = runtime.signal()
    for lease in leases:
        with lease._core.mutex:
            lease._signals = [*(lease._signals or ()), signal]
    try:
        while all(lease.held for lease in leases) and not should_stop() and (left := end - runtime.now()) > 0:
            await signal.wait(min(left, timing.MAX_SLEEP, *(lease._until_deadline() for lease in leases)))
    finally:
        for lease in leases:
            with lease._core.mutex:
                lease._signals = [other for other in lease._signals or () if other is not signal]
    return any(lease.lost_reason is not None for lease in leases)
