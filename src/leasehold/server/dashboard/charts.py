"""Charts as SVG, drawn on the server: they need no script, and a strict Content-Security-Policy allows them. Colours
are classes of the style sheet, sizes are attributes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from markupsafe import Markup

from leasehold.server.dashboard.words import clock, number

Values: TypeAlias = Sequence[float | None]  # None: nothing was measured then

_SHARE: Final = Markup(
    '<svg class="{}" preserveAspectRatio="none" aria-hidden="true"><rect class="f-track" width="100%" height="6"/>'
    '<rect class="f-{}" width="{}%" height="6"/></svg>'
)


def spark(
    values: Values, role: str = "", kind: str = "", width: int = 120, height: int = 22, area: bool = True
) -> Markup:
    """A small line without axes. What was not measured is drawn as 0."""
    shown = [value or 0.0 for value in values] or [0.0]
    if len(shown) == 1:
        shown *= 2
    top = max(*shown, 1e-9) * 1.12
    line = _path((width * i / (len(shown) - 1), height - 1 - (height - 3) * v / top) for i, v in enumerate(shown))
    below = Markup('<path class="spark-area" d="{}L{} {}L0 {}z"/>').format(line, width, height, height)
    return Markup(
        '<svg class="{}" viewBox="0 0 {} {}" preserveAspectRatio="none" aria-hidden="true">{}'
        '<path class="spark-line {}" d="{}"/></svg>'
    ).format(kind, width, height, below if area else Markup(""), role, line)


def ticks(counts: Sequence[int], role: str, width: int = 120, height: int = 22) -> Markup:
    """Events so rare that each is a mark."""
    marks = Markup("").join(
        Markup('<rect class="f-{}" x="{:.1f}" y="{}" width="2.4" height="{}" rx="1"/>').format(
            role, width * i / len(counts), height - 4 - 5 * min(count, 3), 5 * min(count, 3) + 2
        )
        for i, count in enumerate(counts)
        if count
    )
    return Markup(
        '<svg viewBox="0 0 {} {}" preserveAspectRatio="none" aria-hidden="true"><rect class="f-track" y="{}" '
        'width="{}" height="1"/>{}</svg>'
    ).format(width, height, height - 2, width, marks)


def share(part: float, role: str = "wait", kind: str = "") -> Markup:
    """A bar that is filled to this part, from 0 to 1."""
    return _SHARE.format(kind, role, f"{100 * min(max(part, 0.01 if part else 0.0), 1.0):.0f}")


def chart(
    series: Sequence[tuple[str, Values]],
    times: Sequence[float],
    title: str,
    limit: tuple[float, str] | None = None,
    area: bool = False,
    width: int = 560,
    height: int = 190,
) -> Markup:
    """Lines over time. `series`: class and values, one value for each of `times` (seconds since 1970)."""
    left, top_margin, bottom = 36, 8, 20
    wide, high = width - left - 4, height - top_margin - bottom
    largest = max((value for _, values in series for value in values if value is not None), default=0.0)
    if limit is not None and largest > limit[0] / 10:
        largest = max(largest, limit[0] * 1.15)  # near enough to show how far away it is
    top, steps = nice_top(largest)

    def x(i: int) -> float:
        return left + wide * i / max(1, len(times) - 1)

    def y(value: float) -> float:
        return top_margin + high - high * min(value, top) / top

    parts = [Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">').format(width, height, title)]
    for step in range(steps + 1):
        value = top * step / steps
        parts.append(
            Markup('<path class="axis" d="M{} {:.1f}H{}"/><text x="{}" y="{:.1f}" text-anchor="end">{}</text>').format(
                left, y(value), width - 4, left - 8, y(value) + 3.5, number(value)
            )
        )
    for part in range(5):
        i = round((len(times) - 1) * part / 4)
        anchor = "start" if part == 0 else "end" if part == 4 else "middle"
        parts.append(
            Markup('<text x="{:.1f}" y="{}" text-anchor="{}" data-at="{:.0f}" data-form="hm">{}</text>').format(
                x(i), height - 4, anchor, times[i], clock(times[i], "hm")
            )
        )
    for kind, values in series:
        for begin, end in _runs(values):
            line = _path((x(i), y(values[i] or 0.0)) for i in range(begin, end))
            if area:
                closed = f"{line}L{x(end - 1):.1f} {top_margin + high}L{x(begin):.1f} {top_margin + high}z"
                parts.append(Markup('<path class="a-wait" d="{}"/>').format(closed))
            parts.append(Markup('<path class="{}" d="{}"/>').format(kind, line))
    if limit is not None and limit[0] <= top:
        parts.append(
            Markup(
                '<path class="limit" d="M{} {:.1f}H{}"/><text class="limit-t" x="{}" y="{:.1f}" text-anchor="end">{}'
                "</text>"
            ).format(left, y(limit[0]), width - 4, width - 6, y(limit[0]) - 5, limit[1])
        )
    return Markup("").join(parts) + Markup("</svg>")


def histogram(counts: Sequence[int], labels: Sequence[str], title: str, width: int = 316, height: int = 92) -> Markup:
    """One bar for each count. An empty label is left out."""
    step = (width - 8) / max(1, len(counts))
    largest = max(*counts, 1) if counts else 1
    parts = [
        Markup('<svg class="chart plain" viewBox="0 0 {} {}" role="img" aria-label="{}">').format(width, height, title)
    ]
    for i, count in enumerate(counts):
        tall = 62 * count / largest if count else 0.0
        parts.append(
            Markup('<rect class="f-wait" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" rx="2"/>').format(
                4 + i * step + step * 0.14, 72 - tall, step * 0.72, max(tall, 1.0)
            )
        )
    for i, label in enumerate(labels):
        if label:
            parts.append(
                Markup('<text x="{:.1f}" y="88" text-anchor="middle">{}</text>').format(4 + i * step + step / 2, label)
            )
    return Markup("").join(parts) + Markup("</svg>")


def nice_top(largest: float) -> tuple[float, int]:
    """The upper end of an axis, and how many steps lead there: all of them are round numbers."""
    if largest <= 0:
        return 1.0, 2
    unit = 10.0 ** math.floor(math.log10(largest))
    for factor, steps in ((1, 2), (1.5, 3), (2, 4), (3, 3), (4, 4), (5, 5), (6, 3), (8, 4), (10, 5)):
        if largest <= factor * unit * 1.0001:
            return factor * unit, steps
    return 10 * unit, 5


def _path(points: Iterable[tuple[float, float]]) -> str:
    line = "M" + "L".join(f"{_short(x)} {_short(y)}" for x, y in points)
    return line if "L" in line else f"{line}h1"  # one point is a dot


def _short(value: float) -> str:
    """One decimal, unless it is 0: a table has a hundred of these lines."""
    return f"{value:.1f}".removesuffix(".0")


def _runs(values: Values) -> list[tuple[int, int]]:
    """The stretches in which something was measured: start, and one after the end."""
    known = [i for i, value in enumerate(values) if value is not None]
    begins = [i for i in known if i == 0 or values[i - 1] is None]
    return [(i, next((k for k in range(i, len(values)) if values[k] is None), len(values))) for i in begins]
