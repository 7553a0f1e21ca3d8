"""Locks, read and write locks, permits of a semaphore: one recipe, told apart by their shape."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from leasehold.config import UNSET, LockOptions, Unset, check_required, check_wait
from leasehold.core.admission import described
from leasehold.core.names import check_name, claim_id
from leasehold.core.timing import NEVER
from leasehold.engine import Engine
from leasehold.errors import LeaseLost, NotAcquired, SelfDeadlock, Unsupported
from leasehold.model import Claim, Grant, Kind, Mode
from leasehold.recipes.acquiring import acquire
from leasehold.recipes.entries import Entry
from leasehold.recipes.lease import LOST, RELEASED, BaseLease
from leasehold.runtime.base import settle

if TYPE_CHECKING:
    from leasehold.recipes.client import BaseClient
    from leasehold.recipes.desk import Desk

L = TypeVar("L", bound=BaseLease)
T = TypeVar("T")

_new = tuple.__new__  # what `Claim(...)` comes down to, without matching the arguments


class Shape(NamedTuple):
    """What is asked of a name: `lock` and its read and write sides are one kind, a semaphore of n another."""

    mode: Mode = "exclusive"
    kind: Kind = "lock"
    limit: int = 1


class BaseLock(Generic[L]):
    """The lock of both faces: immutable, shared freely between threads and tasks."""

    __slots__ = ("_client", "_desk", "_lease_type", "_namespace", "_terms", "name", "options", "shape")

    def __init__(self, client: BaseClient, lease_type: type[L], name: str, shape: Shape, options: LockOptions) -> None:
        self.name = check_name(name)
        self._client, self._lease_type, self.shape, self.options = client, lease_type, shape, options
        self._desk: Desk = client._desk
        self._namespace = self._desk.options.namespace
        # What every claim of this lock says after its holder, laid out once: claims are made on each acquire.
        self._terms = (options.ttl, *shape, options.delay, options.min_hold, False, 0, NEVER)
        self._refuse_unsupported()
        self._desk.dog.shortest = min(self._desk.dog.shortest, options.ttl)

    def _refuse_unsupported(self) -> None:
        """What the engine cannot do is said now, not by a call that already runs."""
        traits, engine = self._desk.traits, self._desk.name
        missing = []
        if self.shape.mode == "shared" and not traits.shared:
            missing.append("shared claims (read locks)")
        if traits.max_limit is not None and self.shape.limit > traits.max_limit:
            missing.append(f"more than {traits.max_limit} holder(s) of a name")
        if not traits.outlives and (self.options.min_hold or self.options.delay):
            missing.append("min_hold and delay (its grants die with their process)")
        if missing:
            text = f"{engine} does not support {' or '.join(missing)}: use another engine"
            raise Unsupported(text, engine=engine, missing=tuple(missing))
        if self.options.require:
            check_required(self.options.require, traits, engine)

    def __repr__(self) -> str:
        what = "shared lock" if self.shape.mode == "shared" else described(self.shape.kind, self.shape.limit)
        return f"<{type(self).__name__} {self.name} ({what}) ttl={self.options.ttl}>"

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._client, self._lease_type, self.name, self.shape, self.options)

    # ----------------------------------------------------------- acquiring

    def _acquire(self, wait: float | Unset | None = UNSET) -> Coroutine[Any, Any, L]:
        """A new lease; of a reentrant lock this thread or task already holds, the same lease once more."""
        return self._counted(wait) if self.options.reentrant else self._take(wait)

    async def _counted(self, wait: float | Unset | None) -> L:
        lease = await self._take(wait)
        self._desk.entries.push(self.name, Entry(None, lease, self.shape.mode))
        return lease

    async def _try_acquire(self) -> L | None:
        try:
            return await self._acquire(0)
        except NotAcquired:
            return None

    async def _take(self, wait: float | Unset | None, ready: Callable[[], Engine] | None = None) -> L:
        """A new lease, or one this thread or task has already (its depth tells). `ready` may raise to end the wait.

        Here and below a coroutine is only made where something is awaited: each costs a call as much again.
        """
        if isinstance(wait, Unset):
            wait = self.options.wait
        else:
            check_wait(wait)
        desk = self._desk
        if not desk.runtime.bind():  # before anything is noted of the running task
            desk.move()
        if self.options.require:
            await desk.meet(self.options.require)
        mine, alone = desk.entries.find(self.name), False
        if mine is not None:
            if not (self.options.reentrant and mine.mode in ("exclusive", self.shape.mode)):
                alone = self._beside(mine, wait)
            elif mine.lease._again():
                return mine.lease  # type: ignore[return-value]  # leases of one client are of one type
        claim = self._claim()
        began, telling = desk.runtime.now(), desk.options.on_event is not None
        if telling:
            desk.emit("attempted", claim)
        desk.under_way.add(claim.mark)
        try:
            lease, waited = await acquire(
                desk, ready or desk.ready, claim, began, wait, alone, self._admit, self._renamed
            )
        except NotAcquired as busy:
            desk.emit("busy", claim, token=busy.token, since=began, reason=busy.holder)
            raise
        except BaseException as error:
            desk.emit("failed", claim, since=began, reason=f"{type(error).__name__}: {error}")
            raise
        finally:
            desk.under_way.discard(claim.mark)
        if telling:
            if waited:
                desk.emit("waited", lease._claim, token=lease.token, since=began)
            desk.emit("granted", lease._claim, token=lease.token, since=began)
        return lease

    def _beside(self, mine: Entry, wait: float | None) -> bool:
        """True: may be tried beside the lease this thread or task has, but not waited for. Raises if it never could."""
        if self.shape.kind == "semaphore" or wait == 0:
            return False
        if self.shape.mode == mine.mode == "shared":
            return True
        raise SelfDeadlock(self.name, token=mine.lease.token)

    def _claim(self) -> Claim:
        desk, options = self._desk, self.options
        runtime, holder = desk.runtime, desk.holder(options.holder, options.purpose)
        secret, mark = claim_id(runtime.owner_mark(), runtime.entropy(16).hex())
        return _new(Claim, (self._namespace, self.name, secret, mark, holder, *self._terms))

    def _renamed(self, claim: Claim) -> Claim:
        return self._claim()._replace(queue=claim.queue, until=claim.until)

    def _admit(self, claim: Claim, grant: Grant, asked: float, valid_until: float, doubted: object) -> L:
        if self.options.require:  # the server may have come back with other settings while this stood in line
            check_required(self.options.require, self._desk.traits, self._desk.name)
        lease = self._lease_type(self._desk, claim, grant, asked, valid_until, self.options.max_hold)
        self._desk.admit(lease, doubted)
        return lease

    # ------------------------------------------------------ with, and call

    def _entered(self, lease: L, frame: int, entered: list[Entry]) -> L:
        """It was taken for the `with` that this frame runs; `entered` tells what to undo if that is torn apart."""
        desk = self._desk
        interrupt = desk.runtime.interrupt() if lease._depth == 1 else None  # an outer hold has its own
        entry = Entry(self, lease, self.shape.mode, frame, interrupt)
        entered.append(entry)
        desk.entries.push(self.name, entry)
        if interrupt is not None:
            lease._interrupt = interrupt
            if lease.state is LOST:  # before the interrupt was in place
                interrupt.fire()
        return lease

    async def _leave(
        self, frame: int, kind: type[BaseException] | None, error: BaseException | None, left: list[Entry]
    ) -> None:
        """Release, which takes its verdict by the clock before it sends anything; LOST raises `LeaseLost`. `left` tells
        that the entry is taken out: from then on the release sees to itself, whatever happens."""
        entry = self._desk.entries.pop(self.name, self, frame)
        left.append(entry)
        interrupted = entry.interrupt is not None and entry.interrupt.disarm(kind)
        lease = entry.lease
        if not entry.spent:
            await lease._release()
        if lease._ended is RELEASED or (reason := lease.lost_reason) is None:
            return
        lost = LeaseLost(self.name, reason=reason, token=lease.token)
        if error is None or interrupted:
            raise lost from error
        if not isinstance(error, LeaseLost):
            error.add_note(str(lost))

    def _undo(self, entered: list[Entry]) -> None:
        """After Ctrl-C in the middle of entering a `with`: what this very one has taken is given up."""
        for entry in entered:
            if self._desk.entries.remove(entry) and not entry.spent:
                entry.lease._abandon()

    def _abandon(self, frame: int, left: list[Entry]) -> None:
        """After Ctrl-C in the middle of leaving a `with`: what it still holds is given up."""
        if not left and (entry := self._desk.entries.abandon(self, frame)) and not entry.spent:
            entry.lease._abandon()

    async def _call(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], pass_lease: bool
    ) -> Any:
        async def work(lease: L) -> Any:
            result = fn(*args, **kwargs, lease=lease) if pass_lease else fn(*args, **kwargs)
            return result if self._desk.runtime.blocking else await settle(result)

        return await self._under(work)

    async def _under(self, work: Callable[[L], Awaitable[T]]) -> T:
        """What the body of a `with` would be, as a coroutine function of the lease."""
        frame = id(sys._getframe())
        entered: list[Entry] = []
        left: list[Entry] = []
        try:
            lease = self._entered(await self._take(UNSET), frame, entered)
            try:
                result = await work(lease)
            except BaseException as error:
                await self._leave(frame, type(error), error, left)
                raise
            await self._leave(frame, None, None, left)
        except BaseException:
            if not left:
                self._undo(entered)
            raise
        return result

    async def _locked(self) -> bool:
        """Whether no further holder of this shape would be let in, if nobody stood in line."""
        desk = self._desk
        found = await desk.engine().inspect(desk.options.namespace, self.name, True, desk.deadline())
        holders = [holding for holding in found if holding.state in ("held", "reserved", "cooling")]
        if self.shape.mode == "shared":
            return any(holding.mode == "exclusive" for holding in holders)
        return len(holders) >= self.shape.limit
