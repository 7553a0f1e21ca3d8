"""`leasehold acquire`: a lease for a script to keep, renew and release by hand."""

from __future__ import annotations

import sys
from typing import Any

import click

from leasehold.cli import exit_codes, render
from leasehold.cli.console import Console, pass_console
from leasehold.cli.help import Command
from leasehold.cli.options import AcquireOptions, acquire_options, name_argument, usage_error_if
from leasehold.client import lease_document
from leasehold.errors import NotAcquired

EXAMPLES = """
LEASEHOLD_LEASE=$(leasehold acquire deploy --ttl 600 -w 60) || exit
export LEASEHOLD_LEASE
trap 'leasehold release' EXIT
./deploy.sh --token "$(printf %s "$LEASEHOLD_LEASE" | jq .token)"
"""


@click.command(
    "acquire",
    cls=Command,
    examples=EXAMPLES,
    codes=(exit_codes.UNREACHABLE, exit_codes.BUSY, exit_codes.CONFIG, exit_codes.SIGNALLED),
)
@name_argument
@acquire_options
@pass_console
def acquire(console: Console, /, name: str, **given: Any) -> int:
    """Take NAME and print the lease as JSON.

    The lease is for `leasehold renew` and `leasehold release`. Nobody renews it for you: the lease lapses TTL
    seconds from now unless `leasehold renew` is called in time. `leasehold run` is safer wherever it fits, because
    it renews and stops the work when the lease is lost.

    The JSON holds the secret id that owns the lease. Keep it in $LEASEHOLD_LEASE or hand it over on stdin, and
    never on a command line, where every user of the machine can read it. Its shape is described in
    docs/reference/json.md; `-o` changes nothing here.
    """
    options = AcquireOptions(**given)
    usage_error_if(sys.stdout is None, "stdout is closed: nobody could read the lease")
    with console.client(ttl=options.ttl) as client:
        lock = options.lock(client, name, outlives=True)
        try:
            lease = lock.acquire()
        except NotAcquired as busy:
            console.say(render.busy_text(busy) + ("" if busy.waited else "; -w SECS stands in line"))
            return exit_codes.BUSY if options.busy_code is None else options.busy_code
        console.put_json({**lease_document.dump(lease), "left": render.rounded(lease.remaining)})
        lease_document.detach(lease)  # only now: had nobody been there to read it, it would have been released
    return exit_codes.OK
