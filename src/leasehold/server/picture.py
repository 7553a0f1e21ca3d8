"""A picture is the answer to the last `inspect` of a namespace, kept for a moment for everything that only reads.

Many readers ask for the same namespace: pages of the dashboard, `GET /v1/locks`, `leasehold top`, scrapes of
`/metrics`. Together they cost the engine at most two inspects a second for each namespace and worker.

No decision is ever made from a picture. It is old when it arrives, so a lock that it shows as held may have been
released and granted again since. The verbs (attempt, renew, release, break) do not read it: each of them is one atomic
step at the engine, which compares the claim or the token there. This holds by construction: a `Pictures` can only
inspect, and `Service`, which has the verbs, does not know it. A token that a person saw in a picture and wants to break
goes to the engine as a condition; if another grant has the lock by then, nothing is broken.

A picture shows everything that happened before `as_of`. What clients of this server do marks it as outdated, so that a
caller that lists locks sees its own grant.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol, TypeAlias

from leasehold.core.deadlocks import Deadlock, deadlocks
from leasehold.errors import LeaseholdError, Unavailable
from leasehold.model import Holding, HoldingState, Kind, Mode
from leasehold.server.limits import LARGE
from leasehold.server.past import Owner

if TYPE_CHECKING:
    from leasehold.runtime.loop import Loop

_log = logging.getLogger("leasehold.server")

MAX_AGE: Final = 1.0  # seconds that a picture is good for
MIN_INTERVAL: Final = 0.5  # seconds between two inspects of one namespace
SHOWN_STALE: Final = 10.0  # seconds that a picture is shown while the engine does not answer
MAX_NAMESPACES: Final = 64  # with a picture
MAX_KNOWN: Final = 1000  # namespaces
MAX_READ: Final = 20  # namespaces that a reader of the whole engine gets

Result: TypeAlias = Literal["hit", "miss", "stale"]


Who: TypeAlias = tuple[str, str, int]  # label, host, pid: one client

_OF_OWNERS: Final = frozenset({"held", "waiting", "passed over"})


def who_of(holding: Holding) -> Who:
    label, host, pid, _ = holding.holder
    return label, host, pid


class LockView(NamedTuple):
    """One name as a picture shows it."""

    namespace: str
    name: str
    kind: Kind
    limit: int
    holders: tuple[Holding, ...]  # held, reserved or cooling
    queue: tuple[Holding, ...]  # waiting or passed over, in order

    @property
    def state(self) -> HoldingState:
        """The strongest state of its claims: held, reserved, cooling, then waiting."""
        states = {holding.state for holding in self.holders}
        return next((state for state in _STRONGEST if state in states), "waiting")

    @property
    def mode(self) -> Mode:
        return (self.holders or self.queue)[0].mode

    @property
    def oldest_wait(self) -> float:
        """Seconds; 0 without waiters."""
        return max((waiter.age for waiter in self.queue), default=0.0)


_STRONGEST: Final[tuple[HoldingState, ...]] = ("held", "reserved", "cooling")


class Snapshot:
    """What one inspect of a namespace found, and what follows from it, worked out once."""

    def __init__(self, namespace: str, as_of: float, holdings: Sequence[Holding]) -> None:
        self.namespace = namespace
        self.as_of = as_of  # Unix time before the engine was asked: everything before it is shown
        self.holdings = holdings
        self.known_owners: dict[int | None, list[Owner]] = {}  # kept by the history, which knows when each last renewed

    def prepare(self) -> None:
        """Work everything out. From any thread: for a large namespace it takes too long for the event loop."""
        _ = self.locks, self.by_name, self.states, self.deadlocks, self.owners

    @cached_property
    def locks(self) -> tuple[LockView, ...]:
        """By name."""
        by_name = sorted(self.holdings, key=lambda holding: holding.name)  # stable: claims stay in the engine's order
        return tuple(_view(self.namespace, name, list(claims)) for name, claims in groupby(by_name, lambda h: h.name))

    @cached_property
    def by_name(self) -> dict[str, LockView]:
        return {lock.name: lock for lock in self.locks}

    @cached_property
    def owners(self) -> frozenset[Who]:
        """All that hold or wait. A name that cools has no owner."""
        return frozenset(who_of(each) for each in self.holdings if each.state in _OF_OWNERS)

    @cached_property
    def states(self) -> Counter[HoldingState]:
        """How many claims are in which state."""
        return Counter(holding.state for holding in self.holdings)

    @cached_property
    def deadlocks(self) -> list[Deadlock]:
        return deadlocks(claim for lock in self.locks for claim in (*lock.holders, *lock.queue))


class Picture(NamedTuple):
    """A snapshot, as old as it was when a reader asked. `stale`: the engine did not answer since."""

    snapshot: Snapshot
    age: float
    stale: bool

    @property
    def namespace(self) -> str:
        return self.snapshot.namespace

    @property
    def as_of(self) -> float:
        return self.snapshot.as_of

    @property
    def locks(self) -> tuple[LockView, ...]:
        return self.snapshot.locks

    def with_prefix(self, prefix: str) -> Picture:
        """Only the names that begin with it, for a caller that may read no others."""
        if not prefix:
            return self
        found = [holding for holding in self.snapshot.holdings if holding.name.startswith(prefix)]
        return self._replace(snapshot=Snapshot(self.namespace, self.as_of, found))


class Inspects(Protocol):
    """What a picture needs of the service: one verb, which changes nothing."""

    @property
    def call_timeout(self) -> float: ...

    @property
    def runtime(self) -> Loop: ...

    def inspect(self, namespace: str, prefix: str, exact: bool, deadline: float) -> Awaitable[Sequence[Holding]]: ...


class _Entry:
    """The picture of one namespace."""

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None
        self.changes = 0  # made by clients of this server
        self.shown_changes = -1  # of these, those made before the engine was asked
        self.taken_at = float("-inf")  # by the runtime's clock, before the engine was asked
        self.asked_at = float("-inf")  # the same of the latest inspect, answered or not
        self.taking: asyncio.Task[None] | None = None


class Pictures:
    """The pictures of one worker."""

    def __init__(self, service: Inspects, max_age: float = MAX_AGE) -> None:
        self._service, self._max_age = service, max_age
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # the one read last is at the end
        self._known: OrderedDict[str, None] = OrderedDict()  # namespaces that are in use
        self.results: Counter[Result] = Counter()  # of all reads, for metrics
        self.on_taken: Callable[[Snapshot], None] = lambda _snapshot: None

    async def get(self, namespace: str, *, fresh: bool = False, outdated: bool = False) -> Picture:
        """The picture of a namespace, at most `max_age` old.

        `fresh`: a new one, which shows everything before the call. `outdated`: also one that does not show what clients
        of this server did since: it is there at once. Raises Unavailable if the engine did not answer for 10 s.
        """
        entry, oldest = self._entry(namespace), self._service.runtime.now() - self._max_age
        entry.changes += fresh  # as if a client had changed something just now
        changes = 0 if outdated else entry.changes
        result: Result = "hit"
        failure: LeaseholdError | None = None
        while (entry.shown_changes < changes or entry.taken_at < oldest) and failure is None:
            if entry.taking is None:
                result = "miss"  # this reader costs the engine an inspect; those that wait for the same one do not
            failure = await self._take(namespace, entry)
        return self._shown(entry, result, failure)

    async def get_many(self, namespaces: Sequence[str]) -> list[Picture]:
        """The pictures of several namespaces, taken side by side. One that the engine does not give is left out."""
        reads = [self.get(namespace, outdated=True) for namespace in namespaces]
        found = await asyncio.gather(*reads, return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException) and not isinstance(each, LeaseholdError):
                raise each
        return [each for each in found if isinstance(each, Picture)]

    def touch(self, namespace: str) -> None:
        """A client of this server changed something in this namespace: the picture is outdated."""
        self._note_use(namespace)
        if (entry := self._entries.get(namespace)) is not None:
            entry.changes += 1

    def namespaces(self) -> list[str]:
        """Those in use, as far as this server knows: with a change through it, or with a claim in a picture."""
        return sorted(self._known)

    def latest_namespaces(self) -> list[str]:
        """Those used last, few enough to read all of them."""
        return [name for name, _ in zip(reversed(self._known), range(MAX_READ), strict=False)]

    def ages(self) -> dict[str, float]:
        """How old the picture of each namespace is that ever had one."""
        now = self._service.runtime.now()
        return {name: now - entry.taken_at for name, entry in self._entries.items() if entry.shown_changes >= 0}

    # ------------------------------------------------------------------ taking

    async def _take(self, namespace: str, entry: _Entry) -> LeaseholdError | None:
        """Wait for one inspect: the one under way, or a new one. Returns its error. A reader that has something to show
        does not wait for a silent engine."""
        if entry.taking is None:
            entry.taking = asyncio.get_running_loop().create_task(self._inspect(namespace, entry))
            entry.taking.add_done_callback(_retrieve)
        task, timeout = entry.taking, None
        if entry.snapshot is not None and self._age(entry) <= SHOWN_STALE:
            timeout = MIN_INTERVAL + self._max_age
        done, _ = await asyncio.wait({task}, timeout=timeout)
        if not done:
            return Unavailable("the engine has not answered yet")
        error = task.exception()
        if error is not None and not isinstance(error, LeaseholdError):
            raise error
        return error

    async def _inspect(self, namespace: str, entry: _Entry) -> None:
        runtime = self._service.runtime
        try:
            await runtime.sleep(max(0.0, entry.asked_at + MIN_INTERVAL - runtime.now()))
            asked_at, as_of, changes = runtime.now(), runtime.wall(), entry.changes
            entry.asked_at = asked_at
            found = await self._service.inspect(namespace, "", False, asked_at + self._service.call_timeout)
            snapshot = Snapshot(namespace, as_of, found)
            if len(found) > LARGE:
                await asyncio.to_thread(snapshot.prepare)
            entry.snapshot, entry.taken_at, entry.shown_changes = snapshot, asked_at, changes
        finally:
            entry.taking = None
        for each in self._entries.values():
            if self._age(each) > SHOWN_STALE:
                each.snapshot = None  # it may be large, and is never shown again
        if found:
            self._note_use(namespace)
        try:
            self.on_taken(snapshot)
        except Exception as error:
            _log.error("a new picture could not be evaluated; it is shown all the same", exc_info=error)

    def _shown(self, entry: _Entry, result: Result, failure: LeaseholdError | None = None) -> Picture:
        age = self._age(entry)
        if failure is not None and age > SHOWN_STALE:
            self.results[result] += 1
            raise failure
        assert entry.snapshot is not None  # noqa: S101  # for the type checker: without one the age is infinite
        self.results["stale" if failure else result] += 1
        return Picture(entry.snapshot, age, failure is not None)

    def _age(self, entry: _Entry) -> float:
        return self._service.runtime.now() - entry.taken_at

    def _entry(self, namespace: str) -> _Entry:
        entry = self._entries.get(namespace)
        if entry is None:
            entry = self._entries[namespace] = _Entry()
            if len(self._entries) > MAX_NAMESPACES:
                self._entries.popitem(last=False)
        self._entries.move_to_end(namespace)
        return entry

    def _note_use(self, namespace: str) -> None:
        self._known[namespace] = None
        self._known.move_to_end(namespace)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)


def _retrieve(task: asyncio.Task[None]) -> None:
    """Readers get the error of an inspect. If all of them have left, asyncio must not log it."""
    if not task.cancelled():
        task.exception()


def _view(namespace: str, name: str, claims: Sequence[Holding]) -> LockView:
    holders = tuple(claim for claim in claims if claim.state not in ("waiting", "passed over"))
    queue = tuple(claim for claim in claims if claim.state in ("waiting", "passed over"))
    return LockView(namespace, name, claims[0].kind, claims[0].limit, holders, queue)
