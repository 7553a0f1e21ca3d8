"""Line plots (both axes logarithmic) and bar charts as SVG, without a plotting package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, floor, log10
from typing import Final, NamedTuple

WIDTH: Final = 720
HEIGHT: Final = 420
LEFT, RIGHT, TOP, BOTTOM = 70, 150, 40, 50  # margins
FONT: Final = 'font-family="sans-serif" font-size="12"'
COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#999999", "#882255")


class Axis(NamedTuple):
    """A logarithmic axis from `low` to `high`, over pixels from `start` to `end`."""

    low: int
    high: int
    start: float
    end: float

    def at(self, value: float) -> float:
        return self.start + (log10(value) - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        return [10.0**power for power in range(self.low, self.high + 1)]


def axis(values: Sequence[float], start: float, end: float) -> Axis:
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    return Axis(low, max(high, low + 1), start, end)


def svg(
    title: str,
    across: str,
    up: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    *,
    level: tuple[str, float] | None = None,
    at: tuple[str, float] | None = None,
) -> str:
    """`lines`: by name, points of two positive numbers. `level` and `at`: a dashed line across and one upwards, with
    what they mean."""
    points = [point for line in lines.values() for point in line]
    x = axis([point[0] for point in points], LEFT, WIDTH - RIGHT)
    y = axis([point[1] for point in points] + ([level[1]] if level else []), HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {FONT}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, 20, title, "middle", 'font-size="15"'),
        _text((x.start + x.end) / 2, HEIGHT - 12, across, "middle"),
        _text(16, HEIGHT / 2, up, "middle", f'transform="rotate(-90 16 {HEIGHT / 2})"'),
    ]
    for tick in x.ticks():
        parts += [_rule(x.at(tick), y.start, x.at(tick), y.end), _text(x.at(tick), y.start + 16, f"{tick:g}", "middle")]
    for tick in y.ticks():
        parts += [_rule(x.start, y.at(tick), x.end, y.at(tick)), _text(x.start - 6, y.at(tick) + 4, f"{tick:g}", "end")]
    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        pixels = [(x.at(a), y.at(b)) for a, b in line]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in pixels)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in pixels]
        parts.append(_text(x.end + 12, TOP + 10 + 18 * number, name, "start", f'fill="{colour}"'))
    if level is not None:
        parts += [
            _rule(x.start, y.at(level[1]), x.end, y.at(level[1]), _DASHED),
            _text(x.start + 6, y.at(level[1]) - 5, level[0], "start"),
        ]
    if at is not None:
        parts += [
            _rule(x.at(at[1]), y.start, x.at(at[1]), y.end, _DASHED),
            _text(x.at(at[1]) - 6, y.end + 12, at[0], "end"),
        ]
    return "\n".join([*parts, "</svg>\n"])


_DASHED: Final = 'stroke="#555" stroke-dasharray="5 4"'

BAR: Final = 24  # pixels of one bar and the gap below it
NAMES: Final = 300  # pixels for the names to the left


def bars(title: str, rows: Sequence[tuple[str, float]]) -> str:
    """One bar per name; ours are coloured. A vertical line shows 1, the base."""
    high = TOP + BAR * len(rows) + 10
    longest = max(value for _, value in rows)
    scale = (WIDTH - NAMES - 70) / longest
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {high}" {FONT}>',
        f'<rect width="{WIDTH}" height="{high}" fill="white"/>',
        _text(10, 20, title, "start", 'font-size="13"'),
    ]
    for number, (name, value) in enumerate(rows):
        top, colour = TOP + BAR * number, COLOURS[0] if name.startswith("leasehold") else "#b0b0b0"
        width = max(1.0, value * scale)
        parts += [
            _text(NAMES - 8, top + 13, name, "end"),
            f'<rect x="{NAMES}" y="{top}" width="{width:.1f}" height="{BAR - 6}" fill="{colour}"/>',
            _text(NAMES + width + 6, top + 13, f"{value:.2f}", "start"),
        ]
    parts.append(_rule(NAMES + scale, TOP - 4, NAMES + scale, high - 6))
    return "\n".join([*parts, "</svg>\n"])


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'


def _rule(x1: float, y1: float, x2: float, y2: float, stroke: str = 'stroke="#ddd"') -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {stroke}/>'
