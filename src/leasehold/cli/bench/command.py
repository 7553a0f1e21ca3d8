"""`leasehold bench`: measure how fast an engine is from this machine."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from dataclasses import asdict, replace

import click

from leasehold.cli import exit_codes
from leasehold.cli.bench.cases import cases
from leasehold.cli.bench.measurement import format_results, measure
from leasehold.cli.console import Console, pass_console
from leasehold.cli.help import Command
from leasehold.cli.options import WholeNumber

EXAMPLES = """
leasehold bench                             the engine of LEASEHOLD_URL, or your SQLite file
leasehold bench redis://127.0.0.1:6379      another engine
leasehold -o json bench | jq '.results[] | {case, ratio}'
"""


@click.command("bench", cls=Command, examples=EXAMPLES, codes=(exit_codes.UNREACHABLE, exit_codes.CONFIG))
@click.argument("engine_url", required=False, metavar="[URL]")
@click.option("--rounds", type=WholeNumber(2, 1000), default=15, metavar="N", help="Number of rounds. Default: 15.")
@click.option(
    "--held",
    type=WholeNumber(1, 100_000),
    default=100,
    metavar="N",
    help="Number of leases to hold during the measurement, and to renew. Default: 100.",
)
@pass_console
def bench(console: Console, engine_url: str | None, rounds: int, held: int) -> None:
    """Measure how fast an engine is from this machine.

    Measures pairs of acquire and release, hand-offs to a waiter, several threads, and renewals, in interleaved rounds.
    Each result is compared with one round trip to the engine in the same round. Compare these ratios: the times alone
    say more about the machine and the network than about the lock. A round that was disturbed by other load is
    repeated.

    It needs only the engine. It uses its own namespace, which is empty again at the end. It puts load on the server for
    some seconds, so be careful with a server in production.

    With `-o json`: one object, described by `leasehold docs reference/json`.
    """
    bench_console = replace(console, url=engine_url or console.url, namespace=f"leasehold-bench-{secrets.token_hex(8)}")
    with bench_console.client(in_process=True) as client, cases(client, held) as chosen:
        results = measure(chosen, rounds, _progress(console))
        engine = client._core.engine_name
    if console.json:
        rows = [{"case": (facts := asdict(result)).pop("name"), **facts} for result in results]
        console.put_json({"engine": engine, "rounds": rounds, "held": held, "results": rows})
    else:
        console.put(format_results(f"{engine}: compared with one round trip", results))


def _progress(console: Console) -> Callable[[int, int], None]:
    """A progress line that overwrites itself, if stderr is a terminal."""
    show_progress = sys.stderr.isatty() and not console.quiet

    def print_progress(number: int, rounds: int) -> None:
        if show_progress:
            click.echo(f"\rround {number} of {rounds}" + ("\n" if number == rounds else ""), err=True, nl=False)

    return print_progress
