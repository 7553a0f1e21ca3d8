"""What the first page shows: one sentence, what needs attention, the numbers of an hour, the locks to watch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from markupsafe import Markup

from leasehold.server.dashboard import charts
from leasehold.server.dashboard.charts import Values
from leasehold.server.dashboard.engine import Health, card
from leasehold.server.dashboard.page_data import (
    AT_RISK,
    BROKEN,
    DAY,
    DEADLOCK,
    DOWN,
    HOUR,
    LOST,
    QUIET,
    REFUSED,
    PageData,
    State,
    latest,
)
from leasehold.server.dashboard.views import Context, incident_view
from leasehold.server.dashboard.words import (
    counted,
    duration,
    link,
    lock_link,
    number,
    plain,
    rate,
    sentence,
    spelled,
    token,
)
from leasehold.server.past import Bucket, Stats, Summary
from leasehold.server.stats import quantiles

MAX_WARNINGS: Final = 6
_RECENT: Final = 900.0  # seconds for which an incident needs attention
_POINTS: Final = 120  # of a chart
_SLOW: Final = 50.0  # milliseconds: the alert LeaseholdAcquireSlow


class WarningItem(NamedTuple):
    state: State
    subject: str
    is_name: bool
    href: str
    text: str
    at: float | None


class Cell(NamedTuple):
    title: str
    value: str
    unit: str
    picture: Markup


class Chart(NamedTuple):
    title: str
    unit: str
    legend: list[tuple[str, str, str]]
    picture: Markup
    table: list[list[Any]]


class GroupRow(NamedTuple):
    name: str
    rate: str
    contention: str
    bar: Markup
    wait: str
    hold: str
    lost: int
    picture: Markup


class ServerRow(NamedTuple):
    name: str
    rate: str
    text: str


def overview(data: PageData, health: Health | None, server: str, missing: Sequence[str]) -> Context:
    locks_held = sum(lock.state == "held" for lock in data.locks)
    waiting = sum(len(lock.queue) for lock in data.locks)
    warnings = _warnings(data, health)
    lede = _lede(locks_held, waiting, len(warnings))
    return {
        "lede": lede,
        "under": _under(data),
        "warnings": warnings[:MAX_WARNINGS],
        "strip": _strip(data, locks_held, waiting),
        "charts": _charts(data, waiting),
        "worst": _worst(data),
        "groups": [_group(each) for each in data.stats.groups[:8]] if data.stats is not None else [],
        "no_groups": "Nothing was acquired in the last hour."
        if data.reads_all
        else "Shown to keys that may read the whole namespace.",
        "engine": card(data.app, health),
        "feed": [incident_view(data, each) for each in data.incidents[:5]],
        "servers": _servers(data, server, missing),
        "say": lede,
    }


def _lede(held: int, waiting: int, warnings: int) -> str:
    if not held and not waiting:
        text = "No lock is held here"
    else:
        text = f"{held:,} {'lock is' if held == 1 else 'locks are'} held"
        text += (
            f", {waiting:,} {'caller waits' if waiting == 1 else 'callers wait'}" if waiting else ", no caller waits"
        )
    if not warnings:
        return f"{text}, and all is well."
    return f"{text}, and {spelled(warnings)} {'thing needs' if warnings == 1 else 'things need'} attention."


def _under(data: PageData) -> str:
    where = f"namespace {plain(data.namespace)}" if data.namespace else "the default namespace"
    oldest = max((lock.oldest_wait for lock in data.locks), default=0.0)
    what = "Everything in" if data.reads_all else "What you may read of"
    # Rounded up to what a reader remembers, so that the text does not change with every frame.
    rough = next((bound for bound in (1, 5, 10, 30, 60, 300, 900, 3600, 14_400) if oldest <= bound), None)
    if not oldest:
        return f"{what} {where}."
    most = f"{rough / 60:.0f} min" if rough and rough > 60 else f"{rough} s" if rough else duration(oldest)
    return f"{what} {where}. The longest wait under way is at most {most}."


# ------------------------------------------------------------ what needs attention


def _warnings(data: PageData, health: Health | None) -> list[WarningItem]:
    found = [*_deadlocks(data), *_engine(data, health), *_quiet(data)]
    shown = {each.subject for each in found}
    for incident in latest(data.incidents, data.now - _RECENT):
        if incident.kind not in ("lost", "stale_token", "broken") or incident.name in shown:
            continue
        shown.add(incident.name)
        who, shown_token = (
            plain(incident.holder) or "a holder",
            "" if incident.token is None else f" {token(incident.token)}",
        )
        state, text = {
            "lost": (LOST, f"was lost: {who} did not renew token{shown_token} in time."),
            "stale_token": (REFUSED, f": a late write of {who} with token{shown_token} was refused by a fence."),
            "broken": (BROKEN, f": token{shown_token} was broken by {plain(incident.actor) or 'an operator'}."),
        }[incident.kind]
        href = lock_link(incident.namespace, incident.name)
        found.append(WarningItem(state, incident.name, True, href, text, incident.at))
    return found


def _quiet(data: PageData) -> list[WarningItem]:
    """Owners whose renewals are overdue: one line for one lock, or for all locks of one owner."""
    found: dict[str, list[tuple[str, float, int]]] = {}
    for lock in data.at_risk:
        for each in lock.holders:
            if data.app.history.at_risk(each):
                heard_at = data.app.history.heard_at(each, data.picture.as_of)
                found.setdefault(each.holder.label, []).append((lock.name, heard_at, len(lock.queue)))
    warnings = []
    for holder, held in found.items():
        name, heard_at, queue = held[0]
        heard_at = data.memory.steady("heard", holder, max(each[1] for each in held))
        if len(held) == 1:
            waiters = _waiters(queue, "it")
            text = f"is at risk: {plain(holder)} has missed renewals, and loses it unless it renews.{waiters}"
            warnings.append(WarningItem(AT_RISK, name, True, lock_link(data.namespace, name), text, heard_at))
        else:
            waiters = _waiters(sum(each[2] for each in held), "them")
            text = f"has gone quiet. It holds {spelled(len(held))} locks, which expire by themselves.{waiters}"
            warnings.append(
                WarningItem(QUIET, holder, False, link("/owners", namespace=data.namespace), text, heard_at)
            )
    return warnings


def _waiters(count: int, what: str) -> str:
    return (
        f" {sentence(spelled(count))} {'caller waits' if count == 1 else 'callers wait'} for {what}." if count else ""
    )


def _deadlocks(data: PageData) -> list[WarningItem]:
    if not data.reads_all:
        return []
    return [
        WarningItem(
            DEADLOCK,
            each.victim.name,
            True,
            lock_link(data.namespace, each.victim.name),
            f"is part of a deadlock: {plain(str(each))}. Break token {token(each.victim.token or 0)} to end it.",
            None,
        )
        for each in data.picture.snapshot.deadlocks[:3]
    ]


def _engine(data: PageData, health: Health | None) -> list[WarningItem]:
    warnings = []
    href = link("/engines", namespace=data.namespace)
    if data.app.service.breaker.open or (health is not None and not health.up):
        warnings.append(WarningItem(DOWN, "The engine", False, href, "does not answer: new acquires fail.", None))
    for number_, member in enumerate(health.members if health is not None else (), 1):
        for storage in member.storage:
            if storage.used_ratio is not None and storage.used_ratio > 0.8:
                text = (
                    f"uses {100 * storage.used_ratio:.0f} % of its {storage.store}. When it is full, it refuses writes."
                )
                warnings.append(
                    WarningItem(AT_RISK._replace(word="STORAGE"), f"Member {number_}", False, href, text, None)
                )
    return warnings


# --------------------------------------------------------------------- numbers


def _points(stats: Stats, value: Any) -> list[float | None]:
    """One value for each point of a chart: of the buckets of that time together."""
    step = max(1, len(stats.buckets) // _POINTS)
    buckets = stats.buckets
    return [value(buckets[begin : begin + step]) for begin in range(0, len(buckets) - len(buckets) % step, step)]


def _times(stats: Stats) -> list[float]:
    step = max(1, len(stats.buckets) // _POINTS)
    return [stats.buckets[i].at for i in range(0, len(stats.buckets) - len(stats.buckets) % step, step)]


def _latency(part: float, path: str, bounds: Sequence[float]) -> Any:
    def value(buckets: Sequence[Bucket]) -> float | None:
        histogram: list[int] = []
        for bucket in buckets:
            counts = getattr(bucket.counts, path)
            if counts:
                histogram = [a + b for a, b in zip(histogram, counts, strict=True)] if histogram else list(counts)
        found = quantiles(histogram, bounds)
        return None if found is None else found[{0.5: 0, 0.95: 1, 0.99: 2}[part]] * 1000

    return value


def _gauge(name: str) -> Any:
    def value(buckets: Sequence[Bucket]) -> float | None:
        seen = [getattr(bucket, name) for bucket in buckets if getattr(bucket, name) is not None]
        return float(max(seen)) if seen else None

    return value


def _acquires(buckets: Sequence[Bucket]) -> float:
    return float(sum(sum(bucket.counts.acquires.values()) for bucket in buckets))


def _errors(buckets: Sequence[Bucket]) -> float:
    keys = ("unavailable", "error")
    return float(
        sum(count for bucket in buckets for key, count in bucket.counts.acquires.items() if key.split()[0] in keys)
    )


def _strip(data: PageData, locks_held: int, waiting: int) -> list[Cell]:
    leases = sum(each.state == "held" for lock in data.locks for each in lock.holders)
    queues = sum(bool(lock.queue) for lock in data.locks)
    cells = [
        Cell("Leases now", f"{leases:,}", f"on {counted(locks_held, 'lock')}" if leases else "", Markup("")),
        Cell("Waiting now", f"{waiting:,}", f"in {counted(queues, 'queue')}" if queues else "", Markup("")),
    ]
    stats = data.stats
    if stats is None:
        return cells
    recent = stats.buckets[-7:-1]  # a minute; the last bucket is not full yet
    per_second = _acquires(recent) / (10 * len(recent)) if recent else 0.0
    direct, queued = (
        _recent_quantile(recent, "direct", stats.bounds, 1),
        _recent_quantile(stats.buckets, "queued", stats.bounds, 2),
    )
    day = latest(data.incidents, data.now - DAY)
    lost = [each.at for each in day if each.kind == "lost"]
    refused = [each.at for each in day if each.kind == "stale_token"]
    return [
        cells[0]._replace(picture=charts.spark(_points(stats, _gauge("holding")), "held")),
        cells[1]._replace(picture=charts.spark(_points(stats, _gauge("waiting")), "wait")),
        Cell("Acquires", *_parts(rate(per_second)), charts.spark(_points(stats, _acquires))),
        Cell(
            "Acquire p95",
            _milliseconds(direct),
            "ms, limit 50",
            charts.spark(_points(stats, _latency(0.95, "direct", stats.bounds))),
        ),
        Cell("Wait p99", *_split(queued), charts.spark(_points(stats, _latency(0.99, "queued", stats.bounds)), "wait")),
        Cell(
            "Errors",
            number(round(100 * stats.total.errors, 2)),
            "%",
            charts.spark(_points(stats, _errors), "lost" if stats.total.errors else ""),
        ),
        Cell(
            "Lost, 24 h",
            f"{len(lost):,}",
            "lease" if len(lost) == 1 else "leases",
            charts.ticks(_by_time(lost, data.now), "lost"),
        ),
        Cell(
            "Refused, 24 h",
            f"{len(refused):,}",
            "write" if len(refused) == 1 else "writes",
            charts.ticks(_by_time(refused, data.now), "lost"),
        ),
    ]


def _recent_quantile(buckets: Sequence[Bucket], path: str, bounds: Sequence[float], which: int) -> float | None:
    found = _latency((0.5, 0.95, 0.99)[which], path, bounds)(buckets)
    return None if found is None else float(found) / 1000


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else number(round(seconds * 1000, 1))


def _split(seconds: float | None) -> tuple[str, str]:
    """A duration as a number and its unit."""
    if seconds is None:
        return "–", ""
    return _parts(duration(seconds))


def _parts(text: str) -> tuple[str, str]:
    value, _, unit = text.partition(" ")
    return value, unit


def _by_time(instants: Sequence[float], now: float) -> list[int]:
    """How many fall into each half hour of a day."""
    counts = [0] * 48
    for at in instants:
        counts[min(47, max(0, 47 - int((now - at) // (HOUR / 2))))] += 1
    return counts


# ---------------------------------------------------------------------- charts


def _charts(data: PageData, waiting: int) -> list[Chart]:
    stats = data.stats
    if stats is None or len(stats.buckets) < 2:
        return []
    times = _times(stats)
    lines: list[Values] = [_points(stats, _latency(part, "direct", stats.bounds)) for part in (0.5, 0.95, 0.99)]
    last = [_milliseconds(None if stats.total.direct is None else value) for value in stats.total.direct or (None,) * 3]
    queued = _points(stats, _gauge("waiting"))
    p99 = None if stats.total.queued is None else stats.total.queued[2]
    latency = charts.chart(
        list(zip(("l1", "l2", "l3"), lines, strict=True)),
        times,
        f"Acquire latency of the last hour, in milliseconds: p50 {last[0]}, p95 {last[1]}, p99 {last[2]}",
        limit=(_SLOW, "alert: p95 over 50 ms"),
    )
    peak = max((value for value in queued if value is not None), default=0.0)
    queue = charts.chart([("lw", queued)], times, f"Waiting callers in the last hour: at most {peak:.0f}", area=True)
    return [
        Chart(
            "Acquire latency",
            "without a queue, ms",
            [("p50", last[0], "k1"), ("p95", last[1], "k2"), ("p99", last[2], "k3")],
            latency,
            _table(["At", "p50 ms", "p95 ms", "p99 ms"], times, lines),
        ),
        Chart(
            "Waiting",
            "callers",
            [("waiting", f"{waiting:,}", "kw"), ("wait p99", "–" if p99 is None else duration(p99), "")],
            queue,
            _table(["At", "Waiting"], times, [queued]),
        ),
    ]


def _table(heads: list[str], times: Sequence[float], lines: Sequence[Values]) -> list[list[Any]]:
    """The numbers of a chart, every five minutes: the largest of each."""
    step = max(1, len(times) // 12)
    rows: list[list[Any]] = [list(heads)]
    for begin in range(0, len(times), step):
        row: list[Any] = [times[begin]]
        for line in lines:
            values = [value for value in line[begin : begin + step] if value is not None]
            row.append(number(round(max(values), 1)) if values else "–")
        rows.append(row)
    return rows


# ----------------------------------------------------------------------- tables


def _worst(data: PageData) -> list[Any]:
    risky = {lock.name for lock in data.at_risk}

    def key(lock: Any) -> tuple[bool, int, float, float]:
        left = min((each.left for each in lock.holders), default=0.0)
        return lock.name not in risky, -len(lock.queue), -lock.oldest_wait, left

    return [data.row(lock) for lock in sorted(data.locks, key=key)[:6]]


def _group(group: Summary) -> GroupRow:
    step = max(1, len(group.activity) // 24)
    activity = [float(sum(group.activity[i : i + step])) for i in range(0, len(group.activity), step)]
    return GroupRow(
        group.group,
        rate(group.rate),
        f"{100 * group.contention:.0f} %",
        charts.share(group.contention),
        "" if group.queued is None else duration(group.queued[1]),
        "" if group.held is None else duration(group.held[0]),
        sum(group.counts.lost.values()),
        charts.spark(activity, kind="act-spark", width=88, height=20),
    )


def _servers(data: PageData, server: str, missing: Sequence[str]) -> list[ServerRow]:
    app = data.app
    streams = len(app.service.streams) + len(app.feed)
    recent = [] if data.stats is None else data.stats.buckets[-7:-1]
    per_second = rate(_acquires(recent) / (10 * len(recent))) if recent else ""
    load = f"{counted(app.service.waiters, 'waiter')}, {counted(streams, 'stream')}" if data.reads_everything else ""
    own = ServerRow(server, per_second, load)
    answering = len(app.peers) - len(missing)
    peers = [ServerRow(counted(answering, "peer"), "", "history merged")] if answering > 0 else []
    return [own, *peers, *(ServerRow(each, "", "does not answer") for each in missing)]
