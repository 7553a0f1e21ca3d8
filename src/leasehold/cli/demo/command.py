"""`leasehold demo`: failures that locks and fences prevent, shown with real processes."""

from __future__ import annotations

import click

from leasehold.cli import exit_codes
from leasehold.cli.console import Console, make_printable, pass_console
from leasehold.cli.demo import NAMES, DemoResult, load_demo
from leasehold.cli.demo.runner import DemoRunner, TimelinePrinter
from leasehold.cli.help import Command

EXAMPLES = """
leasehold demo --list            list the demos
leasehold demo zombie            a paused holder sells the last teapot twice; a fence refuses it
leasehold demo failover          Redis forgets a lock in a failover; needs redis-server
leasehold demo                   run all demos
leasehold -o json demo lost-update | jq .with
"""

WORKER_COLOURS = ("cyan", "yellow", "magenta", "green", "blue")  # one per process


@click.command(
    "demo", cls=Command, examples=EXAMPLES, codes=(exit_codes.NOT_SHOWN, exit_codes.UNREACHABLE, exit_codes.CONFIG)
)
@click.argument("names", nargs=-1, type=click.Choice(NAMES), metavar="[DEMO]...")
@click.option("--list", "listing", is_flag=True, help="List the demos and exit.")
@click.option(
    "--size", type=click.IntRange(10, 5000), metavar="N", help="Number of callers in thundering-herd. Default: 200."
)
@pass_console
def demo(console: Console, names: tuple[str, ...], listing: bool, size: int | None) -> int:
    """Show failures that locks and fences prevent, with real processes.

    Prints a timeline of each DEMO, first without the fix and then with it. Without DEMO, runs all of them. Without -u
    and $LEASEHOLD_URL, demos use their own SQLite engine in a temporary directory, which is deleted afterwards. They
    touch nothing else and need no privileges. `failover` always starts two Redis servers of its own; it needs
    redis-server and leasehold[redis].

    With `-o json`: one object per demo, described in docs/reference/json.md. The exit code is 0 if every demo behaved
    as expected: it failed without the fix, and worked with it.
    """
    if listing:
        for name in NAMES:
            about = {"story": name, "title": load_demo(name).TITLE, "cure": load_demo(name).CURE}
            console.put_json(about) if console.json else console.put(f"{name:<16} {about['title']}")
        return exit_codes.OK
    results = [_run_demo(console, name, size) for name in names or NAMES]
    return exit_codes.OK if all(results) else exit_codes.NOT_SHOWN


def _run_demo(console: Console, name: str, size: int | None) -> bool:
    chosen_demo = load_demo(name)
    if not console.json:
        console.put(click.style(f"{name}: {chosen_demo.TITLE}", bold=True))
    halves: dict[str, DemoResult] = {}
    for half, cured in (("without", False), ("with", True)):
        if not console.json:
            console.put(click.style(f"\n {half} the fix" + (f": {chosen_demo.CURE}" if cured else ""), underline=True))
        with DemoRunner(
            name, console.url, _timeline_printer(console), size=size, verbose=console.verbosity > 0
        ) as runner:
            result = halves[half] = chosen_demo.run(runner, cured)
        if not console.json:
            verdict = "as expected" if result.as_expected else "NOT as expected"
            good = cured and result.as_expected
            console.put(f"  => {click.style(result.text, fg='green' if good else 'red', bold=True)}  ({verdict})")
    all_as_expected = all(result.as_expected for result in halves.values())
    if console.json:
        facts = {half: {"seen": half_result.as_expected, **half_result.facts} for half, half_result in halves.items()}
        console.put_json({"story": name, "shown": all_as_expected, **facts})
    else:
        console.put("")
    return all_as_expected


def _timeline_printer(console: Console) -> TimelinePrinter:
    """Prints the timeline, unless the output is JSON or quiet."""

    def print_line(seconds: float, who: str, text: str) -> None:
        if console.json or console.quiet:
            return
        colour = WORKER_COLOURS[(ord(who[0]) - ord("A")) % len(WORKER_COLOURS)] if who else "white"
        name = click.style(f"{who:<3}", fg=colour, bold=True)
        console.put(f"  {seconds:6.2f} s  {name} {click.style(make_printable(text), fg=colour, dim=not who)}")

    return print_line
