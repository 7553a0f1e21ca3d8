"""`leasehold get`: one name, its holders and its line."""

from __future__ import annotations

import click

from leasehold.cli import exit_codes, render
from leasehold.cli.console import Console, pass_console
from leasehold.cli.help import Command
from leasehold.cli.options import name_argument

EXAMPLES = """
leasehold get nightly-report
leasehold -o json get nightly-report | jq .locked
"""


@click.command("get", cls=Command, examples=EXAMPLES, codes=(exit_codes.UNREACHABLE, exit_codes.CONFIG))
@name_argument
@pass_console
def get(console: Console, name: str) -> None:
    """Show who holds NAME and who waits for it.

    Decide nothing by the answer: it is a picture of a moment that has passed. `leasehold run -n` asks and takes in
    one step.

    With `-o json`: one object, described in docs/reference/json.md. Exits 0 whenever the engine answered, held or
    not: the answer is in the data.
    """
    with console.client() as client:
        holdings = client.inspect(name, exact=True)
    holders = [holding for holding in holdings if render.blocks_others(holding)]
    waiters = [holding for holding in holdings if not render.blocks_others(holding)]
    if console.json:
        console.put_json(
            {
                "namespace": console.namespace,
                "name": name,
                "locked": bool(holders),
                "holders": [render.holding_as_json(holding) for holding in holders],
                "waiters": [render.holding_as_json(holding) for holding in waiters],
            }
        )
    elif holdings:
        for line in render.holdings_table(holdings):
            console.put(line)
    else:
        console.say(f"{name} is free")
