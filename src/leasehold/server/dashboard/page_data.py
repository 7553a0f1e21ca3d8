"""What a page is made from: the picture of a namespace and its history, as far as the caller may read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Final, NamedTuple

from markupsafe import Markup, escape

from leasehold.model import Holding
from leasehold.server.auth import Caller
from leasehold.server.dashboard import charts
from leasehold.server.dashboard.words import cut, duration
from leasehold.server.keys import ANY_NAMESPACE
from leasehold.server.past import Incident, Owner, PastGrant, Stats
from leasehold.server.peers import NamePast
from leasehold.server.picture import LockView, Picture

if TYPE_CHECKING:
    from leasehold.server.app import App

HOUR: Final = 3600.0
NO_PAST: Final = NamePast([], [])
DAY: Final = 24 * HOUR
_STATS_AGE: Final = 2.0  # seconds that the statistics of an hour are shown again
MAX_STEADY: Final = 5_000  # times that are kept stable: so many at least, twice as many at most
_JITTER: Final = 0.3  # seconds by which two pictures may differ about the same instant


class State(NamedTuple):
    """A state has a colour, a shape and a word: none of them is needed to understand the others."""

    role: str
    shape: str
    word: str


HELD: Final = State("held", "held", "HELD")
AT_RISK: Final = State("risk", "risk", "AT RISK")
LOST: Final = State("lost", "lost", "LOST")
EXPIRED: Final = State("lost", "lost", "EXPIRED")
WAITING: Final = State("wait", "wait", "WAITING")
RESERVED: Final = State("wait", "wait", "RESERVED")
COOLING: Final = State("cool", "cool", "COOLING")
FREE: Final = State("dim", "no", "FREE")
REFUSED: Final = State("lost", "stale", "REFUSED")
BROKEN: Final = State("cool", "lost", "BROKEN")
DEADLOCK: Final = State("risk", "risk", "DEADLOCK")
DOWN: Final = State("lost", "lost", "DOWN")
UP: Final = State("held", "held", "UP")
WELL: Final = State("held", "held", "OK")
QUIET: Final = State("risk", "risk", "QUIET")


class LockRow(NamedTuple):
    """A lock, or one grant of it, as tables show it. Times are Unix times."""

    id: str
    namespace: str
    name: str
    state: State
    holder: str
    where: str
    token: int | None
    began_at: float | None
    ends_at: float | None
    ttl: float
    queue: int = 0
    waiting_since: float | None = None
    wait_p95: str = ""
    activity: Markup = Markup("")
    can_break: bool = False


class Steady:
    """Keeps times stable that are computed again from each picture: a part of a page must change only if what it shows
    has changed. What no page shows any more is forgotten when enough others were shown."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], float] = {}
        self._before: dict[tuple[str, str], float] = {}  # what was known before the last time that many were

    def __call__(self, kind: str, fingerprint: str, at: float) -> float:
        key = kind, fingerprint
        known = self._known.get(key) or self._before.get(key)
        if known is None or abs(known - at) >= _JITTER:
            known = at
        if len(self._known) >= MAX_STEADY:
            self._before, self._known = self._known, {}
        self._known[key] = known
        return known


class Memory:
    """What pages of one worker keep from one rendering to the next."""

    def __init__(self) -> None:
        self.steady = Steady()
        self._stats: dict[str, tuple[float, Stats]] = {}

    async def stats(self, app: App, namespace: str, now: float) -> Stats:
        """Of the last hour. The same for two seconds: adding up an hour takes a while."""
        known = self._stats.get(namespace)
        if known is None or not 0 <= now - known[0] < _STATS_AGE:
            if len(self._stats) > 100:
                self._stats.clear()
            known = self._stats[namespace] = (now, (await app.peers.stats(namespace, HOUR)).value)
        return known[1]


@dataclass(frozen=True)
class PageData:
    """What one caller sees of one namespace at one moment."""

    app: App
    caller: Caller
    memory: Memory
    namespace: str
    arguments: dict[str, str]
    picture: Picture
    now: float  # Unix time
    may_break: bool = False
    incidents: Sequence[Incident] = ()  # latest first, those that the caller may see
    stats: Stats | None = None  # of the last hour, for the overview
    owners: Sequence[Owner] = ()  # the first that fit the filter, for their page
    past: NamePast = NO_PAST  # of the lock of the page

    @cached_property
    def reads_all(self) -> bool:
        """Whether the caller may read every name of the namespace: sums over names are shown only then."""
        return self.caller.may_list(self.namespace, "")

    @cached_property
    def reads_everything(self) -> bool:
        return self.caller.may("read", ANY_NAMESPACE, "")

    def may_read(self, namespace: str, name: str) -> bool:
        return self.caller.may("read", namespace, name)

    @cached_property
    def locks(self) -> Sequence[LockView]:
        found = self.picture.locks
        return found if self.reads_all else [lock for lock in found if self.may_read(self.namespace, lock.name)]

    @cached_property
    def at_risk(self) -> list[LockView]:
        return [lock for lock in self.locks if any(map(self.app.history.at_risk, lock.holders))]

    def grants(self, name: str) -> list[PastGrant]:
        """Those that this server saw. For those of all servers: `past`."""
        return self.app.history.grants(self.namespace, name)

    # ------------------------------------------------------------------- rows

    def row(self, lock: LockView, details: bool = False) -> LockRow:
        """A lock as one row. Of several holders it shows the one whose lease ends first."""
        first = min(lock.holders, key=lambda each: each.left, default=None)
        if first is None:
            free = LockRow(
                part_name("l", lock.name), self.namespace, lock.name, WAITING, "none yet", "", None, None, None, 1.0
            )
            return self._with_queue(free, lock, details)
        row = self.grant_row(lock, first)._replace(id=part_name("l", lock.name))
        if len(lock.holders) > 1:
            held = sum(each.state == "held" for each in lock.holders)
            labels = ", ".join(dict.fromkeys(each.holder.label for each in lock.holders))
            who = f"{held} of {lock.limit} slots" if lock.kind == "semaphore" else f"{held:,} readers"
            row = row._replace(holder=who, where=cut(labels, 80))
        return self._with_queue(row, lock, details)

    def _with_queue(self, row: LockRow, lock: LockView, details: bool) -> LockRow:
        since = None
        if lock.queue:
            oldest = max(lock.queue, key=lambda waiter: waiter.age)
            since = self._instant("queued", oldest.fingerprint, -oldest.age)
        row = row._replace(queue=len(lock.queue), waiting_since=since)
        if not details:
            return row
        waits = sorted(wait.ended - wait.began for wait in self.app.history.waits(self.namespace, lock.name))
        p95 = duration(waits[min(len(waits) - 1, int(len(waits) * 0.95))]) if waits else ""
        return row._replace(wait_p95=p95, activity=self._activity(lock.name))

    def _activity(self, name: str) -> Markup:
        counts = [0.0] * 24
        for grant in self.grants(name):
            part = int((self.now - grant.granted_at) // (HOUR / 24))
            if 0 <= part < 24:
                counts[23 - part] += 1
        return charts.spark(counts, kind="act-spark", width=88, height=20, area=False) if any(counts) else Markup("")

    def grant_row(self, lock: LockView, holding: Holding) -> LockRow:
        """One grant of a lock as a row."""
        history, who = self.app.history, holding.holder
        is_held = holding.state == "held"
        ttl = history.ttl(holding) if is_held else max(holding.left + holding.age, holding.left, 0.1)
        state = {"held": HELD, "reserved": RESERVED, "cooling": COOLING}.get(holding.state, WAITING)
        label, where = who.label, place(who.host, who.pid) or who.purpose
        if holding.state == "cooling":
            label, where = "cooling", "until it may be granted"
        elif holding.state == "reserved":
            where = "may claim it now"
        return LockRow(
            id=f"g-{holding.fingerprint}",
            namespace=self.namespace,
            name=lock.name,
            state=AT_RISK if history.at_risk(holding) else state,
            holder=cut(label, 80),
            where=cut(where, 80),
            token=holding.token,
            began_at=self._instant("began", holding.fingerprint, -holding.age) if is_held else None,
            ends_at=self._instant("ends", holding.fingerprint, holding.left),
            ttl=max(ttl, 0.1),
            queue=len(lock.queue),
            can_break=is_held,
        )

    def _instant(self, kind: str, fingerprint: str, seconds: float) -> float:
        return self.memory.steady(kind, fingerprint, self.picture.as_of + seconds)


def place(host: str | None, pid: int | None) -> str:
    """Where a holder runs."""
    return f"{host}:{pid}" if host and pid else host or ""


def part_name(kind: str, text: str) -> str:
    """The id of a row about any text, as letters and digits."""
    return f"{kind}-{sha256(text.encode()).hexdigest()[:20]}"


def with_code(text: str) -> Markup:
    """A text with parts in backticks, which are code."""
    parts = [escape(part) for part in text.split("`")]
    return Markup("").join(
        Markup('<code class="mono">{}</code>').format(part) if number % 2 else part for number, part in enumerate(parts)
    )


def latest(incidents: Iterable[Incident], since: float) -> list[Incident]:
    return [each for each in incidents if each.at > since]
