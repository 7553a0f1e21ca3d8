"""`leasehold bench`: how fast an engine is from here."""

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

EXAMPLES = """
leasehold bench                             of the engine of LEASEHOLD_URL, or your own SQLite
leasehold bench redis://127.0.0.1:6379      of another
leasehold -o json bench | jq '.results[] | {case, ratio}'
"""


@click.command("bench", cls=Command, examples=EXAMPLES, codes=(exit_codes.UNREACHABLE, exit_codes.CONFIG))
@click.argument("engine_url", required=False, metavar="[URL]")
@click.option("--rounds", type=click.IntRange(2, 1000), default=15, metavar="N", help="Rounds to measure. Default: 15.")
@click.option(
    "--held",
    type=click.IntRange(1, 100_000),
    default=100,
    metavar="N",
    help="Leases to hold meanwhile, and to renew. Default: 100.",
)
@pass_console
def bench(console: Console, engine_url: str | None, rounds: int, held: int) -> None:
    """Measure how fast an engine is, from this machine, beside its own round trip.

    Pairs of acquire and release, hand-offs, several threads, renewals: measured in turns, in rotating rounds, and each
    compared with one round trip of the same round. The ratio is what to look at: times alone say more about the
    machine and the network than about the lock. A round that something else disturbed is repeated.

    Needs nothing but the engine. It works in a namespace of its own, which is empty again at the end; it does load the
    server for some seconds, so think before you point it at one in production.

    With `-o json`: one object, described in docs/reference/json.md.
    """
    bench_console = replace(console, url=engine_url or console.url, namespace=f"leasehold-bench-{secrets.token_hex(8)}")
    with bench_console.client() as client, cases(client, held) as chosen:
        results = measure(chosen, rounds, _progress(console))
        engine = client._core.engine_name
    if console.json:
        rows = [{"case": (facts := asdict(result)).pop("name"), **facts} for result in results]
        console.put_json({"engine": engine, "rounds": rounds, "held": held, "results": rows})
    else:
        console.put(format_results(f"{engine}: against one round trip", results))


def _progress(console: Console) -> Callable[[int, int], None]:
    """On the terminal of whoever waits: one line, written over."""
    show_progress = sys.stderr.isatty() and not console.quiet

    def print_progress(number: int, rounds: int) -> None:
        if show_progress:
            click.echo(f"\rround {number} of {rounds}" + ("\n" if number == rounds else ""), err=True, nl=False)

    return print_progress
