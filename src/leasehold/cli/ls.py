"""`leasehold ls`: who holds what, and who waits."""

from __future__ import annotations

import click

from leasehold.cli import exit_codes, render
from leasehold.cli.console import Console, pass_console
from leasehold.cli.help import Command
from leasehold.cli.options import checked_prefix

EXAMPLES = """
leasehold ls                                          everything live in this namespace
leasehold ls orders/                                  names that begin with orders/
leasehold -o json ls | jq -r '.[] | select(.state == "held") | .name'
"""


@click.command("ls", cls=Command, examples=EXAMPLES, codes=(exit_codes.UNREACHABLE, exit_codes.CONFIG))
@click.argument("prefix", type=checked_prefix, default="")
@pass_console
def ls(console: Console, prefix: str) -> None:
    """List who holds what and who waits.

    Shows every live name that begins with PREFIX. A name that nobody holds or waits for is not listed: nothing of
    it is kept. LEFT is the time until the holding ends unless its holder renews it, AGE the time since it was
    granted, or since a waiter joined the line. What you see may have changed by the time you read it: take the lock
    if you need to be sure.

    With `-o json`: one array, described in docs/reference/json.md. Exits 0 whenever the engine answered, also with
    nothing found.
    """
    with console.client() as client:
        holdings = client.inspect(prefix)
    if console.json:
        console.put_json([render.holding_as_json(holding) for holding in holdings])
    elif holdings:
        for line in render.holdings_table(holdings):
            console.put(line)
    else:
        console.say(f"nothing is held or waited for{f' under {prefix}' if prefix else ''}")
