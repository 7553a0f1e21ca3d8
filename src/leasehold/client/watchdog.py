"""The background renewer: one per client, on a thread of its own, even under asyncio.

Its promises:
- The watchdog renews a lease at a third of its life, sooner after a failed renewal, in batches. A call lasts at most a
  third of the shortest ttl that is held or may be granted meanwhile, so that one silent call does not cost another
  lease its renewal. Two exceptions: the limit is never below `_MIN_CALL_TIMEOUT`, and it does not apply to a retry
  after a failed renewal. But no call lasts longer than `call_timeout`, or than half of the time until the first lease
  ends (10 ms if that is shorter).
- In a slow network a call may last two thirds of both instead, as does the first call, because it opens a connection,
  which takes several round trips. If the grant was slow already, the first call begins right after it. Where the
  network is fast, a lease that ends before its first renewal costs no second connection.
- A lease that reaches its local deadline is ended and reported then, before the engine can grant the name again. One
  that was granted late, during a call, and ends before that call does, is reported after the call.
- Heartbeats keep waiters in the queue, and pending releases are retried until the engine answers.
- Leases are referenced weakly: one that was dropped is released, not renewed for ever.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from itertools import count
from weakref import ref

from leasehold.client.lease import BaseLease, LeaseRef, Renewal
from leasehold.core import timing
from leasehold.engines.base import Engine
from leasehold.engines.registry import ClaimRegistry, snapshot_items
from leasehold.errors import LeaseholdError, Unavailable
from leasehold.model import Alive, Claim, Gone
from leasehold.runtime.base import Runtime, Signal

_log = logging.getLogger("leasehold.watchdog")

_MAX_BATCH = 500
_MIN_CALL_TIMEOUT = 0.25  # the least a first try gets: on a slow network a shorter one never succeeds
_EARLY_SHARE = 0.1  # of the renewal interval: leases due this soon join a batch early
_NEVER = timing.NEVER
_DROPPED_TEXT = (
    "the lease of %s was dropped while it was held; it is released now, and the work is not protected: keep the lease "
    "in a variable (lease = lock.acquire()) and call lease.release(), or use `with lock as lease:`"
)


class Watchdog:
    def __init__(
        self,
        runtime: Runtime,
        registry: ClaimRegistry,
        open_engine: Callable[[Runtime], Engine],
        call_timeout: float,
        submit_callback: Callable[..., None],  # for calls that may block, such as log handlers
        report_released: Callable[[Claim, int], None],  # with the token; for leases that `release_soon` got
    ) -> None:
        self._submit_callback, self._report_released = submit_callback, report_released
        self._runtime, self._registry = runtime, registry
        self._open_engine, self._call_timeout = open_engine, call_timeout
        registry.wake_watchdog = self.wake_by
        # The shortest ttl of any lock of this client: such a lease may be granted during any call.
        self.shortest_ttl = _NEVER
        self._engine: Engine | None = None
        self.after_fork()

    def after_fork(self) -> None:
        """Watch nothing. The parent's thread does not exist in the child, and its leases are not the child's."""
        self._mutex = self._runtime.mutex()
        self._new_leases: dict[str, LeaseRef] = {}
        self._to_release: deque[tuple[Claim, int, bool]] = deque()
        self._renewals: list[tuple[float, int, LeaseRef]] = []  # by renewal time; may contain ended leases
        self._expiries: list[tuple[float, int, LeaseRef]] = []  # by local deadline; a renewal may have moved it
        self._sequence = count()
        self._next_heartbeat_at: float | None = None  # None while there are no waiters
        self._next_release_retry_at = 0.0
        self._release_failures = 0
        self._wakes_at = _NEVER  # NEVER while awake: then every `wake_by` sets the signal
        self._requested_wake = _NEVER  # what the last `wake_by` asked for
        self._signal: Signal | None = None
        self._running = False
        self._last_answer: float | None = None  # seconds that a call took; None: no connection is open yet
        self._stopped_signal: Signal | None = None  # set when the thread has ended, for stop()
        self._stopped = self._stops_when_idle = False
        if self._engine is not None:
            self._engine.after_fork()
            self._engine = None

    # --------------------------------------------- from the callers' threads

    def watch(self, lease: BaseLease, lease_ref: LeaseRef | None = None) -> None:
        self._new_leases[lease._claim.id_hash] = lease_ref or ref(lease)  # atomic on a dictionary: no mutex
        asked_at, ttl, end = lease._validity  # max_hold may end it before any renewal is due
        due = lease._renew_at
        if self._last_answer is None:  # the first renewal opens a connection, which takes long if the grant did
            now = self._runtime.now()
            if timing.is_slow(now - asked_at, ttl) and now < due < end:
                lease._renew_at = due = now
        if due < self._wakes_at or end < self._wakes_at or not self._running:
            self.wake_by(due if due < end else end)

    def unwatch(self, id_hash: str) -> None:
        self._registry.held.pop(id_hash, None)
        self._new_leases.pop(id_hash, None)
        if self._stops_when_idle:  # it may be idle now
            self._wake()

    def release_soon(self, claim: Claim, token: int, dropped: bool = False) -> None:
        """Release a lease on the watchdog's thread. Safe in a finaliser: takes no mutex and logs nothing. `dropped`:
        the lease was garbage-collected while held."""
        self._to_release.append((claim, token, dropped))
        self._wake()

    def wake_by(self, at: float) -> None:
        """Make the watchdog run by this instant."""
        if not self._running:
            self._start()
        elif at < self._wakes_at and self._signal is not None:
            self._requested_wake = at
            self._signal.set()

    def stop_when_idle(self) -> None:
        """End once there is nothing left to do: the client object is gone. Safe inside a finaliser."""
        self._stops_when_idle = True
        self._wake()

    async def stop(self, seconds: float) -> None:
        self._stopped_signal = self._runtime.signal()
        self.request_stop()
        if self._running:
            await self._stopped_signal.wait(seconds)

    def request_stop(self) -> None:
        self._stopped = True
        self._wake()

    @property
    def running(self) -> bool:
        return self._running

    def retry_releases_now(self) -> None:
        """Send the pending releases now, even if the last try failed a moment ago."""
        self._next_release_retry_at = 0.0
        self.wake_by(self._runtime.now())
        self._wake()

    def _wake(self) -> None:
        """Make the thread run now. Safe in a finaliser."""
        if self._signal is not None:
            self._signal.set()

    def _start(self) -> None:
        with self._mutex:
            if self._running or self._stopped:
                return
            self._running = True
        try:
            self._runtime.start_thread(self._run, "leasehold-watchdog")
        except BaseException:  # no thread could be started, or Ctrl-C: the next `wake_by` tries again
            self._running = False
            raise

    # ----------------------------------------- on the watchdog's own thread

    async def _run(self, runtime: Runtime) -> None:
        self._signal = signal = runtime.signal()
        while not self._stopped:
            self._wakes_at = _NEVER
            try:
                wake = await self._run_once(runtime)
            except Exception as error:
                # Continue after any error: a dead watchdog would lose every lease of the client.
                self._submit_callback(
                    partial(_log.error, "unexpected error in the watchdog; continuing", exc_info=error)
                )
                wake = runtime.now() + 0.1
            if self._stops_when_idle and wake == _NEVER and self._try_finish():
                break
            # Keep the requested wake-up even if its lease has ended: then the next lease, due no earlier, need not wake
            # this thread. Otherwise each short-lived lease would.
            requested, self._requested_wake = self._requested_wake, _NEVER
            if requested > runtime.now():
                wake = min(wake, requested)
            self._wakes_at = wake
            # While the machine is suspended, a sleep does not advance, but a ttl does. So the thread sleeps only
            # briefly while it has something to do.
            await signal.wait(3600.0 if wake == _NEVER else min(wake - runtime.now(), timing.MAX_SLEEP))
        try:
            if self._engine is not None or self._registry.closed:  # closed: at exit nothing else closes the session
                await self._own_engine(runtime).close()
                self._engine = None
        except Exception as error:
            self._submit_callback(partial(_log.error, "could not close the watchdog's connections", exc_info=error))
        finally:  # stop() waits for this
            if self._stopped:
                self._running = False
                if self._stopped_signal is not None:
                    self._stopped_signal.set()

    def _try_finish(self) -> bool:
        with self._mutex:
            if self._new_leases:
                return False
            self._running = False  # a later `wake_by` starts a new thread
            return True

    async def _run_once(self, runtime: Runtime) -> float:
        """Do everything that is due, and return when to run again."""
        self._take_new_leases()
        self._expire_overdue(runtime.now())
        await self._renew_due(runtime)
        await self._send_heartbeats(runtime)
        await self._retry_pending_releases(runtime)
        self._expire_overdue(runtime.now())
        return min(
            self._next_renewal_at(),
            self._next_expiry_at(),
            _NEVER if self._next_heartbeat_at is None else self._next_heartbeat_at,
            self._next_release_retry_at if self._registry.pending_releases else _NEVER,
        )

    def _take_new_leases(self) -> None:
        while self._new_leases:
            try:
                _, lease_ref = self._new_leases.popitem()
            except KeyError:  # released by another thread just now
                break
            if (lease := lease_ref()) is not None:
                if lease.guaranteed:
                    self._schedule_renewal(lease, lease_ref)
                self._schedule_expiry(lease, lease_ref)
        self.start_releases()

    def start_releases(self) -> None:
        while self._to_release:
            try:
                claim, token, dropped = self._to_release.popleft()
            except IndexError:  # close() and the watchdog's own thread may both be here
                return
            self._registry.held.pop(claim.id_hash, None)
            self._registry.retry_release(claim)
            self._report_released(claim, token)
            if dropped:
                self._submit_callback(_log.warning, _DROPPED_TEXT, claim.name)

    def _schedule_renewal(self, lease: BaseLease, lease_ref: LeaseRef) -> None:
        lease._renewal_entry_id = next(self._sequence)
        heappush(self._renewals, (lease._renew_at, lease._renewal_entry_id, lease_ref))

    def _schedule_expiry(self, lease: BaseLease, lease_ref: LeaseRef) -> None:
        lease._expiry_entry_id = next(self._sequence)
        heappush(self._expiries, (lease._validity.valid_until, lease._expiry_entry_id, lease_ref))

    def _next_renewal_at(self) -> float:
        while self._renewals:
            planned_at, entry_id, lease_ref = self._renewals[0]
            lease = lease_ref()
            if lease is not None and lease._final_state is None and lease._renewal_entry_id == entry_id:
                return planned_at
            heappop(self._renewals)
        return _NEVER

    def _next_expiry_at(self) -> float:
        """The earliest local deadline of all leases. Entries that a renewal made out of date are corrected here."""
        while self._expiries:
            planned_at, entry_id, lease_ref = self._expiries[0]
            lease = lease_ref()
            if lease is not None and lease._final_state is None and lease._expiry_entry_id == entry_id:
                if lease._validity.valid_until <= planned_at:
                    return planned_at
                self._schedule_expiry(lease, lease_ref)
            heappop(self._expiries)
        return _NEVER

    def _expire_overdue(self, now: float) -> None:
        while self._next_expiry_at() <= now:
            lease = heappop(self._expiries)[2]()
            if lease is not None and lease._validity.valid_until <= now:
                lease._end_lost(lease._expiry_reason())

    def _deadline(self, runtime: Runtime, after_failure: bool = False) -> float:
        """The deadline of a call. `after_failure`: a retry may exceed a third of the shortest ttl, so that a slow
        engine costs a lease one try, not its life."""
        self._take_new_leases()  # a call must not outlast a lease that was granted during the call before
        now = runtime.now()
        slow = self._last_answer is None or timing.is_slow(self._last_answer, self.shortest_ttl)
        latest = timing.renewal_deadline(now, self._next_expiry_at(), self._call_timeout, slow)
        usual = self.shortest_ttl * (2 / 3 if slow else 1 / 3)
        return latest if after_failure else min(latest, now + max(usual, _MIN_CALL_TIMEOUT))

    async def _renew_due(self, runtime: Runtime) -> None:
        """Renew in batches: ten thousand leases take a few batches a second, not one call each. One batch per run: a
        short-lived lease must not wait for hundreds that are only nearly due."""
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
                    else lease._renew_at - (lease._renew_at - lease._validity.asked_at) * _EARLY_SHARE
                )
                if now >= due_soon_at:
                    due.append(lease)
                elif now < planned_at:
                    break
                else:  # renewed explicitly meanwhile: this entry is void
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
                lease._on_renewal(Renewal(asked_at, claim, reply))
        finally:  # whatever was raised, every lease gets its next renewal
            for lease in leases:
                if lease._final_state is None:
                    self._schedule_renewal(lease, ref(lease))

    async def _send_renewals(
        self, runtime: Runtime, claims: list[Claim], after_failure: bool = False
    ) -> list[Alive | Gone | Unavailable]:
        """The engine's answers, or `Unavailable` for all: any other failure is not an answer (E5)."""
        asked_at = runtime.now()
        try:
            replies = list(await self._own_engine(runtime).renew(claims, self._deadline(runtime, after_failure)))
            if any(not isinstance(reply, Unavailable) for reply in replies):
                self._last_answer = runtime.now() - asked_at
            return replies
        except Exception as error:
            if not isinstance(error, LeaseholdError):
                text = "a renewal failed with an error that the engine should have mapped (E9)"
                self._submit_callback(partial(_log.error, text, exc_info=error))
            return [Unavailable(f"renewal failed: {error}")] * len(claims)

    async def _send_heartbeats(self, runtime: Runtime) -> None:
        """One batch for all waiters (E7). A waiter that is at the head, has a reservation, was passed over or is
        unknown to the engine is woken, so that it asks again even if no wake-up came. The others need not ask, and
        neither need those whose first attempt is still under way.

        The attempt with which a waiter joined the queue was its first heartbeat, so none is sent while all waiters are
        newer than the interval."""
        waiters = [waiter for _, waiter in snapshot_items(self._registry.waiting) if not waiter.refused]
        if not waiters:
            self._next_heartbeat_at = None
            return
        now, due_at = runtime.now(), min(waiter.joined_at for waiter in waiters) + timing.HEARTBEAT_INTERVAL
        if self._next_heartbeat_at is None or self._next_heartbeat_at < due_at:
            self._next_heartbeat_at = due_at
        if now < self._next_heartbeat_at:
            return
        self._next_heartbeat_at = now + timing.HEARTBEAT_INTERVAL
        for waiter, reply in zip(waiters, await self._send_renewals(runtime, [w.claim for w in waiters]), strict=True):
            if isinstance(reply, Alive) and reply.position:
                waiter.kept_at = now
            elif isinstance(reply, Alive) or (isinstance(reply, Gone) and waiter.answered):
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
                    # To the end of the queue: the other releases may go to servers that answer.
                    if found := self._registry.pending_releases.pop(id_hash, None):
                        self._registry.pending_releases.setdefault(id_hash, found)
                    self._release_failures += 1
                    jitter = 0.5 + runtime.random() / 2
                    self._next_release_retry_at = runtime.now() + timing.backoff(
                        self._release_failures, 0.05, 2.0, jitter
                    )
                    self._submit_callback(
                        _log.info, "the release of %s is still pending: %s", pending.claim.name, error
                    )
                    return
            if self._registry.pending_releases.get(id_hash) is pending:  # not scheduled again meanwhile
                self._registry.pending_releases.pop(id_hash, None)
            if min(self._next_renewal_at(), self._next_expiry_at()) <= runtime.now():
                return  # thousands of releases must not cost a lease: the next run goes on with them
        self._release_failures, self._next_release_retry_at = 0, 0.0

    def _own_engine(self, runtime: Runtime) -> Engine:
        if self._engine is None:  # a connection of its own, opened at the first renewal
            self._engine, self._last_answer = self._open_engine(runtime), None
        return self._engine
