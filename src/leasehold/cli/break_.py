"""`leasehold break`: an operator takes a lock from its holder."""

from __future__ import annotations

import sys

import click

from leasehold.cli import exit_codes, render
from leasehold.cli.console import Console, pass_console, write_stderr
from leasehold.cli.help import Command
from leasehold.cli.options import name_argument, usage_error_if
from leasehold.model import Holding

EXAMPLES = """
leasehold break nightly-report                  shows the holder and asks
leasehold break nightly-report --token 1741     exactly this grant, without a question
leasehold break nightly-report --yes            whoever holds it now, without a question
"""


@click.command(
    "break", cls=Command, examples=EXAMPLES, codes=(exit_codes.UNREACHABLE, exit_codes.NOT_PERMITTED, exit_codes.CONFIG)
)
@name_argument
@click.option(
    "--token", type=click.IntRange(min=1), metavar="N", help="Break the grant with this token, which `ls` shows."
)
@click.option("-y", "--yes", is_flag=True, help="Ask no question. Needed without --token where stdin is no terminal.")
@pass_console
def break_(console: Console, name: str, token: int | None, yes: bool) -> None:
    """Take NAME from its holder, whoever that is.

    The holder is told where the engine can tell it, and at its next renewal otherwise: until then it works on,
    beside the next holder. Stop it first if you can, and let the resource check tokens. A break names the token
    that was seen, so that a successor is never hit.

    Exits 0 also when that grant was over already; with `-o json` the field `broken` tells which.
    """
    with console.client() as client:
        # What is reserved has no holder yet: it is granted, or passes on, within seconds.
        holdings = [holding for holding in client.inspect(name, exact=True) if holding.state in ("held", "cooling")]
        target = token if token is not None else choose(name, holdings)
        if target is None:
            broken = False
        else:
            if token is None and not yes:
                confirm(console, name, target)
            broken = client.break_lock(name, token=target)
    report(console, name, target, broken, holdings)


def choose(name: str, holdings: list[Holding]) -> int | None:
    """The one token there is to break. Several holders need a choice, which is the operator's."""
    for line in render.holdings_table(holdings) if holdings else ():
        write_stderr(line)
    tokens = [holding.token for holding in holdings if holding.token is not None]
    usage_error_if(
        len(tokens) > 1,
        f"{name} has {len(tokens)} holders: choose one with --token ({', '.join(map(str, tokens))})",
    )
    return tokens[0] if tokens else None


def confirm(console: Console, name: str, token: int) -> None:
    usage_error_if(
        sys.stdin is None or not sys.stdin.isatty(),
        f"nobody can be asked here: name what you have seen with --token {token}, or say --yes",
    )
    if not click.confirm(f"Take {name} from the holder of token {token}?", err=True):
        console.say("nothing was broken", error=True)
        raise click.exceptions.Exit(exit_codes.NOT_PERMITTED)


def report(console: Console, name: str, token: int | None, broken: bool, holdings: list[Holding]) -> None:
    matching = next((holding for holding in holdings if holding.token == token), None)
    if console.json:
        console.put_json(
            {
                "namespace": console.namespace,
                "name": name,
                "token": token,
                "broken": broken,
                "holding": render.holding_as_json(matching) if matching is not None and broken else None,
            }
        )
    if broken:
        who = f", held by {matching.holder.label}" if matching is not None else ""
        console.say(f"broke {name} (token {token}{who})")
    elif token is None:
        console.say(f"{name} is free: nothing to break")
    elif matching is not None and matching.state == "cooling":
        console.say(f"{name} (token {token}) is kept for its --delay, which cannot be cut short: nothing was broken")
    else:
        console.say(f"the grant of {name} with token {token} is over already: nothing was broken")
