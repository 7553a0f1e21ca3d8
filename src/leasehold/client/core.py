"""What all leases of one client share: engine, watchdog, teller, book. It outlives the client while a lease lives."""

from __future__ import annotations

import logging
import os
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any
from weakref import ref

from leasehold.client.callbacks import CallbackThread
from leasehold.client.held_locks import HeldLocks
from leasehold.client.watchdog import Watchdog
from leasehold.config import ClientOptions, EngineConfig, check_required, default_holder
from leasehold.core import timing
from leasehold.core.names import owner_of
from leasehold.engines.base import Engine, Opener
from leasehold.engines.registry import ClaimRegistry, snapshot_items
from leasehold.errors import ConfigError, Reentered, Unavailable
from leasehold.events import Event, EventKind, call_hook
from leasehold.model import Claim, Holder, Reason, Traits
from leasehold.runtime.base import Runtime

if TYPE_CHECKING:
    from leasehold.client.lease import BaseLease

_log = logging.getLogger("leasehold")

_POLL_INTERVAL = 0.005  # between looks, in close(), whether the others have left
_CLOSED_TEXT = "this client is closed: make a new one"


class ClientCore:
    def __init__(self, options: ClientOptions, config: EngineConfig, opener: Opener, runtime: Runtime) -> None:
        self.options, self.config, self.runtime = options, config, runtime
        self._opener = opener
        self.mutex = runtime.mutex()
        self.registry = ClaimRegistry(runtime, runtime.random_bytes(8).hex())
        self.callbacks = CallbackThread(runtime)
        self.held_locks = HeldLocks(runtime)
        self.watchdog = Watchdog(runtime, self.registry, self._new_engine, options.call_timeout, self.callbacks.submit)
        self.closed = self._fully_closed = False
        self.in_flight: set[str] = set()  # marks of what others acquire or release: close() waits for them
        self._traits_confirmed = False
        self._engine = self._new_engine(runtime)
        self._set_identity()

    def _new_engine(self, runtime: Runtime) -> Engine:
        return self._opener(self.config, runtime, self.registry)

    def _set_identity(self) -> None:
        self._host, self._pid = os.uname().nodename if hasattr(os, "uname") else "", os.getpid()
        self._label = self.options.holder or default_holder()
        self._holder = Holder(self._label, self._host, self._pid)

    @property
    def engine_name(self) -> str:
        """What the engine is called in events and errors: its scheme, never its address."""
        return self.config.scheme

    @property
    def traits(self) -> Traits:
        return self._engine.traits

    def engine(self) -> Engine:
        """The engine, for use now and from here."""
        if not self.runtime.bind():
            self.rebind_loop()
        return self.engine_unless_closed()

    def engine_unless_closed(self) -> Engine:
        """The same, for somebody who has just come from `bind`."""
        if self.closed:
            raise ConfigError(_CLOSED_TEXT)
        return self._engine

    async def check_traits(self, required: frozenset[str]) -> None:
        """Before the first grant: check what a lock requires against what the server's settings turned out to be."""
        if not self._traits_confirmed:
            await self.engine().ping(self.deadline())
            self._traits_confirmed = True
        check_required(required, self.traits, self.engine_name)

    def rebind_loop(self) -> None:
        """The event loop of before is closed: its tasks are gone, and so are the connections that lived in it."""
        for _, waiter in snapshot_items(self.registry.waiting):
            self.registry.remove_waiter(waiter.claim.id_hash)
            self.registry.retry_release(waiter.claim)
        self.in_flight.clear()
        self._engine = self._new_engine(self.runtime)

    def deadline(self) -> float:
        return self.runtime.now() + self.options.call_timeout

    def holder(self, label: str | None, purpose: str | None) -> Holder:
        if label is None and purpose is None:
            return self._holder
        return Holder(label or self._label, self._host, self._pid, purpose or "")

    def register(self, lease: BaseLease, loss_epoch: object) -> None:
        """Look after a new lease. It is known as held before it stops being known as waiting: a late wake-up for a
        claim nobody knows would release it. `loss_epoch`: what the book had there when it was asked for."""
        registry, id_hash = self.registry, lease._claim.id_hash
        registry.held[id_hash] = lease_ref = ref(lease)
        self.watchdog.watch(lease, lease_ref)
        registry.remove_waiter(id_hash)
        if registry.loss_epoch is not loss_epoch:  # before the lease could be met in the book
            lease._mark_at_risk("the engine lost its way while this was granted")
        if self.closed:  # meanwhile: either close() saw the lease just entered, or this sees that it is closed
            self.watchdog.unwatch(id_hash)
            lease._invalidate("released")
            raise ConfigError(_CLOSED_TEXT)

    def send_release(self, claim: Claim, now: float) -> Coroutine[Any, Any, bool]:
        """Release at the engine; if that does not answer, the caller has it owed."""
        return self._engine.release(claim, timing.call_deadline(now, self.options.call_timeout, claim.ttl))

    def retry_release(self, claim: Claim, error: Unavailable) -> None:
        self.registry.retry_release(claim)
        _log.warning("the release of %s could not be confirmed and is repeated: %s", claim.name, error)
        self.emit("release_pending", claim, reason=str(error))

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
        on_callback_thread: bool = False,
    ) -> None:
        """Hand an event to the client's hook; `on_callback_thread`: made by the watchdog, told on the teller's
        thread."""
        hook = self.options.on_event
        if hook is None:
            return
        event = Event(
            kind=kind,
            engine=self.engine_name,
            namespace=claim.namespace,
            name=claim.name,
            at=self.runtime.wall(),
            token=token,
            fingerprint=claim.fingerprint or None,
            holder=claim.holder.label,
            seconds=None if since is None else self.runtime.now() - since,
            reason=reason,
        )
        if on_callback_thread:
            self.callbacks.submit(call_hook, hook, event)
        else:
            call_hook(hook, event)

    def report_lost(self, lease: BaseLease, reason: Reason) -> None:
        level = logging.INFO if reason == "max_hold" else logging.WARNING
        text = "the lease of %s (token %d, %s) is lost: %s"
        self.callbacks.submit(_log.log, level, text, lease.name, lease.token, lease.fingerprint, reason)
        self.emit(
            "lost", lease._claim, token=lease.token, since=lease._granted_at, reason=reason, on_callback_thread=True
        )

    def report_at_risk(self, lease: BaseLease, error: Unavailable) -> None:
        self.callbacks.submit(_log.warning, "the lease of %s (token %d) is at risk: %s", lease.name, lease.token, error)
        self.emit(
            "at_risk",
            lease._claim,
            token=lease.token,
            since=lease._renewed_at,
            reason=str(error),
            on_callback_thread=True,
        )

    # ------------------------------------------------------ lives of a client

    def leases(self) -> list[BaseLease]:
        found = [lease_ref() for _, lease_ref in snapshot_items(self.registry.held)]
        return [lease for lease in found if lease is not None]  # type: ignore[misc]

    async def close(self) -> None:
        """Release what is held, settle what is owed, all within `call_timeout`; let go of the engine.

        Interrupted, it can be repeated: what it has not done yet is done then.
        """
        if self._fully_closed:
            return
        if not self.runtime.bind():
            self.rebind_loop()
        self.closed = True
        until = self.deadline()
        for lease in self.leases():
            lease._depth = 1
            if (
                self.registry.pending_releases
            ):  # an engine that did not answer for one is not asked for each of the others
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

    async def _drain_in_flight(self, until: float) -> None:
        """Have the others who acquire leave the line, and wait for them: a grant still on its way, or a place in line,
        is given up by whoever asked for it, and nobody could do that once the engine is let go. So with their releases:
        what `close()` found in nobody's hands must not be held any more when it returns."""
        own_id = self.runtime.owner_id()  # a signal handler may close the client inside a call of its own thread
        while True:
            for _, waiter in snapshot_items(self.registry.waiting):  # they find the client closed
                waiter.cancelled = True
                waiter.signal.set()
            if all(owner_of(id_hash) == own_id for id_hash in self.in_flight.copy()) or self.runtime.now() >= until:
                return
            await self.runtime.sleep(_POLL_INTERVAL)

    async def _send_pending_releases(self, until: float) -> None:
        self.watchdog.release_collected()
        while self.registry.pending_releases and self.runtime.now() < until:
            for id_hash, pending in snapshot_items(self.registry.pending_releases):
                try:
                    await self._engine.release(pending.claim, until)
                except Reentered:
                    return  # nothing can be answered before this very call has returned
                except Unavailable:
                    await self.runtime.sleep(0.05)
                    break
                self.registry.pending_releases.pop(id_hash, None)
        for _, unconfirmed in snapshot_items(self.registry.pending_releases):
            _log.warning("the release of %s was not confirmed before close(); it lapses", unconfirmed.claim.name)

    def stop_when_idle(self) -> None:
        """The client object is gone. What its leases need stays until they are."""
        self.watchdog.stop_when_idle()
        self.callbacks.stop_when_idle()

    def after_fork(self) -> None:
        """In a forked child: nothing here is held, renewed or released; the client itself can be used again."""
        inherited = self.leases()
        self.runtime.after_fork()
        self.mutex = self.runtime.mutex()
        self.held_locks.after_fork()
        self.in_flight.clear()
        self.registry.waiting.clear()
        self.registry.pending_releases.clear()
        self.registry.held.clear()
        self.registry.client_id = self.runtime.random_bytes(8).hex()
        self.callbacks.after_fork()
        self.watchdog.after_fork()
        self._engine.after_fork()
        self._set_identity()
        for lease in inherited:
            lease._invalidate("forked")
