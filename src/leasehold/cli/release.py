"""`leasehold release`: release a lease of `leasehold acquire`."""

from __future__ import annotations

from leasehold.cli import exit_codes
from leasehold.cli.console import Console, pass_console
from leasehold.cli.help import command
from leasehold.cli.lease_input import LeaseCommand, read_lease
from leasehold.client import lease_document
from leasehold.runtime.base import run_sync

EXAMPLES = """
leasehold release                               the lease in $LEASEHOLD_LEASE
leasehold release < lease.json
"""


@command("release", EXAMPLES, exit_codes.UNREACHABLE, exit_codes.CONFIG, exit_codes.LOST, cls=LeaseCommand)
@pass_console
def release(console: Console) -> int:
    """Release a lease, so that the next waiter can acquire the name.

    Reads the output of `leasehold acquire` from $LEASEHOLD_LEASE [env var: LEASEHOLD_LEASE], or from stdin if the
    variable is empty; never from the command line.

    Exits 79 if the lease had already ended: another holder may have had the name in the meantime. A second release of
    the same lease exits 79, too.
    """
    console, document = read_lease(console)
    claim = document.claim
    with console.client() as client:
        released = run_sync(lease_document.release(client._core, document))
    if console.json:
        console.put_json({"namespace": claim.namespace, "name": claim.name, "token": claim.token, "released": released})
    if released:
        console.say(f"released {claim.name} (token {claim.token})")
        return exit_codes.OK
    console.say(
        f"the lease of {claim.name} (token {claim.token}) had already ended: it expired, was broken or was released",
        error=True,
    )
    return exit_codes.LOST
