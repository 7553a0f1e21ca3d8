"""What happened through this server: past grants and waits of each name, and incidents, from events.

Live state comes from the engine (`picture.py`), history from events: an engine does not keep it. So a server knows what
went through it, and through its peers (`peers.py`). A grant may end elsewhere, so an end that was not seen is not
invented: the grant is shown as ended `unseen` once a later exclusive grant shows that it is over.

Memory is bounded: names, grants and waits of a name, grants of all names, renewals of a grant, incidents. The namespace
that has the most forgets first, and what was used least recently: one tenant cannot push out the history of another. No
decision depends on any of it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from leasehold.core import timing
from leasehold.core.deadlocks import Deadlock, seen_in_both
from leasehold.events import Event
from leasehold.model import Claim, Holding
from leasehold.server import incidents, merging
from leasehold.server.fair_table import FairTable, Tally
from leasehold.server.past import AtRisk, Incident, Owner, PastGrant, PastRenewal, PastWait, Refusal, Stats
from leasehold.server.picture import Picture, Snapshot, Who
from leasehold.server.stats import Hour

MAX_NAMES: Final = 2000
MAX_GRANTS_PER_NAME: Final = 50
MAX_GRANTS: Final = 5000  # of all names
MAX_WAITS: Final = 50  # per name
MAX_RENEWALS: Final = 40  # per grant
MAX_MARKS: Final = 20  # per grant: times at risk, refusals
MAX_INCIDENTS: Final = 200  # per namespace: one tenant cannot push out those of another
MAX_INCIDENT_NAMESPACES: Final = 50
MAX_STATS: Final = 20  # answers that are kept
MAX_HOLDERS: Final = 2000  # whose losses are counted

_RENEWED_SECONDS: Final = 2.0  # a life that falls by so much more than the clock was renewed with a shorter ttl
_SAME_OUTAGE: Final = 10.0  # seconds


class _Life(NamedTuple):
    """What was last seen of a grant."""

    at: float
    left: float
    ttl: float  # when it was new or renewed, as far as it is known


class _Past:
    """The past of one name."""

    __slots__ = ("grants", "highest_token", "waits")

    def __init__(self) -> None:
        self.grants: deque[PastGrant] = deque()
        self.waits: deque[PastWait] = deque(maxlen=MAX_WAITS)
        self.highest_token = 0

    def find(self, fingerprint: str | None, token: int | None) -> PastGrant | None:
        """The grant of an event, which has the fingerprint of its claim, or its token, or both."""
        for grant in reversed(self.grants):
            if (fingerprint and grant.fingerprint == fingerprint) or (
                not fingerprint and token is not None and grant.token == token
            ):
                return grant
        return None


class History:
    """A hook for the events of a server. Every method is for the event loop's thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock  # Unix time
        self._names: FairTable[_Past] = FairTable()
        self._grants = Tally()  # of all names
        self._incidents: OrderedDict[str | None, deque[Incident]] = OrderedDict()  # by namespace; None: of the engine
        self._losses: FairTable[int] = FairTable()  # by holder
        self._lives: FairTable[_Life] = FairTable()  # of grants, by fingerprint
        self._deadlocks: dict[str, list[Deadlock]] = {}  # of the picture before, by namespace
        self._shown_deadlocks: dict[str, dict[frozenset[str], Incident]] = {}
        self._outages: dict[str, Incident] = {}  # the last of each kind
        self.hour = Hour(clock)
        self._stats: dict[tuple[str, float], Stats] = {}  # the last answers

    def __call__(self, event: Event, trace: str = "") -> None:
        """Record an event. `trace` is the trace id of its request."""
        if event.kind in ("breaker_opened", "breaker_closed"):
            self._on_breaker(event)
            return
        past = self._past(event.namespace, event.name)
        held = None
        match event.kind:
            case "granted":
                self._on_grant(past, event, trace)
            case "busy":
                self._on_given_up(past, event)
            case "renewed":
                self._on_renewal(past, event)
            case "renew_failed" | "at_risk":
                _begin_risk(past.find(event.fingerprint, event.token), event.at)
            case "released" | "lost" | "broken":
                held = self._on_end(past, event)
            case "stale_token":
                self._on_refusal(past, event)
        self.hour.count(event, held)

    # ------------------------------------------------------------------ reading

    def grants(self, namespace: str, name: str) -> list[PastGrant]:
        """Latest first."""
        return merging.grants([self.records(namespace, name)])

    def records(self, namespace: str, name: str) -> list[PastGrant]:
        """The same, with releases of grants that only a peer may know."""
        past = self._names.get(namespace, name)
        return [] if past is None else list(reversed(past.grants))

    def waits(self, namespace: str, name: str) -> list[PastWait]:
        """Latest first."""
        past = self._names.get(namespace, name)
        return [] if past is None else list(reversed(past.waits))

    def incidents(self, namespace: str | None = None) -> list[Incident]:
        """Latest first; those of a namespace, and those of the whole engine. None: all."""
        places = list(self._incidents) if namespace is None else [namespace, None]
        found = [incident for place in places for incident in self._incidents.get(place, ())]
        return sorted(found, key=lambda incident: incident.at, reverse=True)

    def stats(self, namespace: str, seconds: float) -> Stats:
        """At most a second old: adding up an hour takes some milliseconds, in which no request is served."""
        now, key = self._clock(), (namespace, seconds)
        known = self._stats.get(key)
        if known is None or not known.until <= now < known.until + 1.0:
            if len(self._stats) >= MAX_STATS:
                self._stats.clear()
            known = self._stats[key] = self.hour.read(namespace, now, seconds)
        return known

    def ttl(self, holding: Holding) -> float:
        """The life of the grant when it was new or renewed, as far as it is known: at least what is left."""
        known = self._lives.get(holding.namespace, holding.fingerprint)
        return holding.left if known is None else max(known.ttl, holding.left)

    def at_risk(self, holding: Holding) -> bool:
        """Whether the holder has missed its renewals: by the same rule as in the client."""
        return holding.state == "held" and holding.left < self.ttl(holding) - timing.overdue_at(0.0, self.ttl(holding))

    def heard_at(self, holding: Holding, as_of: float) -> float:
        """When the holder of a grant acquired or renewed it last."""
        return as_of + holding.left - self.ttl(holding)

    def owners(
        self, picture: Picture, most: int | None = None, fits: Callable[[Who], bool] | None = None
    ) -> list[Owner]:
        """The holders of a picture, those gone quiet first; all of them, or the first."""
        known = picture.snapshot.known_owners
        if fits is not None:
            return incidents.owners(picture, self, most, fits)
        if most not in known:
            known[most] = incidents.owners(picture, self, most)
        return known[most]

    def deadlocks(self, namespace: str) -> int:
        """How many the last two pictures of the namespace show."""
        return len(self._shown_deadlocks.get(namespace, ()))

    def losses(self, namespace: str, holder: str) -> int:
        """How many leases the holder lost in this namespace."""
        return self._losses.get(namespace, holder) or 0

    def expired_token(self, claim: Claim) -> int | None:
        """The token of the claim's grant, if that is known here, has not ended, and was not renewed in time."""
        past = self._names.get(claim.namespace, claim.name)
        grant = None if past is None else past.find(claim.fingerprint, None)
        if grant is None or grant.end not in (None, "unseen") or self._clock() < grant.expires_at:
            return None
        return grant.token

    # ------------------------------------------------------------------- events

    def _on_grant(self, past: _Past, event: Event, trace: str) -> None:
        fingerprint = event.fingerprint or ""
        known = past.find(fingerprint, None)
        if known is not None and known.end is None and known.token == event.token:
            return  # the answer to a repeated request
        ttl, waited = event.ttl or 0.0, event.seconds or 0.0
        if event.mode == "exclusive" and event.slot is None:
            for grant in past.grants:
                if grant.end is None:
                    grant.end, grant.ended_at = "unseen", min(event.at, grant.expires_at)
        self._add(
            past,
            event.namespace,
            PastGrant(
                token=event.token,
                fingerprint=fingerprint,
                holder=event.holder or "",
                purpose=event.purpose,
                mode=event.mode or "exclusive",
                slot=event.slot,
                granted_at=event.at,
                waited=waited,
                queued=bool(event.queued),
                ttl=ttl,
                expires_at=event.at + ttl,
                trace=trace or None,
            ),
        )
        self._record_life(event.namespace, fingerprint, _Life(event.at, ttl, ttl))
        past.highest_token = max(past.highest_token, event.token or 0)
        if event.queued:
            past.waits.append(_wait(event, waited, "granted"))

    def _add_partial(self, past: _Past, event: Event) -> PastGrant:
        """Something happened to a grant that went another way, such as through a peer."""
        grant = PastGrant(
            token=event.token,
            fingerprint=event.fingerprint or "",
            holder=event.holder or "",
            purpose=event.purpose,
            mode=event.mode or "exclusive",
            slot=event.slot,
            granted_at=event.at,
            waited=0.0,
            queued=False,
            ttl=event.ttl or 0.0,
            expires_at=event.at,
            partial=True,
        )
        self._add(past, event.namespace, grant)
        return grant

    def _add(self, past: _Past, namespace: str, grant: PastGrant) -> None:
        past.grants.append(grant)
        if len(past.grants) > MAX_GRANTS_PER_NAME:
            past.grants.popleft()
            return
        self._grants.add(namespace, 1)
        while self._grants.total > MAX_GRANTS:
            self._forget_grant(self._grants.largest())

    def _on_given_up(self, past: _Past, event: Event) -> None:
        if event.queued:
            past.waits.append(_wait(event, event.seconds or 0.0, "gave up"))

    def _on_renewal(self, past: _Past, event: Event) -> None:
        grant = past.find(event.fingerprint, event.token) or self._add_partial(past, event)
        ttl = event.ttl or 0.0
        self._record_life(event.namespace, event.fingerprint or "", _Life(event.at, ttl, ttl))
        grant.renewed += 1
        grant.renewals.append(PastRenewal(event.at, max(0.0, grant.expires_at - event.at)))
        del grant.renewals[:-MAX_RENEWALS]
        if grant.at_risk and grant.at_risk[-1].ended is None:
            grant.at_risk[-1].ended = event.at
        grant.ttl, grant.expires_at = ttl, event.at + ttl
        if grant.end == "unseen":
            grant.end = grant.ended_at = None

    def _on_end(self, past: _Past, event: Event) -> float | None:
        """Returns the seconds that the lease was held, if its grant is known and had not ended before."""
        grant = past.find(event.fingerprint, event.token)
        if event.kind == "lost" and grant is not None:
            event = _completed_loss(event, grant)
        was_broken = grant is not None and grant.end == "broken"
        if event.kind == "lost" and not was_broken:  # a holder that notices the break is no second incident
            self._on_loss(past, event, grant)
        elif event.kind == "broken":
            self._add_incident(incidents.broken(event, grant, past.highest_token))
        if grant is None:
            grant = self._add_partial(past, event)
        elif grant.end in ("released", "lost", "broken"):
            return None
        if grant.at_risk and grant.at_risk[-1].ended is None:
            grant.at_risk[-1].ended = event.at
        grant.end = event.kind  # type: ignore[assignment]  # one of the three
        grant.reason, grant.actor = event.why or event.reason, event.actor
        grant.ended_at = min(event.at, grant.expires_at) if event.kind == "lost" else event.at
        return None if grant.partial else grant.ended_at - grant.granted_at

    def _on_loss(self, past: _Past, event: Event, grant: PastGrant | None) -> None:
        holder = event.holder or ""
        self._losses.put(event.namespace, holder, 1 + self.losses(event.namespace, holder), MAX_HOLDERS)
        self._add_incident(incidents.lost(event, grant, past.highest_token))

    def _on_refusal(self, past: _Past, event: Event) -> None:
        grant = past.find(event.fingerprint, event.token)
        if grant is not None:
            grant.refused.append(Refusal(event.at, event.fence, event.seen))
            del grant.refused[:-MAX_MARKS]
        self._add_incident(incidents.refused(event, grant, past.highest_token))

    def _on_breaker(self, event: Event) -> None:
        """One incident, although each worker has a breaker: what follows soon is the same outage."""
        self._record_outage("engine_down", event.kind == "breaker_opened", event.at)

    def record_leader(self, has_leader: bool | None, at: float) -> None:
        """What the last probe of the engine's health found; None: it has none, or it is not known."""
        if has_leader is not None:
            self._record_outage("no_leader", not has_leader, at)

    def _record_outage(self, kind: Literal["engine_down", "no_leader"], down: bool, at: float) -> None:
        known = self._outages.get(kind)
        if not down:
            if known is not None and known.ended_at is None:
                known.ended_at = at
        elif known is None or (known.ended_at is not None and at > known.ended_at + _SAME_OUTAGE):
            self._outages[kind] = incidents.outage(kind, at)
            self._add_incident(self._outages[kind])
        else:
            known.ended_at = None

    # ----------------------------------------------------------------- pictures

    def observe(self, snapshot: Snapshot) -> None:
        """Learn from a picture what events do not show: the ttl of grants that were made elsewhere, and deadlocks."""
        self.hour.observe(snapshot)
        for holding in snapshot.holdings:
            if holding.state == "held":
                known = self._lives.get(holding.namespace, holding.fingerprint) or _Life(snapshot.as_of, 0.0, 0.0)
                shortened = holding.left < known.left - (snapshot.as_of - known.at) - _RENEWED_SECONDS
                ttl = holding.left if shortened else max(known.ttl, holding.left)
                self._record_life(holding.namespace, holding.fingerprint, _Life(snapshot.as_of, holding.left, ttl))
        self._observe_deadlocks(snapshot)

    def _observe_deadlocks(self, snapshot: Snapshot) -> None:
        """One incident for each deadlock, once two pictures show it: one alone may mix two moments."""
        namespace, now = snapshot.namespace, snapshot.deadlocks
        certain = seen_in_both(self._deadlocks.get(namespace, []), now)
        shown = self._shown_deadlocks.pop(namespace, {})
        self._deadlocks[namespace] = now
        if not now:
            del self._deadlocks[namespace]
        found = {frozenset(wait.waiter.fingerprint for wait in deadlock.waits): deadlock for deadlock in certain}
        for waiters, incident in shown.items():
            if waiters not in found:
                incident.ended_at = snapshot.as_of
        still = {waiters: incident for waiters, incident in shown.items() if waiters in found}
        for waiters, deadlock in found.items():
            if waiters not in still:
                still[waiters] = incidents.deadlock(snapshot, deadlock)
                self._add_incident(still[waiters])
        if still:
            self._shown_deadlocks[namespace] = still

    # ------------------------------------------------------------------- bounds

    def _add_incident(self, incident: Incident) -> None:
        namespace = incident.namespace if incident.name else None
        self._incidents.setdefault(namespace, deque(maxlen=MAX_INCIDENTS)).append(incident)
        self._incidents.move_to_end(namespace)
        if len(self._incidents) > MAX_INCIDENT_NAMESPACES:
            self._incidents.popitem(last=False)

    def _past(self, namespace: str, name: str) -> _Past:
        past = self._names.get(namespace, name) or _Past()
        if (forgotten := self._names.put(namespace, name, past, MAX_NAMES)) is not None:
            self._grants.add(forgotten.namespace, -len(forgotten.value.grants))
        return past

    def _forget_grant(self, namespace: str) -> None:
        """Of the name that was used least recently. A name without grants is forgotten itself."""
        grants = self._names.oldest(namespace).value.grants
        if grants:
            grants.popleft()
            self._grants.add(namespace, -1)
        if not grants:
            self._names.pop_oldest(namespace)

    def _record_life(self, namespace: str, fingerprint: str, life: _Life) -> None:
        self._lives.put(namespace, fingerprint, life, MAX_GRANTS)


def _wait(event: Event, seconds: float, outcome: str) -> PastWait:
    return PastWait(
        fingerprint=event.fingerprint or "",
        holder=event.holder or "",
        purpose=event.purpose,
        began=event.at - seconds,
        ended=event.at,
        outcome="granted" if outcome == "granted" else "gave up",
        token=event.token,
    )


def _begin_risk(grant: PastGrant | None, at: float) -> None:
    if grant is not None and grant.end is None and not (grant.at_risk and grant.at_risk[-1].ended is None):
        grant.at_risk.append(AtRisk(at, None))
        del grant.at_risk[:-MAX_MARKS]


def _completed_loss(event: Event, grant: PastGrant) -> Event:
    """A loss that the HTTP API reports names its caller, not the holder. And an engine that has forgotten a grant
    cannot say why it ended; if its ttl was over, it expired."""
    expired = event.reason in (None, "unknown") and event.at >= grant.expires_at
    return event._replace(holder=grant.holder or event.holder, reason="expired" if expired else event.reason)
