"""The lines of the screen, from a snapshot and what the keys have chosen. Pure: no terminal, no clock, no engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, Literal, NamedTuple, TypeAlias

from leasehold.cli import render
from leasehold.cli.render import width_of
from leasehold.cli.top.source import Snapshot
from leasehold.core.texts import escape, shell_command
from leasehold.model import Holding

Mode: TypeAlias = Literal["list", "detail", "deadlocks", "help"]
Sort: TypeAlias = Literal["queue", "held", "left", "name"]

SORTS: Final[tuple[Sort, ...]] = ("queue", "held", "left", "name")
AT_RISK_SHARE: Final = 1 / 3  # of the ttl: a live client has renewed long before
STALE_SECONDS: Final = 3.0
_BAR: Final = 12
_MIN_NAME, _MIN_HOLDER = 12, 10

# state -> mark, mark without Unicode, colour (SGR)
STATES: Final = {
    "at risk": ("▲", "!", "33"),
    "held": ("●", "*", "32"),
    "reserved": ("◇", "+", "36"),
    "cooling": ("◐", "o", "34"),
    "waiting": ("○", "-", "35"),
}
MARKS: Final = "".join(mark for mark, _, _ in STATES.values()) + "█░…·↑↓"

KEYS: Final = (
    ("up down", "select a name; also j and k, page up and down, home and end"),
    ("enter", "its holders and its queue; escape returns"),
    ("s", "sort by: queue, longest held, least time left, name"),
    ("/", "filter by a part of the name or of a holder; escape clears it"),
    ("b", "only names that have waiters"),
    ("d", "deadlocks: holders that wait for each other"),
    ("p", "pause the screen, or continue"),
    ("q", "quit"),
)


# ---------------------------------------------------------------- texts


def fit(text: str, width: int, right: bool = False, ellipsis: str = "…") -> str:
    """The text in exactly this many columns."""
    text = escape(text)
    if width_of(text) > width:
        kept = ""
        for char in text:
            if width_of(kept + char) > width - len(ellipsis):
                break
            kept += char
        text = (kept + ellipsis)[:width]
    padding = " " * max(0, width - width_of(text))
    return padding + text if right else text + padding


class Style(NamedTuple):
    """What the terminal can show."""

    colour: bool = True
    unicode: bool = True

    def paint(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour and code and text else text

    def reverse(self, text: str) -> str:
        return f"\x1b[7m{text}\x1b[0m"

    def mark(self, state: str) -> str:
        return STATES[state][0 if self.unicode else 1]

    def bar(self, share: float, width: int) -> str:
        full = max(0, min(width, round(share * width)))
        return ("█" if self.unicode else "#") * full + ("░" if self.unicode else ".") * (width - full)

    @property
    def ellipsis(self) -> str:
        return "…" if self.unicode else "~"


# ----------------------------------------------------------------- rows


class Row(NamedTuple):
    """One name. Times are as of now: the snapshot's, aged."""

    name: str
    state: str
    holders: tuple[Holding, ...]  # and what else keeps others out: reservations, cooling
    queue: tuple[Holding, ...]
    token: int | None
    held: float | None  # of the oldest grant
    left: float | None  # of the grant that ends first
    share: float | None  # `left` as a share of the ttl
    oldest_wait: float | None
    aged: float  # how much time has passed since the snapshot

    @property
    def holder(self) -> str:
        if not self.holders:
            return ""
        first = self.holders[0]
        if first.state == "cooling":
            return "(min hold)"
        more = f" +{len(self.holders) - 1}" if len(self.holders) > 1 else ""
        if first.kind == "semaphore":
            more += f" ({len(self.holders)} of {first.limit})"
        return first.holder.label + more


def rows_of(snapshot: Snapshot, now: float) -> list[Row]:
    by_name = groupby(sorted(snapshot.holdings, key=lambda each: each.name), key=lambda each: each.name)
    return [_row(name, tuple(claims), snapshot, max(0.0, now - snapshot.at)) for name, claims in by_name]


def _row(name: str, claims: tuple[Holding, ...], snapshot: Snapshot, aged: float) -> Row:
    holders = tuple(each for each in claims if render.blocks_others(each))
    waiters = [each for each in claims if not render.blocks_others(each)]
    queue = tuple(sorted(waiters, key=lambda each: each.position or 0))
    ends_first = min(holders, key=lambda each: each.left, default=None)
    left, share = (None, None) if ends_first is None else _life(ends_first, snapshot, aged)
    state = min((each.state for each in holders), key=list(STATES).index, default="waiting")
    if any(_is_at_risk(each, snapshot) for each in holders):
        state = "at risk"
    ages = [each.age + aged for each in holders if each.since_grant]
    waits = [each.age + aged for each in queue]
    token = max((each.token or 0 for each in holders), default=0) or None
    held, oldest_wait = max(ages, default=None), max(waits, default=None)
    return Row(name, state, holders, queue, token, held, left, share, oldest_wait, aged)


def _life(each: Holding, snapshot: Snapshot, aged: float) -> tuple[float, float]:
    """Seconds left, and their share of the ttl, as far as that is known."""
    left, ttl = max(0.0, each.left - aged), snapshot.ttls.get(each.fingerprint, each.left)
    return left, left / ttl if ttl > 0 else 0.0


def _is_at_risk(each: Holding, snapshot: Snapshot) -> bool:
    """When the engine answered: what has happened since is not known."""
    return each.state == "held" and _life(each, snapshot, 0.0)[1] < AT_RISK_SHARE


_ORDERS: Final[dict[Sort, Callable[[Row], tuple[float | str, ...]]]] = {
    "queue": lambda row: (-len(row.queue), row.state != "at risk", row.name),
    "held": lambda row: (-(row.held or 0.0), row.name),
    "left": lambda row: (float("inf") if row.left is None else row.left, row.name),
    "name": lambda row: (row.name,),
}


# ----------------------------------------------------------------- view


@dataclass
class View:
    """What the keys have chosen."""

    title: str  # the engine and the namespace
    style: Style
    mode: Mode = "list"
    sort: Sort = "queue"
    filter: str = ""
    typing: bool = False
    blocking: bool = False
    paused: bool = False
    selected: str | None = None  # a name
    scrolled: int = 0
    quits: bool = False
    _shown: tuple[str, ...] = ()  # names in the list, as last drawn
    _page: int = 1

    # ------------------------------------------------------------- keys

    def on_key(self, key: str) -> None:
        if self.typing:
            self._type(key)
        elif key == "q":
            self.quits = True
        elif key == "escape":
            self.mode, self.filter = "list", self.filter if self.mode != "list" else ""
        elif key == "p":
            self.paused = not self.paused
        elif key in ("?", "h"):
            self.mode = "list" if self.mode == "help" else "help"
        elif key == "d":
            self.mode = "list" if self.mode == "deadlocks" else "deadlocks"
        elif key == "enter":
            self.mode = "detail" if self.mode == "list" and self.selected is not None else "list"
        elif key == "s":
            self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
        elif key == "b":
            self.blocking = not self.blocking
        elif key == "/":
            self.mode, self.typing = "list", True
        else:
            self._move(key)

    def _type(self, key: str) -> None:
        if key == "enter":
            self.typing = False
        elif key == "escape":
            self.typing, self.filter = False, ""
        elif key == "backspace":
            self.filter = self.filter[:-1]
        elif len(key) == 1:
            self.filter += key

    def _move(self, key: str) -> None:
        steps = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -self._page, "page down": self._page}
        ends = {"home": -len(self._shown), "end": len(self._shown)}
        step = steps.get(key, ends.get(key, 0))
        if step and self._shown:
            at = self._shown.index(self.selected) if self.selected in self._shown else 0
            self.selected = self._shown[max(0, min(len(self._shown) - 1, at + step))]

    # ------------------------------------------------------------ frames

    def frame(self, snapshot: Snapshot, size: tuple[int, int], now: float, clock: str, status: str = "") -> list[str]:
        """The screen. `size`: columns and lines; `clock`: the time of day; `status`: of the engine's servers."""
        width, height = max(size[0], 20), max(size[1], 6)
        rows = rows_of(snapshot, now)
        body = {"list": self._list, "detail": self._detail, "deadlocks": self._deadlocks, "help": self._help}
        lines = [self._head(snapshot, width, now, clock, status), self._numbers(snapshot, rows, width)]
        room = height - 3
        lines += body[self.mode](snapshot, rows, width, room)[:room]
        lines += [""] * (height - 1 - len(lines))
        return [*lines, self._foot(width)]

    def _head(self, snapshot: Snapshot, width: int, now: float, clock: str, status: str) -> str:
        age = now - snapshot.at
        if self.paused:
            state, code = "paused", "36"
        elif not snapshot.taken:
            state, code = ("no answer", "31") if snapshot.error else ("connecting", "36")
        elif snapshot.error or snapshot.stale or age > STALE_SECONDS:
            state, code = f"stale {render.duration(age)}", "31"
        else:
            state, code = "live", "32"
        up = [] if snapshot.error or snapshot.seconds is None else [render.short_duration(snapshot.seconds)]
        dot = " · " if self.style.unicode else ", "
        parts = dot.join([*up, *([status] if status else [])])
        right = f"  {clock}  {state}"
        if width >= 78 and parts:
            right = f"  {parts}{right}"
        left = fit(f"leasehold top  {self.title}", width - len(right), ellipsis=self.style.ellipsis)
        return self.style.paint(left, "1") + right[: -len(state)] + self.style.paint(state, code)

    def _numbers(self, snapshot: Snapshot, rows: Sequence[Row], width: int) -> str:
        """The summary, as far as it fits."""
        if snapshot.error:
            return self.style.paint(fit(snapshot.error, width, ellipsis=self.style.ellipsis), "31")
        held = sum(each.state == "held" for row in rows for each in row.holders)
        waiting = sum(len(row.queue) for row in rows)
        at_risk, cycles, rates = sum(row.state == "at risk" for row in rows), len(snapshot.deadlocks), snapshot.rates
        numbers = [
            (f"held {held:,}", ""),
            (f"waiting {waiting:,}", ""),
            (f"at risk {at_risk:,}", "33" if at_risk else ""),
            (f"deadlocks {cycles:,}", "31" if cycles else ""),
        ]
        if rates is not None:
            numbers.append((f"{rates.acquires:,.1f} acquires/s", ""))
            if rates.p95 is not None:
                numbers.append((f"p95 {render.short_duration(rates.p95)}", ""))
            numbers.append((f"lost in 1 h {rates.lost:,}", "31" if rates.lost else ""))
        line, used = "", 0
        for text, code in numbers:
            gap = "   " if line else ""
            if used + len(gap + text) > width:
                break
            line, used = line + gap + self.style.paint(text, code), used + len(gap + text)
        return line

    def _foot(self, width: int) -> str:
        if self.typing:
            return fit(f"filter: {self.filter}_", width)
        if self.mode != "list":
            text = " escape back   p pause   ? help   q quit"
        else:
            shown = f" (only /{self.filter})" if self.filter else ""
            text = f" s sort: {self.sort}   / filter{shown}   enter detail   b blocking   d deadlocks   p pause"
            text += "   ? help   q quit"
            if width_of(text) > width:
                text = f" s sort: {self.sort}  / filter{shown}  enter detail  b d p ? help  q quit"
        return self.style.reverse(fit(text, width, ellipsis=self.style.ellipsis))

    # -------------------------------------------------------------- list

    def _list(self, snapshot: Snapshot, rows: Sequence[Row], width: int, room: int) -> list[str]:
        found = [row for row in rows if self._matches(row)]
        found.sort(key=_ORDERS[self.sort])
        self._shown, self._page = tuple(row.name for row in found), max(1, room - 2)
        if self.selected not in self._shown:
            self.selected = self._shown[0] if self._shown else None
        if not found:
            if not snapshot.taken:
                return []
            return ["", "  " + ("no name matches: escape clears the filter" if rows else "no holders or waiters")]
        columns = _columns(width, found)
        head = "  ".join(fit(each.title, each.width, each.right) for each in columns)
        at, page = self._shown.index(self.selected or ""), room - 1
        if len(found) > page:
            page -= 1  # the last line says how many there are
        self.scrolled = max(0, min(self.scrolled, at, len(found) - page), at - page + 1)
        lines = [self.style.paint(fit(head, width), "1")]
        for row in found[self.scrolled : self.scrolled + page]:
            lines.append(self._line(row, columns, width))
        if len(found) > page:
            last = min(len(found), self.scrolled + page)
            lines.append(self.style.paint(f"  {self.scrolled + 1} to {last} of {len(found):,} names", "2"))
        return lines

    def _matches(self, row: Row) -> bool:
        if self.blocking and not (row.queue and row.holders):
            return False
        wanted = self.filter.casefold()
        texts = [row.name, *(each.holder.label for each in (*row.holders, *row.queue))]
        return not wanted or any(wanted in text.casefold() for text in texts)

    def _line(self, row: Row, columns: Sequence[Column], width: int) -> str:
        chosen, code = row.name == self.selected, STATES[row.state][2]
        cells = []
        for column in columns:
            if column.title == "":
                text = " " * column.width if row.share is None else self.style.bar(row.share, column.width)
            elif column.title.endswith("STATE"):
                text = fit(f"{self.style.mark(row.state)} {row.state.upper()}", column.width)
            else:
                text = fit(column.show(row), column.width, column.right, self.style.ellipsis)
            coloured = column.title == "" or column.title.endswith("STATE")
            cells.append(text if chosen or not coloured else self.style.paint(text, code))
        line = "  ".join(cells)
        return self.style.reverse(line + " " * max(0, width - width_of(line))) if chosen else line

    # ------------------------------------------------------------ others

    def _detail(self, snapshot: Snapshot, rows: Sequence[Row], width: int, room: int) -> list[str]:
        row = next((row for row in rows if row.name == self.selected), None)
        if row is None:
            return ["", f"  {escape(self.selected or '')} has no holders and no waiters now"]
        cut = self.style.ellipsis
        lines = ["", self.style.paint(fit(f"  {row.name}", width, ellipsis=cut), "1")]
        for each in row.holders:
            lines += ["", *self._holder(each, row, snapshot, width)]
        lines += ["", self.style.paint(f"  queue: {len(row.queue):,}", "1")]
        waiters = []
        for each in row.queue:
            position = "-" if each.position is None else f"{each.position:,}"
            note = "" if each.state == "waiting" else f"  ({each.state})"
            text = f"  {position:>6}  {render.duration(each.age + row.aged):>7}  {_who(each)}{note}"
            waiters.append(fit(text, width, ellipsis=cut))
        space = max(1, room - len(lines))
        if len(waiters) > space:
            waiters = [*waiters[: space - 1], f"        and {len(waiters) - space + 1:,} more"]
        return lines + waiters

    def _holder(self, each: Holding, row: Row, snapshot: Snapshot, width: int) -> list[str]:
        left, share = _life(each, snapshot, row.aged)
        state = "at risk" if _is_at_risk(each, snapshot) else each.state
        mark_text, colour = f"{self.style.mark(state)} {state.upper()}", STATES[state][2]
        mark = self.style.paint(mark_text, colour)
        facts = [f"token {each.token}"] if each.token else []
        if each.kind == "semaphore":
            facts.append(f"slot {each.slot} of {each.limit}" if each.slot is not None else f"one of {each.limit}")
        elif each.mode == "shared":
            facts.append("shared")
        if each.since_grant and each.state == "held":
            facts.append(f"held {render.duration(each.age + row.aged)}")
        facts.append(f"{render.duration(left)} left")
        text = ", ".join(facts)
        lines = [f"  {mark}  {fit(text, width - 4 - len(mark_text), ellipsis=self.style.ellipsis).rstrip()}"]
        if width >= 4 + len(mark_text) + len(text) + 2 + _BAR:
            lines[0] += f"  {self.style.paint(self.style.bar(share, _BAR), colour)}"
        about = [_who(each), *([f"for: {each.holder.purpose}"] if each.holder.purpose else [])]
        about.append(f"fingerprint {each.fingerprint}")
        if each.token:
            about.append(f"to end it: {shell_command('break', each.namespace, each.name, '--token', str(each.token))}")
        return lines + [fit(f"    {line}", width, ellipsis=self.style.ellipsis) for line in about]

    def _deadlocks(self, snapshot: Snapshot, _rows: Sequence[Row], width: int, _room: int) -> list[str]:
        if not snapshot.deadlocks:
            return ["", "  no deadlocks"]
        lines = []
        for number, found in enumerate(snapshot.deadlocks, 1):
            lines += ["", self.style.paint(f"  deadlock {number}: {len(found.waits)} waiters in a cycle", "1;31")]
            lines += [fit(f"    {part}", width, ellipsis=self.style.ellipsis) for part in str(found).split("; ")]
            victim = found.victim
            command = shell_command("break", victim.namespace, victim.name, "--token", str(victim.token))
            lines.append(self.style.paint(fit(f"    to resolve it: {command}", width), "2"))
        return lines

    def _help(self, _snapshot: Snapshot, _rows: Sequence[Row], width: int, _room: int) -> list[str]:
        states = {
            "at risk": "its client has not renewed in time: it may be stuck",
            "held": "its client renews in time",
            "reserved": "the next waiter was notified and may claim the name",
            "cooling": "released, and kept taken for the rest of its min_hold",
            "waiting": "waiters, and no holder",
        }
        cut = self.style.ellipsis
        lines = ["", *(fit(f"  {keys:<10} {text}", width, ellipsis=cut) for keys, text in KEYS), ""]
        for state, text in states.items():
            label = self.style.paint(f"{self.style.mark(state)} {state.upper():<9}", STATES[state][2])
            lines.append(f"  {label}{fit(text, width - 13, ellipsis=cut)}")
        about = (
            "LEFT: until the lease ends unless it is renewed; its bar",
            "compares that with the longest that was seen.",
            "`leasehold top` never changes a lock.",
        )
        return [*lines, "", *(fit(f"  {text}", width, ellipsis=cut) for text in about)]


def _who(each: Holding) -> str:
    who = each.holder
    where = [*([f"host {who.host}"] if who.host else []), *([f"pid {who.pid}"] if who.pid else [])]
    gone = " (gone)" if render.process_state(who) == "gone" else ""
    return who.label + (f"  ({', '.join(where)}{gone})" if where else "")


# -------------------------------------------------------------- columns


class Column(NamedTuple):
    title: str  # empty: the bar
    width: int
    right: bool = False
    show: Callable[[Row], str] = lambda _row: ""


def _or_none(value: float | None, show: Callable[[float], str]) -> str:
    return "" if value is None else show(value)


_STATE: Final = Column("  STATE", 9)
_TOKEN: Final = Column("TOKEN", 7, True, lambda row: _or_none(row.token, lambda token: f"{token:.0f}"))
_HELD: Final = Column("HELD", 7, True, lambda row: _or_none(row.held, render.duration))
_LEFT: Final = Column("LEFT", 7, True, lambda row: _or_none(row.left, render.duration))
_BARS: Final = Column("", _BAR)
_QUEUE: Final = Column("QUEUE", 5, True, lambda row: f"{len(row.queue):,}" if row.queue else "")
_OLDEST: Final = Column("OLDEST WAIT", 11, True, lambda row: _or_none(row.oldest_wait, render.duration))


def _columns(width: int, rows: Iterable[Row]) -> list[Column]:
    """All that fit. NAME and HOLDER share what the others leave, as far as they need it."""
    rows = list(rows)
    name = max(_MIN_NAME, *(width_of(escape(row.name)) for row in rows))
    holder = max(_MIN_HOLDER, *(width_of(escape(row.holder)) for row in rows))
    token = _TOKEN._replace(width=max(len("TOKEN"), *(len(_TOKEN.show(row)) for row in rows)))
    small_bars = _BARS._replace(width=_BAR // 2)
    layouts = (
        (_STATE, token, _HELD, _LEFT, _BARS, _QUEUE, _OLDEST),
        (_STATE, token, _HELD, _LEFT, small_bars, _QUEUE, _OLDEST),
        (_STATE, token, _HELD, _LEFT, small_bars, _QUEUE),
        (_STATE, _HELD, _LEFT, small_bars, _QUEUE),
        (_STATE, _HELD, _LEFT, _QUEUE),
    )
    rest = min(name, 28) + 2 + min(holder, 18)
    fits = (layout for layout in layouts if sum(each.width + 2 for each in layout) + rest <= width)
    fixed = next(fits, layouts[-1])
    room = width - sum(each.width + 2 for each in fixed) - 2
    if name + holder > room:
        holder = max(_MIN_HOLDER, min(holder, room - name, room // 2) if name < room else room // 3)
        name = max(_MIN_NAME, room - holder)
    named = [Column("NAME", name, False, lambda row: row.name), Column("HOLDER", holder, False, lambda row: row.holder)]
    return [fixed[0], *named, *fixed[1:]]
