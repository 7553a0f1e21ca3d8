"""What all leases of one client share: engine, watchdog, callback thread, claim registry.

It outlives the client object while a lease lives.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

from leasehold import log_lines
from leasehold.client.acquire import without_min_hold
from leasehold.client.attempt_limit import AttemptLimit
from leasehold.client.breaker import BreakerEngine, SharedBreaker
from leasehold.client.callbacks import CallbackThread
from leasehold.client.deadlock_search import DeadlockSearches
from leasehold.client.held_locks import HeldLocks
from leasehold.client.watchdog import Watchdog
from leasehold.config import ClientOptions, EngineConfig, check_required, default_holder
from leasehold.core import timing
from leasehold.core.names import owner_of
from leasehold.core.texts import escape
from leasehold.engines.base import Engine, Opener
from leasehold.engines.registry import ClaimRegistry, snapshot_items
from leasehold.errors import ConfigError, Deadlocked, NotAcquired, Reentered, StaleToken, Unavailable
from leasehold.events import Event, EventKind, FenceKind, Hook, call_hook, count_dropped_event
from leasehold.model import Claim, Holder, Reason, Traits, fast_tuple
from leasehold.runtime.base import Runtime

if TYPE_CHECKING:
    from leasehold.client.lease import BaseLease

_log = logging.getLogger("leasehold")
_is_logged = _log.isEnabledFor

_POLL_INTERVAL = 0.005  # how often close() checks whether other threads have finished
_CLOSED_TEXT = "this client is closed: make a new one"
_MAX_EVENTS = 10_000  # that wait for the callback thread


def _deliver(hook: Hook | None, event: Event, logged: bool) -> None:
    if logged:
        log_lines.log_event(event)
    if hook is not None:
        call_hook(hook, event)


class ClientCore:
    def __init__(self, options: ClientOptions, config: EngineConfig, opener: Opener, runtime: Runtime) -> None:
        self.options, self.config, self.runtime = options, config, runtime
        self.engine_name = config.scheme  # in events and errors; never its address
        self._opener = opener
        # Whether acquires, renewals and releases are reported: to a hook, or to the log at DEBUG. Every call asks.
        self.reports: Callable[[], bool] = (
            partial(_is_logged, logging.DEBUG) if options.on_event is None else lambda: True
        )
        self.mutex = runtime.mutex()
        self.registry = ClaimRegistry(runtime, runtime.random_bytes(8).hex())
        self.callbacks = CallbackThread(runtime)
        self.held_locks = HeldLocks(runtime)
        self.deadlock_searches = DeadlockSearches(self)
        self.attempts = AttemptLimit(runtime, options.call_timeout, self.engine_name)
        self.watchdog = Watchdog(
            runtime,
            self.registry,
            self._new_engine,
            options.call_timeout,
            self.callbacks.submit,
            self._report_released_soon,
        )
        self.closed = self._fully_closed = False
        self.withdraws_at_exit = True
        self.exiting = False  # the interpreter exits: daemon threads acquire nothing any more
        self.in_flight: set[str] = set()  # id hashes being acquired or released: close() waits for them
        self._traits_confirmed = False
        self._breaker = SharedBreaker(runtime, self.engine_name, self._report_breaker) if options.breaker else None
        self._engine = self._new_engine(runtime)
        self._set_identity()

    def _new_engine(self, runtime: Runtime) -> Engine:
        engine = self._opener(self.config, runtime, self.registry)
        return engine if self._breaker is None else BreakerEngine(engine, self._breaker)

    def _set_identity(self) -> None:
        self._host, self._pid = os.uname().nodename if hasattr(os, "uname") else "", os.getpid()
        self._label = self.options.holder or default_holder()
        self._holder = Holder(self._label, self._host, self._pid)

    @property
    def traits(self) -> Traits:
        return self._engine.traits

    def engine(self) -> Engine:
        """The engine, opened again if the event loop changed. Raises `ConfigError` once the client is closed."""
        self.bind_loop()
        return self.engine_unless_closed()

    def engine_unless_closed(self) -> Engine:
        """The same, for callers that have bound the event loop already."""
        if self.closed:
            raise ConfigError(_CLOSED_TEXT)
        return self._engine

    def liveness_descriptor(self) -> int | None:
        """A descriptor that is open as long as this process lives, if the engine frees the grants of dead processes by
        it."""
        descriptor: Callable[[], int | None] | None = getattr(self._engine, "liveness_descriptor", None)
        return None if descriptor is None else descriptor()

    async def check_traits(self, required: frozenset[str], wait_deadline: float) -> None:
        """Check a lock's requirements before the first grant, when the server's actual settings are known."""
        if not self._traits_confirmed:
            deadline = timing.bounded_attempt(self.runtime.now(), self.deadline(), wait_deadline)
            await self.engine().ping(deadline)
            self._traits_confirmed = True
        check_required(required, self.traits, self.engine_name)

    def bind_loop(self) -> None:
        """Follow the caller into its event loop. Every use of the engine or store begins with this: doing it later
        would end calls that were started before."""
        if not self.runtime.bind():
            self.rebind_loop()

    def rebind_loop(self) -> None:
        """Start over: the previous event loop is closed, and its tasks and connections are gone."""
        for _, waiter in snapshot_items(self.registry.waiting):
            self.registry.remove_waiter(waiter.claim.id_hash)
            self.registry.retry_release(waiter.claim)
        self.in_flight.clear()
        self.attempts.reset()
        self._engine = self._new_engine(self.runtime)

    def deadline(self) -> float:
        return self.runtime.now() + self.options.call_timeout

    def holder(self, label: str | None, purpose: str | None) -> Holder:
        if label is None and purpose is None:
            return self._holder
        return Holder(label or self._label, self._host, self._pid, purpose or "")

    def register(self, lease: BaseLease, connection_epoch: object) -> None:
        """Enter a new lease in the registry and have the watchdog renew it. It is registered as held before its waiter
        is removed: a late wake-up for an unknown claim would release it. `connection_epoch`: the registry's, as it was
        before the attempt."""
        registry, id_hash = self.registry, lease._claim.id_hash
        registry.held[id_hash] = lease_ref = ref(lease)
        self.watchdog.watch(lease, lease_ref)
        if registry.waiting:
            registry.remove_waiter(id_hash)
        if registry.connection_epoch is not connection_epoch:  # too early for `mark_all_at_risk` to find this lease
            lease._mark_at_risk("connection to the engine was lost while the lock was being granted")
        if self.closed or self.exiting:
            self._refuse_if_ending(lease)

    def register_unguaranteed(self, lease: BaseLease) -> None:
        """Enter a lease that the engine did not grant: `close`, a fork and `max_hold` end it, and nothing renews it."""
        self.registry.held[lease._claim.id_hash] = lease_ref = ref(lease)
        if lease._max_hold_at < timing.NEVER:
            self.watchdog.watch(lease, lease_ref)
        self._refuse_if_ending(lease)

    def _refuse_if_ending(self, lease: BaseLease) -> None:
        id_hash = lease._claim.id_hash
        if self.closed:  # either close() saw the lease just registered, or this check sees that it is closed
            self.watchdog.unwatch(id_hash)
            lease._invalidate("released")
            raise ConfigError(_CLOSED_TEXT)
        if self._refuses_at_exit():  # likewise, with `withdraw_claims`
            self.watchdog.unwatch(id_hash)
            lease._invalidate("released")
            raise SystemExit

    def send_release(self, claim: Claim, now: float) -> Coroutine[Any, Any, bool | None]:
        """Send a release. If it raises `Unavailable`, the caller passes it to `retry_release`."""
        if not self.runtime.bind():  # the lease is from a loop that is closed now
            self.rebind_loop()
            self.in_flight.add(claim.id_hash)  # again: `rebind_loop` removed it with those of the closed loop
        return self._engine.release(claim, timing.call_deadline(now, self.options.call_timeout, claim.ttl))

    def retry_release(self, claim: Claim, error: Unavailable) -> None:
        self.registry.retry_release(claim)
        self.emit("release_pending", claim, reason=str(error), error="Unavailable")

    def forget(self, claim: Claim) -> None:
        self._engine.forget(claim)

    # ------------------------------------------------------------- events

    def emit(
        self,
        kind: EventKind,
        claim: Claim,
        token: int | None = None,
        since: float | None = None,
        slot: int | None = None,
        queued: bool | None = None,
        ttl: float | None = None,
        left: float | None = None,
        reason: str | None = None,
        error: str | None = None,
        fence: FenceKind | None = None,
        seen: int | None = None,
        actor: str | None = None,
        why: str | None = None,
        position: int | None = None,
        limit: int | None = None,
        on_callback_thread: bool = False,
    ) -> None:
        """Log an event, and pass it to the client's hook. `on_callback_thread`: not on this thread, which may be the
        watchdog's. If the hook is so slow there that events pile up, they are dropped and counted."""
        hook, logged = self.options.on_event, _is_logged(log_lines.LEVELS[kind])
        if hook is None and not logged:
            return
        # One step for all fields: reading them one by one takes longer than building the event.
        namespace, name, _, id_hash, holder, _, mode, _, _, _, _, _, _, _, group, _ = claim
        label, _, _, purpose = holder
        runtime = self.runtime
        event = fast_tuple(
            Event,
            (
                kind,
                self.engine_name,
                namespace,
                name,
                runtime.wall(),
                token,
                id_hash[:16] or None,
                label,
                None if since is None else runtime.now() - since,
                reason,
                queued,
                error,
                ttl,
                left,
                mode,
                slot,
                purpose or None,
                fence,
                seen,
                actor,
                why,
                group,
                position,
                limit,
            ),
        )
        if on_callback_thread:
            if len(self.callbacks) < _MAX_EVENTS:
                self.callbacks.submit(_deliver, hook, event, logged)
            else:
                count_dropped_event()
            return
        if logged:
            log_lines.log_event(event)
        if hook is not None:
            call_hook(hook, event)

    def report_not_acquired(
        self, claim: Claim, began: float, queued: bool, position: int | None, error: BaseException
    ) -> None:
        about: dict[str, Any] = {"since": began, "queued": queued, "position": position}
        if isinstance(error, NotAcquired) and not isinstance(error, Deadlocked):
            self.emit("busy", claim, token=error.token, reason=error.holder, **about)
            return
        # Engines have subclasses of `Unavailable`, which are their own affair.
        name = "Unavailable" if isinstance(error, Unavailable) else type(error).__name__
        self.emit("failed", claim, reason=f"{type(error).__name__}: {error}", error=name, **about)

    def report_refusal(
        self, claim: Claim, token: int, stale: StaleToken, fence: FenceKind, slot: int | None = None
    ) -> None:
        """A fence refused a token. It is reported to a lock server, too: no server sees what happens at a resource."""
        self.emit("stale_token", claim, token=token, reason=str(stale), slot=slot, fence=fence, seen=stale.highest)
        self.registry.report_refusal(claim, token, stale, fence)

    def _report_released_soon(self, claim: Claim, token: int) -> None:
        self.emit("released", claim, token=token, on_callback_thread=True)

    def report_lost(self, lease: BaseLease, reason: Reason) -> None:
        self.emit(
            "lost",
            lease._claim,
            token=lease._token,
            since=lease._grant_asked_at,
            reason=reason,
            slot=lease.slot,
            on_callback_thread=True,
        )

    def report_at_risk(self, lease: BaseLease, error: Unavailable) -> None:
        self.emit(
            "at_risk",
            lease._claim,
            token=lease.token,
            since=lease._validity.asked_at,
            reason=str(error),
            error="Unavailable",
            ttl=lease._validity.ttl,
            left=lease._left(lease._validity, self.runtime.now()),
            slot=lease.slot,
            on_callback_thread=True,
        )

    def _report_breaker(self, opened: bool, text: str) -> None:
        """On the callback thread: the caller may be the watchdog."""
        claim = Claim(self.options.namespace, "", "", "", self._holder, 0.0)
        kind: EventKind = "breaker_opened" if opened else "breaker_closed"
        self.emit(kind, claim, reason=text, on_callback_thread=True)

    # --------------------------------------------------------- life cycle

    def leases(self) -> list[BaseLease]:
        found = [lease_ref() for _, lease_ref in snapshot_items(self.registry.held)]
        return [lease for lease in found if lease is not None]  # type: ignore[misc]

    async def close(self) -> None:
        """Release all leases and send pending releases within `call_timeout`, then close the engine.

        If it is interrupted, calling it again does the rest.
        """
        if self._fully_closed:
            return
        self.bind_loop()
        self.closed = True
        until = self.deadline()
        for lease in self.leases():
            lease._depth = 1
            if self.registry.pending_releases:  # the engine did not answer for one: do not wait for each of the others
                lease._release_nowait()
            else:
                await lease._release()
        await self._drain_in_flight(until)
        await self._send_pending_releases(until)
        await self.watchdog.stop(max(until - self.runtime.now(), 0.1))
        self.callbacks.stop_when_idle()
        self.registry.closed = True
        await self._engine.close()
        self.runtime.close()
        self._fully_closed = True
        self.withdraws_at_exit = False  # close() has sent what was pending, or has reported it

    async def _drain_in_flight(self, until: float) -> None:
        """Wake all threads and tasks that are still acquiring, and wait until they have withdrawn their claims: once
        the engine is closed, nothing can withdraw a grant in flight or a queue entry. Also wait for releases in flight:
        a lease that another thread is releasing must no longer be held when `close()` returns."""
        own_id = self.runtime.owner_id()  # a signal handler may call close() inside a call of this very thread
        while True:
            for _, waiter in snapshot_items(self.registry.waiting):  # woken waiters find the client closed
                waiter.cancelled = True
                waiter.signal.set()
            if all(owner_of(id_hash) == own_id for id_hash in self.in_flight.copy()) or self.runtime.now() >= until:
                return
            await self.runtime.sleep(_POLL_INTERVAL)

    async def _send_pending_releases(self, until: float) -> None:
        self.watchdog.start_releases()
        while self.registry.pending_releases and self.runtime.now() < until:
            for id_hash, pending in snapshot_items(self.registry.pending_releases):
                try:
                    await self._engine.release(pending.claim, until)
                except Reentered:
                    return  # the engine cannot answer before the interrupted call further up has returned
                except Unavailable:
                    await self.runtime.sleep(0.05)
                    break
                self.registry.pending_releases.pop(id_hash, None)
        self._report_unconfirmed_releases()

    def _report_unconfirmed_releases(self) -> None:
        for _, unconfirmed in snapshot_items(self.registry.pending_releases):
            if not unconfirmed.claim.id:
                continue  # from a wake-up for a claim that this client does not know: not one of its leases
            text = "the engine did not confirm the release of %s in time: it may stay held until its ttl is over"
            _log.warning(text, escape(unconfirmed.claim.name))

    # ----------------------------------------------- interpreter exit

    def refuse_at_exit(self) -> None:
        """Called before every attempt while `exiting`. Daemon threads that still acquire end here, without a traceback:
        an attempt sent now would leave a claim that nothing releases."""
        if self._refuses_at_exit():
            raise SystemExit

    def _refuses_at_exit(self) -> bool:
        """Not on the main thread, which now runs the exit handlers of the program: they end what they began."""
        return self.exiting and not self.runtime.on_main_thread()

    def withdraw_claims(self) -> None:
        """The interpreter exits: let the watchdog release every claim that no code works under. Leases stay held: a
        daemon thread may be working under one. Never waits."""
        self.exiting = True  # first: a claim that is granted from now on is not registered as held
        for id_hash, waiter in snapshot_items(self.registry.waiting):
            if id_hash not in self.registry.held:
                self.registry.retry_release(without_min_hold(waiter.claim), wake_now=False)
                self.registry.remove_waiter(id_hash)
        self.watchdog.start_releases()
        if self.registry.pending_releases:
            with suppress(RuntimeError):  # the watchdog is not running, and at exit no thread can be started
                self.watchdog.retry_releases_now()

    def has_withdrawn(self) -> bool:
        """Whether all pending releases are confirmed, and, if nothing is held, the session is closed. Engines without
        sessions need no closing: their connections end with the process."""
        if self.registry.pending_releases:
            return not self.watchdog.running  # then nothing can send them any more
        if self.traits.liveness == "session" and not self.leases() and self.watchdog.running:
            self.registry.closed = True  # so that the watchdog closes what its engine shares with the caller's
            self.watchdog.request_stop()
            return False
        return True

    def end_withdrawal(self) -> None:
        """The time for `withdraw_claims` is over."""
        self._report_unconfirmed_releases()

    def stop_when_idle(self) -> None:
        """The client object is gone. What its leases need stays until the last lease ends."""
        self.watchdog.stop_when_idle()
        self.callbacks.stop_when_idle()

    def after_fork(self) -> None:
        """In a forked child: nothing of the parent is held, renewed or released; the client itself stays usable."""
        inherited = self.leases()
        self.runtime.after_fork()
        self.mutex = self.runtime.mutex()
        self.held_locks.after_fork()
        self.in_flight.clear()
        self.attempts.reset()
        self.registry.waiting.clear()
        self.registry.pending_releases.clear()
        self.registry.held.clear()
        self.registry.released_on_commit.clear()
        self.registry.client_id = self.runtime.random_bytes(8).hex()
        self.callbacks.after_fork()
        self.watchdog.after_fork()
        if self._breaker is not None:
            self._breaker.after_fork()
        self._engine.after_fork()
        self._set_identity()
        for lease in inherited:
            lease._invalidate("forked")
