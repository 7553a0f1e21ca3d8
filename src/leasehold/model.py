"""The values that cross the engine interface: frozen, without behaviour.

They are named tuples: a frozen dataclass takes four times as long to build, and the module `dataclasses` with its
classes would take a quarter of the time of `import leasehold`. Modules with public named tuples do without postponed
annotations: `help` would show `ForwardRef('str')` for each field.
"""

from math import inf
from typing import Any, Final, Literal, NamedTuple, TypeAlias

Mode: TypeAlias = Literal["exclusive", "shared"]
Kind: TypeAlias = Literal["lock", "semaphore"]
HoldingState: TypeAlias = Literal["held", "reserved", "cooling", "waiting", "passed over"]
Reason: TypeAlias = Literal[
    "expired", "broken", "unreachable", "stalled", "max_hold", "forked", "unknown", "released", "taken_over"
]


NO_MIN_HOLD: Final = -1.0  # `Claim.min_hold` of a release without work done under the grant

# Builds a named tuple from a tuple of all its fields, in a third of the time of calling the class, and a sixth of
# `_replace`. For values that every acquire builds.
fast_tuple: Final = tuple.__new__


class Holder(NamedTuple):
    """Who makes a claim, whether it is granted or waits: a name for display. No decision depends on it."""

    label: str
    host: str = ""
    pid: int = 0
    purpose: str = ""


class Claim(NamedTuple):
    """One request for one name. `id` is the secret that owns the claim; engines store only its hash, `id_hash`."""

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
    min_hold: float = 0.0  # kept with the grant, so a release need not know it; NO_MIN_HOLD there: it does not apply
    queue: bool = False  # if the name is not free: join the queue, or keep the position in it
    token: int = 0  # of the claim's grant; 0 before it is granted
    wait_deadline: float = inf  # when a queued claim's `wait` is over, by `runtime.now()`; never sent to the engine
    group: str | None = None  # of the lock in metrics; never sent to the engine
    # Its grant is of no use once this process has ended, so an engine that can prove that may end it. Never sent to a
    # server: a process elsewhere works under that grant.
    process_bound: bool = False

    @property
    def fingerprint(self) -> str:
        """What may be shown of the id: enough to distinguish claims, not enough to release one."""
        return self.id_hash[:16]

    def __repr__(self) -> str:
        # The tuple's own repr would show the id.
        return f"<Claim {self.namespace}:{self.name} {self.fingerprint} {self.mode} {self.kind} limit={self.limit}>"


class Grant(NamedTuple):
    """The engine's yes. `ttl` is the life left when the engine answered, even if the grant is repeated (E8)."""

    token: int  # 1 or more: the client refuses a grant without a token
    ttl: float
    slot: int | None = None


class Busy(NamedTuple):
    """The engine's "not now": which grant blocks the claim, and when to attempt again at the latest."""

    # Seconds until the first blocking grant or reservation ends unless renewed, or a shorter time after which the head
    # of the queue re-checks whether a reservation's client is alive. None: not known.
    left: float | None = None
    position: int | None = None  # 0 is the head; an engine may count no further than 1,000; None: not queued
    token: int | None = None
    holder: Holder | None = None


class Alive(NamedTuple):
    """The engine has the claim: a grant lives `ttl` more seconds, or a waiter keeps its position for `ttl` seconds."""

    ttl: float
    position: int | None = None  # of a waiter; None: it has a reservation or was passed over, and must attempt again


class Gone(NamedTuple):
    """The engine answered that it does not have the claim (E5)."""

    reason: Literal["expired", "broken", "unknown"] = "unknown"


class Holding(NamedTuple):
    """One claim as `inspect` shows it: of a holder or of a waiter. Times are in seconds, by the engine's clock when it
    answered."""

    namespace: str
    name: str
    state: HoldingState
    mode: Mode
    kind: Kind
    limit: int
    fingerprint: str
    holder: Holder
    age: float  # since it was granted, or since it joined the queue
    left: float  # until it ends unless renewed
    token: int | None = None
    slot: int | None = None
    position: int | None = None  # how many waiters are ahead: 0 is next
    owner: str = ""  # eight hex digits, the same for all claims of one thread or task: finds deadlocks across names
    since_grant: bool = True  # False: the engine knows only when the claim was made, and `age` counts from there
    # When it was granted: Unix time by the clock of the client that inspects. None: not granted, or not known.
    acquired_at: float | None = None


class Term(NamedTuple):
    """One leader's term, as an observer sees it."""

    name: str
    token: int  # rises from term to term; fences the leader's writes
    holder: Holder
    age: float  # since the term began, by the engine's clock when it answered
    missed: bool = False  # the observer may have missed terms just before this one


class Outcome(NamedTuple):
    """The state of a key of `once`, as `outcome` shows it."""

    key: str
    state: Literal["running", "done", "failed", "expired"]  # expired: its runner is gone, the next caller takes over
    token: int  # of its last runner
    runs: int  # how often a run began
    holder: str  # of the last run; for display only
    at: float  # when the last run began, by its runner's wall clock; for display only
    result: Any = None  # if done
    error: str = ""  # if failed


class Traits(NamedTuple):
    """What an engine, as configured, promises. Client code decides by traits, never by an engine's name.

    The defaults promise the whole contract: an engine states where it differs, and always what its grants survive. The
    conformance suite tests every promise.
    """

    survives: Literal["nothing", "restart", "minority"]  # what its grants and tokens survive
    liveness: Literal["ttl", "session"] = "ttl"  # what frees the grant of a dead holder
    clock: Literal["engine", "client"] = "engine"  # whose clock ends it
    fencing: bool = True  # E3 holds
    fair: bool = True  # grants follow arrival
    push: bool = True  # wait() is woken rather than polled
    shared: bool = True  # shared claims allowed (RWLock)
    max_limit: int | None = None  # 1: locks only, None: any semaphore
    slots: bool = True  # permits are numbered, so they can be fenced one by one
    outlives: bool = True  # a grant may outlive its client (min_hold, delay, `leasehold acquire`)
    break_notice: bool = True  # a break is pushed to the holder
    resizable: bool = True  # the limit of a semaphore can be changed while it is in use (set_limit)
    min_ttl: float = 0.0  # the engine raises a shorter ttl to this
    ttl_step: float = 0.0  # the engine rounds a ttl up to a multiple of this; 0: it does not round
