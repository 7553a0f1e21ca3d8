"""What the pages about locks, owners and incidents show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from math import ceil
from typing import Any, Final, NamedTuple
from zlib import crc32

from markupsafe import Markup

from leasehold.core.texts import shell_command
from leasehold.model import Holding
from leasehold.server import deadlocks
from leasehold.server.dashboard import charts, timeline
from leasehold.server.dashboard.page_data import (
    AT_RISK,
    BROKEN,
    DAY,
    DEADLOCK,
    DOWN,
    EXPIRED,
    FREE,
    HELD,
    LOST,
    QUIET,
    REFUSED,
    WAITING,
    WELL,
    LockRow,
    PageData,
    State,
    latest,
    part_name,
    place,
    with_code,
)
from leasehold.server.dashboard.words import counted, duration, link, number, plain, sentence, spelled, token
from leasehold.server.history import MAX_INCIDENTS
from leasehold.server.past import Incident, Owner, PastGrant
from leasehold.server.picture import LockView, Who

MAX_ROWS: Final = 100  # of a table
MAX_WAITERS: Final = 50
MAX_FILTER: Final = 300

Context = dict[str, Any]


class PageTab(NamedTuple):
    label: str
    total: int
    href: str
    current: bool


class Column(NamedTuple):
    title: str
    href: str = ""
    sorted: str = ""
    number: bool = False


# ---------------------------------------------------------------------- locks

_SORTS: Final = {"queue": "Queue", "name": "Lock", "held": "Held for", "left": "Lease left"}


def locks(data: PageData) -> Context:
    tab_key = data.arguments.get("tab", "all")
    sort = data.arguments.get("sort", "")
    filter_text = data.arguments.get("filter", "")[:MAX_FILTER]
    risky = {lock.name for lock in data.at_risk}
    tabs = {
        "all": ("All", data.locks),
        "blocking": ("Blocking", [lock for lock in data.locks if lock.queue]),
        "risk": ("At risk", data.at_risk),
        "cooling": ("Cooling", [lock for lock in data.locks if lock.state == "cooling"]),
        "semaphores": ("Semaphores", [lock for lock in data.locks if lock.kind == "semaphore"]),
    }
    if tab_key not in tabs:
        tab_key = "all"
    fitting = [lock for lock in tabs[tab_key][1] if _fits(lock, filter_text)]
    fitting.sort(key=_sort_key(sort, risky))

    def href(**changed: str) -> str:
        kept = {"namespace": data.namespace, "tab": tab_key, "sort": sort, "filter": filter_text} | changed
        return link("/locks", **{name: value for name, value in kept.items() if value not in ("", "all")})

    order = {"queue": "descending", "held": "descending", "name": "ascending", "left": "ascending"}

    def column(key: str, is_number: bool = False) -> Column:
        return Column(_SORTS[key], href(sort=key), order[key] if sort == key else "", is_number)

    return {
        "tabs": [PageTab(label, len(found), href(tab=key), key == tab_key) for key, (label, found) in tabs.items()],
        "tab_key": tab_key,
        "sort": sort,
        "columns": [
            column("name"),
            Column("Holder"),
            Column("Token", number=True),
            column("held", True),
            column("left"),
            column("queue", True),
            Column("Wait p95", number=True),
            Column("Grants, 1 h"),
        ],
        "rows": [data.row(lock, details=True) for lock in fitting[:MAX_ROWS]],
        "fitting": len(fitting),
        "total": len(data.locks),
        "filter": filter_text,
        "filter_hint": "prefix or holder:name",
        "say": f"{counted(len(data.locks), 'lock')}, {len(risky)} at risk",
    }


def _fits(lock: LockView, filter_text: str) -> bool:
    wanted = filter_text.strip().lower()
    if wanted.startswith("holder:"):
        part = wanted.removeprefix("holder:").strip()
        claims = (*lock.holders, *lock.queue)
        return any(part in f"{each.holder.label} {each.holder.host}".lower() for each in claims)
    return wanted in lock.name.lower()


def _sort_key(sort: str, risky: set[str]) -> Any:
    if sort == "name":
        return lambda lock: lock.name
    if sort == "held":
        return lambda lock: -max((each.age for each in lock.holders if each.state == "held"), default=-1.0)
    if sort == "left":
        return lambda lock: min((each.left for each in lock.holders), default=float("inf"))
    if sort == "queue":
        return lambda lock: (-len(lock.queue), lock.name)
    return lambda lock: (lock.name not in risky, -len(lock.queue), lock.name)


# ------------------------------------------------------------------- one lock


class WaiterRow(NamedTuple):
    position: int
    holder: str
    where: str
    purpose: str
    began_at: float
    note: str


class GrantRow(NamedTuple):
    token: int | None
    holder: str
    granted_at: float
    waited: str
    held: str | None  # None: it still is
    renewals: int
    state: State | None
    end: str


def lock(data: PageData, name: str) -> Context:
    found = data.picture.snapshot.by_name.get(name)
    grants, waits = data.past
    if found is None:
        row = LockRow("lock", data.namespace, name, FREE, "none", "", None, None, None, 1.0)
        queue: Sequence[Holding] = ()
    else:
        row, queue = data.row(found), found.queue
    holders = () if found is None else found.holders
    shown = queue[:MAX_WAITERS]
    waiting = [
        timeline.Waiting(each.fingerprint, each.holder.label, data.picture.as_of - each.age, (each.position or 0) + 1)
        for each in shown
    ]
    first = min(holders, key=lambda each: each.left, default=None)
    return {
        "name": name,
        "row": row,
        "tags": _tags(found),
        "token_note": _token_note(row, grants),
        "held_title": "Held for" if row.state in (HELD, AT_RISK) else "State",
        "held_note": _held_note(row, grants, data.now),
        "purpose": "" if first is None else first.holder.purpose,
        "trace": next((grant.trace for grant in grants if grant.token == row.token and grant.trace), None),
        "slots": [data.grant_row(found, each) for each in holders] if found is not None and len(holders) > 1 else [],
        "slots_note": "" if found is None else _slots_note(found),
        "timeline": timeline.draw(name, grants, waits, waiting, data.now),
        "timeline_key": _timeline_key(grants, queue, data.now),
        "queue": [
            WaiterRow(
                (each.position or 0) + 1,
                each.holder.label,
                place(each.holder.host, each.holder.pid),
                each.holder.purpose,
                data.memory.steady("queued", each.fingerprint, data.picture.as_of - each.age),
                _waiter_note(each),
            )
            for each in shown
        ],
        "queue_more": len(queue) - len(shown),
        "queue_since": row.waiting_since or data.now,
        "queue_note": "first come, first served" if data.app.service.engine.traits.fair else "in no promised order",
        "grants": [_grant_row(grant, row.token) for grant in grants[:12]],
        "grants_note": f"{counted(len(grants), 'grant')} known" if len(grants) > 12 else "",
        "waits": _waits([wait.ended - wait.began for wait in waits], grants),
        "commands": [shell_command(verb, data.namespace, name) for verb in ("get", "watch", "history")],
        "may_break": data.may_break,
        "say": f"{plain(name)}: {row.state.word}, {plain(row.holder)}, {counted(len(queue), 'waiter')}",
    }


def _tags(found: LockView | None) -> list[str]:
    if found is None:
        return []
    if found.kind == "semaphore":
        return [f"semaphore, {counted(found.limit, 'slot')}"]
    return [found.mode]


def _slots_note(found: LockView) -> str:
    held = sum(each.state == "held" for each in found.holders)
    return f"{held} of {found.limit} slots" if found.kind == "semaphore" else counted(held, "reader")


def _token_note(row: LockRow, grants: Sequence[PastGrant]) -> str:
    before = next((grant for grant in grants if row.token and grant.token and grant.token < row.token), None)
    if before is None:
        return "" if row.token is None else "rises with every grant"
    how = {"lost": "was lost", "broken": "was broken", "released": "was released"}.get(before.end or "", "ended")
    return f"after {token(before.token or 0)}, which {how}"


def _held_note(row: LockRow, grants: Sequence[PastGrant], now: float) -> str:
    past = [grant.ended_at - grant.granted_at for grant in grants if grant.ended_at is not None]
    if row.began_at is None or len(past) < 5:
        return ""
    # In steps of 10 %, so that the page does not change with every grant.
    shorter = sum(each < now - row.began_at for each in past) * 10 // len(past) * 10
    return f"longer than {shorter} % of past grants" if shorter else "shorter than most past grants"


def _waiter_note(waiter: Holding) -> str:
    if waiter.state == "passed over":
        return "did not claim the lock in time"
    return "shared" if waiter.mode == "shared" else ""


def _timeline_key(grants: Sequence[PastGrant], queue: Sequence[Holding], now: float) -> object:
    """The timeline is redrawn after every event, and every few seconds so that it keeps up with the clock."""
    newest = grants[0] if grants else None
    said = None if newest is None else (newest.token, newest.end, newest.renewed, len(newest.refused))
    return said, tuple(each.fingerprint for each in queue[:5]), int(now // 5)


def fate(grant: PastGrant) -> State | None:
    """How a grant ended, if a table should mark it."""
    if grant.end == "unseen" and grant.ended_at is not None and grant.ended_at >= grant.expires_at - 0.5:
        return EXPIRED
    return {"lost": LOST, "broken": BROKEN}.get(grant.end or "")


def _grant_row(grant: PastGrant, current: int | None) -> GrantRow:
    state = REFUSED if grant.refused else fate(grant)
    if state is not None and grant.reason and state.word == "LOST":
        state = state._replace(word=f"LOST, {plain(grant.reason)}")
    is_current = grant.ended_at is None and grant.token == current
    ended = grant.ended_at
    if ended is None and not is_current:
        ended = grant.expires_at
    return GrantRow(
        grant.token,
        grant.holder,
        grant.granted_at,
        duration(grant.waited),
        None if ended is None else duration(ended - grant.granted_at),
        grant.renewed,
        HELD if is_current else state,
        {"released": "released", "unseen": "not seen by this server"}.get(grant.end or "", "not seen by this server"),
    )


def _waits(waited: list[float], grants: Sequence[PastGrant]) -> Context:
    bounds = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0)
    waited.sort()
    counts = [0] * (len(bounds) + 1)
    for seconds in waited:
        counts[sum(seconds > bound for bound in bounds)] += 1
    held = sorted(grant.ended_at - grant.granted_at for grant in grants if grant.ended_at is not None)
    margins = [
        renewal.left / grant.ttl
        for grant in grants
        for renewal in grant.renewals
        if renewal.left is not None and grant.ttl
    ]
    facts = [("Wait p50, p95", _quantiles(waited)), ("Hold p50, p95", _quantiles(held))]
    if margins:
        middle = sorted(margins)[len(margins) // 2]
        facts.append(("Renewal margin", f"{100 * middle:.0f} % left, lowest {100 * min(margins):.0f} %"))
    labels = ["0.1", "", "1", "", "10", "30", "60", "", "300 s", ""]
    title = f"How long callers waited: {counted(len(waited), 'wait')} known"
    return {"picture": charts.histogram(counts, labels, title), "facts": facts}


def _quantiles(values: Sequence[float]) -> str:
    if not values:
        return "none known"
    return ", ".join(duration(values[min(len(values) - 1, int(len(values) * part))]) for part in (0.5, 0.95))


# --------------------------------------------------------------------- owners


class OwnerRow(NamedTuple):
    id: str
    holder: str
    where: str
    holds: str
    waits: int
    blocks: int
    heard_at: float | None
    lost: int
    state: State


class ChainLink(NamedTuple):
    holder: str
    namespace: str
    name: str


class ChainRow(NamedTuple):
    links: list[ChainLink]
    note: str


def owners(data: PageData) -> Context:
    total = len(data.picture.snapshot.owners)
    quiet = [
        data.grant_row(lock, each) for lock in data.at_risk for each in lock.holders if data.app.history.at_risk(each)
    ]
    quiet.sort(key=lambda row: (row.holder, row.ends_at or 0.0))
    names = list(dict.fromkeys(row.holder for row in quiet))
    return {
        "lede": _owners_lede(total, names, quiet, data.now),
        "quiet": quiet[:MAX_ROWS],
        "chains": [
            ChainRow(
                [ChainLink(each.holder.holder.label, data.namespace, each.lock.name) for each in chain.links],
                f"{counted(chain.blocked, 'waiter')} blocked until the last one is released",
            )
            for chain in deadlocks.chains(data.picture, 5)
        ],
        "rows": [_owner_row(data, each) for each in data.owners],
        "total": total,
        "filter": data.arguments.get("filter", "")[:MAX_FILTER],
        "filter_hint": "owner or host",
        "say": f"{counted(total, 'owner')}, {len(names)} gone quiet",
    }


def owner_filter(text: str) -> Callable[[Who], bool] | None:
    """What finds the owners that a reader of their page asks for; None: all."""
    wanted = text[:MAX_FILTER].strip().lower()
    return (lambda who: wanted in f"{who[0]} {place(*who[1:])}".lower()) if wanted else None


def _owners_lede(total: int, names: Sequence[str], quiet: Sequence[LockRow], now: float) -> str:
    if not total:
        return "No client holds or waits for a lock here."
    if not names:
        one = total == 1
        return (
            f"{sentence(spelled(total))} {'owner holds or waits' if one else 'owners hold or wait'}, and all is well."
        )
    one_owner, one_lock = len(names) == 1, len(quiet) == 1
    seconds = max(1, ceil(max((row.ends_at or now) for row in quiet) - now))
    expire = "lock, which expires by itself" if one_lock else "locks, which expire by themselves"
    return (
        f"{sentence(spelled(len(names)))} of {counted(total, 'owner')} {'has' if one_owner else 'have'} gone quiet. "
        f"{'It holds' if one_owner else 'They hold'} {spelled(len(quiet))} {expire} within {seconds} s."
    )


def _owner_row(data: PageData, owner: Owner) -> OwnerRow:
    where = place(owner.host, owner.pid)
    part_id = part_name("o", f"{owner.holder}\n{where}")
    heard_at = None if owner.heard_at is None else data.memory.steady("heard", part_id, owner.heard_at)
    holds = f"{len(owner.holds):,}"
    state = QUIET if owner.quiet else WELL if owner.holds else WAITING
    return OwnerRow(part_id, owner.holder, where, holds, len(owner.waits), owner.blocks, heard_at, owner.lost, state)


# ------------------------------------------------------------------ incidents


class IncidentView(NamedTuple):
    id: str
    state: State
    at: float
    namespace: str
    name: str
    title: str
    text: str  # in one line
    meaning: Markup
    facts: list[str]
    advice: Markup
    picture: Markup


class Day(NamedTuple):
    at: float
    incidents: list[IncidentView]


_KINDS: Final[dict[str, tuple[State, str, str]]] = {  # state, title, tab
    "lost": (LOST, "the lease was lost", "Lost"),
    "stale_token": (REFUSED, "a late write was refused", "Refused"),
    "broken": (BROKEN, "broken", "Broken"),
    "deadlock": (DEADLOCK, "owners wait for each other", "Deadlock"),
    "engine_down": (DOWN, "The engine did not answer", "Engine"),
    "no_leader": (DOWN, "The engine had no leader", "Engine"),
}


def incidents(data: PageData) -> Context:
    found = data.incidents
    chosen = data.arguments.get("kind", "")
    counts: dict[str, int] = {}
    for each in found:
        counts[_KINDS[each.kind][2]] = counts.get(_KINDS[each.kind][2], 0) + 1
    shown = [each for each in found if not chosen or _KINDS[each.kind][2].lower() == chosen][:MAX_ROWS]

    def href(kind: str) -> str:
        return link("/incidents", namespace=data.namespace, kind=kind)

    tabs = [PageTab("All", len(found), href(""), not chosen)]
    tabs += [PageTab(label, count, href(label.lower()), label.lower() == chosen) for label, count in counts.items()]
    days = [
        Day(group[0].at, [incident_view(data, each) for each in group])
        for _, each_day in groupby(shown, key=lambda each: int(each.at // DAY))
        if (group := list(each_day))
    ]
    lede = _incidents_lede(latest(found, data.now - DAY))
    return {
        "lede": lede,
        "most": MAX_INCIDENTS,
        "tabs": tabs,
        "days": days,
        "list_key": [(each.at, each.kind, each.name, each.token, each.ended_at, each.token_after) for each in shown],
        "say": lede,
    }


def _incidents_lede(day: Sequence[Incident]) -> str:
    if not day:
        return "There were no incidents in the last 24 hours."
    lost = sum(each.kind == "lost" for each in day)
    refused = sum(each.kind == "stale_token" for each in day)
    rest = len(day) - lost - refused
    parts = []
    if lost:
        parts.append(f"{spelled(lost)} {'lease was' if lost == 1 else 'leases were'} lost")
    if rest:
        parts.append(f"{spelled(rest)} other {'incident' if rest == 1 else 'incidents'} happened")
    text = " and ".join(parts) + " in the last 24 hours." if parts else ""
    if refused:
        late, it = ("write", "it") if refused == 1 else ("writes", "them")
        text += f" {sentence(spelled(refused))} {late} came too late, and a fence refused {it}."
    return sentence(text.strip())


def incident_view(data: PageData, incident: Incident) -> IncidentView:
    state, title, _ = _KINDS[incident.kind]
    if incident.kind == "lost" and incident.reason:
        title = f"the lease was lost, {plain(incident.reason)}"
    if incident.kind == "broken" and incident.actor:
        title = f"broken by {plain(incident.actor)}"
    about, then = _grants_of(data, incident)
    meaning = incident.meaning
    if incident.kind == "broken" and incident.reason:
        meaning = f"“{plain(incident.reason)}” {meaning}"
    shown = ", ".join(part for part in (plain(incident.name), plain(incident.holder)) if part)
    return IncidentView(
        id=f"i-{incident.kind}-{incident.at * 1e6:.0f}-{incident.token or 0}-{crc32(incident.name.encode()):08x}",
        state=state,
        at=incident.at,
        namespace=incident.namespace,
        name=incident.name,
        title=title,
        text=shown,
        meaning=with_code(plain(meaning)),
        facts=_facts(incident, about),
        advice=with_code(plain(incident.advice)),
        picture=Markup("") if about is None else timeline.mini(about, then, data.now),
    )


def _tokens(incident: Incident) -> str:
    if incident.token is None:
        return ""
    return f"token {token(incident.token)}" + (f", then {token(incident.token_after)}" if incident.token_after else "")


def _facts(incident: Incident, about: PastGrant | None) -> list[str]:
    facts = [f"holder {plain(incident.holder)}"] if incident.holder else []
    if tokens := _tokens(incident):
        facts.append(tokens)
    if incident.silent is not None:
        facts.append(f"silent for {duration(incident.silent)}")
    if about is not None:
        facts.append(f"ttl {number(about.ttl)} s")
        if incident.kind == "stale_token" and about.ended_at is not None:
            facts.append(f"{duration(incident.at - about.ended_at)} after it had ended")
    if incident.ended_at is not None:
        facts.append(f"ended after {duration(incident.ended_at - incident.at)}")
    return facts


def _grants_of(data: PageData, incident: Incident) -> tuple[PastGrant | None, PastGrant | None]:
    """The grant that an incident is about, and the one after it."""
    if incident.namespace != data.namespace or not incident.name:
        return None, None
    grants = data.grants(incident.name)
    about = next((grant for grant in grants if grant.token == incident.token), None)
    if about is None:
        return None, None
    later = [grant for grant in grants if grant.granted_at > about.granted_at]
    return about, later[-1] if later else None
