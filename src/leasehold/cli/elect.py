"""`leasehold elect`: a command that runs on the leader alone, or the terms of an election as they come."""

from __future__ import annotations

import os
import sys
import time
from datetime import UTC, datetime
from itertools import count
from typing import Any

import click

from leasehold.blocking import Client, Lock
from leasehold.cli import exit_codes, render
from leasehold.cli.console import Console, make_printable, pass_console
from leasehold.cli.options import (
    check_ttl_option,
    is_label,
    label,
    name_argument,
    positive_seconds,
    seconds,
    usage_error_if,
)
from leasehold.cli.run.command import RunCommand, RunJob, RunOptions
from leasehold.cli.run.result_file import RunResult
from leasehold.cli.run.signals import raise_on_signals
from leasehold.config import LockArguments
from leasehold.core import timing
from leasehold.errors import Unavailable
from leasehold.model import Term

EXAMPLES = """
leasehold elect scheduler -- ./scheduler          on every machine: runs on one of them
leasehold elect --ttl 10 scheduler -- ./scheduler
leasehold elect --listen scheduler                who leads, now and from now on
leasehold -o json elect --listen scheduler | jq -r .holder
"""

_MAX_PAUSE = 10.0


@click.command(
    "elect",
    cls=RunCommand,
    examples=EXAMPLES,
    codes=tuple(
        code
        for code in exit_codes.MEANING
        if code not in (exit_codes.OK, exit_codes.USAGE, exit_codes.BUSY, exit_codes.LOST)
    ),
    options_metavar="[OPTIONS]",
)
@name_argument
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[--] [CMD [ARG]...]")
@click.option("--listen", is_flag=True, help="Do not stand for election: print each term as it comes.")
@click.option("--for", "lasting", type=seconds, metavar="SECS", help="With --listen: end after SECS.")
@click.option(
    "--ttl",
    type=positive_seconds,
    default=30.0,
    show_default=True,
    metavar="SECS",
    help="How long a leader that is no longer heard of stays leader: all candidates should say the same.",
)
@click.option(
    "--delay",
    type=seconds,
    default=0.0,
    metavar="SECS",
    help="Let nobody lead for so much longer after a leader is lost: for a resource that checks no tokens.",
)
@click.option(
    "--max-hold", type=positive_seconds, metavar="SECS", help="The longest a term lasts; then another may lead."
)
@click.option(
    "--kill-after",
    type=seconds,
    metavar="SECS",
    help="Time between TERM and KILL when the term is lost; at most a third of --ttl. "
    "Default: the smaller of 5 and a third of the life granted.",
)
@click.option("--holder", type=label, metavar="TEXT", help="Who stands for election, for people. Default: host:pid.")
@click.option("--purpose", type=label, metavar="TEXT", help="What for, for people.")
@pass_console
def elect(
    console: Console,
    /,
    name: str,
    command: tuple[str, ...],
    listen: bool,
    lasting: float | None,
    max_hold: float | None,
    kill_after: float | None,
    **given: Any,
) -> int:
    """Run CMD while leading NAME, of all who stand for election.

    Stands in line until it leads, then runs CMD as `leasehold run` does: signals, terminal, environment and exit code
    are the same, and LEASEHOLD_TOKEN is the fence of this term. When the term is lost, CMD is stopped, and it stands
    for election again. When CMD ends by itself, or is ended by a signal sent here, it resigns, after CMD and not
    before, and exits with the code of CMD.

    An engine that does not answer at the start ends it with 69; later it is asked again until it does.

    With --listen: a line for each term, the one under way first, each once and in order. With `-o json`: a JSON
    object for each, one per line, described in docs/reference/json.md.
    """
    check_ttl_option(given["ttl"])
    options: LockArguments = {**given, "max_hold": max_hold}  # type: ignore[typeddict-item]  # by click
    if listen:
        usage_error_if(bool(command), "--listen and CMD exclude each other: who listens does not stand for election")
        print_terms(console, name, options, lasting)
        return exit_codes.OK
    usage_error_if(lasting is not None, "--for is for --listen")
    usage_error_if(not command, "nothing to run: give CMD after NAME, or --listen")
    usage_error_if(command[0].startswith("-"), f"CMD cannot begin with a dash: {command[0]}. Is it an option misspelt?")
    if options.get("purpose") is None and is_label(os.path.basename(command[0])):
        options["purpose"] = os.path.basename(command[0])
    run_options = RunOptions(given["ttl"], max_hold, "term", kill_after)
    return run_leader(console, name, list(command), options, run_options)


def run_leader(console: Console, name: str, argv: list[str], options: LockArguments, run_options: RunOptions) -> int:
    """Term after term, until CMD ends by itself."""

    def lock(client: Client) -> Lock:
        return client.election(name, **options).lead()

    with console.client(ttl=run_options.ttl) as client:
        lock(client)
        client.ping()  # what cannot work at all is said at once
    tries = count(1)
    while True:
        _wait_single_threaded()
        raise_on_signals()  # while CMD runs, signals are its own
        result = RunResult(console.namespace, name, argv, None)
        try:
            RunJob(console, name, argv, lock, run_options, result, exit_codes.BUSY).run()
        except Unavailable as unavailable:
            pause = timing.backoff(next(tries), 0.5, _MAX_PAUSE, 1.0)
            console.say(f"{unavailable}; standing for election again in {pause:.1f} s", error=True)
            time.sleep(pause)
            continue
        if result.outcome != "lost":
            return result.exit_code
        if result.end_signal is not None:
            return exit_codes.SIGNALLED + result.end_signal
        console.say(f"{name} is lost; standing for election again")
        tries = count(1)


def _wait_single_threaded() -> None:
    """The next child is forked by a process with one thread: those of the last client end as soon as they can."""
    deadline = time.monotonic() + 1.0
    while len(sys._current_frames()) > 1 and time.monotonic() < deadline:
        time.sleep(0.005)


def print_terms(console: Console, name: str, options: LockArguments, lasting: float | None) -> None:
    with console.client() as client:
        for term in client.election(name, **options).observe(seconds=lasting):
            print_term(console, term)


def print_term(console: Console, term: Term) -> None:
    at = datetime.now(UTC)
    if console.json:
        console.put_json(
            {
                "at": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
                "namespace": console.namespace,
                "name": term.name,
                "token": term.token,
                "holder": term.holder.label,
                "host": term.holder.host or None,
                "pid": term.holder.pid or None,
                "purpose": term.holder.purpose or None,
                "age": render.rounded(term.age),
                "missed": term.missed,
            }
        )
        return
    clock = at.astimezone().strftime("%H:%M:%S")
    gap = "  (terms may have been missed before it)" if term.missed else ""
    console.put(f"{clock}  {make_printable(term.name)}  token {term.token}  {make_printable(term.holder.label)}{gap}")
