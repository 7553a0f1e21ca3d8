"""`leasehold renew`: a lease of `leasehold acquire`, for another while."""

from __future__ import annotations

import click

from leasehold.cli import exit_codes, render
from leasehold.cli.console import Console, pass_console
from leasehold.cli.help import Command
from leasehold.cli.lease_input import read_lease
from leasehold.cli.options import positive_seconds
from leasehold.client import lease_document
from leasehold.runtime.base import run_sync

EXAMPLES = """
leasehold renew                                 the lease in $LEASEHOLD_LEASE
leasehold renew --ttl 600 < lease.json
"""


@click.command(
    "renew", cls=Command, examples=EXAMPLES, codes=(exit_codes.UNREACHABLE, exit_codes.CONFIG, exit_codes.LOST)
)
@click.option(
    "--ttl", type=positive_seconds, metavar="SECS", help="Live so long from now. Default: as it was acquired."
)
@pass_console
def renew(console: Console, ttl: float | None) -> None:
    """Push the end of a lease back.

    It then lives --ttl seconds from now. Reads what `leasehold acquire` printed from $LEASEHOLD_LEASE [env var:
    LEASEHOLD_LEASE], or else from stdin; never from the command line. An end that was already promised for later
    stays.

    Exits 79 when the engine no longer has the lease: stop the work it protects.
    """
    claim = read_lease()
    with console.client() as client:
        left = run_sync(lease_document.renew(client._core, claim, ttl))
    if console.json:
        console.put_json(
            {"namespace": claim.namespace, "name": claim.name, "token": claim.token, "left": render.rounded(left)}
        )
    else:
        console.say(f"{claim.name} (token {claim.token}) is yours for another {left:.1f} s")
