"""`leasehold renew`: renew a lease of `leasehold acquire`."""

from __future__ import annotations

from leasehold.cli import exit_codes, render
from leasehold.cli.console import Console, pass_console
from leasehold.cli.help import command
from leasehold.cli.lease_input import LeaseCommand, read_lease
from leasehold.cli.options import check_ttl_option, positive_seconds_option
from leasehold.client import lease_document
from leasehold.runtime.base import run_sync

EXAMPLES = """
leasehold renew                                 the lease in $LEASEHOLD_LEASE
leasehold renew --ttl 600 < lease.json
"""


@command("renew", EXAMPLES, exit_codes.UNREACHABLE, exit_codes.CONFIG, exit_codes.LOST, cls=LeaseCommand)
@positive_seconds_option("--ttl", help="New ttl, counted from now. Default: the ttl that the lease was acquired with.")
@pass_console
def renew(console: Console, ttl: float | None) -> None:
    """Renew a lease.

    The lease then expires --ttl seconds from now, or later if it had more time left: a renewal never shortens it. Reads
    the output of `leasehold acquire` from $LEASEHOLD_LEASE [env var: LEASEHOLD_LEASE], or from stdin if the variable is
    empty; never from the command line.

    Exits 79 if the lease has ended: stop the work it protects.
    """
    if ttl is not None:
        check_ttl_option(ttl)
    console, document = read_lease(console)
    claim = document.claim
    with console.client() as client:
        left = run_sync(lease_document.renew(client._core, document, ttl))
    if console.json:
        console.put_json(
            {"namespace": claim.namespace, "name": claim.name, "token": claim.token, "left": render.rounded(left)}
        )
    else:
        console.say(f"renewed {claim.name} (token {claim.token}): {left:.1f} s left")
