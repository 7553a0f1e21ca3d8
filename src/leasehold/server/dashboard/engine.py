"""What is shown of the engine: its servers by number, never by address; what it promises; how long its calls take."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from markupsafe import Markup

from leasehold.engines.probe import Health, MemberHealth
from leasehold.model import Traits
from leasehold.server.dashboard import charts
from leasehold.server.dashboard.page_data import AT_RISK, DOWN, UP, State
from leasehold.server.dashboard.words import counted, number, plain, size
from leasehold.server.metrics import CALL_BUCKETS
from leasehold.server.stats import quantiles

if TYPE_CHECKING:
    from leasehold.server.app import App
    from leasehold.server.dashboard.views import Context

__all__ = ["Health", "card", "engines"]

NAMES: Final = {
    "etcd": "etcd",
    "memory": "Memory",
    "mysql": "MySQL",
    "postgresql": "PostgreSQL",
    "redis": "Redis",
    "rediss": "Redis",
    "redlock": "Redlock",
    "sqlite": "SQLite",
}
_UNKNOWN: Final = State("dim", "no", "NOT PROBED YET")
_FULL: Final = 0.8  # share of a storage that needs attention


class Fact(NamedTuple):
    title: str
    text: str
    dim: bool = False
    picture: Markup = Markup("")


class EngineView(NamedTuple):
    name: str
    state: State
    members: str
    facts: list[Fact]
    note: str = ""
    probed: str = ""
    empty_title: str = ""
    empty_text: str = ""


class MemberCard(NamedTuple):
    name: str
    role: str
    facts: list[Fact]


class CallTimes(NamedTuple):
    name: str
    p50: str
    p95: str
    p99: str
    calls: str
    failed: str


def name_of(app: App) -> str:
    return NAMES.get(app.service.config.scheme, app.service.config.scheme)


def _state(app: App, health: Health | None) -> State:
    if app.service.breaker.open or (health is not None and not health.up):
        return DOWN
    if health is None:
        return UP if app.service.config.scheme == "memory" else _UNKNOWN
    return AT_RISK._replace(word="UP, WITH WARNINGS") if any(m.findings for m in health.members) else UP


def card(app: App, health: Health | None) -> EngineView:
    """The engine in the side column of the first page."""
    facts = []
    if health is not None and health.members:
        trips = [each.round_trip for each in health.members if each.round_trip is not None]
        leader = next((i for i, each in enumerate(health.members, 1) if each.role in ("leader", "primary")), None)
        if health.has_leader is not None and len(health.members) > 1:
            facts.append(Fact("Leader", f"member {leader}" if leader else "yes" if health.has_leader else "none"))
        if trips:
            facts.append(Fact("Round trip", f"{_ms(min(trips))}"))
        for storage in health.members[0].storage:
            if storage.used_ratio is not None and storage.limit is not None:
                text = f"{100 * storage.used_ratio:.0f} % of {size(storage.limit)}"
                facts.append(Fact(storage.store.capitalize(), text, picture=_meter(storage.used_ratio)))
    calls = {each.name: each for each in _calls(app)}
    if attempt := calls.get("attempt"):
        facts.append(Fact("Attempt p50, p99", f"{attempt.p50}, {attempt.p99} ms"))
    facts.append(Fact("Breaker", "open" if app.service.breaker.open else "closed"))
    survives = {
        "nothing": "ends when the engine restarts",
        "restart": "survives a restart",
        "minority": "survives the loss of a minority",
    }
    facts.append(Fact("A grant", survives[app.service.engine.traits.survives]))
    return EngineView(
        name_of(app), _state(app, health)._replace(word=_short_word(app, health)), _members(health), facts
    )


def _short_word(app: App, health: Health | None) -> str:
    word = _state(app, health).word
    return "UP" if word.startswith("UP") else word


def _members(health: Health | None) -> str:
    if health is None or health.voting is None:
        return "Details"
    return f"{health.reachable or 0} of {counted(health.voting, 'member')}"


def engines(app: App, health: Health | None) -> Context:
    state = _state(app, health)
    found = [] if health is None else [_member(i, each) for i, each in enumerate(health.members, 1)]
    members = [each for each in found if not all(fact.dim for fact in each.facts)]
    return {
        "engine": EngineView(
            name_of(app),
            state,
            _members(health),
            [],
            note="" if health is None or health.voting is None else f"{_members(health)} reachable",
            probed=f"probed every 10 s, breaker {'open' if app.service.breaker.open else 'closed'}",
            empty_title="This engine has no servers to probe."
            if app.service.config.scheme == "memory"
            else "Not probed yet.",
            empty_text="Locks are in the memory of this server, and end with it."
            if app.service.config.scheme == "memory"
            else "",
        ),
        "members": members,
        "calls": list(_calls(app)),
        "promises": list(promises(app.service.engine.traits)),
        "findings": list(_findings(health)),
        "findings_note": _findings_note(health),
        "say": f"{name_of(app)}: {state.word}",
    }


def _member(number_: int, member: MemberHealth) -> MemberCard:
    missing = Fact("", "not reported", dim=True)
    facts = [
        missing._replace(title="Round trip")
        if member.round_trip is None
        else Fact("Round trip", _ms(member.round_trip))
    ]
    for storage in member.storage[:2]:
        ratio = storage.used_ratio
        if ratio is None and member.memory is not None:
            continue  # it has no limit, and `memory` says the same
        text = (
            size(storage.used)
            if ratio is None or storage.limit is None
            else f"{100 * ratio:.0f} % of {size(storage.limit)}"
        )
        facts.append(Fact(storage.store.capitalize(), text, picture=Markup("") if ratio is None else _meter(ratio)))
    if member.disk_seconds is not None:
        facts.append(Fact("Disk", _ms(member.disk_seconds)))
    if member.evictions is not None:
        facts.append(Fact("Evictions", f"{member.evictions:,}"))
    if member.memory is not None and len(facts) < 5:
        facts.append(Fact("Memory", size(member.memory)))
    facts.append(
        missing._replace(title="Clock offset")
        if member.clock_offset is None
        else Fact("Clock offset", f"{1000 * member.clock_offset:+.1f} ms")
    )
    if member.unapplied_entries is not None:
        facts.append(Fact("Behind", counted(member.unapplied_entries, "entry", "entries")))
    elif member.replication_lag is not None:
        facts.append(Fact("Behind", f"{member.replication_lag:.1f} s"))
    role = ", ".join(part for part in (member.role, member.version) if part) or "server"
    return MemberCard(f"Member {number_}", plain(role) if member.up else "does not answer", facts[:5])


def _ms(seconds: float) -> str:
    return f"{number(round(seconds * 1000, 1))} ms"


def _meter(ratio: float) -> Markup:
    return charts.share(ratio, "risk" if ratio > _FULL else "held", "meter")


def _calls(app: App) -> Iterator[CallTimes]:
    """How long each verb takes, from the histograms of the metrics."""
    reached: dict[str, list[float]] = {}  # calls that took no longer than each bound
    failed: dict[str, float] = {}
    for name, labels, value in app.metrics.call_seconds.family().samples:
        verb = labels["call"]
        if labels["outcome"] == "ok" and name.endswith("_bucket"):
            reached.setdefault(verb, []).append(value)
        elif labels["outcome"] != "ok" and name.endswith("_count"):
            failed[verb] = failed.get(verb, 0) + value
    for verb in sorted(reached.keys() | failed.keys()):
        histogram = [round(b - a) for a, b in pairwise([0.0, *reached.get(verb, [])])]
        values = quantiles(histogram, CALL_BUCKETS)
        p50, p95, p99 = ["–"] * 3 if values is None else [number(round(value * 1000, 1)) for value in values]
        bad = failed.get(verb, 0)
        yield CallTimes(verb, p50, p95, p99, f"{sum(histogram) + bad:,.0f}", f"{bad:,.0f}" if bad else "")


def promises(traits: Traits) -> Iterator[tuple[int, str, str]]:
    """1: it is promised. 3: it is not."""
    yield (
        (1, "Tokens that only rise", "a fence can refuse late writes")
        if traits.fencing
        else (3, "No fencing tokens", "a fence cannot recognise a late write")
    )
    yield (
        (1, "A fair queue", "first come, first served")
        if traits.fair
        else (3, "No fair queue", "waiters are granted the lock in no promised order")
    )
    yield (
        (1, "Waiters are woken", "without polling")
        if traits.push
        else (3, "Waiters poll", "a release is noticed a little later")
    )
    yield {
        "minority": (1, "Grants survive the loss of a minority", "of the engine’s servers"),
        "restart": (1, "Grants survive a restart", "not the loss of the server’s data"),
        "nothing": (3, "Grants survive no restart", "of the engine: it keeps them in memory"),
    }[traits.survives]
    yield (
        (1, "A break is pushed to the holder", "at once")
        if traits.break_notice
        else (3, "A break is noticed at the next renewal", "")
    )
    if traits.min_ttl:
        yield 3, f"No ttl below {number(traits.min_ttl)} s", "shorter ones are raised"


def _findings(health: Health | None) -> Iterator[tuple[int, str, str]]:
    if health is None:
        yield 3, "Nothing is known yet", ""
        return
    found = False
    for number_, member in enumerate(health.members, 1):
        for finding in member.findings:
            found = True
            yield 2, f"{plain(finding.setting)} is {plain(finding.value)} on member {number_}", plain(finding.advice)
    for alarm in health.alarms:
        found = True
        yield 2, f"Alarm {plain(alarm)}", "the engine refuses writes until it is cleared"
    if not found:
        yield 1, "No setting is known to weaken locks", "checked every 10 s"


def _findings_note(health: Health | None) -> str:
    count = 0 if health is None else sum(len(each.findings) for each in health.members) + len(health.alarms)
    return counted(count, "warning") if count else ""
