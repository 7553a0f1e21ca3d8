"""`leasehold deadlocks`: cycles of waiters, and the grant to break."""

from __future__ import annotations

from leasehold.cli import exit_codes, render
from leasehold.cli.console import Console, pass_console
from leasehold.cli.help import command
from leasehold.core.deadlocks import Deadlock
from leasehold.core.texts import escape, shell_command

EXAMPLES = """
leasehold deadlocks
leasehold -o json deadlocks | jq -r '.[].victim | "\\(.name) \\(.token)"'
"""


@command(
    "deadlocks",
    EXAMPLES,
    exit_codes.UNREACHABLE,
    exit_codes.CONFIG,
    short_help="Find holders that wait for each other.",
)
@pass_console
def deadlocks(console: Console) -> None:
    """Find deadlocks: threads, tasks and processes that wait for each other.

    Reads all holders and waiters of the namespace, and reads them again to confirm what it finds. For each deadlock it
    shows which holder waits for which name, and the command that resolves the deadlock by breaking the youngest grant,
    which has the least work to lose. The other waiters then continue, and the holder of the broken grant learns that
    its lease is lost. To prevent deadlocks, acquire several names with `multilock`, which sorts them, or limit `wait`.

    Detects only threads and tasks that wait for one lock while they hold another. It does not see waits for anything
    else, nor a `leasehold run` inside the CMD of another one.

    With `-o json`: one array, described by `leasehold docs reference/json`. The exit code is 0 even if nothing was
    found, as long as the engine answered.
    """
    with console.client() as client:
        found = client.deadlocks()
    if console.json:
        console.put_json([deadlock_as_json(deadlock) for deadlock in found])
    elif not found:
        console.say("no deadlocks")
    for number, deadlock in enumerate([] if console.json else found, 1):
        console.put(f"deadlock {number}: {len(deadlock.waits)} waiters in a cycle")
        for part in str(deadlock).split("; "):
            console.put(f"  {escape(part)}")
        victim = deadlock.victim
        command = shell_command("break", victim.namespace, victim.name, "--token", str(victim.token))
        console.put(f"  to resolve it: {command}")


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
