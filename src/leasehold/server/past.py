"""The records of a server's history, as the HTTP API has them. Times are Unix times by the clock of the server that saw
the event, for display only."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct, field

from leasehold.events import FenceKind
from leasehold.model import Mode

End: TypeAlias = Literal["released", "lost", "broken", "unseen"]
# Peers may have another version, or a wrong clock. What they send is checked when it is decoded: a time that no
# calendar has, or a count below zero, must not keep a page from being shown.
Instant: TypeAlias = Annotated[float, Meta(ge=0, le=1e11)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
Token: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
IncidentKind: TypeAlias = Literal["lost", "stale_token", "broken", "engine_down", "no_leader", "deadlock"]


class PastRenewal(Struct, array_like=True):
    at: Instant
    left: float | None  # seconds of the ttl that were left before it


class AtRisk(Struct, array_like=True):
    """The engine had not confirmed a renewal in time."""

    began: Instant
    ended: Instant | None


class Refusal(Struct, array_like=True):
    """A fence refused the token of the grant."""

    at: Instant
    fence: FenceKind | None
    seen: Token | None  # the highest token that the fence had seen


class PastGrant(Struct, kw_only=True):
    """One grant, from the events of the servers. What happened elsewhere is not known."""

    token: Token | None
    fingerprint: str
    holder: str
    purpose: str | None
    mode: Mode
    slot: int | None
    granted_at: Instant
    waited: Annotated[float, Meta(description="Seconds from the acquire to the grant.")]
    queued: bool
    ttl: float
    expires_at: Annotated[Instant, Meta(description="When it expires, or expired, unless it was renewed elsewhere.")]
    partial: Annotated[
        bool,
        Meta(description="The grant was made elsewhere: `granted_at` is when a server first saw it."),
    ] = False
    renewals: Annotated[list[PastRenewal], Meta(description="The latest; `renewed` counts all.")] = field(
        default_factory=list
    )
    renewed: Count = 0
    at_risk: list[AtRisk] = field(default_factory=list)
    ended_at: Instant | None = None
    end: Annotated[
        End | None, Meta(description="unseen: it ended, and not through these servers; null: not known to have ended.")
    ] = None
    reason: Annotated[str | None, Meta(description="Of the loss, or of the operator who broke it.")] = None
    actor: Annotated[str | None, Meta(description="Who broke it.")] = None
    refused: list[Refusal] = field(default_factory=list)
    trace: Annotated[str | None, Meta(description="Trace id of the acquire.")] = None
    server: Annotated[str, Meta(description="Which server saw it; empty: the one that answers.")] = ""


class PastWait(Struct, kw_only=True):
    """A past wait in the queue."""

    fingerprint: str
    holder: str
    purpose: str | None
    began: Instant
    ended: Instant
    outcome: Literal["granted", "gave up"]
    token: Token | None = None
    server: str = ""


class Incident(Struct, kw_only=True):
    """An event that needs an operator's attention, with what it means and what to do."""

    at: Instant
    kind: IncidentKind
    namespace: str
    name: Annotated[str, Meta(description="Empty if it concerns the whole engine.")]
    meaning: str
    advice: str
    names: Annotated[list[str], Meta(description="All names of a deadlock.")] = field(default_factory=list)
    token: Annotated[Token | None, Meta(description="The token of the grant.")] = None
    token_after: Annotated[Token | None, Meta(description="The highest token granted for the name by then.")] = None
    holder: str | None = None
    fingerprint: str | None = None
    reason: str | None = None
    actor: str | None = None
    fence: FenceKind | None = None
    silent: Annotated[float | None, Meta(description="Seconds since the holder last acquired or renewed.")] = None
    ended_at: Annotated[Instant | None, Meta(description="When the engine answered again, or the deadlock ended.")] = (
        None
    )
    server: str = ""


class Owner(Struct, kw_only=True):
    """One holder, with all that it holds and waits for."""

    holder: str
    host: str | None
    pid: int | None
    holds: list[str]  # names
    waits: list[str]
    heard_at: Annotated[Instant | None, Meta(description="When it last acquired or renewed; null: not known.")]
    quiet: Annotated[bool, Meta(description="It has missed renewals: one of its leases is at risk.")]
    expires_at: Annotated[
        Instant | None, Meta(description="When the first of its leases expires if it does not renew.")
    ]
    blocks: Annotated[Count, Meta(description="How many waiters wait for what it holds.")]
    lost: Annotated[Count, Meta(description="Leases that it lost, as far as these servers remember.")]


class Counts(Struct, kw_only=True, omit_defaults=True):
    """What was counted, in ten seconds or over a longer time."""

    acquires: Annotated[
        dict[str, Count], Meta(description="Acquires that ended, by outcome and path, such as `granted direct`.")
    ] = field(default_factory=dict)
    direct: Annotated[
        list[Count], Meta(description="Grants without a queue, by seconds: see `bounds`. Empty: none.")
    ] = field(default_factory=list)
    queued: Annotated[list[Count], Meta(description="Grants after a queue, by seconds: see `bounds`.")] = field(
        default_factory=list
    )
    held: Annotated[list[Count], Meta(description="Leases that ended, by seconds held: see `hold_bounds`.")] = field(
        default_factory=list
    )
    renewals: Annotated[dict[str, Count], Meta(description="By outcome: ok, failed.")] = field(default_factory=dict)
    lost: Annotated[dict[str, Count], Meta(description="Leases lost, by reason.")] = field(default_factory=dict)
    refused: Annotated[Count, Meta(description="Tokens that a fence refused.")] = 0
    broken: Count = 0


class Bucket(Struct, kw_only=True):
    """Ten seconds of a namespace."""

    at: Annotated[Instant, Meta(description="When they began.")]
    counts: Counts
    holding: Annotated[Count | None, Meta(description="Claims held, by the last picture in that time; null: none.")] = (
        None
    )
    waiting: Annotated[Count | None, Meta(description="Waiters, by the same picture.")] = None


Quantiles: TypeAlias = Annotated[
    list[float] | None, Meta(description="p50, p95 and p99 in seconds, estimated from the histogram; null: no values.")
]


class Summary(Struct, kw_only=True):
    """Counts of a namespace or of one group of names, and rates and quantiles of them."""

    group: Annotated[
        str, Meta(description="Names with their ids replaced, as in the metrics. Empty: the whole namespace.")
    ]
    counts: Counts
    activity: Annotated[list[Count], Meta(description="Acquires in each ten seconds, oldest first.")]
    rate: Annotated[float, Meta(description="Acquires per second.")]
    errors: Annotated[float, Meta(description="Share of acquires without an answer of the engine, or with an error.")]
    contention: Annotated[float, Meta(description="Share of acquires that met another holder.")]
    direct: Quantiles
    queued: Quantiles
    held: Quantiles


class Stats(Struct, kw_only=True):
    """A namespace over a time, at most the last hour."""

    namespace: str
    since: Instant
    until: Instant
    bounds: Annotated[list[float], Meta(description="Upper bounds of `direct` and `queued` in `counts`.")]
    hold_bounds: Annotated[list[float], Meta(description="Upper bounds of `held` in `counts`.")]
    total: Summary
    groups: Annotated[list[Summary], Meta(description="The 20 with the most acquires, most first.")]
    buckets: Annotated[list[Bucket], Meta(description="Oldest first, one for each ten seconds.")]
