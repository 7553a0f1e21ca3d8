"""`leasehold rebase`: raise the base of new tokens after an engine was restored from older data."""

from __future__ import annotations

import click

from leasehold.cli import exit_codes
from leasehold.cli.console import Console, pass_console
from leasehold.cli.help import command
from leasehold.cli.option import whole_number
from leasehold.runtime.base import run_sync

EXAMPLES = """
leasehold -u etcd://etcd-1:2379 rebase          after a restore, before clients connect
leasehold rebase --above 1741000000000417       above the highest token that a resource has seen
"""


@command(
    "rebase",
    EXAMPLES,
    exit_codes.UNREACHABLE,
    exit_codes.CONFIG,
    short_help="Make new tokens exceed all old ones after a restore.",
)
@click.option(
    "--above",
    type=whole_number(min=0, max=2**53 - 2**40 - 1),
    default=0,
    metavar="TOKEN",
    help="The highest token that any resource has seen, if known. All new tokens are greater.",
)
@pass_console
def rebase(console: Console, above: int) -> None:
    """Make new tokens exceed all old ones after the engine's data was restored or lost.

    This command is for etcd and ZooKeeper, which derive tokens from a count of their own changes. If their data is
    restored from a snapshot or lost, that count is lower than before, and a fence would refuse every new holder. The
    command sets the number above which new tokens begin: on etcd this machine's clock in microseconds, or --above if
    that is greater; on ZooKeeper --above, or without it the clock plus a margin. It applies to all namespaces below the
    prefix of the URL.

    Holders and waiters are kept. An etcd client that was connected before and after a restore refuses to continue:
    restart it.

    Exits 78 if the engine does not need this.
    """
    with console.client() as client:
        base = run_sync(client._rebase(above))
    if console.json:
        console.put_json({"base": base})
    console.say(f"new tokens are greater than {base}")
