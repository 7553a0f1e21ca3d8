"""`leasehold deadlocks`: who waits for each other, and the way out."""

from __future__ import annotations

import shlex

import click

from leasehold.cli import exit_codes, render
from leasehold.cli.console import Console, make_printable, pass_console
from leasehold.cli.help import Command
from leasehold.core.deadlocks import Deadlock

EXAMPLES = """
leasehold deadlocks
leasehold -o json deadlocks | jq -r '.[].victim | "\\(.name) \\(.token)"'
"""


@click.command("deadlocks", cls=Command, examples=EXAMPLES, codes=(exit_codes.UNREACHABLE, exit_codes.CONFIG))
@pass_console
def deadlocks(console: Console) -> None:
    """Name the circles of threads, tasks and processes that wait for each other.

    Looks at every holder and waiter of this namespace, twice if there is something to be seen. Each circle is shown
    with whoever waits for what, and its way out: the youngest grant, which has the least work to lose. Breaking it
    lets the others go on; its holder is told. To be rid of the cause, take several names with `multilock`, which
    sorts them, or stand in line for a bounded time.

    Seen is who waits for a lock while holding another in the same thread or task. Not seen: what waits for anything
    but locks, and a `leasehold run` inside the CMD of another.

    With `-o json`: one array, described in docs/reference/json.md. Exits 0 whenever the engine answered, also with
    nothing found.
    """
    with console.client() as client:
        found = client.deadlocks()
    if console.json:
        console.put_json([deadlock_as_json(deadlock) for deadlock in found])
    elif not found:
        console.say("nobody waits in a circle")
    for number, deadlock in enumerate([] if console.json else found, 1):
        console.put(f"deadlock {number}: {len(deadlock.waits)} in a circle")
        for part in str(deadlock).split("; "):
            console.put(f"  {make_printable(part)}")
        console.put(f"  way out: leasehold break {break_arguments(deadlock)}")


def break_arguments(deadlock: Deadlock) -> str:
    """As it can be pasted into a shell."""
    return f"{shlex.quote(make_printable(deadlock.victim.name))} --token {deadlock.victim.token}"


def deadlock_as_json(deadlock: Deadlock) -> dict[str, object]:
    return {
        "waits": [
            {
                "name": wait.name,
                "waiter": render.holding_as_json(wait.waiter),
                "holder": render.holding_as_json(wait.holder),
            }
            for wait in deadlock.waits
        ],
        "victim": render.holding_as_json(deadlock.victim),
    }
