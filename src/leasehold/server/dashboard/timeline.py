"""Who held a lock, and when, as SVG: a bar per grant with its token and renewals, what was at risk or lost, the gap
until the next grant, who waited, and what a fence refused. With the story of its latest loss in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from markupsafe import Markup

from leasehold.core import timing
from leasehold.server.dashboard.words import clock, counted, cut, duration, plain, rough, token
from leasehold.server.past import PastGrant, PastWait

MAX_LANES: Final = 6  # holders; a fence has one more
_SPANS: Final = (60.0, 90.0, 120.0, 180.0, 240.0, 360.0, 600.0, 900.0, 1800.0, 3600.0, 3 * 3600.0, 6 * 3600.0)
_WIDTH: Final = 1180.0
_LEFT: Final = 158.0
_RIGHT: Final = 14.0
_TOP: Final = 34.0
_LANE: Final = 70.0
_CHARACTER: Final = 6.1  # width of one, of small text


class Waiting(NamedTuple):
    """A claim that is in the queue now."""

    fingerprint: str
    holder: str
    began: float
    position: int


class StoryStep(NamedTuple):
    """One step of a story, with its number in the drawing."""

    at: float
    title: str
    text: str
    holder: str  # whose lane it is in; empty: the fence's


class Timeline(NamedTuple):
    svg: Markup
    strip: Markup
    lanes: tuple[str, ...]  # the names at the left
    story: tuple[StoryStep, ...]
    focus: float  # where something happened: 0 is the left end, 1 the right
    span: float  # seconds


class _Scale:
    """Times as positions."""

    def __init__(self, now: float, span: float, left: float = _LEFT, width: float = _WIDTH, right: float = _RIGHT):
        self.now, self.span, self.left, self._wide = now, span, left, width - left - right
        self.begin = now - span

    def __call__(self, at: float) -> float:
        return self.left + self._wide * min(max((at - self.begin) / self.span, 0.0), 1.0)

    def shows(self, began: float, ended: float) -> bool:
        return ended > self.begin and began <= self.now


class _Drawing:
    """Collects shapes. Every text that comes from a caller is escaped by `Markup.format`."""

    def __init__(self) -> None:
        self.parts: list[Markup] = []

    def add(self, shape: str, *values: object) -> None:
        self.parts.append(Markup(shape).format(*values))  # noqa: S704  # a shape is a constant of this module

    def bar(self, kind: str, x: float, end: float, middle: float, title: str = "", tall: float = 24) -> None:
        inner = Markup("<title>{}</title>").format(title) if title else Markup("")
        self.add(
            '<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{}" rx="{}">{}</rect>',
            kind,
            x,
            middle - tall / 2,
            max(end - x, 1.5),
            tall,
            min(4, tall / 5, max(end - x, 1.5) / 2),
            inner,
        )

    def hatch(self, x: float, end: float, middle: float, tall: float = 24, pattern: str = "hatch") -> None:
        self.add(
            '<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{}" fill="url(#{})"/>',
            x,
            middle - tall / 2,
            max(end - x, 0.0),
            tall,
            pattern,
        )

    def text(self, kind: str, x: float, y: float, text: str, anchor: str = "start") -> None:
        self.add('<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>', kind, x, y, anchor, text)

    def line(self, kind: str, path: str) -> None:
        self.add('<path class="{}" d="{}"/>', kind, path)

    def badge(self, number: int, x: float, y: float) -> None:
        self.add(
            '<g class="no"><circle cx="{:.1f}" cy="{:.1f}" r="8"/><text x="{:.1f}" y="{:.1f}">{}</text></g>',
            x,
            y,
            x,
            y + 3.5,
            number,
        )

    def joined(self) -> Markup:
        return Markup("").join(self.parts)


def _ended(grant: PastGrant, now: float) -> float:
    """When its bar ends."""
    return min(now, now if grant.ended_at is None else grant.ended_at)


def _heard(grant: PastGrant) -> float:
    return grant.renewals[-1].at if grant.renewals else grant.granted_at


def _risks(grant: PastGrant, end: float) -> list[tuple[float, float]]:
    """When it was at risk: as reported, or, if it was lost in silence, by the same rule as in the client."""
    found = [(risk.began, min(risk.ended or end, end)) for risk in grant.at_risk if risk.began < end]
    overdue = timing.overdue_at(_heard(grant), grant.ttl)
    return found or ([(overdue, end)] if grant.end == "lost" and overdue < end else [])


def draw(
    name: str, grants: Sequence[PastGrant], waits: Sequence[PastWait], waiting: Sequence[Waiting], now: float
) -> Timeline | None:
    """The timeline of a lock. `grants` and `waits` are the latest first. None: nothing is known."""
    if not grants:
        return None
    trouble = next((grant for grant in grants if grant.end in ("lost", "broken") or grant.refused), None)
    scale = _Scale(now, _choose_span(grants, trouble, now))
    shown = [grant for grant in grants if scale.shows(grant.granted_at, _ended(grant, now))]
    lanes = _lanes(shown, waiting, trouble)
    fenced = [(grant, refusal) for grant in shown for refusal in grant.refused if refusal.at > scale.begin]
    story = _story(trouble, grants) if trouble is not None and trouble in shown else ()
    rows = [*lanes, "Fence"] if fenced else lanes
    height = _TOP + _LANE * len(rows) + 8
    drawing = _Drawing()
    drawing.add(
        '<svg class="tl" viewBox="0 0 {:.0f} {:.0f}" role="img" aria-label="{}">',
        _WIDTH,
        height,
        _describe(name, shown, scale),
    )
    _axis(drawing, scale, rows, shown, height)
    for number, lane in enumerate(lanes):
        _lane(drawing, scale, lane, number, shown, waits, waiting, trouble)
    for grant, refusal in fenced:
        _refusal(drawing, scale, lanes, grant, refusal.at, refusal.seen, is_trouble=grant is trouble)
    for number, step in enumerate(story, 1):
        _place_badge(drawing, scale, lanes, number, step)
    drawing.line("now", f"M{scale(now):.1f} {_TOP - 8:.0f}V{height:.0f}")
    drawing.text("", scale(now), 14, "now", "end")
    drawing.parts.append(Markup("</svg>"))
    at = trouble.ended_at if trouble in shown and trouble is not None and trouble.ended_at else now
    focus = scale(at) / _WIDTH
    return Timeline(
        drawing.joined(),
        _strip(grants, now, scale.span),
        tuple(cut(plain(row), 21) for row in rows),
        story,
        focus,
        scale.span,
    )


def _choose_span(grants: Sequence[PastGrant], trouble: PastGrant | None, now: float) -> float:
    """A round time that shows the last few grants, and the latest trouble if that is not too long ago."""
    begin = grants[min(len(grants), 5) - 1].granted_at
    if trouble is not None and now - trouble.granted_at < 1800:
        begin = min(begin, trouble.granted_at - 5)
    wanted = max(now - begin, 30.0) * 1.05
    return next((span for span in _SPANS if span >= wanted), _SPANS[-1])


def _lanes(shown: Sequence[PastGrant], waiting: Sequence[Waiting], trouble: PastGrant | None) -> list[str]:
    """The holders to show, in the order in which they held: those of the latest trouble, then the latest."""
    chosen: list[str] = []
    important = [] if trouble is None else [trouble.holder]
    for holder in (*important, *(grant.holder for grant in shown), *(waiter.holder for waiter in waiting)):
        if holder not in chosen and len(chosen) < MAX_LANES:
            chosen.append(holder)
    first = {grant.holder: grant.granted_at for grant in shown}  # the earliest comes last
    return sorted(chosen, key=lambda holder: first.get(holder, float("inf")))


def _middle(lane: int) -> float:
    return _TOP + _LANE * lane + 34


def _axis(drawing: _Drawing, scale: _Scale, rows: Sequence[str], shown: Sequence[PastGrant], height: float) -> None:
    step = next(each for each in (10, 20, 30, 60, 120, 300, 600, 1800, 3600) if scale.span / each <= 7)
    form = "hms" if step < 60 else "hm"
    at = (scale.begin // step + 1) * step
    while at < scale.now:
        x = scale(at)
        if x < scale(scale.now) - 40:
            drawing.line("lane", f"M{x:.1f} {_TOP - 8:.0f}V{height:.0f}")
            drawing.add(
                '<text x="{:.1f}" y="14" text-anchor="middle" data-at="{:.0f}" data-form="{}">{}</text>',
                x,
                at,
                form,
                clock(at, form),
            )
        at += step
    for number, row in enumerate(rows):
        drawing.line("mid", f"M0 {_TOP + _LANE * number - 4:.0f}H{_WIDTH:.0f}")
        label = plain(row)
        drawing.text("who", 0, _middle(number) - 2, cut(label, 21))
        purposes = [grant.purpose for grant in shown if grant.holder == row and grant.purpose]
        if purposes:
            text = plain(purposes[0])
            drawing.text("", 0, _middle(number) + 13, cut(text, 24))


def _lane(
    drawing: _Drawing,
    scale: _Scale,
    holder: str,
    number: int,
    shown: Sequence[PastGrant],
    waits: Sequence[PastWait],
    waiting: Sequence[Waiting],
    trouble: PastGrant | None,
) -> None:
    middle = _middle(number)
    free_until = _LEFT  # where texts above the bars may begin
    bars = [(scale(grant.granted_at), scale(_ended(grant, scale.now))) for grant in shown if grant.holder == holder]
    for wait in reversed(waits):
        if wait.holder == holder and scale.shows(wait.began, wait.ended):
            x, end = scale(wait.began), scale(wait.ended)
            text = f"waited {duration(wait.ended - wait.began)}"
            text += "" if wait.outcome == "granted" else ", gave up"
            free_until = _wait(drawing, x, end, middle, text, free_until, bars)
    for waiter in waiting:
        if waiter.holder == holder:
            text = f"waits, position {waiter.position}"
            free_until = _wait(drawing, scale(waiter.began), scale(scale.now), middle, text, free_until, bars)
    for grant in reversed(shown):
        if grant.holder == holder:
            _grant(drawing, scale, grant, middle, shown, is_trouble=grant is trouble)


def _wait(
    drawing: _Drawing,
    x: float,
    end: float,
    middle: float,
    text: str,
    free_until: float,
    bars: Sequence[tuple[float, float]],
) -> float:
    """Returns where the next text may begin."""
    if end - x < 2:
        return free_until
    drawing.line("waitl", f"M{x:.1f} {middle:.1f}H{end - 2:.1f}")
    drawing.add('<circle cx="{:.1f}" cy="{:.1f}" r="3.2" class="f-wait"/>', x, middle)
    wide = len(text) * _CHARACTER
    is_clear = all(bar_end <= x + 1 or bar >= x + wide for bar, bar_end in bars)
    if end - x > wide and x >= free_until and is_clear:
        drawing.text("t-wait", x + 2, middle - 8, text)
        return x + wide + 8
    return free_until


def _grant(
    drawing: _Drawing,
    scale: _Scale,
    grant: PastGrant,
    middle: float,
    shown: Sequence[PastGrant],
    is_trouble: bool,
) -> None:
    end = _ended(grant, scale.now)
    x, x_end = scale(grant.granted_at), scale(end)
    shown_token = "" if grant.token is None else token(grant.token)
    held = duration(end - grant.granted_at)
    outcome = {"released": ", released", "lost": ", lost", "broken": ", broken"}.get(grant.end or "", "")
    is_over = grant.end in ("lost", "broken")
    silent_from = scale(min(_heard(grant) + 1, end))
    if is_over and is_trouble:  # what it did after its last renewal is not known
        drawing.hatch(silent_from, scale(min(scale.now, end + (end - _heard(grant)) / 2)), middle)
    title = f"{plain(grant.holder)}, token {shown_token}: held {'' if outcome else 'for '}{held}{outcome}"
    drawing.bar("b-held", x, x_end, middle, title)
    if is_over and is_trouble:
        drawing.hatch(silent_from, x_end, middle)
    for began, ended in _risks(grant, end):
        drawing.bar("b-risk", scale(began), scale(ended), middle)
    if x_end - x > 24:
        for renewal in grant.renewals:
            if renewal.at > scale.begin and renewal.at <= end:
                drawing.line("renew", f"M{scale(renewal.at):.1f} {middle + 6:.1f}v6")
    note = f"held {'' if outcome else 'for '}{held}{outcome if grant.end == 'released' else ''}"
    _grant_text(drawing, x, x_end, middle, shown_token, "" if is_over else note)
    if grant.end == "released" and x_end - x > 6:
        drawing.line("ok", f"M{x_end:.1f} {middle - 12:.1f}v24")
    if is_over:
        _grant_loss(drawing, scale, grant, middle, shown, is_trouble)


def _grant_text(drawing: _Drawing, x: float, x_end: float, middle: float, shown_token: str, note: str) -> None:
    """The token of a grant, and a note, as far as there is room in its bar."""
    room, token_room = (x_end - x - 14) / _CHARACTER, len(shown_token) * 1.15
    if room > token_room:
        drawing.text("tokt t-held", x + 9, middle + 3, shown_token)
        if note and room > token_room + len(note) + 3:
            drawing.text("", x + 18 + 7.4 * len(shown_token), middle + 3, note)


def _grant_loss(
    drawing: _Drawing, scale: _Scale, grant: PastGrant, middle: float, shown: Sequence[PastGrant], is_trouble: bool
) -> None:
    """Where a grant was lost or broken, and how long the name was free then."""
    end = _ended(grant, scale.now)
    x_end = scale(end)
    drawing.line("lostl", f"M{x_end:.1f} {middle - 20:.1f}v40")
    if is_trouble:  # others have a line and a title: texts would overlap
        word = "LOST" if grant.end == "lost" else "BROKEN"
        text = f"{word}: {plain(grant.reason)[:40]}" if grant.reason else word
        drawing.text("t-lost", x_end + 24, middle - 18, text)
    after = min((each.granted_at for each in shown if each.granted_at >= end), default=None)
    if after is not None and scale(after) - x_end > 3:
        drawing.hatch(x_end, scale(after), middle, 6, "hatch-c")


def _refusal(
    drawing: _Drawing,
    scale: _Scale,
    lanes: Sequence[str],
    grant: PastGrant,
    at: float,
    seen: int | None,
    is_trouble: bool,
) -> None:
    x, middle = scale(at), _middle(len(lanes))
    if grant.holder in lanes:
        origin = _middle(lanes.index(grant.holder))
        drawing.add('<circle cx="{:.1f}" cy="{:.1f}" r="3.5" class="f-lost"/>', x, origin)
        drawing.line("stale", f"M{x:.1f} {origin + 5:.1f}V{middle - 14:.1f}")
    drawing.add(
        '<rect class="card" x="{:.1f}" y="{:.1f}" width="16" height="16" rx="3" transform="rotate(45 {:.1f} {:.1f})"/>',
        x - 8,
        middle - 8,
        x,
        middle,
    )
    drawing.line("lostl", f"M{x - 4:.1f} {middle:.1f}h8")
    if not is_trouble:
        return
    text = f"{token(grant.token or 0)} refused" + ("" if seen is None else f": {token(seen)} seen already")
    wide = len(text) * _CHARACTER + 12
    begin = x + 15 if x + 15 + wide < _WIDTH else x - 15 - wide
    drawing.add(
        '<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="20" rx="4" class="card"/>', begin, middle - 10, wide
    )
    drawing.text("t-lost", begin + 7, middle + 4, text)


# --------------------------------------------------------------------- the story


def _story(trouble: PastGrant, grants: Sequence[PastGrant]) -> tuple[StoryStep, ...]:
    """The latest loss, step by step."""
    who = plain(trouble.holder)
    steps: list[StoryStep] = []
    if trouble.end == "lost":
        silent = (trouble.ended_at or trouble.expires_at) - _heard(trouble)
        what = "The last renewal" if trouble.renewals else "The grant"
        steps.append(StoryStep(_heard(trouble), what, f"Then {who} is silent for {duration(silent)}.", trouble.holder))
        if risks := _risks(trouble, trouble.ended_at or trouble.expires_at):
            steps.append(
                StoryStep(risks[-1][0], "At risk", "Renewals are overdue. Waiters keep waiting.", trouble.holder)
            )
        reason = f" ({plain(trouble.reason)})" if trouble.reason else ""
        text = f"The lease of {duration(trouble.ttl)} is over{reason}. From here on {who} must not write."
        steps.append(StoryStep(trouble.ended_at or trouble.expires_at, "Lost", text, trouble.holder))
    elif trouble.end == "broken":
        by = f" by {plain(trouble.actor)}" if trouble.actor else ""
        reason = f"“{plain(trouble.reason)}”" if trouble.reason else "No reason was given."
        steps.append(StoryStep(trouble.ended_at or trouble.expires_at, f"Broken{by}", reason, trouble.holder))
    after = [grant for grant in grants if grant.granted_at > trouble.granted_at and grant is not trouble]
    if after:
        then = after[-1]
        waited = f", after waiting for {duration(then.waited)}" if then.queued else ""
        shown = "" if then.token is None else f"With token {token(then.token)}{waited}."
        steps.append(StoryStep(then.granted_at, f"Granted to {plain(then.holder)}", shown, then.holder))
    if trouble.refused:
        refusal = trouble.refused[-1]
        text = f"{who} sends a late write. The fence refuses the token; nothing is overwritten."
        steps.append(StoryStep(refusal.at, "The fence refuses a write", text, ""))
    return tuple(sorted(steps, key=lambda step: step.at))


def _place_badge(drawing: _Drawing, scale: _Scale, lanes: Sequence[str], number: int, step: StoryStep) -> None:
    if not step.holder:
        drawing.badge(number, scale(step.at) - 18, _middle(len(lanes)) - 14)
    elif step.holder in lanes:
        shift = 10 if step.title.startswith(("Lost", "Broken", "Granted")) else 0
        drawing.badge(number, scale(step.at) + shift, _middle(lanes.index(step.holder)) - 22)


def _describe(name: str, shown: Iterable[PastGrant], scale: _Scale) -> str:
    grants = list(shown)
    lost = sum(grant.end == "lost" for grant in grants)
    refused = sum(len(grant.refused) for grant in grants)
    parts = [counted(len(grants), "grant")]
    parts += [f"{lost} lost"] if lost else []
    parts += [f"{refused} refused by a fence"] if refused else []
    return f"Who held {plain(name)} in the last {rough(scale.span)}: {', '.join(parts)}. The table below has the same."


# ------------------------------------------------------------------ small ones


def _strip(grants: Sequence[PastGrant], now: float, window: float) -> Markup:
    """All known grants in one row, with the window of the timeline marked."""
    oldest = min(grant.granted_at for grant in grants)
    scale = _Scale(now, max(now - oldest, window) * 1.02)
    lost = sum(grant.end == "lost" for grant in grants)
    drawing = _Drawing()
    said = f"{counted(len(grants), 'grant')}, {lost} lost"
    drawing.add(
        '<svg class="tl" viewBox="0 0 {:.0f} 46" role="img" aria-label="The last {}: {}">',
        _WIDTH,
        rough(scale.span),
        said,
    )
    drawing.text("who", 0, 18, f"Last {rough(scale.span)}")
    drawing.text("", 0, 33, said)
    for number, grant in enumerate(reversed(grants)):
        x, end = scale(grant.granted_at), scale(_ended(grant, now))
        drawing.add(
            '<rect class="past{}" x="{:.1f}" y="8" width="{:.1f}" height="16" rx="1.5"/>',
            " alt" if number % 2 else "",
            x,
            max(end - x - 0.8, 0.8),
        )
    for grant in grants:
        if grant.end in ("lost", "broken") and grant.ended_at is not None:
            drawing.line("lostl", f"M{scale(grant.ended_at):.1f} 4v24")
    form = "hms" if scale.span < 600 else "hm"
    for part in range(1, 6):
        at = scale.begin + scale.span * part / 6
        drawing.add(
            '<text x="{:.1f}" y="42" text-anchor="middle" data-at="{:.0f}" data-form="{}">{}</text>',
            scale(at),
            at,
            form,
            clock(at, form),
        )
    x, end = scale(now - window), scale(now)
    drawing.add('<rect class="brush" x="{:.1f}" y="2" width="{:.1f}" height="28" rx="2"/>', x, end - x)
    drawing.line("brush-e", f"M{x:.1f} 2v28M{end:.1f} 2v28")
    drawing.parts.append(Markup("</svg>"))
    return drawing.joined()


def mini(about: PastGrant, then: PastGrant | None, now: float) -> Markup:
    """An incident in the width of a column: the grant that it is about, and the one after it."""
    ended = about.ended_at or about.expires_at
    refused = [refusal.at for refusal in about.refused]
    last = max([ended, *refused, ended if then is None else then.granted_at])
    begin = max(about.granted_at, ended - 3 * max(about.ttl, last - ended, 5.0))
    until = min(now, last + max((last - begin) * 0.35, 1.0))
    scale = _Scale(until, max(until - begin, 1.0), left=96, width=400, right=6)
    drawing = _Drawing()
    drawing.add('<svg class="tl mini" viewBox="0 0 400 58" role="img" aria-label="the same as a small timeline">')
    drawing.text("who", 0, 18, _short(about.holder))
    x, x_end = scale(about.granted_at), scale(ended)
    drawing.bar("b-held", x, x_end, 14, tall=16)
    if about.end == "lost":
        drawing.hatch(scale(min(_heard(about), ended)), scale(min(until, (ended + last) / 2)), 14, 16)
    for risk_began, risk_ended in _risks(about, ended):
        drawing.bar("b-risk", scale(risk_began), scale(risk_ended), 14, tall=16)
    if about.token is not None and x_end - x > len(token(about.token)) * 8 + 8:
        drawing.text("tokt t-held", x + 6, 18, token(about.token))
    if about.end in ("lost", "broken"):
        drawing.line("lostl", f"M{x_end:.1f} 3v22")
    for at in refused:
        drawing.add('<circle cx="{:.1f}" cy="14" r="3.5" class="f-lost"/>', scale(at))
        drawing.line("stale", f"M{scale(at):.1f} 18V36")
    if then is not None:
        drawing.text("who", 0, 48, _short(then.holder))
        if then.queued:
            drawing.line("waitl", f"M{scale(then.granted_at - then.waited):.1f} 44H{scale(then.granted_at):.1f}")
        drawing.bar("b-held", scale(then.granted_at), scale(min(until, _ended(then, now))), 44, tall=16)
        if then.token is not None and scale(until) - scale(then.granted_at) > len(token(then.token)) * 8 + 8:
            drawing.text("tokt t-held", scale(then.granted_at) + 6, 48, token(then.token))
    for at in refused:
        drawing.add(
            '<rect class="card" x="{:.1f}" y="38" width="12" height="12" rx="2" transform="rotate(45 {:.1f} 44)"/>',
            scale(at) - 6,
            scale(at),
        )
        drawing.line("lostl", f"M{scale(at) - 3:.1f} 44h6")
    drawing.parts.append(Markup("</svg>"))
    return drawing.joined()


def _short(holder: str) -> str:
    return cut(plain(holder), 14)
