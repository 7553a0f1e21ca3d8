"""`leasehold demo`: the stories that locks are for, played by real processes."""

from __future__ import annotations

import click

from leasehold.cli import exits
from leasehold.cli.console import Console, pass_console, printable
from leasehold.cli.manual import Command
from leasehold.stories import NAMES, Outcome, story
from leasehold.stories.stage import Stage, Teller

EXAMPLES = """
leasehold demo --list            which stories there are
leasehold demo zombie            a paused holder sells the last teapot twice; then it is refused
leasehold demo failover          a Redis that dies forgets a lock; needs redis-server installed
leasehold demo                   all of them
leasehold -o json demo naive | jq .with
"""

COLOURS = ("cyan", "yellow", "magenta", "green", "blue")  # of the processes


@click.command("demo", cls=Command, examples=EXAMPLES, codes=(exits.NOT_SHOWN, exits.UNREACHABLE, exits.CONFIG))
@click.argument("names", nargs=-1, type=click.Choice(NAMES), metavar="[STORY]...")
@click.option("--list", "listing", is_flag=True, help="Show which stories there are.")
@click.option("--size", type=click.IntRange(10, 5000), metavar="N", help="How many come to the herd. Default: 200.")
@pass_console
def demo(console: Console, names: tuple[str, ...], listing: bool, size: int | None) -> int:
    """Play the stories that locks are for, with real processes.

    Each STORY is told as a timeline, without its cure and then with it. Without -u they use an engine of their own, in
    a folder that is gone afterwards; nothing else is touched, and no rights are needed. `failover` always starts two
    servers of its own, from the redis-server that is installed.

    With `-o json`: one object for each story, described in docs/reference/json.md. Exits 0 if everything that was to
    be shown was seen, failures without the cure included.
    """
    if listing:
        for name in NAMES:
            about = {"story": name, "title": story(name).TITLE, "cure": story(name).CURE}
            console.put_json(about) if console.json else console.put(f"{name:<10} {about['title']}")
        return exits.OK
    shown = [_played(console, name, size) for name in names or NAMES]
    return exits.OK if all(shown) else exits.NOT_SHOWN


def _played(console: Console, name: str, size: int | None) -> bool:
    told = story(name)
    if not console.json:
        console.put(click.style(f"{name}: {told.TITLE}", bold=True))
    halves: dict[str, Outcome] = {}
    for half, cured in (("without", False), ("with", True)):
        if not console.json:
            console.put(click.style(f"\n {half} the cure" + (f": {told.CURE}" if cured else ""), underline=True))
        with Stage(name, console.url, _teller(console), size=size, loud=console.verbosity > 0) as stage:
            outcome = halves[half] = told.play(stage, cured)
        if not console.json:
            verdict = "as told" if outcome.seen else "NOT as told"
            good = cured and outcome.seen
            console.put(f"  => {click.style(outcome.text, fg='green' if good else 'red', bold=True)}  ({verdict})")
    shown = all(outcome.seen for outcome in halves.values())
    if console.json:
        facts = {half: {"seen": one.seen, **one.facts} for half, one in halves.items()}
        console.put_json({"story": name, "shown": shown, **facts})
    else:
        console.put("")
    return shown


def _teller(console: Console) -> Teller:
    """A timeline for people; programs get the outcome."""

    def tell(seconds: float, who: str, text: str) -> None:
        if console.json or console.quiet:
            return
        colour = COLOURS[(ord(who[0]) - ord("A")) % len(COLOURS)] if who else "white"
        name = click.style(f"{who:<3}", fg=colour, bold=True)
        console.put(f"  {seconds:6.2f} s  {name} {click.style(printable(text), fg=colour, dim=not who)}")

    return tell
