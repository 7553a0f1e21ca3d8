"""Numbers, times and names as people read them. The script in static/ writes durations the same way."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final
from urllib.parse import urlencode

from leasehold.core.texts import escape

_SPELLED: Final = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def duration(seconds: float) -> str:
    """Such as 3 ms, 0.4 s, 21.3 s, 1 min 12 s, 3 h 05 min, 9 d 4 h."""
    seconds = max(0.0, seconds)
    if 0 < seconds < 0.0995:
        return f"{max(1, round(seconds * 1000))} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if seconds < 3599.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    if seconds < 86_370:
        hours, minutes = divmod(round(seconds / 60), 60)
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days} d {hours} h"


def number(value: float) -> str:
    """Two or three digits that matter: 1,284, 41.7, 4.2, 0.42, 0.003."""
    if value == 0 or value >= 99.95 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 0.95 else f"{value:.2g}"


def spelled(count: int) -> str:
    """A small count as a word, for sentences."""
    return _SPELLED[count] if count < len(_SPELLED) else f"{count:,}"


def counted(count: int, one: str, many: str = "") -> str:
    """Such as `3 locks`, `1 lock`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def token(value: int) -> str:
    """The last nine digits of a long token: many engines issue microseconds, and people compare the end."""
    return f"{value:,}" if value < 10**9 else f"…\u2060{value % 10**9:011,}"  # never broken into two lines


def rough(seconds: float) -> str:
    """A time span without odd seconds, such as 6 min, 1 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def rate(per_second: float) -> str:
    """Such as 4.2 /s, 12 /min, 3 /h."""
    for seconds, unit in ((1, "s"), (60, "min")):
        if per_second * seconds >= 0.95:
            return f"{number(per_second * seconds)} /{unit}"
    return f"{per_second * 3600:.0f} /h"


def plain(text: str | None) -> str:
    """A name or label of a caller: controls of direction and of terminals are shown as what they are."""
    return escape(text or "")


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def clock(at: float, form: str = "hms") -> str:
    """In UTC; the script rewrites it in the reader's time zone. Forms: hm, hms, ms, day."""
    moment = datetime.fromtimestamp(at, UTC)
    if form == "day":
        return f"{moment:%A}, {moment.day} {moment:%B}"
    if form == "ms":
        return f"{moment:%H:%M:%S}.{moment.microsecond // 100_000}"
    return f"{moment:%H:%M}" if form == "hm" else f"{moment:%H:%M:%S}"


def link(path: str, **arguments: str | None) -> str:
    """A path with those arguments that are not empty."""
    given = urlencode({name: value for name, value in arguments.items() if value})
    return f"{path}?{given}" if given else path


def lock_link(namespace: str, name: str) -> str:
    return link("/lock", namespace=namespace, name=name)
