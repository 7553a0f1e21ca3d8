"""`leasehold get`: one name, its holders and its queue."""

from __future__ import annotations

import sys

from leasehold.cli import exit_codes, render
from leasehold.cli.console import Console, pass_console, terminal_width
from leasehold.cli.help import command
from leasehold.cli.options import name_argument

EXAMPLES = """
leasehold get nightly-report
leasehold -o json get nightly-report | jq .locked
"""


@command("get", EXAMPLES, exit_codes.UNREACHABLE, exit_codes.CONFIG)
@name_argument
@pass_console
def get(console: Console, name: str) -> None:
    """Show who holds NAME and who waits for it.

    Do not base decisions on the answer: it may be out of date when you read it. To run a command only if NAME is free,
    use `leasehold run -n`, which checks and acquires in one step.

    With `-o json`: one object, described by `leasehold docs reference/json`. The exit code is 0 whether NAME is held or
    not, as long as the engine answered.
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
        for line in render.holdings_table(holdings, terminal_width(sys.stdout)):
            console.put(line)
    else:
        console.say(f"{name} is free")
