"""`leasehold rebase`: after an engine's data went back in time, have its tokens rise on from where they were."""

from __future__ import annotations

import click

from leasehold.cli import exit_codes
from leasehold.cli.console import Console, pass_console
from leasehold.cli.help import Command
from leasehold.runtime.base import run_sync

EXAMPLES = """
leasehold -u etcd://etcd-1:2379 rebase          after a restore, before clients are let in
leasehold rebase --above 1741000000000417       and a resource is known to have seen this token
"""


@click.command("rebase", cls=Command, examples=EXAMPLES, codes=(exit_codes.UNREACHABLE, exit_codes.CONFIG))
@click.option(
    "--above",
    type=click.IntRange(min=0, max=2**53 - 2**40 - 1),
    default=0,
    metavar="TOKEN",
    help="The highest token any resource has seen, if that is known: new ones exceed it for certain.",
)
@pass_console
def rebase(console: Console, above: int) -> None:
    """Let tokens rise on after the engine's data were restored or lost.

    For engines that count tokens by the number of their own changes (etcd, ZooKeeper): after a restore from a
    snapshot that number is lower than before, and a fence would refuse every new holder. This sets the number that
    tokens begin at to this machine's clock, in microseconds, or to --above where that is more. It covers all
    namespaces below the prefix of the URL.

    Holders and waiters stay. Clients that were connected all the time have noticed, and must be started anew.

    Exits 78 for engines that need no such thing.
    """
    with console.client() as client:
        base = run_sync(client._rebase(above))
    if console.json:
        console.put_json({"base": base})
    console.say(f"new tokens are greater than {base}")
