"""`leasehold acquire`: a lease that a script keeps, renews and releases itself."""

from __future__ import annotations

import sys
from typing import Any

from leasehold.cli import exit_codes, render
from leasehold.cli.console import Console, pass_console
from leasehold.cli.help import command
from leasehold.cli.options import AcquireOptions, acquire_options, name_argument, usage_error_if
from leasehold.client import lease_document
from leasehold.errors import NotAcquired, Unsupported

EXAMPLES = """
LEASEHOLD_LEASE=$(leasehold acquire deploy --ttl 600 -w 60) || exit
export LEASEHOLD_LEASE
trap 'leasehold release' EXIT
./deploy.sh --token "$(printf %s "$LEASEHOLD_LEASE" | jq .token)"
"""


@command("acquire", EXAMPLES, exit_codes.UNREACHABLE, exit_codes.BUSY, exit_codes.CONFIG, exit_codes.SIGNALLED)
@name_argument
@acquire_options
@pass_console
def acquire(console: Console, /, name: str, **given: Any) -> int:
    """Acquire NAME and print the lease as JSON.

    Pass the JSON to `leasehold renew` and `leasehold release`. The lease is not renewed automatically: it expires
    after --ttl seconds unless you call `leasehold renew` in time. Prefer `leasehold run` where possible: it renews the
    lease, and stops the command if the lease is lost.

    The JSON contains a secret, with which any process can renew or release the lease. Keep it in $LEASEHOLD_LEASE or
    pass it on stdin, never on a command line, where every user of the machine can read it. The format is described by
    `leasehold docs reference/json`; `-o` has no effect on it.
    """
    options = AcquireOptions(**given).checked()
    usage_error_if(sys.stdout is None, "stdout is closed, so the lease cannot be printed")
    with console.client(ttl=options.ttl) as client:
        if not client.traits.outlives:
            raise Unsupported(
                "this engine ends a lease with the process that acquired it, so `leasehold acquire` cannot keep one: "
                "use `leasehold run`"
            )
        lock = options.lock(client, name, outlives=True)
        try:
            lease = lock.acquire()
        except NotAcquired as busy:
            console.say(render.busy_text(busy) + ("" if busy.waited else "; pass -w SECS to wait for it"))
            return exit_codes.BUSY if options.busy_code is None else options.busy_code
        console.put_json({**lease_document.dump(lease), "left": render.rounded(lease.remaining)})
        lease_document.detach(lease)  # only after printing: if that fails, closing the client releases the lease
    return exit_codes.OK
