"""What a server knows of the past, as the HTTP API shows it and as peers send it to each other. Times are Unix times by
the clock of the server that saw it; display only."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct, field

from leasehold.events import FenceKind
from leasehold.model import Mode

End: TypeAlias = Literal["released", "lost", "broken", "unseen"]
IncidentKind: TypeAlias = Literal["lost", "stale_token", "broken", "engine_down", "no_leader", "deadlock"]


class Renewal(Struct, array_like=True):
    at: float
    left: float | None  # seconds of the ttl that were left before it


class AtRisk(Struct, array_like=True):
    """The engine had not confirmed a renewal in time."""

    began: float
    ended: float | None


class Refusal(Struct, array_like=True):
    """A fence refused the token of the grant."""

    at: float
    fence: FenceKind | None
    seen: int | None  # the highest token that the fence had seen


class PastGrant(Struct, kw_only=True):
    """One grant, from the events of the servers. What happened elsewhere is not known."""

    token: int | None
    fingerprint: str
    holder: str
    purpose: str | None
    mode: Mode
    slot: int | None
    granted_at: float
    waited: Annotated[float, Meta(description="Seconds from the acquire to the grant.")]
    queued: bool
    ttl: float
    expires_at: Annotated[float, Meta(description="When it ends, or ended, if no later renewal went another way.")]
    partial: Annotated[
        bool,
        Meta(description="The grant itself went another way: `granted_at` is when it was first heard of."),
    ] = False
    renewals: Annotated[list[Renewal], Meta(description="The latest; `renewed` counts all.")] = field(
        default_factory=list
    )
    renewed: int = 0
    at_risk: list[AtRisk] = field(default_factory=list)
    ended_at: float | None = None
    end: Annotated[
        End | None, Meta(description="unseen: it ended, and not through these servers; null: not known to have ended.")
    ] = None
    reason: Annotated[str | None, Meta(description="Of the loss, or of the operator who broke it.")] = None
    actor: Annotated[str | None, Meta(description="Who broke it.")] = None
    refused: list[Refusal] = field(default_factory=list)
    trace: Annotated[str | None, Meta(description="Trace id of the acquire.")] = None
    server: Annotated[str, Meta(description="Which server saw it; empty: the one that answers.")] = ""


class PastWait(Struct, kw_only=True):
    """One stay in the queue that is over."""

    fingerprint: str
    holder: str
    purpose: str | None
    began: float
    ended: float
    outcome: Literal["granted", "gave up"]
    token: int | None = None
    server: str = ""


class Incident(Struct, kw_only=True):
    """Something that an operator should know, with what it means and what to do."""

    at: float
    kind: IncidentKind
    namespace: str
    name: Annotated[str, Meta(description="Empty for one of the whole engine.")]
    meaning: str
    advice: str
    names: Annotated[list[str], Meta(description="All names of a deadlock.")] = field(default_factory=list)
    token: Annotated[int | None, Meta(description="Of the grant that it is about.")] = None
    token_after: Annotated[int | None, Meta(description="The highest token of the name that was granted by then.")] = (
        None
    )
    holder: str | None = None
    fingerprint: str | None = None
    reason: str | None = None
    actor: str | None = None
    fence: FenceKind | None = None
    silent: Annotated[float | None, Meta(description="Seconds since the holder was last heard of.")] = None
    ended_at: Annotated[float | None, Meta(description="When the engine answered again, or the deadlock was over.")] = (
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
    heard_at: Annotated[float | None, Meta(description="When it last acquired or renewed; null: not known.")]
    quiet: Annotated[bool, Meta(description="It has missed renewals: a lease of it is at risk.")]
    expires_at: Annotated[float | None, Meta(description="When the first of its leases ends unless it renews.")]
    blocks: Annotated[int, Meta(description="How many waiters wait for what it holds.")]
    lost: Annotated[int, Meta(description="Leases that it lost, as far as these servers remember.")]


class Counts(Struct, kw_only=True, omit_defaults=True):
    """What was counted, in ten seconds or over a longer time."""

    acquires: Annotated[
        dict[str, int], Meta(description="Acquires that ended, by outcome and path, such as `granted direct`.")
    ] = field(default_factory=dict)
    direct: Annotated[list[int], Meta(description="Grants without a queue, by seconds: see `bounds`. Empty: none.")] = (
        field(default_factory=list)
    )
    queued: Annotated[list[int], Meta(description="Grants after a queue, by seconds: see `bounds`.")] = field(
        default_factory=list
    )
    held: Annotated[list[int], Meta(description="Leases that ended, by seconds held: see `hold_bounds`.")] = field(
        default_factory=list
    )
    renewals: Annotated[dict[str, int], Meta(description="By outcome: ok, failed.")] = field(default_factory=dict)
    lost: Annotated[dict[str, int], Meta(description="Leases lost, by reason.")] = field(default_factory=dict)
    refused: Annotated[int, Meta(description="Tokens that a fence refused.")] = 0
    broken: int = 0


class Bucket(Struct, kw_only=True):
    """Ten seconds of a namespace."""

    at: Annotated[float, Meta(description="When they began.")]
    counts: Counts
    holding: Annotated[int | None, Meta(description="Claims held, by the last picture in that time; null: none.")] = (
        None
    )
    waiting: Annotated[int | None, Meta(description="Waiters, the same way.")] = None


Quantiles: TypeAlias = Annotated[
    list[float] | None, Meta(description="p50, p95 and p99 in seconds, estimated from the histogram; null: no values.")
]


class Summary(Struct, kw_only=True):
    """What was counted for a namespace or for one group of names, and what follows from it."""

    group: Annotated[str, Meta(description="Names without their ids, as in the metrics. Empty: the whole namespace.")]
    counts: Counts
    activity: Annotated[list[int], Meta(description="Acquires in each ten seconds, oldest first.")]
    rate: Annotated[float, Meta(description="Acquires per second.")]
    errors: Annotated[float, Meta(description="Share of acquires without an answer of the engine, or with an error.")]
    contention: Annotated[float, Meta(description="Share of acquires that met another holder.")]
    direct: Quantiles
    queued: Quantiles
    held: Quantiles


class Stats(Struct, kw_only=True):
    """A namespace over a time, at most the last hour."""

    namespace: str
    since: float
    until: float
    bounds: Annotated[list[float], Meta(description="Upper bounds of `direct` and `queued` in `counts`.")]
    hold_bounds: Annotated[list[float], Meta(description="Upper bounds of `held` in `counts`.")]
    total: Summary
    groups: Annotated[list[Summary], Meta(description="The 20 with the most acquires, most first.")]
    buckets: Annotated[list[Bucket], Meta(description="Oldest first, one for each ten seconds.")]
