"""`leasehold bench`: measure how fast an engine is from this machine."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Final

import click

from leasehold.cli import exit_codes
from leasehold.cli.bench import until_breaks as until_breaks_
from leasehold.cli.bench.cases import cases
from leasehold.cli.bench.measurement import format_results, measure
from leasehold.cli.bench.ramp import RateStep
from leasehold.cli.console import Console, is_terminal, pass_console
from leasehold.cli.help import command
from leasehold.cli.option import file_path, whole_number
from leasehold.cli.options import positive_seconds_option, usage_error_if
from leasehold.cli.output_file import OutputFile

ROUNDS: Final = 15
HELD: Final = 100
P99: Final = 0.05
STEP: Final = 2.0
MAX_STEP: Final = 60.0

EXAMPLES = """
leasehold bench                             the engine of LEASEHOLD_URL, or your SQLite file
leasehold bench redis://127.0.0.1:6379      another engine
leasehold -o json bench | jq '.results[] | {case, ratio}'
leasehold bench URL --until-breaks          more and more load, up to the breaking point
leasehold bench URL --until-breaks --plot load.svg
"""


@command("bench", EXAMPLES, exit_codes.UNREACHABLE, exit_codes.CONFIG)
@click.argument("engine_url", required=False, metavar="[URL]")
@click.option("--rounds", type=whole_number(2, 1000), metavar="N", help=f"Number of rounds. Default: {ROUNDS}.")
@click.option(
    "--held",
    type=whole_number(1, 100_000),
    metavar="N",
    help=f"Number of leases to hold during the measurement, and to renew. Default: {HELD}.",
)
@click.option("--until-breaks", is_flag=True, help="Raise the load until the engine or the clients cannot keep up.")
@positive_seconds_option(
    "--p99", help=f"--until-breaks: the longest p99 that still counts as sustained. Default: {P99}."
)
@click.option(
    "--processes",
    type=whole_number(1, 64),
    metavar="N",
    help="--until-breaks: number of client processes. Default: one per processor, at most 8.",
)
@positive_seconds_option(
    "--step", help=f"--until-breaks: how long to offer each load, at most {MAX_STEP:g}. Default: {STEP:g}."
)
@click.option(
    "--plot",
    "plot_file",
    type=file_path(),
    metavar="FILE",
    help="--until-breaks: draw the result as SVG.",
)
@pass_console
def bench(
    console: Console,
    engine_url: str | None,
    rounds: int | None,
    held: int | None,
    until_breaks: bool,
    p99: float | None,
    processes: int | None,
    step: float | None,
    plot_file: str | None,
) -> int:
    """Measure how fast an engine is from this machine.

    Measures pairs of acquire and release, hand-offs to a waiter, several threads, and renewals, in interleaved rounds.
    Each result is compared with one round trip to the engine in the same round. Compare these ratios: the times alone
    say more about the machine and the network than about the lock. A round that was disturbed by other load is
    repeated.

    With --until-breaks, client processes acquire and release different names at a rate that doubles with each step,
    until p99 is above the limit, more than 0.1 % of the pairs fail, or the pairs fall behind; then the command narrows
    down the limit and says which resource ran out. Each pair starts when it is due, whether or not the engine has
    answered the ones before (an open loop), and its time counts from then. Ctrl-C ends it at any time, and releases
    everything.

    This command uses the namespace leasehold-bench, which is empty again at the end. It puts load on the server for
    some seconds, and with --until-breaks as much as the server can take for a minute, so be careful with a server in
    production.

    With `-o json`: one object, described by `leasehold docs reference/json`.
    """
    # Always the same namespace: an engine that counts tokens by namespace keeps that counter for ever.
    bench_console = console._replace(url=console.url if engine_url is None else engine_url, namespace="leasehold-bench")
    prefix = f"{secrets.token_hex(8)}/"
    plot = None if plot_file is None else OutputFile("--plot", plot_file)
    if until_breaks:
        usage_error_if(bool(rounds or held), "--until-breaks cannot be combined with --rounds or --held")
        step = step or STEP
        usage_error_if(step > MAX_STEP, f"--step {step:g} is too long: the maximum is {MAX_STEP:g} seconds")
        return _bench_until_breaks(bench_console, prefix, processes, step, p99 or P99, plot)
    usage_error_if(bool(p99 or processes or step or plot), "this option needs --until-breaks: see --help")
    rounds, held = rounds or ROUNDS, held or HELD
    with bench_console.client(in_process=True) as client, cases(client, held, prefix) as chosen:
        results = measure(chosen, rounds, _progress(console))
        engine = client._core.engine_name
    if console.json:
        rows = [{"case": (facts := asdict(result)).pop("name"), **facts} for result in results]
        console.put_json({"engine": engine, "rounds": rounds, "held": held, "results": rows})
    else:
        console.put(format_results(f"{engine}: compared with one round trip", results))
    return exit_codes.OK


def _bench_until_breaks(
    console: Console, prefix: str, processes: int | None, seconds: float, p99: float, plot: OutputFile | None
) -> int:
    with console.client(in_process=True) as client:
        client.ping()
        engine = client._core.engine_name
    # Locks of memory:// exist in one process: several would measure as many engines.
    count = 1 if engine == "memory" else processes or min(os.cpu_count() or 1, 8)
    if not console.json:
        console.put(f"{engine}: {count} client process{'es' if count > 1 else ''}, {seconds:g} s a step")
        console.put(until_breaks_.HEADER)

    def report(step: RateStep) -> None:
        if not console.json:
            console.put(until_breaks_.format_step(step, p99 * 1000))

    ramp = until_breaks_.run(console.url, console.namespace, prefix, count, seconds, p99 * 1000, report)
    if console.json:
        console.put_json(until_breaks_.as_json(engine, ramp, count))
    else:
        console.put(until_breaks_.conclusion(ramp, count))
    if plot is not None:
        try:
            plot.write(until_breaks_.draw(engine, ramp))
        except OSError as error:
            console.say(f"the --plot file could not be written: {error}", error=True)
            return exit_codes.OUTPUT
    return exit_codes.OK


def _progress(console: Console) -> Callable[[int, int], None]:
    """A progress line that overwrites itself, if stderr is a terminal."""
    show_progress = is_terminal(sys.stderr) and not console.quiet

    def print_progress(number: int, rounds: int) -> None:
        if show_progress:
            click.echo(f"\rround {number} of {rounds}" + ("\n" if number == rounds else ""), err=True, nl=False)

    return print_progress
