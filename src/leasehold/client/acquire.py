"""Attempt, wait, attempt again: the only such loop in the tree, so that E6 and E8 are kept in one place."""

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


class AcquireRequest(Generic[L]):
    """One call to acquire a lock, and what the loop below needs of that lock."""

    __slots__ = (
        "answered", "began", "claim", "get_engine", "lock", "position", "reports", "search", "wait", "waited",
        "waiting_deadlocks",
    )  # fmt: skip

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
        self.waited = False  # the claim had to wait in the queue
        self.position: int | None = None  # when it joined the queue
        self.answered = False  # the engine answered at least once
        self.reports = 0  # lines logged while it waits
        self.search: WaitSearch | None = None  # for deadlocks, if the lock asks for that, while it waits

    def may_run(self, error: Unavailable) -> bool:
        """Whether the caller may go on without a grant. Never after an answer: the name was held by another claim, or
        the engine works and is slow, or busy with other calls of this client."""
        if self.answered or isinstance(error, Reentered | Crowded):
            return False
        return self.lock.options.on_unavailable == "run"

    def may_retry(self, error: Unavailable, now: float, deadline: float) -> bool:
        """Whether a caller that may wait tries again. After a refusal by an overloaded server it does, whatever
        `on_unavailable` says, because the engine works and nothing was done. A caller that would rather run without a
        grant does so only as long as it would wait for an answer."""
        if isinstance(error, Reentered) or now >= deadline:
            return False
        when = self.lock.options.on_unavailable
        if when == "run" and isinstance(error, Overloaded):
            return self.answered or now < self.began + self.lock._core.options.call_timeout
        return when == "wait" or isinstance(error, Overloaded)

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

    def add_waiter(self, claim: Claim) -> Waiter:
        core = self.lock._core
        return core.registry.add_waiter(claim, core.runtime)

    def is_next(self, claim: Claim, reply: Grant | Busy | None) -> bool:
        """Whether the claim is queued and may be granted now: it has been notified, or no other is ahead of it."""
        waiter = self.lock._core.registry.waiting.get(claim.id_hash)
        if waiter is None or not isinstance(reply, Busy):
            return False
        return waiter.woken or waiter.recheck_at is not None or not reply.position

    def is_kept(self, claim: Claim, reply: Busy, asked_at: float) -> bool:
        """Whether the watchdog keeps the claim in the queue, far from its head, so that another attempt would be
        useless."""
        core = self.lock._core
        waiter = core.registry.waiting.get(claim.id_hash)
        if waiter is None or waiter.cancelled or self.is_next(claim, reply):
            return False
        return timing.needs_no_attempt(reply.position, asked_at, waiter.kept_at, core.runtime.now())

    async def wait_to_send(self, claim: Claim, deadline: float, retries: bool) -> tuple[float, Engine, Claim]:
        """Wait until the attempt may be sent. Returns its deadline, the engine to send it to, and the claim: it queues
        at once if other calls have met contention meanwhile."""
        core = self.lock._core
        now, call_timeout = core.runtime.now(), core.options.call_timeout
        may_wait = self.wait != 0 and not self.waiting_deadlocks
        if may_wait and now < deadline:
            until = max(deadline, now + call_timeout)
            if retries:
                until = timing.bounded_attempt(now, timing.NEVER, deadline)
            latest = await core.attempts.enter(claim.id_hash, until) + call_timeout
        else:  # the caller waits for nothing but this answer: the time here counts into its `call_timeout`
            latest = timing.call_deadline(now, call_timeout, claim.ttl)
            await core.attempts.enter(claim.id_hash, latest)
        engine = self.get_engine()
        if core.exiting:
            core.refuse_at_exit()
        if may_wait and not claim.queue and engine.queues_at_once:
            claim = _with_queue(claim, deadline)
        return latest, engine, claim

    def with_new_id(self, claim: Claim) -> Claim:
        self.claim = self.lock._new_claim()._replace(queue=claim.queue, wait_deadline=claim.wait_deadline)
        return self.claim

    def register(self, claim: Claim, grant: Grant, asked_at: float, valid_until: float, connection_epoch: object) -> L:
        """Make the grant a lease, which the watchdog renews from now on."""
        lock = self.lock
        core, options = lock._core, lock.options
        if options.require:  # the server may have restarted with other settings while this waited
            check_required(options.require, core.traits, core.engine_name)
        lease: L = lock._lease_type(core, claim, grant, asked_at, valid_until, options.max_hold, options.strict)
        core.register(lease, connection_epoch)  # type: ignore[arg-type]
        return lease

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


async def acquire(request: AcquireRequest[L]) -> L:
    """Acquire the name within `wait` seconds of `began`, or raise and leave no claim behind (E6)."""
    lock, claim, wait = request.lock, request.claim, request.wait
    core, options = lock._core, lock.options
    now, call_timeout = core.runtime.now, core.options.call_timeout
    deadline = timing.NEVER if wait is None else request.began + wait
    may_wait, engine = wait != 0 and not request.waiting_deadlocks, request.get_engine()
    if may_wait and engine.queues_at_once:
        claim = _with_queue(claim, deadline)
    must_release = sent_before = False
    late_grants = failures = 0
    retries = may_wait and options.on_unavailable == "wait"
    attempts, reply = core.attempts, None
    try:
        while True:
            if core.exiting:
                core.refuse_at_exit()
            sent_before = must_release
            try:
                if options.require:
                    await core.check_traits(options.require, deadline if retries else timing.NEVER)
                admitted_until, answered = timing.NEVER, False
                try:
                    if not attempts.try_enter(claim.id_hash) and not request.is_next(claim, reply):
                        admitted_until, engine, claim = await request.wait_to_send(claim, deadline, retries)
                    # Read before the request leaves (E8).
                    asked_at, connection_epoch, must_release = now(), core.registry.connection_epoch, True
                    latest = timing.call_deadline(asked_at, call_timeout, claim.ttl)
                    if admitted_until < latest:
                        latest = admitted_until
                    if retries:
                        latest = timing.bounded_attempt(asked_at, latest, deadline)
                    reply, answered = await engine.attempt(claim, latest), True
                except LeaseholdError as error:  # a refusal is an answer, too
                    answered = not isinstance(error, Unavailable) or isinstance(error, Overloaded)
                    raise
                finally:
                    attempts.leave(claim.id_hash, answered=answered)
            except Unavailable as error:
                if isinstance(error, NotSent):
                    must_release = sent_before
                if not may_wait or not request.may_retry(error, now(), deadline):
                    raise
                if must_release and not isinstance(error, NotSent):
                    # A new id: the engine may have sent a release behind this attempt, which must not hit the next one.
                    engine.forget(without_min_hold(claim))
                    must_release, claim = False, request.with_new_id(claim)
                claim, failures = _with_queue(claim, deadline), failures + 1
                engine = await _pause_before_retry(request, claim, error, failures, is_queued=must_release)
                continue
            if isinstance(reply, Grant):
                if reply.token < 1:  # it would pass no fence, and be renewed as a claim in the queue
                    raise Unavailable(f"the grant of {claim.name} has no token", engine=core.engine_name)
                valid_until = timing.valid_until(asked_at, reply.ttl, core.options.drift)
                if options.strict:
                    valid_until = min(valid_until, timing.overdue_at(asked_at, reply.ttl))
                if now() < valid_until:
                    return request.register(claim, reply, asked_at, valid_until, connection_epoch)
                request.answered = True
                engine.forget(without_min_hold(claim))  # granted too late to be trusted
                # A new id: the release just sent must not hit the next attempt.
                must_release, late_grants, claim = False, late_grants + 1, request.with_new_id(claim)
                if late_grants == _MAX_LATE_GRANTS or now() >= deadline:
                    raise _late_grant_error(claim, now() - asked_at)
                continue
            request.answered, failures = True, 0
            must_release = claim.queue  # answered busy and never queued: nothing to release
            if request.waiting_deadlocks or now() >= deadline:
                raise _not_acquired(request, reply)
            if claim.queue:
                engine = await _wait_in_queue(request, engine, claim, reply, asked_at)
            else:
                core.registry.shared["contended"] = True  # see `Engine.queues_at_once`
                claim = _with_queue(claim, deadline)
    except BaseException:  # timed out, cancelled, Ctrl-C, unreachable: leave no claim behind (E6)
        attempts.leave(claim.id_hash, answered=False)  # again: Ctrl-C may have interrupted it
        if must_release:
            engine.forget(without_min_hold(claim))  # sent at once, or retried by the watchdog; never a second wait
        else:
            core.registry.remove_waiter(claim.id_hash)
        raise


async def _wait_in_queue(
    request: AcquireRequest[L], engine: Engine, claim: Claim, reply: Busy, asked_at: float
) -> Engine:
    """Wait until it is time for the next attempt, and return the engine to send it to. The claim stays queued (E7)."""
    core, options = request.lock._core, request.lock.options
    now, deadline = core.runtime.now, claim.wait_deadline
    if (waiter := core.registry.waiting.get(claim.id_hash)) is not None:
        waiter.answered = True
    if not request.waited:
        request.waited, request.position = True, reply.position
        request.search = WaitSearch(core, now()) if options.on_deadlock == "raise" else None
    search = request.search
    try:
        while True:
            request.report_waiting(now(), reply)
            seconds = max(0.0, min(deadline - now(), timing.recheck_interval(reply.position)))
            seconds = min(seconds, request.until_report(now()))
            if search is not None:
                seconds = min(seconds, search.seconds_left(now()))
            end = now() + seconds
            await engine.wait(claim, reply, seconds)
            if search is not None:
                await search.search_if_due(claim)
            engine = request.get_engine()  # after every wait: waiters notice that the client was closed
            if not end <= now() < deadline or not request.is_kept(claim, reply, asked_at):
                return engine
    except Unavailable:
        if options.on_unavailable != "wait":
            raise
        return request.get_engine()


async def _pause_before_retry(
    request: AcquireRequest[L], claim: Claim, error: Unavailable, failures: int, *, is_queued: bool
) -> Engine:
    """Pause after an attempt without an answer, or one that was refused, and return the engine to send the next to."""
    runtime = request.lock._core.runtime
    request.report_waiting(runtime.now(), error)
    if isinstance(error, Overloaded):
        # A claim in the queue may get its reservation soon: its pauses do not grow.
        pause = timing.overload_pause(1 if is_queued else failures, error.retry_in or 0.0, runtime.random())
        await _pause(request, claim, pause, refused=not is_queued)
    else:
        await _pause(request, claim, max(timing.outage_pause(failures, runtime.random()), error.retry_in or 0.0))
    return request.get_engine()


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


async def _pause(request: AcquireRequest[L], claim: Claim, seconds: float, refused: bool = False) -> None:
    """Sleep until the next try, at most until `wait` is over. The claim is registered as a waiter, so that `close()`
    and notifications end the pause. `refused`: it is not in the queue, so no heartbeat is sent for it."""
    runtime = request.lock._core.runtime
    waiter, end = request.add_waiter(claim), min(runtime.now() + seconds, claim.wait_deadline)
    waiter.refused = refused
    while not waiter.cancelled and not waiter.woken and (left := end - runtime.now()) > 0:
        await waiter.signal.wait(left)


def _with_queue(claim: Claim, wait_deadline: float) -> Claim:
    return fast_tuple(Claim, (*claim[:_QUEUE_INDEX], True, claim.token, wait_deadline, *claim[_QUEUE_INDEX + 3 :]))


def without_min_hold(claim: Claim) -> Claim:
    """The claim to release when no work was done under it: `min_hold` does not apply."""
    return claim._replace(min_hold=NO_MIN_HOLD) if claim.min_hold else claim
