"""What each incident means, and what to do. Also the owners of a picture: which of them have gone quiet."""

from __future__ import annotations

from collections.abc import Callable
from heapq import nsmallest
from typing import TYPE_CHECKING, Final, Literal

from leasehold.core.deadlocks import Deadlock
from leasehold.events import Event
from leasehold.model import Holding
from leasehold.server.past import Incident, Owner, PastGrant
from leasehold.server.picture import LockView, Picture, Snapshot, Who, who_of

if TYPE_CHECKING:
    from leasehold.server.history import History

_STOP = "Make the work stop when the lease is lost: call `lease.check()` before each write, and send the token with it."

# Why a lease was lost -> what it means, what to do.
_LOSSES = {
    "expired": (
        "The holder did not renew in time: it did not run, or could not reach a server. It may continue to work until "
        "it notices, while another holder may have the lock already.",
        f"Find out why the holder did not run (a long pause, a suspended machine, a blocked event loop). {_STOP}",
    ),
    "broken": (
        "An operator ended the lease while its holder worked.",
        "Check that the holder has stopped. Its writes with the old token must be refused by a fence.",
    ),
    "unknown": (
        "The engine no longer has the grant, and cannot tell what ended it: it expired, was broken, or the "
        "engine lost data.",
        "If it happens after a restart or failover of the engine, run `leasehold doctor` on it: a setting may let it "
        "forget grants.",
    ),
}


def lost(event: Event, grant: PastGrant | None, highest_token: int) -> Incident:
    meaning, advice = _LOSSES.get(event.reason or "", _LOSSES["unknown"])
    return _about(
        event,
        "lost",
        grant,
        highest_token,
        meaning,
        advice,
        reason=event.reason,
        silent=None if grant is None else event.at - _heard_at(grant),
    )


def refused(event: Event, grant: PastGrant | None, highest_token: int) -> Incident:
    seen = f" It had seen {event.seen}." if event.seen is not None else ""
    return _about(
        event,
        "stale_token",
        grant,
        highest_token,
        f"A holder wrote after it had lost the lock, and the fence refused token {event.token}.{seen} Nothing was "
        "overwritten: this is what the fence is for.",
        f"Find out why the holder continued. {_STOP}",
        reason=event.reason,
        fence=event.fence,
        silent=None if grant is None else event.at - _heard_at(grant),
    )


def broken(event: Event, grant: PastGrant | None, highest_token: int) -> Incident:
    return _about(
        event,
        "broken",
        grant,
        highest_token,
        f"{event.actor or 'An operator'} ended this lease. Its holder may continue until its next renewal fails, at "
        "the same time as the next holder.",
        "Check that the holder has stopped. Without a fence at the resource, both may have written.",
        reason=event.why or event.reason,
        actor=event.actor,
    )


_OUTAGES: Final[dict[Literal["engine_down", "no_leader"], tuple[str, str]]] = {
    "engine_down": (
        "The engine did not answer 5 calls in a row. New acquires are refused at once; renewals are still sent, and "
        "holders keep their leases until their ttl is over.",
        "Run `leasehold doctor` with the engine's URL, and look at the engine's own log. If it stays down for longer "
        "than the ttl, holders lose their leases and stop.",
    ),
    "no_leader": (
        "The engine has no leader, so it grants and renews nothing. Holders keep their leases until their ttl is over.",
        "Look at the engine's members: a majority must run and reach each other. A ttl well above the time that an "
        "election takes keeps holders from losing their leases.",
    ),
}


def outage(kind: Literal["engine_down", "no_leader"], at: float) -> Incident:
    meaning, advice = _OUTAGES[kind]
    return Incident(at=at, kind=kind, namespace="", name="", meaning=meaning, advice=advice)


def deadlock(snapshot: Snapshot, found: Deadlock) -> Incident:
    victim = found.victim
    owners = len(found.waits)
    return Incident(
        at=snapshot.as_of,
        kind="deadlock",
        namespace=snapshot.namespace,
        name=victim.name,
        meaning=f"{owners} owners wait for each other, and none of them can continue: {found}.",
        advice=f"Break {victim.name}, token {victim.token}: it is the youngest grant, so the least work is lost. Then "
        "acquire names in one order everywhere, or together with `multilock`.",
        names=sorted({wait.name for wait in found.waits}),
        token=victim.token,
        holder=victim.holder.label,
        fingerprint=victim.fingerprint,
    )


def _about(
    event: Event,
    kind: str,
    grant: PastGrant | None,
    highest_token: int,
    meaning: str,
    advice: str,
    **more: object,
) -> Incident:
    token = event.token if event.token is not None or grant is None else grant.token
    return Incident(
        at=event.at,
        kind=kind,  # type: ignore[arg-type]
        namespace=event.namespace,
        name=event.name,
        meaning=meaning,
        advice=advice,
        token=token,
        token_after=highest_token if token is not None and highest_token > token else None,
        holder=event.holder or (None if grant is None else grant.holder),
        fingerprint=event.fingerprint or (None if grant is None else grant.fingerprint),
        **more,  # type: ignore[arg-type]
    )


def _heard_at(grant: PastGrant) -> float:
    return grant.expires_at - grant.ttl


def owners(
    picture: Picture, history: History, most: int | None = None, fits: Callable[[Who], bool] | None = None
) -> list[Owner]:
    """The holders of a picture that fit, those gone quiet first, then by the number of waiters that they block; then
    those that only wait. `most`: no more than these. There may be ten thousand that only wait, and a page shows a
    hundred owners: the others are not made."""
    found: dict[Who, Owner] = {}
    for lock in picture.locks:
        for holding in lock.holders:
            if holding.state == "held" and ((who := who_of(holding)) in found or fits is None or fits(who)):
                owner = found.get(who) or found.setdefault(who, _new_owner(who, picture, history))
                _add_hold(owner, lock, holding, picture, history)
    if most is None or len(found) < most:
        waiting = {who for who in picture.snapshot.owners if who not in found and (fits is None or fits(who))}
        for who in sorted(waiting) if most is None else nsmallest(most - len(found), waiting):
            found[who] = _new_owner(who, picture, history)
    for lock in picture.locks:
        for waiter in lock.queue:
            if (known := found.get(who_of(waiter))) is not None:
                known.waits.append(lock.name)
    order = sorted(found.values(), key=lambda each: (not each.quiet, -each.blocks, -len(each.holds), each.holder))
    return order[:most]


def _add_hold(owner: Owner, lock: LockView, holding: Holding, picture: Picture, history: History) -> None:
    heard_at, ends = history.heard_at(holding, picture.as_of), picture.as_of + holding.left
    owner.holds.append(lock.name)
    owner.blocks += len(lock.queue)
    owner.quiet = owner.quiet or history.at_risk(holding)
    owner.heard_at = heard_at if owner.heard_at is None else max(owner.heard_at, heard_at)
    owner.expires_at = ends if owner.expires_at is None else min(owner.expires_at, ends)


def _new_owner(who: Who, picture: Picture, history: History) -> Owner:
    label, host, pid = who
    return Owner(
        holder=label,
        host=host or None,
        pid=pid or None,
        holds=[],
        waits=[],
        heard_at=None,
        quiet=False,
        expires_at=None,
        blocks=0,
        lost=history.losses(picture.namespace, label),
    )
