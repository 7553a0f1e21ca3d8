"""`leasehold demo`: failures that locks and fences prevent, shown with real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import click

from leasehold.cli import exit_codes
from leasehold.cli.console import Console, pass_console
from leasehold.cli.demo import NAMES, DemoResult, load_demo, partition
from leasehold.cli.demo.redis_server import find_program
from leasehold.cli.demo.runner import DemoFailed, DemoRunner, TimelinePrinter
from leasehold.cli.help import command
from leasehold.cli.option import whole_number
from leasehold.core.texts import escape
from leasehold.errors import ConfigError

EXAMPLES = """
leasehold demo --list            list the demos
leasehold demo zombie            a paused holder sells the last teapot a second time
leasehold demo failover          Redis forgets a lock in a failover; needs redis-server
leasehold demo partition         a holder is cut off by the network; needs redis-server, or -u URL
leasehold demo                   all that can run here
leasehold -o json demo race | jq .with
"""

# Raises `ConfigError` if a demo cannot run here, or not on the engine of this URL; the others need only the base
# install.
CHECKS: Mapping[str, Callable[[str | None], object]] = {
    "failover": lambda _: find_program(),
    "partition": partition.check,
}

WORKER_COLOURS = ("cyan", "yellow", "magenta", "green", "blue")  # one per process


@command(
    "demo",
    EXAMPLES,
    exit_codes.CHECK_FAILED,
    exit_codes.UNREACHABLE,
    exit_codes.CONFIG,
    short_help="Show failures that locks and fences prevent.",
)
@click.argument("names", nargs=-1, type=click.Choice(NAMES), metavar="[DEMO]...")
@click.option("--list", "listing", is_flag=True, help="List the demos and exit.")
@click.option(
    "--size", type=whole_number(50, 500), metavar="N", help="Number of callers in thundering-herd. Default: 200."
)
@pass_console
def demo(console: Console, names: tuple[str, ...], listing: bool, size: int | None) -> int:
    """Show failures that locks and fences prevent, with real processes.

    Prints a timeline of each DEMO, first without the fix and then with it. Without DEMO, runs all demos that can run
    here, and says what the others need. Without -u and $LEASEHOLD_URL, demos use their own SQLite engine in a temporary
    directory, which is deleted afterwards. They touch nothing else and need no privileges. `expired-lease` always uses
    that engine. `failover` always starts two Redis servers of its own; it needs redis-server and leasehold[redis], as
    does `partition` if no URL is given. With a URL, `partition` puts a proxy between one client and the servers.

    With `-o json`: one object per demo, described by `leasehold docs reference/json`. The exit code is 0 if every demo
    that ran behaved as expected: it failed without the fix, and worked with it.
    """
    if listing:
        for name in NAMES:
            about = {"demo": name, "title": load_demo(name).TITLE, "fix": load_demo(name).FIX}
            console.put_json(about) if console.json else console.put(f"{name:<16} {about['title']}")
        return exit_codes.OK
    if size is not None and names and "thundering-herd" not in names:
        raise click.UsageError("--size: only thundering-herd has a size")
    console.client().close()  # connects to nothing; raises if the URL is wrong
    for name in names:
        _check_requirements(name, console.url)
    results = [_run_demo(console, name, size) for name in names or _runnable(console)]
    return exit_codes.OK if all(results) else exit_codes.CHECK_FAILED


def _check_requirements(name: str, url: str | None) -> None:
    if name in CHECKS:
        CHECKS[name](url)


def _runnable(console: Console) -> Iterator[str]:
    """The demos that can run here, and a message for each other one."""
    for name in NAMES:
        try:
            _check_requirements(name, console.url)
        except ConfigError as missing:
            if console.json:
                console.put_json(_report_json(name, skipped=str(missing)))
            else:
                console.put(click.style(f"{name}: skipped", bold=True) + f": {missing}\n")
        else:
            yield name


def _report_json(
    name: str, *, skipped: str | None = None, halves: Mapping[str, DemoResult] | None = None
) -> dict[str, object]:
    """The document of one demo. Every key is always present."""
    facts = {half: {"as_expected": result.as_expected, **result.facts} for half, result in (halves or {}).items()}
    as_expected = None if halves is None else len(halves) == 2 and all(part.as_expected for part in halves.values())
    return {
        "demo": name,
        "as_expected": as_expected,
        "skipped": skipped,
        "without": facts.get("without"),
        "with": facts.get("with"),
    }


def _run_demo(console: Console, name: str, size: int | None) -> bool:
    halves: dict[str, DemoResult] = {}
    try:
        _run_halves(console, name, size, halves)
    except DemoFailed as failed:
        console.say(f"{name}: {failed}", error=True)
    report = _report_json(name, halves=halves)
    if console.json:
        console.put_json(report)
    else:
        console.put("")
    return report["as_expected"] is True


def _run_halves(console: Console, name: str, size: int | None, halves: dict[str, DemoResult]) -> None:
    chosen_demo = load_demo(name)
    if not console.json:
        console.put(click.style(f"{name}: {chosen_demo.TITLE}", bold=True))
    for half, fixed in (("without", False), ("with", True)):
        if not console.json:
            heading = f"{half} the fix" + (f": {chosen_demo.FIX}" if fixed else "")
            console.put("\n " + click.style(heading, underline=True))
        with DemoRunner(
            name, console.url, _timeline_printer(console), size=size, verbose=console.verbosity > 0
        ) as runner:
            result = halves[half] = chosen_demo.run(runner, fixed)
        if not console.json:
            what = "no failure" if fixed else "the failure"
            verdict = f"{what}, as expected" if result.as_expected else "NOT as expected"
            good = fixed and result.as_expected
            console.put(f"  => {click.style(result.text, fg='green' if good else 'red', bold=True)}  ({verdict})")


def _timeline_printer(console: Console) -> TimelinePrinter:
    """Prints the timeline, unless the output is JSON or quiet."""

    def print_line(seconds: float, who: str, text: str) -> None:
        if console.json or console.quiet:
            return
        colour = WORKER_COLOURS[(ord(who[0]) - ord("A")) % len(WORKER_COLOURS)] if who else "white"
        name = click.style(f"{who:<3}", fg=colour, bold=True)
        console.put(f"  {seconds:6.2f} s  {name} {click.style(escape(text), fg=colour, dim=not who)}")

    return print_line
