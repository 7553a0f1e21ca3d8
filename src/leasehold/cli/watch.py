"""`leasehold watch`: the changes of holders and waiters as they come.

Engines have no feed of all changes, so this looks again and again: often while something happens, seldom while not.
A holding that begins and ends between two looks is not seen; `on_event` and the audit log see everything.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Literal, NamedTuple, TypeAlias

import click

from leasehold.blocking import Client
from leasehold.cli import exits, show
from leasehold.cli.console import Console, pass_console, printable
from leasehold.cli.manual import Command
from leasehold.cli.options import checked_prefix, seconds, some_seconds
from leasehold.core import timing
from leasehold.errors import Unavailable
from leasehold.model import Holding

Change: TypeAlias = Literal["present", "appeared", "changed", "gone"]
Picture: TypeAlias = dict[tuple[str, str], Holding]  # by name and fingerprint

SOONEST = 0.1
CLEAR = "\x1b[H\x1b[J"

EXAMPLES = """
leasehold watch                          a table that keeps itself fresh
leasehold watch orders/                  only names that begin with orders/
leasehold -o json watch | jq -c 'select(.change == "gone") | .name'
"""


@click.command("watch", cls=Command, examples=EXAMPLES, codes=(exits.CONFIG, exits.SIGNALLED))
@click.argument("prefix", type=checked_prefix, default="")
@click.option(
    "--interval",
    type=some_seconds,
    default=2.0,
    show_default=True,
    metavar="SECS",
    help="Look at least so often. While things change it looks more often.",
)
@click.option("--for", "lasting", type=seconds, metavar="SECS", help="End after SECS. Default: at Ctrl-C.")
@pass_console
def watch(console: Console, prefix: str, interval: float, lasting: float | None) -> None:
    """Follow holders and waiters as they change.

    Shows the names that begin with PREFIX. On a terminal: the table of `ls`, kept fresh. Into a pipe: a line for
    each change. With `-o json`: a JSON object for each change, one per line, described in docs/reference/json.md.

    It looks again and again, so that a holding that begins and ends between two looks is missed. An engine that
    does not answer is said on stderr and asked again.
    """
    end = float("inf") if lasting is None else time.monotonic() + lasting
    with console.client() as client:
        if not console.json and sys.stdout.isatty():
            for holdings, _ in looks(console, client, prefix, interval, end):
                console.put(CLEAR + "\n".join(show.table(holdings)))
            return
        for _, changes in looks(console, client, prefix, interval, end):
            for one in changes:
                put_change(console, one)


class Seen(NamedTuple):
    change: Change
    holding: Holding


def looks(
    console: Console, client: Client, prefix: str, interval: float, end: float
) -> Iterator[tuple[list[Holding], list[Seen]]]:
    """What is there at each look, and how it differs from the look before."""
    before: Picture | None = None
    quiet = 0
    while True:
        try:
            holdings = client.inspect(prefix)
        except Unavailable as silent:
            console.say(f"{silent}; asking again", error=True)
            quiet += 1
        else:
            now = {(holding.name, holding.fingerprint): holding for holding in holdings}
            changes = list(compare(before, now))
            quiet, before = (0 if changes else quiet + 1), now
            yield holdings, changes
        left = end - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, timing.backoff(quiet, min(SOONEST, interval), interval, 1.0)))


def compare(before: Picture | None, now: Picture) -> Iterator[Seen]:
    """Ends first: whoever reads the stream sees a name free before it sees the next holder."""
    for key, holding in (before or {}).items():
        if key not in now:
            yield Seen("gone", holding)
    for key, holding in now.items():
        if before is None:
            yield Seen("present", holding)
        elif key not in before:
            yield Seen("appeared", holding)
        elif stance(before[key]) != stance(holding):
            yield Seen("changed", holding)


def stance(holding: Holding) -> tuple[object, ...]:
    """What counts as a change: not the clock, and not how far the line has moved up."""
    return holding.state, holding.token, holding.slot


def put_change(console: Console, seen: Seen) -> None:
    at = datetime.now(UTC)
    if console.json:
        stamp = at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        console.put_json({"at": stamp, "change": seen.change, **show.as_json(seen.holding)})
        return
    name, state, token, holder, *_ = show.row(seen.holding)
    clock = at.astimezone().strftime("%H:%M:%S")
    console.put(f"{clock}  {seen.change:<8}  {printable(name)}  {state}  token {token}  {printable(holder)}")
