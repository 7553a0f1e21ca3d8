"""Holdings as output: the JSON that docs/reference/json.md documents, tables, and the text of a busy name."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import zip_longest
from typing import Literal, TypedDict

from leasehold.core.texts import escape
from leasehold.errors import NotAcquired
from leasehold.model import Holder, Holding


class HoldingJson(TypedDict):
    """Every key is always present, and null if it does not apply. Seconds are by the engine's clock."""

    namespace: str
    name: str
    state: str
    mode: str
    kind: str
    limit: int
    token: int | None
    slot: int | None
    position: int | None
    holder: str
    host: str | None
    pid: int | None
    purpose: str | None
    process: str | None
    acquired_at: str | None
    age: float
    left: float
    fingerprint: str
    owner: str


def holding_as_json(holding: Holding) -> HoldingJson:
    who = holding.holder
    return {
        "namespace": holding.namespace,
        "name": holding.name,
        "state": holding.state,
        "mode": holding.mode,
        "kind": holding.kind,
        "limit": holding.limit,
        "token": holding.token,
        "slot": holding.slot,
        "position": holding.position,
        "holder": who.label,
        "host": who.host or None,
        "pid": who.pid or None,
        "purpose": who.purpose or None,
        "process": process_state(holding.holder),
        "acquired_at": None if holding.acquired_at is None else utc(datetime.fromtimestamp(holding.acquired_at, UTC)),
        "age": rounded(holding.age),
        "left": rounded(holding.left),
        "fingerprint": holding.fingerprint,
        "owner": holding.owner,
    }


def rounded(seconds: float) -> float:
    return round(seconds, 3)


def utc(instant: datetime) -> str:
    return instant.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def process_state(who: Holder) -> Literal["gone", "exists"] | None:
    """Whether a process of this machine has the holder's pid. None: the holder is on another host, or did not say, or
    said what no process can have.

    "exists" proves nothing: the pid may have been given to another process. "gone" is certain, but for a holder in a
    container that shares this host's name and not its pids.
    """
    if not 0 < who.pid <= _MAX_PID or who.host != os.uname().nodename:
        return None
    try:
        os.kill(who.pid, 0)
    except ProcessLookupError:
        return "gone"
    except OSError:  # it belongs to another user
        pass
    return "exists"


def blocks_others(holding: Holding) -> bool:
    """Whether it keeps others out now: held, reserved for a waiter that was notified, or cooling. If not, it waits."""
    return holding.state in ("held", "reserved", "cooling")


_MAX_PID = 2**31 - 1  # a larger number raises OverflowError in `os.kill`, and a negative one means a group
COLUMNS = ("NAME", "STATE", "TOKEN", "HOLDER", "PID", "ACQUIRED", "AGE", "TTL LEFT", "PURPOSE")
STATE_COLOURS = {
    "held": "green",
    "at risk": "red",
    "reserved": "cyan",
    "cooling": "blue",
    "waiting": "yellow",
    "passed over": "red",
}
_STATE_COLUMN = COLUMNS.index("STATE")


def holding_row(holding: Holding) -> tuple[str, ...]:
    state = holding.state if holding.position is None else f"{holding.state} {holding.position}"
    if holding.mode == "shared":
        state += " (shared)"
    elif holding.slot is not None:
        state += f" (slot {holding.slot} of {holding.limit})"
    who = holding.holder
    return (
        holding.name,
        state,
        str(holding.token or "-"),
        who.label,
        f"{who.pid} (gone)" if process_state(who) == "gone" else str(who.pid or "-"),
        local_time(holding.acquired_at),
        duration(holding.age),
        duration(holding.left),
        who.purpose or "-",
    )


def holdings_table(holdings: Sequence[Holding], width: int | None = None) -> Iterable[str]:
    """The lines of the table, headings first. `width`: that of the terminal, for which columns may be left out."""
    colours = [STATE_COLOURS[holding.state] for holding in holdings]
    rows = [COLUMNS, *map(holding_row, holdings)]
    for spare in ("ACQUIRED", "PURPOSE"):
        widths = [max(width_of(escape(cell)) for cell in column) for column in zip(*rows, strict=True)]
        if width is not None and sum(widths) + 2 * (len(widths) - 1) > width:
            at = rows[0].index(spare)
            rows = [row[:at] + row[at + 1 :] for row in rows]
    return table(rows[0], rows[1:], _STATE_COLUMN, colours)


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], painted: int = 0, colours: Sequence[str] = ()
) -> Iterable[str]:
    """The lines of a table, headings first. `colours`: of the cells in the column `painted`. click removes them if the
    stream is not a terminal."""
    from click import style  # only here: `leasehold run` prints no table

    rows = [tuple(map(escape, row)) for row in rows]
    widths = [max(map(width_of, column)) for column in zip(columns, *rows, strict=True)]
    yield style("  ".join(_pad(columns, widths)).rstrip(), bold=True)
    for row, colour in zip_longest(rows, colours):
        cells = _pad(row, widths)
        cells[painted] = style(cells[painted], fg=colour) if colour else cells[painted]
        yield "  ".join(cells).rstrip()


def _pad(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [cell + " " * (width - width_of(cell)) for cell, width in zip(cells, widths, strict=True)]


def width_of(text: str) -> int:
    """Columns on a terminal. Chinese, Japanese and Korean characters and emoji have two, combining marks none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def local_time(instant: float | None) -> str:
    """The time of day, with the date unless it is today's."""
    if instant is None:
        return "-"
    then = datetime.fromtimestamp(instant)
    return then.strftime("%H:%M:%S" if then.date() == datetime.now().date() else "%Y-%m-%d %H:%M:%S")


def duration(seconds: float) -> str:
    """The two largest units: 0.4s, 12.3s, 3m12s, 5h03m, 2d04h."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    whole = int(seconds)
    for size, letter, part, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "m")):
        if whole >= size:
            return f"{whole // size}{letter}{whole % size // part:02}{small}"
    return f"{whole // 60}m{whole % 60:02}s"


def short_duration(seconds: float) -> str:
    """The same, with milliseconds below a second."""
    return f"{seconds * 1000:.1f}ms" if seconds < 1 else duration(seconds)


def busy_text(busy: NotAcquired) -> str:
    """The text of the error without its advice, which is for Python."""
    return busy.situation()
