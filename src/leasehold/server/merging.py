"""Merges the histories of several servers. Changes none of its arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from leasehold.server.past import Bucket, Incident, Owner, PastGrant, PastWait, Stats, Summary
from leasehold.server.stats import add_up, by_activity, summarise

_SAME_INCIDENT = 60.0  # seconds between two servers that see the same


def grants(sources: Sequence[Sequence[PastGrant]], keep_unknown: bool = False) -> list[PastGrant]:
    """Latest first. Records of the same grant become one. A release of a grant that no source knows is left out, unless
    `keep_unknown`: another server may know it."""
    by_claim: dict[str, list[PastGrant]] = {}
    fingerprints = {grant.token: grant.fingerprint for source in sources for grant in source if grant.fingerprint}
    for source in sources:
        for grant in source:
            # A break is known by its token alone.
            key = grant.fingerprint or fingerprints.get(grant.token) or f"token {grant.token}"
            by_claim.setdefault(key, []).append(grant)
    merged = [each for records in by_claim.values() for each in _merge_grants(records)]
    found = [grant for grant in merged if keep_unknown or grant.token is not None]
    return sorted(found, key=lambda grant: (grant.granted_at, grant.token or 0), reverse=True)


def _merge_grants(records: list[PastGrant]) -> list[PastGrant]:
    """A claim's records: of one grant, or of several if its id was used again."""
    whole: dict[int | None, PastGrant] = {}
    for record in sorted(records, key=lambda record: (record.partial, record.granted_at)):
        same = whole.get(record.token) if record.token is not None else next(reversed(whole.values()), None)
        if same is None:
            whole[record.token] = replace(record)
        else:
            whole[same.token] = _merge_two(same, record)
    return list(whole.values())


def _merge_two(one: PastGrant, other: PastGrant) -> PastGrant:
    end = max((one, other), key=lambda grant: (grant.end is not None, grant.end != "unseen", -(grant.ended_at or 0.0)))
    later = max((one, other), key=lambda grant: grant.expires_at)
    return replace(
        one,
        fingerprint=one.fingerprint or other.fingerprint,
        holder=one.holder or other.holder,
        ttl=later.ttl,
        expires_at=later.expires_at,
        renewals=sorted([*one.renewals, *other.renewals], key=lambda renewal: renewal.at),
        renewed=one.renewed + other.renewed,
        at_risk=sorted([*one.at_risk, *other.at_risk], key=lambda risk: risk.began),
        refused=sorted([*one.refused, *other.refused], key=lambda refusal: refusal.at),
        ended_at=end.ended_at,
        end=end.end,
        reason=end.reason,
        actor=end.actor,
        trace=one.trace or other.trace,
    )


def waits(sources: Iterable[Sequence[PastWait]]) -> list[PastWait]:
    """Latest first. A waiter that gave up at one server and was granted at another waited once."""
    found: dict[str, PastWait] = {}
    for wait in sorted((wait for source in sources for wait in source), key=lambda wait: wait.ended):
        earlier = found.get(wait.fingerprint)
        began = wait.began if earlier is None else min(earlier.began, wait.began)
        found[wait.fingerprint] = replace(wait, began=began)
    return sorted(found.values(), key=lambda wait: wait.ended, reverse=True)


def incidents(sources: Iterable[Sequence[Incident]]) -> list[Incident]:
    """Latest first. What several servers saw at about the same time is one incident, as the first of them saw it."""
    found: list[Incident] = []
    last: dict[object, Incident] = {}
    for incident in sorted((each for source in sources for each in source), key=lambda incident: incident.at):
        what = (incident.kind, incident.namespace, incident.name, incident.token, incident.fingerprint)
        known = last.get(what)
        if known is not None and incident.at - known.at < _SAME_INCIDENT and incident.server != known.server:
            known.ended_at = known.ended_at and incident.ended_at and max(known.ended_at, incident.ended_at)
        else:
            last[what] = replace(incident)
            found.append(last[what])
    return found[::-1]


def owners(own: list[Owner], others: Sequence[Sequence[Owner]]) -> list[Owner]:
    """The owners of this server's picture. A server that saw a grant knows its ttl, and therefore when its holder last
    renewed; another one guesses a later time."""
    if not others:
        return own
    known: dict[tuple[str, str | None, int | None], list[Owner]] = {}
    for source in others:
        for owner in source:
            known.setdefault((owner.holder, owner.host, owner.pid), []).append(owner)
    merged = []
    for owner in own:
        same = [owner, *known.get((owner.holder, owner.host, owner.pid), ())]
        merged.append(
            replace(
                owner,
                heard_at=min((each.heard_at for each in same if each.heard_at is not None), default=None),
                quiet=any(each.quiet for each in same),
                lost=sum(each.lost for each in same),
            )
        )
    return sorted(merged, key=lambda owner: not owner.quiet)  # stable


def stats(own: Stats, others: Sequence[Stats]) -> Stats:
    if not others:
        return own
    everywhere = [own, *others]
    times = [bucket.at for bucket in own.buckets]
    seconds = own.until - own.since
    groups: dict[str, list[tuple[Stats, Summary]]] = {}
    for each in everywhere:
        for summary in each.groups:
            groups.setdefault(summary.group, []).append((each, summary))
    return replace(
        own,
        total=_merge_summaries([(each, each.total) for each in everywhere], times, seconds),
        groups=by_activity(_merge_summaries(found, times, seconds) for found in groups.values()),
        buckets=_merge_buckets(everywhere),
    )


def _merge_summaries(found: Sequence[tuple[Stats, Summary]], times: Sequence[float], seconds: float) -> Summary:
    activity = dict.fromkeys(times, 0)
    for of_server, summary in found:
        for bucket, count in zip(of_server.buckets, summary.activity, strict=False):
            if bucket.at in activity:
                activity[bucket.at] += count
    counts = add_up(summary.counts for _, summary in found)
    return summarise(found[0][1].group, counts, list(activity.values()), seconds)


def _merge_buckets(everywhere: Sequence[Stats]) -> list[Bucket]:
    own, *others = everywhere
    elsewhere = [{bucket.at: bucket for bucket in each.buckets} for each in others]
    merged = []
    for bucket in own.buckets:
        same = [bucket, *(found for each in elsewhere if (found := each.get(bucket.at)) is not None)]
        seen = next((each for each in same if each.holding is not None), bucket)  # all see the same engine
        counts = add_up(each.counts for each in same)
        merged.append(Bucket(at=bucket.at, counts=counts, holding=seen.holding, waiting=seen.waiting))
    return merged
