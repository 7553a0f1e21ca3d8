"""`leasehold ls`: holders and waiters."""

from __future__ import annotations

import sys

import click

from leasehold.cli import exit_codes, render
from leasehold.cli.console import Console, pass_console, terminal_width
from leasehold.cli.help import command
from leasehold.cli.options import checked_prefix

EXAMPLES = """
leasehold ls                                          all holders and waiters of the namespace
leasehold ls orders/                                  only names that begin with orders/
leasehold -o json ls | jq -r '.[] | select(.state == "held") | .name'
"""


@command("ls", EXAMPLES, exit_codes.UNREACHABLE, exit_codes.CONFIG)
@click.argument("prefix", type=checked_prefix, default="")
@pass_console
def ls(console: Console, prefix: str) -> None:
    """List holders and waiters.

    Shows the names that begin with PREFIX; by default all names of the namespace. A name that has no holders and no
    waiters is not listed. The list may be out of date when you read it: to be sure, acquire the lock.

    ACQUIRED is when the lock was granted, by the clock of this machine; `-` if the engine does not know (ZooKeeper).
    AGE is the time since then, or since the waiter joined the queue. TTL LEFT is the time until the lease or the waiter
    expires unless it is renewed: for a holder that is alive it never reaches 0. The number after `waiting` is the
    position in the queue: 0 is next. `(gone)` after a PID means that no process on this machine has that pid any
    more, so the lease will not be renewed.

    If the terminal is too narrow for the table, ACQUIRED is left out, and then PURPOSE.

    With `-o json`: one array, described by `leasehold docs reference/json`. The exit code is 0 even if nothing was
    found, as long as the engine answered.
    """
    with console.client() as client:
        holdings = client.inspect(prefix)
    if console.json:
        console.put_json([render.holding_as_json(holding) for holding in holdings])
    elif holdings:
        for line in render.holdings_table(holdings, terminal_width(sys.stdout)):
            console.put(line)
    else:
        console.say(f"no holders or waiters{f' of names that begin with {prefix}' if prefix else ''}")
