"""`leasehold acquire`: a lease for a script to keep, renew and release by hand."""

from __future__ import annotations

import sys
from typing import Any

import click

from leasehold.cli import exits, show
from leasehold.cli.console import Console, pass_console
from leasehold.cli.manual import Command
from leasehold.cli.options import Taking, name_argument, refuse, taking
from leasehold.errors import NotAcquired
from leasehold.recipes import deed

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
    codes=(exits.UNREACHABLE, exits.BUSY, exits.CONFIG, exits.SIGNALLED),
)
@name_argument
@taking
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
    options = Taking(**given)
    refuse(sys.stdout is None, "stdout is closed: nobody could read the lease")
    with console.client(ttl=options.ttl) as client:
        lock = options.lock(client, name, outlives=True)
        try:
            lease = lock.acquire()
        except NotAcquired as busy:
            console.say(show.busy_text(busy) + ("" if busy.waited else "; -w SECS stands in line"))
            return exits.BUSY if options.busy_code is None else options.busy_code
        console.put_json({**deed.write(lease), "left": show.rounded(lease.remaining)})
        deed.let_go(lease)  # only now: had nobody been there to read it, it would have been released
    return exits.OK
