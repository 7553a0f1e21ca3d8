"""`leasehold break`: an operator ends the grant of a holder."""

from __future__ import annotations

import sys

import click

from leasehold.cli import exit_codes, render
from leasehold.cli.console import Console, is_terminal, pass_console, use_color, write_stderr
from leasehold.cli.help import command
from leasehold.cli.option import whole_number
from leasehold.cli.options import audit_hook, audit_options, label, name_argument, usage_error_if
from leasehold.model import Holding

EXAMPLES = """
leasehold break nightly-report                  show the holder and ask for confirmation
leasehold break nightly-report --token 1741     exactly this grant, without confirmation
leasehold break nightly-report --yes            the current holder, without confirmation
leasehold break nightly-report --yes --reason 'web-3 is suspended' --audit audit.jsonl
"""


@command("break", EXAMPLES, exit_codes.UNREACHABLE, exit_codes.NOT_PERMITTED, exit_codes.CONFIG)
@name_argument
@click.option(
    "--token",
    type=whole_number(min=1),
    metavar="N",
    help="Break only the grant with this token. `leasehold ls` shows it.",
)
@click.option(
    "-y",
    "--yes",
    is_flag=True,
    help="Do not ask for confirmation. Required without --token if stdin is not a terminal.",
)
@click.option("--reason", type=label, metavar="TEXT", help="Why you break it, for the audit log.")
@audit_options
@pass_console
def break_(
    console: Console,
    name: str,
    token: int | None,
    yes: bool,
    reason: str | None,
    audit_file: str | None,
    audit_key_file: str | None,
) -> None:
    """Take NAME away from its holder.

    The holder learns of the break at once if the engine can notify it, and otherwise at its next renewal. Until then it
    keeps working, perhaps at the same time as the next holder. Stop the holder first if you can, and let the resource
    check tokens. A break applies to one token, so it never affects a later holder.

    The exit code is 0 even if that grant had already ended; with `-o json` the field `broken` is then false.
    """
    with audit_hook(audit_file, audit_key_file) as audit, console.client(on_event=audit) as client:
        # A reservation has no holder yet: within seconds it is claimed or passes to the next waiter.
        holdings = [holding for holding in client.inspect(name, exact=True) if holding.state in ("held", "cooling")]
        target = token if token is not None else choose(name, holdings)
        if target is None:
            broken = False
        else:
            if token is None and not yes:
                confirm(console, name, target)
            broken = client.break_lock(name, token=target, why=reason)
    report(console, name, target, broken, holdings)


def choose(name: str, holdings: list[Holding]) -> int | None:
    """The token of the only holder, or None. If there are several, the operator must choose."""
    coloured = is_terminal(sys.stderr) and use_color() is not False
    for line in render.holdings_table(holdings) if holdings else ():
        write_stderr(line if coloured else click.unstyle(line))
    tokens = [holding.token for holding in holdings if holding.token is not None]
    usage_error_if(
        len(tokens) > 1,
        f"{name} has {len(tokens)} holders: choose one with --token ({', '.join(map(str, tokens))})",
    )
    return tokens[0] if tokens else None


def confirm(console: Console, name: str, token: int) -> None:
    usage_error_if(
        not is_terminal(sys.stdin),
        f"cannot ask for confirmation, because stdin is not a terminal; pass --token {token} or --yes",
    )
    if not click.confirm(f"Break {name} (token {token})?", err=True):
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
        console.say(f"{name} (token {token}) is kept by its --delay, which cannot be shortened: nothing was broken")
    else:
        console.say(f"{name} is not held with token {token}: nothing was broken")
