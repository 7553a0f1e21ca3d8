"""Attempt, wait, attempt again: the only such loop in the tree, so that E6 and E8 are kept in one place.

`acquire` is the loop. The decisions are methods of `AcquireRequest`, which keeps the state of the call:

- when an attempt is sent if there are too many already: `wait_to_send`; and how long it may take: `bound_attempt`
- the engine granted the name: `register`, or `after_late_grant` if the grant cannot be trusted any more
- the name is busy: `after_busy`; and how long to wait in the queue: `wait_in_queue`
- the engine did not answer, or refused the attempt: `after_failure` and `pause_before_retry`
- the call ends without a lease: `withdraw`
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from leasehold import log_lines
from leasehold.client.deadlock_search import WaitSearch
from leasehold.config import check_required
from leasehold.core import timing
from leasehold.core.texts import server_text
from leasehold.engines.base import Engine
from leasehold.errors import (
    Crowded,
    LeaseholdError,
    NotAcquired,
    NotSent,
    Overloaded,
    Reentered,
    SelfDeadlock,
    Unavailable,
    describe_position,
)
from leasehold.model import NO_MIN_HOLD, Busy, Claim, Grant, Holder, fast_tuple

if TYPE_CHECKING:
    from leasehold.client.lock import BaseLock
    from leasehold.engines.registry import Waiter

L = TypeVar("L")

_QUEUE_INDEX = Claim._fields.index("queue")
_log = logging.getLogger("leasehold.waiting")
_FIRST_REPORT: Final = 10.0
_REPORT_INTERVAL: Final = 60.0
_MAX_LATE_GRANTS = 3  # an engine slower than the ttl stays slow: retrying for ever would only load it


async def acquire(request: AcquireRequest[L]) -> L:
    """Acquire the name within `wait` seconds of `began`, or raise and leave no claim behind (E6).

    It sends the attempts itself, because one more coroutine would make every acquire slower.
    """
    core, options = request.lock._core, request.lock.options
    attempts, now = core.attempts, core.runtime.now
    request.engine = request.get_engine()
    if request.may_wait and request.engine.queues_at_once:
        request.join_queue()
    try:
        while True:
            if core.exiting:
                core.refuse_at_exit()
            try:
                if options.require:
                    await request.check_traits()
                admitted_until = timing.NEVER
                if not attempts.try_enter(request.claim.id_hash):
                    admitted_until = await request.wait_to_send()
                claim = request.claim
                request.asked_at = asked_at = now()  # before the request leaves (E8)
                request.connection_epoch, request.sent = core.registry.connection_epoch, True
                latest = timing.call_deadline(asked_at, core.options.call_timeout, claim.ttl)
                if request.retries or admitted_until < latest:
                    latest = request.bound_attempt(latest, admitted_until)
                reply = await request.engine.attempt(claim, latest)
            except Unavailable as error:
                if not request.after_failure(error):
                    raise
                await request.pause_before_retry(error)
                continue
            except LeaseholdError:  # a refusal is an answer, too
                attempts.leave(request.claim.id_hash, answered=True)
                raise
            attempts.leave(claim.id_hash, answered=True)
            if isinstance(reply, Busy):
                await request.after_busy(reply)
            elif (lease := request.register(reply)) is not None:
                return lease
            else:
                request.after_late_grant()
    except BaseException:  # timed out, cancelled, Ctrl-C, unreachable
        request.withdraw()
        raise


class AcquireRequest(Generic[L]):
    """One call to acquire a lock: what it asks for, and how far it has come."""

    __slots__ = (
        "answered", "asked_at", "began", "busy", "claim", "connection_epoch", "deadline", "engine", "failures",
        "get_engine", "late_grants", "lock", "may_wait", "position", "queued", "reports", "retries", "search", "sent",
        "wait", "waited", "waiting_deadlocks",
    )  # fmt: skip

    engine: Engine  # to send the next attempt to
    asked_at: float  # when the last attempt was sent
    connection_epoch: object  # the registry's, at that time
    search: WaitSearch | None  # for deadlocks, if the lock asks for that, while it waits

    def __init__(
        self,
        lock: BaseLock[Any],
        claim: Claim,
        began: float,
        wait: float | None,
        waiting_deadlocks: bool,
        get_engine: Callable[[], Engine],
    ) -> None:
        self.lock, self.began, self.wait = lock, began, wait
        self.claim = claim  # after a late grant or an unanswered attempt, one with another id
        self.waiting_deadlocks = waiting_deadlocks  # the same thread or task holds the name: granted at once or never
        self.get_engine = get_engine  # raises to end the wait, as when the client is closed
        self.deadline = timing.NEVER if wait is None else began + wait
        self.may_wait = wait != 0 and not waiting_deadlocks
        self.retries = self.may_wait and lock.options.on_unavailable == "wait"
        # What the engine may know of the claim: an attempt was sent and is not answered, or the claim is in the queue.
        self.sent = self.queued = False
        self.busy: Busy | None = None  # the last answer for this claim, if it was that
        self.late_grants = 0
        self.failures = 0  # attempts since the last answer
        self.answered = False  # the engine answered at least once
        self.waited = False  # the claim had to wait in the queue
        self.position: int | None = None  # when it joined the queue
        self.reports = 0  # lines logged while it waits

    # ------------------------------------------------------------ sending

    async def check_traits(self) -> None:
        """Raise `Unsupported` if the server does not promise what the lock requires."""
        wait_deadline = self.deadline if self.retries else timing.NEVER
        await self.lock._core.check_traits(self.lock.options.require, wait_deadline)

    async def wait_to_send(self) -> float:
        """Wait until the attempt may be sent, and return its deadline. The claim queues at once if other calls have met
        contention meanwhile."""
        if self.is_next():
            return timing.NEVER
        core, id_hash = self.lock._core, self.claim.id_hash
        now, call_timeout = core.runtime.now(), core.options.call_timeout
        if self.may_wait and now < self.deadline:
            until = max(self.deadline, now + call_timeout)
            if self.retries:
                until = timing.bounded_attempt(now, timing.NEVER, self.deadline)
            latest = await core.attempts.enter(id_hash, until) + call_timeout
        else:  # the caller waits for nothing but this answer: the time here counts into its `call_timeout`
            latest = timing.call_deadline(now, call_timeout, self.claim.ttl)
            await core.attempts.enter(id_hash, latest)
        self.engine = self.get_engine()
        if core.exiting:
            core.refuse_at_exit()
        if self.may_wait and not self.claim.queue and self.engine.queues_at_once:
            self.join_queue()
        return latest

    def bound_attempt(self, latest: float, admitted_until: float) -> float:
        """The deadline of an attempt that had to wait until it was sent, or that is repeated until `wait` is over."""
        latest = min(latest, admitted_until)
        return timing.bounded_attempt(self.asked_at, latest, self.deadline) if self.retries else latest

    def is_next(self) -> bool:
        """Whether the claim is queued and may be granted now: it has been notified, or no other is ahead of it."""
        waiter = self.lock._core.registry.waiting.get(self.claim.id_hash)
        if waiter is None or self.busy is None:
            return False
        return waiter.woken or waiter.recheck_at is not None or not self.busy.position

    def join_queue(self) -> None:
        """Let the claim queue from its next attempt on."""
        self.claim = _with_queue(self.claim, self.deadline)

    # ------------------------------------------------------------ granted

    def register(self, grant: Grant) -> L | None:
        """Make the grant a lease, which the watchdog renews from now on. None: it came too late to be trusted."""
        lock, asked_at = self.lock, self.asked_at
        core, options = lock._core, lock.options
        if grant.token < 1:  # it would pass no fence, and be renewed as a claim in the queue
            raise Unavailable(f"the grant of {self.claim.name} has no token", engine=core.engine_name)
        valid_until = timing.valid_until(asked_at, grant.ttl, core.options.drift)
        if options.strict:
            valid_until = min(valid_until, timing.overdue_at(asked_at, grant.ttl))
        if core.runtime.now() >= valid_until:
            return None
        if options.require:  # the server may have restarted with other settings while this waited
            check_required(options.require, core.traits, core.engine_name)
        lease: L = lock._lease_type(core, self.claim, grant, asked_at, valid_until, options.max_hold, options.strict)
        core.register(lease, self.connection_epoch)  # type: ignore[arg-type]
        return lease

    def after_late_grant(self) -> None:
        """Release a grant that came too late to be trusted. Raises if it would be useless to try again."""
        self.answered = True
        self.release_claim()
        self.late_grants += 1
        now = self.lock._core.runtime.now()
        if self.late_grants == _MAX_LATE_GRANTS or now >= self.deadline:
            raise _late_grant_error(self.claim, now - self.asked_at)

    def release_claim(self) -> None:
        """Release the claim, and continue with a new id: the release must not hit the next attempt."""
        claim = self.claim
        self.engine.forget(without_min_hold(claim))
        self.claim = self.lock._new_claim()._replace(queue=claim.queue, wait_deadline=claim.wait_deadline)
        self.sent = self.queued = False
        self.busy = None

    def register_unguaranteed(self) -> L:
        """A lease that the engine did not grant. Its claim is never sent: the one that was sent is being released."""
        lock, claim = self.lock, self.lock._new_claim()
        core = lock._core
        lease = lock._lease_type(
            core, claim, Grant(0, claim.ttl), core.runtime.now(), timing.NEVER, lock.options.max_hold
        )
        lease._mark_unguaranteed()
        core.register_unguaranteed(lease)
        return lease  # type: ignore[no-any-return]

    # --------------------------------------------------------------- busy

    async def after_busy(self, reply: Busy) -> None:
        """Wait in the queue until the next attempt, or let it join the queue. Raises if the caller does not wait."""
        core = self.lock._core
        self.busy, self.answered, self.failures = reply, True, 0
        self.sent, self.queued = False, self.claim.queue  # if it never queued, there is nothing to release
        if self.waiting_deadlocks or core.runtime.now() >= self.deadline:
            raise _not_acquired(self, reply)
        if self.queued:
            await self.wait_in_queue(reply)
        else:
            core.registry.shared["contended"] = True  # see `Engine.queues_at_once`
            self.join_queue()

    async def wait_in_queue(self, reply: Busy) -> None:
        """Wait until it is time for the next attempt. The claim stays queued (E7)."""
        core, options, claim = self.lock._core, self.lock.options, self.claim
        now = core.runtime.now
        if (waiter := core.registry.waiting.get(claim.id_hash)) is not None:
            waiter.answered = True
        if not self.waited:
            self.waited, self.position = True, reply.position
            self.search = WaitSearch(core, now()) if options.on_deadlock == "raise" else None
        search = self.search
        try:
            while True:
                self.report_waiting(now(), reply)
                seconds = max(0.0, min(self.deadline - now(), timing.recheck_interval(reply.position)))
                seconds = min(seconds, self.until_report(now()))
                if search is not None:
                    seconds = min(seconds, search.seconds_left(now()))
                end = now() + seconds
                await self.engine.wait(claim, reply, seconds)
                if search is not None:
                    await search.search_if_due(claim)
                self.engine = self.get_engine()  # after every wait: waiters notice that the client was closed
                if not end <= now() < self.deadline or not self.is_kept(reply):
                    return
        except Unavailable:
            if options.on_unavailable != "wait":
                raise
            self.engine = self.get_engine()

    def is_kept(self, reply: Busy) -> bool:
        """Whether the watchdog keeps the claim in the queue, far from its head, so that another attempt would be
        useless."""
        core = self.lock._core
        waiter = core.registry.waiting.get(self.claim.id_hash)
        if waiter is None or self.is_next():
            return False
        return timing.needs_no_attempt(reply.position, self.asked_at, waiter.kept_at, core.runtime.now())

    def add_waiter(self, claim: Claim) -> Waiter:
        core = self.lock._core
        return core.registry.add_waiter(claim, core.runtime)

    def until_report(self, now: float) -> float:
        """Seconds until it is time to log that the caller still waits: after 10 seconds, and then every minute."""
        if not _log.isEnabledFor(logging.INFO):
            return timing.NEVER
        return max(0.0, self.began + _FIRST_REPORT + self.reports * _REPORT_INTERVAL - now)

    def report_waiting(self, now: float, reply: Busy | Unavailable) -> None:
        """Log that the caller still waits, if it is time to."""
        if self.until_report(now) > 0:
            return
        claim, waited = self.claim, now - self.began
        self.reports = int((waited - _FIRST_REPORT) // _REPORT_INTERVAL) + 1
        fields: dict[str, Any] = {"seconds": waited, "group": claim.group, "fingerprint": claim.fingerprint}
        if isinstance(reply, Unavailable):
            what = "the server is overloaded" if isinstance(reply, Overloaded) else "the engine does not answer"
            text = f"{claim.name}: {what}; waiting for {waited:.0f} s: {reply}"
            fields.update(reason=str(reply), error="Unavailable")
        else:
            shown = _for_display(reply)
            text = f"{NotAcquired(claim.name, **shown._asdict()).situation()}; waiting for {waited:.0f} s"
            if shown.position is not None:
                text += f", {describe_position(shown.position)}"
            holder = None if shown.holder is None else shown.holder.label
            fields.update(position=shown.position, token=shown.token, holder=holder)
        fields.update(event="waiting", namespace=claim.namespace, lock=claim.name, engine=self.lock._core.engine_name)
        _log.info("%s", text, extra=log_lines.extra(**fields))

    # --------------------------------------------- not answered, or refused

    def after_failure(self, error: Unavailable) -> bool:
        """Whether the caller tries again, after a pause. If so, the claim queues from then on; it gets a new id if the
        engine may know the old one."""
        core, was_sent = self.lock._core, not isinstance(error, NotSent)
        core.attempts.leave(self.claim.id_hash, answered=isinstance(error, Overloaded))
        if not was_sent:
            self.sent = False
        if not self.may_wait or not self.may_retry(error, core.runtime.now()):
            return False
        if was_sent and (self.sent or self.queued):
            self.release_claim()  # the engine may have sent a release of its own behind the attempt
        self.failures += 1
        self.join_queue()
        return True

    def may_retry(self, error: Unavailable, now: float) -> bool:
        """Whether a caller that may wait tries again. After a refusal by an overloaded server it does, whatever
        `on_unavailable` says, because the engine works and nothing was done. A caller that would rather run without a
        grant does so only as long as it would wait for an answer."""
        if isinstance(error, Reentered) or now >= self.deadline:
            return False
        when = self.lock.options.on_unavailable
        if when == "run" and isinstance(error, Overloaded):
            return self.answered or now < self.began + self.lock._core.options.call_timeout
        return when == "wait" or isinstance(error, Overloaded)

    def may_run(self, error: Unavailable) -> bool:
        """Whether the caller may go on without a grant. Never after an answer: the name was held by another claim, or
        the engine works and is slow, or busy with other calls of this client."""
        if self.answered or isinstance(error, Reentered | Crowded):
            return False
        return self.lock.options.on_unavailable == "run"

    async def pause_before_retry(self, error: Unavailable) -> None:
        """Pause after an attempt that was not answered, or was refused."""
        runtime = self.lock._core.runtime
        self.report_waiting(runtime.now(), error)
        if isinstance(error, Overloaded):
            # A claim in the queue may get its reservation soon: its pauses do not grow.
            failures = 1 if self.queued else self.failures
            pause = timing.overload_pause(failures, error.retry_in or 0.0, runtime.random())
            await self.pause(pause, refused=not self.queued)
        else:
            await self.pause(max(timing.outage_pause(self.failures, runtime.random()), error.retry_in or 0.0))
        self.engine = self.get_engine()

    async def pause(self, seconds: float, refused: bool = False) -> None:
        """Sleep until the next try, at most until `wait` is over. The claim is registered as a waiter, so that
        `close()` and notifications end the pause. `refused`: it is not in the queue, so no heartbeat is sent for it."""
        runtime = self.lock._core.runtime
        waiter, end = self.add_waiter(self.claim), min(runtime.now() + seconds, self.deadline)
        waiter.refused = refused
        while not waiter.cancelled and not waiter.woken and (left := end - runtime.now()) > 0:
            await waiter.signal.wait(left)

    # ------------------------------------------------------------ given up

    def withdraw(self) -> None:
        """Leave no claim behind (E6), without waiting for an answer."""
        core = self.lock._core
        core.attempts.leave(self.claim.id_hash, answered=False)  # again: Ctrl-C may have interrupted it
        if self.sent or self.queued:
            self.engine.forget(without_min_hold(self.claim))  # sent at once, or retried by the watchdog
        else:
            core.registry.remove_waiter(self.claim.id_hash)


def _not_acquired(request: AcquireRequest[L], reply: Busy) -> LeaseholdError:
    """The name is busy, and the caller cannot wait, or has waited long enough."""
    name, now = request.claim.name, request.lock._core.runtime.now()
    if request.waiting_deadlocks:
        why = "a writer is queued behind its read lock, so a second one would never be granted; pass the lease down"
        return SelfDeadlock(name, why=why)
    waited = now - request.began if request.wait else 0.0
    return NotAcquired(name, waited=waited, **_for_display(reply)._asdict())


def _late_grant_error(claim: Claim, seconds: float) -> Unavailable:
    text = f"the engine took longer to grant {claim.name} than its ttl of {claim.ttl} s: choose a longer ttl"
    return Unavailable(text, seconds=seconds)


def _for_display(busy: Busy) -> Busy:
    """Safe to show: the holder's texts are as the engine has them, and another program may have written them there."""
    if (holder := busy.holder) is not None:
        pid = holder.pid if isinstance(holder.pid, int) else 0
        holder = Holder(server_text(holder.label), server_text(holder.host), pid, server_text(holder.purpose))
    return busy._replace(holder=holder, token=busy.token if isinstance(busy.token, int) else None)


def _with_queue(claim: Claim, wait_deadline: float) -> Claim:
    return fast_tuple(Claim, (*claim[:_QUEUE_INDEX], True, claim.token, wait_deadline, *claim[_QUEUE_INDEX + 3 :]))


def without_min_hold(claim: Claim) -> Claim:
    """The claim to release when no work was done under it: `min_hold` does not apply."""
    return claim._replace(min_hold=NO_MIN_HOLD) if claim.min_hold else claim
