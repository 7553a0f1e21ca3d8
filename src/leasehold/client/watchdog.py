"""The background renewer: one per client, on a thread of its own also under asyncio.

Its promises (DESIGN: "renewal a busy program can hardly starve"):
- a lease is renewed at a third of its life, sooner after a miss, in batches; no call outlasts a third of the shortest
  life it looks after, or may be given meanwhile, so one silent call never costs another lease its renewal;
- a lease that reaches its local deadline is ended then, and told, before the engine can grant the name again;
- waiters keep their place in line, and owed releases are repeated until answered;
- leases are held weakly: one that was dropped is released, not renewed for ever.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from itertools import count
from weakref import ref

from leasehold.client.lease import BaseLease, LeaseRef
from leasehold.core import timing
from leasehold.engines.base import Engine
from leasehold.engines.registry import ClaimRegistry, snapshot_items
from leasehold.errors import LeaseholdError, Unavailable
from leasehold.model import Alive, Claim, Gone
from leasehold.runtime.base import Runtime, Signal

_log = logging.getLogger("leasehold.watchdog")

_MAX_BATCH = 500
_MIN_CALL_TIMEOUT = 0.25  # no first try is given less: a slow network would answer none
_EARLY_SHARE = 0.1  # of the time from one renewal to the next: what is so nearly due goes along with what is
_NEVER = timing.NEVER


class Watchdog:
    def __init__(
        self,
        runtime: Runtime,
        registry: ClaimRegistry,
        open_engine: Callable[[Runtime], Engine],
        call_timeout: float,
        submit_callback: Callable[..., None],  # runs elsewhere what may block: a log handler above all
    ) -> None:
        self._submit_callback = submit_callback
        self._runtime, self._registry, self._open_engine, self._call_timeout = (
            runtime,
            registry,
            open_engine,
            call_timeout,
        )
        registry.wake_watchdog = self.wake_by
        self.shortest_ttl = (
            _NEVER  # the least ttl any lock of this client asks for: such a lease may come during any call
        )
        self._engine: Engine | None = None
        self.after_fork()

    def after_fork(self) -> None:
        """Watch nothing. The parent's thread does not exist here, and its leases are not ours."""
        self._mutex = self._runtime.mutex()
        self._new_leases: dict[str, LeaseRef] = {}
        self._collected: deque[Claim] = deque()
        self._renewals: list[tuple[float, int, LeaseRef]] = []  # by when to renew; may name what has ended
        self._expiries: list[tuple[float, int, LeaseRef]] = []  # by local deadline; a later one may be true by now
        self._sequence = count()
        self._next_heartbeat_at = self._next_release_retry_at = 0.0
        self._release_failures = 0
        self._wakes_at = _NEVER  # while awake: every stir is remembered
        self._requested_wake = _NEVER  # what the last stir asked for
        self._signal: Signal | None = None
        self._running = False
        self._stopped_signal: Signal | None = None  # set when it has ended, for whoever waits for that
        self._stopped = self._stops_when_idle = False
        if self._engine is not None:
            self._engine.after_fork()
            self._engine = None

    # --------------------------------------------- from the callers' threads

    def watch(self, lease: BaseLease, lease_ref: LeaseRef | None = None) -> None:
        self._new_leases[lease._claim.id_hash] = lease_ref or ref(lease)  # single steps on a dictionary: no guard
        due, end = lease._renew_at, lease._valid_until  # max_hold may end it before any renewal is due
        if due < self._wakes_at or end < self._wakes_at or not self._running:
            self.wake_by(due if due < end else end)

    def unwatch(self, id_hash: str) -> None:
        self._registry.held.pop(id_hash, None)
        self._new_leases.pop(id_hash, None)
        if self._stops_when_idle and self._signal is not None:  # perhaps there is nothing left to stay for
            self._signal.set()

    def lease_collected(self, claim: Claim) -> None:
        """A lease was collected while held. Called by its finaliser: no guard may be taken here."""
        self._collected.append(claim)
        if self._signal is not None:
            self._signal.set()

    def wake_by(self, at: float) -> None:
        """See that the watchdog looks around by this instant."""
        if not self._running:
            self._start()
        elif at < self._wakes_at and self._signal is not None:
            self._requested_wake = at
            self._signal.set()

    def stop_when_idle(self) -> None:
        """End once there is nothing left to look after: the client itself is gone. Safe inside a finaliser."""
        self._stops_when_idle = True
        if self._signal is not None:
            self._signal.set()

    async def stop(self, seconds: float) -> None:
        self._stopped_signal = self._runtime.signal()
        self._stopped = True
        if self._running:
            if self._signal is not None:
                self._signal.set()
            await self._stopped_signal.wait(seconds)

    def _start(self) -> None:
        with self._mutex:
            if self._running or self._stopped:
                return
            self._running = True
        try:
            self._runtime.start_thread(self._run, "leasehold-watchdog")
        except BaseException:  # no thread to be had, or Ctrl-C just here: whoever stirs next tries again
            self._running = False
            raise

    # ------------------------------------------------ on the watchdog's own

    async def _run(self, runtime: Runtime) -> None:
        self._signal = signal = runtime.signal()
        while not self._stopped:
            self._wakes_at = _NEVER
            try:
                wake = await self._run_once(runtime)
            except Exception as error:
                # A dead watchdog would lose every lease of the client: whatever this was, go on.
                self._submit_callback(partial(_log.error, "the watchdog stumbled; it goes on", exc_info=error))
                wake = runtime.now() + 0.1
            if self._stops_when_idle and wake == _NEVER and self._try_finish():
                break
            # A lease too short-lived to be met here still fixes the next look, or each of its kind would stir anew.
            requested, self._requested_wake = self._requested_wake, _NEVER
            if requested > runtime.now():
                wake = min(wake, requested)
            self._wakes_at = wake
            # A sleep does not count suspend as lives do: with something to look after, it is never a long one.
            await signal.wait(3600.0 if wake == _NEVER else min(wake - runtime.now(), timing.MAX_SLEEP))
        if self._engine is not None:
            await self._engine.close()
            self._engine = None
        if self._stopped and self._stopped_signal is not None:
            self._stopped_signal.set()

    def _try_finish(self) -> bool:
        with self._mutex:
            if self._new_leases:
                return False
            self._running = False  # whoever still stirs after this starts it anew
            return True

    async def _run_once(self, runtime: Runtime) -> float:
        """Do all that is due, and say when to look again."""
        self._take_new_leases()
        self._expire_overdue(runtime.now())
        await self._renew_due(runtime)
        await self._send_heartbeats(runtime)
        await self._retry_pending_releases(runtime)
        self._expire_overdue(runtime.now())
        return min(
            self._next_renewal_at(),
            self._next_expiry_at(),
            self._next_heartbeat_at if self._registry.waiting else _NEVER,
            self._next_release_retry_at if self._registry.pending_releases else _NEVER,
        )

    def _take_new_leases(self) -> None:
        while self._new_leases:
            try:
                _, lease_ref = self._new_leases.popitem()
            except KeyError:  # released by another thread just now
                break
            if (lease := lease_ref()) is not None:
                self._schedule_renewal(lease, lease_ref)
                self._schedule_expiry(lease, lease_ref)
        self.release_collected()

    def release_collected(self) -> None:
        while self._collected:
            try:
                claim = self._collected.popleft()
            except IndexError:  # close() and the watchdog's own thread may both be here
                return
            self._registry.held.pop(claim.id_hash, None)
            self._registry.retry_release(claim)

    def _schedule_renewal(self, lease: BaseLease, lease_ref: LeaseRef) -> None:
        lease._renewal_entry_id = next(self._sequence)
        heappush(self._renewals, (lease._renew_at, lease._renewal_entry_id, lease_ref))

    def _schedule_expiry(self, lease: BaseLease, lease_ref: LeaseRef) -> None:
        lease._expiry_entry_id = next(self._sequence)
        heappush(self._expiries, (lease._valid_until, lease._expiry_entry_id, lease_ref))

    def _next_renewal_at(self) -> float:
        while self._renewals:
            planned_at, entry_id, lease_ref = self._renewals[0]
            lease = lease_ref()
            if lease is not None and lease._final_state is None and lease._renewal_entry_id == entry_id:
                return planned_at
            heappop(self._renewals)
        return _NEVER

    def _next_expiry_at(self) -> float:
        """The earliest local deadline among all leases. Entries made out of date by a renewal are corrected here."""
        while self._expiries:
            planned_at, entry_id, lease_ref = self._expiries[0]
            lease = lease_ref()
            if lease is not None and lease._final_state is None and lease._expiry_entry_id == entry_id:
                if lease._valid_until <= planned_at:
                    return planned_at
                self._schedule_expiry(lease, lease_ref)
            heappop(self._expiries)
        return _NEVER

    def _expire_overdue(self, now: float) -> None:
        while self._next_expiry_at() <= now:
            lease = heappop(self._expiries)[2]()
            if lease is not None and lease._valid_until <= now:
                lease._end_lost(lease._expiry_reason())

    def _deadline(self, runtime: Runtime, after_failure: bool = False) -> float:
        """`after_failure`, after a miss: an engine slower than the shortest ttl allows costs a try, not the lease."""
        now = runtime.now()
        latest = timing.renewal_deadline(now, self._next_expiry_at(), self._call_timeout)
        return latest if after_failure else min(latest, now + max(self.shortest_ttl / 3, _MIN_CALL_TIMEOUT))

    async def _renew_due(self, runtime: Runtime) -> None:
        """Ten thousand leases are renewed in a few batches a second, not each when its time has come. One batch at a
        time: with hundreds that are only nearly due, a short-lived one would wait for all of them."""
        now, due, heap = runtime.now(), list[BaseLease](), self._renewals
        if self._next_renewal_at() > now:
            return
        while heap and len(due) < _MAX_BATCH:
            planned_at, entry_id, lease_ref = heap[0]
            lease = lease_ref()
            if lease is not None and lease._final_state is None and lease._renewal_entry_id == entry_id:
                due_soon_at = (
                    lease._renew_at
                    if lease._renewal_failed
                    else lease._renew_at - (lease._renew_at - lease._renewed_at) * _EARLY_SHARE
                )
                if now >= due_soon_at:
                    due.append(lease)
                elif now < planned_at:
                    break
                else:  # renewed by hand meanwhile; this appointment is void now
                    self._schedule_renewal(lease, lease_ref)
                    continue
            heappop(heap)
        if due:
            await self._renew(runtime, due)

    async def _renew(self, runtime: Runtime, leases: list[BaseLease]) -> None:
        asked_at = runtime.now()
        claims = [lease._claim_for_renewal() for lease in leases]
        for lease in leases:
            lease._renewal_attempted = True
        after_failure = any(lease._renewal_failed for lease in leases)
        try:
            for lease, claim, reply in zip(
                leases, claims, await self._send_renewals(runtime, claims, after_failure), strict=True
            ):
                lease._on_renewal_reply(asked_at, claim, reply)
        finally:  # whatever was raised in there, all of them keep their next appointments
            for lease in leases:
                if lease._final_state is None:
                    self._schedule_renewal(lease, ref(lease))

    async def _send_renewals(
        self, runtime: Runtime, claims: list[Claim], after_failure: bool = False
    ) -> list[Alive | Gone | Unavailable]:
        """The engine's answers, or one `Unavailable` for all: whatever else goes wrong is not an answer (E5)."""
        try:
            return list(await self._own_engine(runtime).renew(claims, self._deadline(runtime, after_failure)))
        except Exception as error:
            if not isinstance(error, LeaseholdError):
                text = "a renewal failed in a way the engine should have mapped (E9)"
                self._submit_callback(partial(_log.error, text, exc_info=error))
            return [Unavailable(f"renewal failed: {error}")] * len(claims)

    async def _send_heartbeats(self, runtime: Runtime) -> None:
        """One batch for all waiters (E7). One that is at the head, had its turn or is not known any more is woken, so
        that it asks again though no wake-up came: the others need not ask for themselves."""
        now = runtime.now()
        if not self._registry.waiting or now < self._next_heartbeat_at:
            return
        self._next_heartbeat_at = now + timing.HEARTBEAT_INTERVAL
        waiters = [waiter for _, waiter in snapshot_items(self._registry.waiting)]
        for waiter, reply in zip(waiters, await self._send_renewals(runtime, [w.claim for w in waiters]), strict=True):
            if isinstance(reply, Gone) or (isinstance(reply, Alive) and not reply.position):
                waiter.woken = True
                waiter.signal.set()

    async def _retry_pending_releases(self, runtime: Runtime) -> None:
        if runtime.now() < self._next_release_retry_at:
            return
        for id_hash, pending in snapshot_items(self._registry.pending_releases):
            if runtime.now() < pending.retry_until:
                try:
                    await self._own_engine(runtime).release(pending.claim, self._deadline(runtime))
                except LeaseholdError as error:
                    if found := self._registry.pending_releases.pop(
                        id_hash, None
                    ):  # others first, the next time: they may be elsewhere
                        self._registry.pending_releases.setdefault(id_hash, found)
                    self._release_failures += 1
                    jitter = 0.5 + runtime.random() / 2
                    self._next_release_retry_at = runtime.now() + timing.backoff(
                        self._release_failures, 0.05, 2.0, jitter
                    )
                    self._submit_callback(_log.info, "the release of %s is still owed: %s", pending.claim.name, error)
                    return
            if self._registry.pending_releases.get(id_hash) is pending:  # not owed anew meanwhile
                self._registry.pending_releases.pop(id_hash, None)
        self._release_failures, self._next_release_retry_at = 0, 0.0

    def _own_engine(self, runtime: Runtime) -> Engine:
        if self._engine is None:  # a connection of its own, opened at the first renewal
            self._engine = self._open_engine(runtime)
        return self._engine
