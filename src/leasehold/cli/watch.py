"""`leasehold watch`: print the changes of holders and waiters as they happen.

Engines have no feed of all changes, so this polls: often while things change, rarely while they do not. It misses a
holding that begins and ends between two polls. A client's `on_event` hook misses none, but sees only its own client.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Literal, NamedTuple, TypeAlias

import click

from leasehold.blocking import Client
from leasehold.cli import exit_codes, render
from leasehold.cli.console import Console, is_terminal, pass_console, terminal_width
from leasehold.cli.help import command
from leasehold.cli.options import checked_prefix, positive_seconds_option, seconds_option
from leasehold.core import timing
from leasehold.core.texts import escape
from leasehold.errors import Unavailable
from leasehold.model import Holding

Change: TypeAlias = Literal["present", "appeared", "changed", "gone"]
Snapshot: TypeAlias = dict[tuple[str, str], Holding]  # by name and fingerprint

MIN_INTERVAL = 0.1
CLEAR_SCREEN = "\x1b[H\x1b[J"

EXAMPLES = """
leasehold watch                          a table that is kept up to date
leasehold watch orders/                  only names that begin with orders/
leasehold -o json watch | jq -c 'select(.change == "gone") | .name'
"""


@command("watch", EXAMPLES, exit_codes.CONFIG, exit_codes.SIGNALLED)
@click.argument("prefix", type=checked_prefix, default="")
@positive_seconds_option(
    "--interval", default=2.0, show_default=True, help="Poll at least every SECS, and more often while locks change."
)
@seconds_option("--for", "lasting", help="Stop after SECS. Default: run until Ctrl-C.")
@pass_console
def watch(console: Console, prefix: str, interval: float, lasting: float | None) -> None:
    """Watch holders and waiters change.

    Shows the names that begin with PREFIX; by default all names of the namespace. On a terminal: the table of `ls`,
    kept up to date. In a pipe: one line per change. With `-o json`: one JSON object per change, one per line, described
    by `leasehold docs reference/json`.

    This command polls the engine, so it misses holders and waiters that come and go between two polls. If the engine
    does not answer, it prints the error to stderr and retries.
    """
    end = float("inf") if lasting is None else time.monotonic() + lasting
    with console.client() as client:
        if not console.json and is_terminal(sys.stdout):
            for holdings, _ in poll(console, client, prefix, interval, end):
                console.put(CLEAR_SCREEN + "\n".join(render.holdings_table(holdings, terminal_width(sys.stdout))))
            return
        for _, changes in poll(console, client, prefix, interval, end):
            for event in changes:
                print_change(console, event)


class HoldingChange(NamedTuple):
    change: Change
    holding: Holding


def poll(
    console: Console, client: Client, prefix: str, interval: float, end: float
) -> Iterator[tuple[list[Holding], list[HoldingChange]]]:
    """Yield the holdings of each poll, and the changes since the poll before."""
    before: Snapshot | None = None
    quiet = 0
    while True:
        try:
            holdings = client.inspect(prefix)
        except Unavailable as unavailable:
            console.say(f"{unavailable}; retrying", error=True)
            quiet += 1
        else:
            now = {(holding.name, holding.fingerprint): holding for holding in holdings}
            changes = list(compare(before, now))
            quiet, before = (0 if changes else quiet + 1), now
            yield holdings, changes
        left = end - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, timing.backoff(quiet, min(MIN_INTERVAL, interval), interval, 1.0)))


def compare(before: Snapshot | None, now: Snapshot) -> Iterator[HoldingChange]:
    """The changes, ends first: a reader of the stream sees a name become free before it sees the next holder."""
    for key, holding in (before or {}).items():
        if key not in now:
            yield HoldingChange("gone", holding)
    for key, holding in now.items():
        if before is None:
            yield HoldingChange("present", holding)
        elif key not in before:
            yield HoldingChange("appeared", holding)
        elif visible_state(before[key]) != visible_state(holding):
            yield HoldingChange("changed", holding)


def visible_state(holding: Holding) -> tuple[object, ...]:
    """What counts as a change: not the times, and not the position in the queue."""
    return holding.state, holding.token, holding.slot


def print_change(console: Console, event: HoldingChange) -> None:
    at = datetime.now(UTC)
    if console.json:
        stamp = render.utc(at)
        console.put_json({"at": stamp, "change": event.change, **render.holding_as_json(event.holding)})
        return
    name, state, token, holder, *_ = render.holding_row(event.holding)
    clock = at.astimezone().strftime("%H:%M:%S")
    console.put(f"{clock}  {event.change:<8}  {escape(name)}  {state}  token {token}  {escape(holder)}")
