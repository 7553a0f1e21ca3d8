"""`leasehold release`: give up a lease of `leasehold acquire`."""

from __future__ import annotations

import click

from leasehold.cli import exits
from leasehold.cli.console import Console, pass_console
from leasehold.cli.manual import Command
from leasehold.cli.paper import read_deed
from leasehold.recipes import deed
from leasehold.runtime.base import step

EXAMPLES = """
leasehold release                               the lease in $LEASEHOLD_LEASE
leasehold release < lease.json
"""


@click.command("release", cls=Command, examples=EXAMPLES, codes=(exits.UNREACHABLE, exits.CONFIG, exits.LOST))
@pass_console
def release(console: Console) -> int:
    """Give up a lease, so that the next in line may go on.

    Reads what `leasehold acquire` printed from $LEASEHOLD_LEASE [env var: LEASEHOLD_LEASE], or else from stdin;
    never from the command line.

    Exits 79 when the lease was over before: somebody else may have held the name meanwhile. That is said once;
    whoever releases again is told the same.
    """
    claim = read_deed()
    with console.client() as client:
        released = step(deed.release(client._desk, claim))
    if console.json:
        console.put_json({"namespace": claim.namespace, "name": claim.name, "token": claim.token, "released": released})
    if released:
        console.say(f"released {claim.name} (token {claim.token})")
        return exits.OK
    console.say(
        f"{claim.name} (token {claim.token}) was over already: it lapsed, was broken or was released", error=True
    )
    return exits.LOST
