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

from leasehold.book import Book, every
from leasehold.core import timing
from leasehold.engine import Engine
from leasehold.errors import LeaseholdError, Unavailable
from leasehold.model import Alive, Claim, Gone
from leasehold.recipes.lease import BaseLease, LeaseRef
from leasehold.runtime.base import Runtime, Signal

_log = logging.getLogger("leasehold.watchdog")

_BATCH = 500
_LEAST_CALL = 0.25  # no first try is given less: a slow network would answer none
_EARLY = 0.1  # of the time from one renewal to the next: what is so nearly due goes along with what is
_NEVER = timing.NEVER


class Watchdog:
    def __init__(
        self,
        runtime: Runtime,
        book: Book,
        open_twin: Callable[[Runtime], Engine],
        call_timeout: float,
        tell: Callable[..., None],  # runs elsewhere what may block: a log handler above all
    ) -> None:
        self._tell = tell
        self._runtime, self._book, self._open_twin, self._call_timeout = runtime, book, open_twin, call_timeout
        book.stir = self.stir
        self.shortest = _NEVER  # the least ttl any lock of this client asks for: such a lease may come during any call
        self._engine: Engine | None = None
        self.after_fork()

    def after_fork(self) -> None:
        """Watch nothing. The parent's thread does not exist here, and its leases are not ours."""
        self._guard = self._runtime.guard()
        self._fresh: dict[str, LeaseRef] = {}
        self._dropped: deque[Claim] = deque()
        self._renewals: list[tuple[float, int, LeaseRef]] = []  # by when to renew; may name what has ended
        self._ends: list[tuple[float, int, LeaseRef]] = []  # by local deadline; a later one may be true by now
        self._order = count()
        self._beat_at = self._owed_at = 0.0
        self._owed_misses = 0
        self._wakes_at = _NEVER  # while awake: every stir is remembered
        self._wanted = _NEVER  # what the last stir asked for
        self._signal: Signal | None = None
        self._running = False
        self._ended: Signal | None = None  # set when it has ended, for whoever waits for that
        self._stopped = self._retired = False
        if self._engine is not None:
            self._engine.after_fork()
            self._engine = None

    # --------------------------------------------- from the callers' threads

    def watch(self, lease: BaseLease, held: LeaseRef | None = None) -> None:
        self._fresh[lease._claim.mark] = held or ref(lease)  # single steps on a dictionary: no guard
        due, end = lease._due, lease._valid_until  # max_hold may end it before any renewal is due
        if due < self._wakes_at or end < self._wakes_at or not self._running:
            self.stir(due if due < end else end)

    def drop(self, mark: str) -> None:
        self._book.held.pop(mark, None)
        self._fresh.pop(mark, None)
        if self._retired and self._signal is not None:  # perhaps there is nothing left to stay for
            self._signal.set()

    def dropped(self, claim: Claim) -> None:
        """A lease was collected while held. Called by its finaliser: no guard may be taken here."""
        self._dropped.append(claim)
        if self._signal is not None:
            self._signal.set()

    def stir(self, at: float) -> None:
        """See that the watchdog looks around by this instant."""
        if not self._running:
            self._start()
        elif at < self._wakes_at and self._signal is not None:
            self._wanted = at
            self._signal.set()

    def retire(self) -> None:
        """End once there is nothing left to look after: the client itself is gone. Safe inside a finaliser."""
        self._retired = True
        if self._signal is not None:
            self._signal.set()

    async def stop(self, seconds: float) -> None:
        self._ended = self._runtime.signal()
        self._stopped = True
        if self._running:
            if self._signal is not None:
                self._signal.set()
            await self._ended.wait(seconds)

    def _start(self) -> None:
        with self._guard:
            if self._running or self._stopped:
                return
            self._running = True
        try:
            self._runtime.aside(self._run, "leasehold-watchdog")
        except BaseException:  # no thread to be had, or Ctrl-C just here: whoever stirs next tries again
            self._running = False
            raise

    # ------------------------------------------------ on the watchdog's own

    async def _run(self, runtime: Runtime) -> None:
        self._signal = signal = runtime.signal()
        while not self._stopped:
            self._wakes_at = _NEVER
            try:
                wake = await self._turn(runtime)
            except Exception as error:
                # A dead watchdog would lose every lease of the client: whatever this was, go on.
                self._tell(partial(_log.error, "the watchdog stumbled; it goes on", exc_info=error))
                wake = runtime.now() + 0.1
            if self._retired and wake == _NEVER and self._finished():
                break
            # A lease too short-lived to be met here still fixes the next look, or each of its kind would stir anew.
            wanted, self._wanted = self._wanted, _NEVER
            if wanted > runtime.now():
                wake = min(wake, wanted)
            self._wakes_at = wake
            # A sleep does not count suspend as lives do: with something to look after, it is never a long one.
            await signal.wait(3600.0 if wake == _NEVER else min(wake - runtime.now(), timing.LOOK_EVERY))
        if self._engine is not None:
            await self._engine.close()
            self._engine = None
        if self._stopped and self._ended is not None:
            self._ended.set()

    def _finished(self) -> bool:
        with self._guard:
            if self._fresh:
                return False
            self._running = False  # whoever still stirs after this starts it anew
            return True

    async def _turn(self, runtime: Runtime) -> float:
        """Do all that is due, and say when to look again."""
        self._absorb()
        self._end_overdue(runtime.now())
        await self._renew_due(runtime)
        await self._keep_places(runtime)
        await self._settle_owed(runtime)
        self._end_overdue(runtime.now())
        return min(
            self._first_renewal(),
            self._first_end(),
            self._beat_at if self._book.waiting else _NEVER,
            self._owed_at if self._book.owed else _NEVER,
        )

    def _absorb(self) -> None:
        while self._fresh:
            try:
                _, held = self._fresh.popitem()
            except KeyError:  # released by another thread just now
                break
            if (lease := held()) is not None:
                self._plan(lease, held)
                self._plan_end(lease, held)
        self.owe_dropped()

    def owe_dropped(self) -> None:
        while self._dropped:
            try:
                claim = self._dropped.popleft()
            except IndexError:  # close() and the watchdog's own thread may both be here
                return
            self._book.held.pop(claim.mark, None)
            self._book.owe(claim)

    def _plan(self, lease: BaseLease, held: LeaseRef) -> None:
        lease._plan = next(self._order)
        heappush(self._renewals, (lease._due, lease._plan, held))

    def _plan_end(self, lease: BaseLease, held: LeaseRef) -> None:
        lease._end_plan = next(self._order)
        heappush(self._ends, (lease._valid_until, lease._end_plan, held))

    def _first_renewal(self) -> float:
        while self._renewals:
            planned, plan, held = self._renewals[0]
            lease = held()
            if lease is not None and lease._ended is None and lease._plan == plan:
                return planned
            heappop(self._renewals)
        return _NEVER

    def _first_end(self) -> float:
        """The earliest local deadline among all leases. Entries made out of date by a renewal are corrected here."""
        while self._ends:
            planned, plan, held = self._ends[0]
            lease = held()
            if lease is not None and lease._ended is None and lease._end_plan == plan:
                if lease._valid_until <= planned:
                    return planned
                self._plan_end(lease, held)
            heappop(self._ends)
        return _NEVER

    def _end_overdue(self, now: float) -> None:
        while self._first_end() <= now:
            lease = heappop(self._ends)[2]()
            if lease is not None and lease._valid_until <= now:
                lease._lose(lease._reason_by_clock())

    def _deadline(self, runtime: Runtime, patient: bool = False) -> float:
        """`patient`, after a miss: an engine slower than the shortest ttl allows costs a try, not the lease."""
        now = runtime.now()
        latest = timing.renewal_deadline(now, self._first_end(), self._call_timeout)
        return latest if patient else min(latest, now + max(self.shortest / 3, _LEAST_CALL))

    async def _renew_due(self, runtime: Runtime) -> None:
        """Ten thousand leases are renewed in a few batches a second, not each when its time has come. One batch at a
        time: with hundreds that are only nearly due, a short-lived one would wait for all of them."""
        now, due, heap = runtime.now(), list[BaseLease](), self._renewals
        if self._first_renewal() > now:
            return
        while heap and len(due) < _BATCH:
            planned, plan, held = heap[0]
            lease = held()
            if lease is not None and lease._ended is None and lease._plan == plan:
                nearly = lease._due if lease._missed else lease._due - (lease._due - lease._asked) * _EARLY
                if now >= nearly:
                    due.append(lease)
                elif now < planned:
                    break
                else:  # renewed by hand meanwhile; this appointment is void now
                    self._plan(lease, held)
                    continue
            heappop(heap)
        if due:
            await self._renew(runtime, due)

    async def _renew(self, runtime: Runtime, leases: list[BaseLease]) -> None:
        asked = runtime.now()
        claims = [lease._renewal() for lease in leases]
        for lease in leases:
            lease._tried = True
        patient = any(lease._missed for lease in leases)
        try:
            for lease, claim, reply in zip(leases, claims, await self._ask(runtime, claims, patient), strict=True):
                lease._answered(asked, claim, reply)
        finally:  # whatever was raised in there, all of them keep their next appointments
            for lease in leases:
                if lease._ended is None:
                    self._plan(lease, ref(lease))

    async def _ask(
        self, runtime: Runtime, claims: list[Claim], patient: bool = False
    ) -> list[Alive | Gone | Unavailable]:
        """The engine's answers, or one `Unavailable` for all: whatever else goes wrong is not an answer (E5)."""
        try:
            return list(await self._twin(runtime).renew(claims, self._deadline(runtime, patient)))
        except Exception as error:
            if not isinstance(error, LeaseholdError):
                text = "a renewal failed in a way the engine should have mapped (E9)"
                self._tell(partial(_log.error, text, exc_info=error))
            return [Unavailable(f"renewal failed: {error}")] * len(claims)

    async def _keep_places(self, runtime: Runtime) -> None:
        """One batch for all waiters (E7). One that is at the head, had its turn or is not known any more is woken, so
        that it asks again though no wake-up came: the others need not ask for themselves."""
        now = runtime.now()
        if not self._book.waiting or now < self._beat_at:
            return
        self._beat_at = now + timing.BEAT_EVERY
        waiters = [waiter for _, waiter in every(self._book.waiting)]
        for waiter, reply in zip(waiters, await self._ask(runtime, [w.claim for w in waiters]), strict=True):
            if isinstance(reply, Gone) or (isinstance(reply, Alive) and not reply.place):
                waiter.go = True
                waiter.signal.set()

    async def _settle_owed(self, runtime: Runtime) -> None:
        if runtime.now() < self._owed_at:
            return
        for mark, owed in every(self._book.owed):
            if runtime.now() < owed.until:
                try:
                    await self._twin(runtime).release(owed.claim, self._deadline(runtime))
                except LeaseholdError as error:
                    if found := self._book.owed.pop(mark, None):  # others first, the next time: they may be elsewhere
                        self._book.owed.setdefault(mark, found)
                    self._owed_misses += 1
                    jitter = 0.5 + runtime.fraction() / 2
                    self._owed_at = runtime.now() + timing.backoff(self._owed_misses, 0.05, 2.0, jitter)
                    self._tell(_log.info, "the release of %s is still owed: %s", owed.claim.name, error)
                    return
            if self._book.owed.get(mark) is owed:  # not owed anew meanwhile
                self._book.owed.pop(mark, None)
        self._owed_misses, self._owed_at = 0, 0.0

    def _twin(self, runtime: Runtime) -> Engine:
        if self._engine is None:  # a connection of its own, opened at the first renewal
            self._engine = self._open_twin(runtime)
        return self._engine
