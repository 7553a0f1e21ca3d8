"""`leasehold resize`: an operator changes the limit of a semaphore in use."""

from __future__ import annotations

import click

from leasehold.cli import exit_codes
from leasehold.cli.console import Console, pass_console
from leasehold.cli.help import command
from leasehold.cli.option import whole_number
from leasehold.cli.options import (
    MAX_SLOTS,
    audit_hook,
    audit_options,
    label,
    name_argument,
    usage_error_if,
)

EXAMPLES = """
leasehold resize encoders 2                     at most 2 holders, whatever the programs say
leasehold resize encoders 2 --reason 'the disk is slow' --audit audit.jsonl
leasehold resize encoders --unset               the limit of the programs applies again
"""


@command(
    "resize",
    EXAMPLES,
    exit_codes.UNREACHABLE,
    exit_codes.NOT_PERMITTED,
    exit_codes.CONFIG,
    short_help="Change the limit of a semaphore in use.",
)
@name_argument
@click.argument("limit", type=whole_number(min=1, max=MAX_SLOTS), metavar="[N]", required=False)
@click.option("--unset", is_flag=True, help="Remove the limit that was set, instead of setting one.")
@click.option("--reason", type=label, metavar="TEXT", help="Why you change it, for the audit log.")
@audit_options
@pass_console
def resize(
    console: Console,
    name: str,
    limit: int | None,
    unset: bool,
    reason: str | None,
    audit_file: str | None,
    audit_key_file: str | None,
) -> None:
    """Let at most N holders have the semaphore NAME at once, from now on.

    N applies to every client, whatever limit its program or `--slots` asks for, until you set another or remove it with
    --unset. No program has to be restarted. If N is larger than before, waiters are admitted at once. If it is smaller,
    no holder is stopped, and nothing is granted until NAME has fewer than N holders.

    After --unset, the limit stays until NAME is idle. Then the limit of its next client applies again.

    Exits 78 if NAME is in use as a lock, or if the engine cannot change a limit (etcd, ZooKeeper, Redlock).
    """
    usage_error_if((limit is None) != unset, "pass the new limit, or --unset")
    with audit_hook(audit_file, audit_key_file) as audit, console.client(on_event=audit) as client:
        client.set_limit(name, limit, why=reason)
        held = sum(holding.state in ("held", "cooling") for holding in client.inspect(name, exact=True))
    if console.json:
        console.put_json({"namespace": console.namespace, "name": name, "limit": limit, "held": held})
    if limit is None:
        console.say(f"the limit of {name} is no longer set")
    else:
        slots, holders = _counted(limit, "slot"), _counted(held, "holder")
        left = "no holder is left" if limit == 1 else f"fewer than {limit} are left"
        console.say(
            f"{name} has {slots} and {holders}" + (f": it is granted again when {left}" if held > limit else "")
        )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
