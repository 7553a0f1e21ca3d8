"""Bodies and answers of the HTTP API, typed: they check what arrives, and the OpenAPI document is made from them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from leasehold.config import DAY
from leasehold.core.names import MAX_NAME_BYTES
from leasehold.core.timing import MIN_DRIFT
from leasehold.engines.remote.wire import MAX_ID, MIN_ID
from leasehold.events import FenceKind
from leasehold.model import HoldingState, Kind, Mode
from leasehold.server import past
from leasehold.telemetry.metrics import ACQUIRE_BUCKETS, HOLD_BUCKETS

MAX_LEASES = 500  # of one renew-many
MAX_HOLDINGS = 1000  # of one page of locks
MAX_WAITERS = 10_000  # of one page, in the queues of its holdings, but for those of the first

Name = Annotated[
    str, Meta(min_length=1, max_length=MAX_NAME_BYTES, description="What is locked: any text of 1 to 255 bytes.")
]
Namespace = Annotated[
    str, Meta(max_length=MAX_NAME_BYTES, description="The same name in two namespaces is two independent locks.")
]
Id = Annotated[
    str,
    Meta(
        pattern=rf"^[A-Za-z0-9._-]{{{MIN_ID},{MAX_ID}}}$",
        description="The secret that owns the claim: a new one for each acquire, such as a UUID. Repeating a request "
        "with the same id is harmless. If it is left out, the server makes one, and a lost answer leaves the name "
        "locked until the ttl is over.",
    ),
]
Label = Annotated[str, Meta(max_length=200)]
Ttl = Annotated[float, Meta(gt=MIN_DRIFT, le=DAY, description="Seconds that the lease lives unrenewed.")]
Seconds = Annotated[float, Meta(ge=0, le=DAY)]
Token = Annotated[int, Meta(ge=1, le=2**63 - 1, description="The fencing token of the lease.")]


AsOf = Annotated[float, Meta(description="Unix time by the server's clock: everything before it is shown.")]
Stale = Annotated[bool, Meta(description="The engine has not answered since `as_of`.")]
Missing = Annotated[list[str], Meta(description="Peers that did not answer: what went through them is not shown.")]


class Body(Struct, forbid_unknown_fields=True):
    """A request. A member that the server does not know is refused: it would be ignored silently otherwise."""


class AcquireBody(Body):
    name: Name
    namespace: Namespace = ""
    id: Id | None = None
    ttl: Ttl = 30.0
    wait: Annotated[
        float,
        Meta(ge=0, le=1e9, description="Seconds to wait in the queue, at most 60: to wait longer, repeat with the id."),
    ] = 0.0
    holder: (
        Annotated[Label, Meta(description="Who asks, for display only. Default: the name of the API key.")] | None
    ) = None
    purpose: Annotated[Label, Meta(description="Purpose of the lock, for display only.")] | None = None
    mode: Mode = "exclusive"
    limit: (
        Annotated[
            int, Meta(ge=1, le=2**31 - 1, description="How many holders at a time: a semaphore. Left out: a lock.")
        ]
        | None
    ) = None
    delay: Annotated[
        Seconds, Meta(description="Extra seconds that the engine keeps the name after the lease is lost.")
    ] = 0.0
    min_hold: Annotated[
        Seconds, Meta(description="Seconds for which the name stays taken at least, even if it is released earlier.")
    ] = 0.0


class LeaseBody(Body):
    """A lease to renew."""

    name: Name
    id: Id
    token: Token
    namespace: Namespace = ""
    ttl: Ttl = 30.0


class RenewManyBody(Body):
    leases: Annotated[list[LeaseBody], Meta(min_length=1, max_length=MAX_LEASES)]


class ReleaseBody(Body):
    name: Name
    id: Id
    namespace: Namespace = ""


class BreakBody(Body):
    name: Name
    token: Token
    namespace: Namespace = ""
    reason: Annotated[str, Meta(max_length=500, description="For the audit log and for events.")] = ""


class LimitBody(Body):
    """A semaphore's new limit."""

    name: Name
    limit: (
        Annotated[
            int,
            Meta(ge=1, lt=2**31, description="Counts for every client, whatever it asks for. null: remove it."),
        ]
        | None
    )
    namespace: Namespace = ""
    reason: Annotated[str, Meta(max_length=500, description="For the audit log and for events.")] = ""


class RefusalBody(Body):
    """A token that a fence refused."""

    name: Name
    token: Token
    namespace: Namespace = ""
    seen: Annotated[Token | None, Meta(description="The highest token that the fence had seen.")] = None
    fence: Annotated[FenceKind | None, Meta(description="What kind of fence it was.")] = None
    holder: Annotated[Label, Meta(description="Who sent the token, for display only.")] | None = None
    reason: Annotated[str, Meta(max_length=500, description="What the fence protects, or its message.")] = ""


class Noted(Struct):
    noted: bool


class Lease(Struct):
    """A granted lease. Trust it for `waited + ttl` seconds, less 1 %, from when the request was sent."""

    id: str
    namespace: str
    name: str
    token: Annotated[int, Meta(description="The fencing token: rises with every grant of the name.")]
    ttl: float
    slot: Annotated[int | None, Meta(description="Which of the semaphore's permits it is.")]
    waited: Annotated[float, Meta(description="Seconds from the request's arrival to the attempt that was granted.")]
    fingerprint: Annotated[str, Meta(description="What may be shown of the id.")]


class Renewed(Struct):
    ttl: Annotated[float, Meta(description="Seconds of life left, from when the request was sent.")]


class Problem(Struct):
    """An RFC 9457 problem. Extension members depend on its type."""

    type: Annotated[str, Meta(examples=["https://leasehold.dev/problems/busy"])]
    title: str
    status: int
    detail: str
    done: Annotated[
        bool, Meta(description="False: the engine was never asked, so nothing is pending: ask another server at once.")
    ] = True
    name: str | None = None
    holder: str | None = None
    purpose: str | None = None
    token: int | None = None
    left: float | None = None
    position: int | None = None
    waited: float | None = None
    reason: Literal["expired", "broken", "unknown"] | None = None
    wanted: str | None = None
    found: str | None = None
    missing: list[str] | None = None
    id: str | None = None


class Renewal(Struct, omit_defaults=True):
    """The answer for one lease: `ttl` if it was renewed, else the members of a problem."""

    ttl: float | None = None
    type: str | None = None
    title: str | None = None
    status: int | None = None
    detail: str | None = None
    name: str | None = None
    reason: Literal["expired", "broken", "unknown"] | None = None


class RenewedMany(Struct):
    leases: Annotated[list[Renewal], Meta(description="One for each lease, in the same order.")]


class Released(Struct):
    released: Annotated[
        bool | None,
        Meta(description="false: the lease had ended before; null: it has ended, perhaps by this request."),
    ]


class Broken(Struct):
    broken: Annotated[bool, Meta(description="false: no grant has this token any more.")]


class Resized(Struct):
    limit: Annotated[int | None, Meta(description="The limit that was set; null: it was removed.")]


OwnerDigits = Annotated[str, Meta(description="The same for all claims of one thread or task; empty: not known.")]


class Waiter(Struct):
    name: str
    holder: str
    purpose: str | None
    position: int | None
    mode: Mode
    waiting_for: Annotated[float, Meta(description="Seconds in the queue.")]
    fingerprint: str
    owner: OwnerDigits


class Holding(Struct):
    """One grant, and the waiters of its name."""

    name: str
    holder: str
    purpose: str | None
    token: int | None
    acquired_at: Annotated[float | None, Meta(description="Unix time by the server's clock; null: not known.")]
    expires_in: Annotated[float, Meta(description="Seconds until it expires if it is not renewed.")]
    state: HoldingState
    mode: Mode
    kind: Kind
    limit: int
    slot: int | None
    fingerprint: str
    host: str | None
    pid: int | None
    owner: OwnerDigits
    queue: list[Waiter]


class Locks(Struct):
    holdings: list[Holding]
    queue: Annotated[list[Waiter], Meta(description="The waiters of all names of this page, also of names not held.")]
    cursor: Annotated[str | None, Meta(description="Pass it to get the next page; null: this is the last.")]
    as_of: AsOf
    stale: Stale


class OfServer(Struct, kw_only=True):
    """An answer from one server's history, or from those of all servers."""

    missing: Missing = msgspec.field(default_factory=list)
    server: Annotated[str, Meta(description="Names the server that answers, by a text that changes when it restarts.")]

    def name_server(self, name: str) -> None:
        """Mark the records as those of the server `name`, as the receiver calls it."""


class Owners(OfServer, kw_only=True):
    owners: Annotated[list[past.Owner], Meta(description="Those that have missed renewals first.")]
    as_of: AsOf
    stale: Stale


class NameHistory(OfServer, kw_only=True):
    """The past of a name, latest first. It is kept in memory, so only the latest is known."""

    namespace: str
    name: str
    grants: list[past.PastGrant]
    waits: list[past.PastWait]

    def name_server(self, name: str) -> None:
        for grant in self.grants:
            grant.server = name
        for wait in self.waits:
            wait.server = name


class Incidents(OfServer, kw_only=True):
    incidents: Annotated[list[past.Incident], Meta(description="Latest first.")]

    def name_server(self, name: str) -> None:
        for incident in self.incidents:
            incident.server = name


class StatsAnswer(OfServer, kw_only=True):
    stats: past.Stats

    def __post_init__(self) -> None:
        """Histograms of a peer are added to those of this server, so they must have the same buckets."""
        found = self.stats
        if found.bounds != list(ACQUIRE_BUCKETS) or found.hold_bounds != list(HOLD_BUCKETS):
            raise ValueError("the statistics have other bounds than those of this version")
        sizes = (0, len(ACQUIRE_BUCKETS) + 1), (0, len(HOLD_BUCKETS) + 1)
        every = [found.total.counts, *(each.counts for each in found.groups), *(each.counts for each in found.buckets)]
        for counts in every:
            if not (len(counts.direct) in sizes[0] and len(counts.queued) in sizes[0] and len(counts.held) in sizes[1]):
                raise ValueError("a histogram has not one value for each of its bounds")


class Ready(Struct):
    ready: bool
