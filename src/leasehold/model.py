"""The values that cross the seam between recipes and engines: frozen, without behaviour.

The ones made on every call are named tuples, four times cheaper to build than frozen dataclasses.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any, Literal, NamedTuple, TypeAlias

Mode: TypeAlias = Literal["exclusive", "shared"]
Kind: TypeAlias = Literal["lock", "semaphore"]
HoldingState: TypeAlias = Literal["held", "reserved", "cooling", "waiting", "passed over"]
Reason: TypeAlias = Literal["expired", "broken", "unreachable", "stalled", "max_hold", "forked", "unknown", "released"]


class Holder(NamedTuple):
    """Who asks, in words for people. Nothing is ever decided by it."""

    label: str
    host: str = ""
    pid: int = 0
    purpose: str = ""


class Claim(NamedTuple):
    """One request for one name. `id` is the secret that owns it; `id_hash`, its hash, is what engines store."""

    namespace: str
    name: str
    id: str
    id_hash: str
    holder: Holder
    ttl: float
    mode: Mode = "exclusive"
    kind: Kind = "lock"
    limit: int = 1
    delay: float = 0.0
    min_hold: float = 0.0
    queue: bool = False  # join the line, or keep the place in it, when the name is not free
    token: int = 0  # the grant this claim was given; 0 until then
    wait_deadline: float = inf  # of one that queues: its `wait` is over then, by `runtime.now()`; nobody else is told

    @property
    def fingerprint(self) -> str:
        """What may be shown of the id: enough to tell claims apart, not enough to release one."""
        return self.id_hash[:16]

    def __repr__(self) -> str:
        # The tuple's own repr would show the id.
        return f"<Claim {self.namespace}:{self.name} {self.fingerprint} {self.mode} {self.kind} limit={self.limit}>"


class Grant(NamedTuple):
    """The engine's yes. `ttl` is the life left as the engine answered, also when repeated (E8)."""

    token: int
    ttl: float
    slot: int | None = None


class Busy(NamedTuple):
    """The engine's not now: what is in the way, and when it is worth asking again at the latest."""

    left: float | None = None  # seconds until the first thing in the way ends by itself
    position: int | None = None  # 0 is the head of the line; None: not in line
    token: int | None = None
    holder: Holder | None = None


class Alive(NamedTuple):
    """The claim stands: a grant lives `ttl` seconds more, or a waiter keeps its place that long."""

    ttl: float
    position: int | None = None  # of a waiter; None: it was given its turn or passed over, and has to ask


class Gone(NamedTuple):
    """The engine does not have the claim. Not a guess: it answered (E5)."""

    reason: Literal["expired", "broken", "unknown"] = "unknown"


@dataclass(frozen=True, slots=True)
class Holding:
    """One claim as `inspect` shows it. Times are seconds by the engine's clock at the moment of asking."""

    namespace: str
    name: str
    state: HoldingState
    mode: Mode
    kind: Kind
    limit: int
    fingerprint: str
    holder: Holder
    age: float  # since it was granted, or since it joined the line
    left: float  # until it ends unless renewed
    token: int | None = None
    slot: int | None = None
    position: int | None = None
    owner: str = ""  # eight hex digits, the same for every claim of one thread or task: who waits for what across names


@dataclass(frozen=True, slots=True)
class Term:
    """One leader's time, as an observer sees it."""

    name: str
    token: int  # rises from term to term: what the leader's writes are fenced by
    holder: Holder
    age: float  # since it began, by the engine's clock at the moment of asking
    missed: bool = False  # terms may have come and gone unseen just before this one


@dataclass(frozen=True, slots=True)
class Outcome:
    """Where a key of `once` stands, as `outcome` shows it."""

    key: str
    state: Literal["running", "done", "failed", "expired"]  # lapsed: its runner is gone, the next caller takes it over
    token: int  # of its last runner
    runs: int  # how often it was begun
    holder: str  # who ran it last, for people
    at: float  # when that began, by that runner's wall clock, for people
    result: Any = None  # of one that is done
    error: str = ""  # of one that failed


@dataclass(frozen=True, slots=True)
class Traits:
    """What an engine, as configured, promises. Recipes choose by these, never by an engine's name."""

    liveness: Literal["ttl", "session"]  # what frees the grant of a dead holder
    clock: Literal["engine", "client"]  # whose clock ends it
    fencing: bool  # E3 holds
    fair: bool  # grants follow arrival
    push: bool  # wait() is woken rather than polled
    shared: bool  # shared claims allowed (RWLock)
    max_limit: int | None  # 1: locks only, None: any semaphore
    slots: bool  # permits are numbered, so they can be fenced one by one
    outlives: bool  # a grant may outlive its client (min_hold, delay, `leasehold acquire`)
    break_notice: bool  # a break is pushed to the holder
    min_ttl: float  # with ttl_step: what the engine makes of a ttl
    ttl_step: float
    survives: Literal["nothing", "restart", "minority"]
