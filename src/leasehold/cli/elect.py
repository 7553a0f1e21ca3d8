"""`leasehold elect`: run a command on the leader only, or print the terms of an election as they begin."""

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
from leasehold.cli.console import Console, pass_console
from leasehold.cli.options import (
    audit_options,
    check_ttl_option,
    is_label,
    label,
    name_argument,
    positive_seconds_option,
    seconds_option,
    strict_options,
    usage_error_if,
)
from leasehold.cli.run.command import RUN_CODES, RunCommand
from leasehold.cli.run.job import RunJob, RunOptions
from leasehold.cli.run.result_file import RunResult
from leasehold.cli.run.signals import raise_on_signals
from leasehold.cli.run.telemetry import RunTelemetry, telemetry_options
from leasehold.config import LockArguments
from leasehold.core import timing
from leasehold.core.texts import escape
from leasehold.errors import Unavailable
from leasehold.model import Term

EXAMPLES = """
leasehold elect scheduler -- ./scheduler          on every machine; only the leader runs it
leasehold elect --ttl 10 scheduler -- ./scheduler
leasehold elect --listen scheduler                print the current leader and each new one
leasehold -o json elect --listen scheduler | jq -r .holder
"""

_MAX_PAUSE = 10.0


@click.command(
    "elect",
    cls=RunCommand,
    examples=EXAMPLES,
    codes=[code for code in RUN_CODES if code not in (exit_codes.BUSY, exit_codes.LOST)],
    options_metavar="[OPTIONS]",
)
@name_argument
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[--] [CMD [ARG]...]")
@click.option("--listen", is_flag=True, help="Do not become a candidate; print each term as it begins.")
@seconds_option("--for", "lasting", help="With --listen: stop after SECS.")
@positive_seconds_option(
    "--ttl",
    default=30.0,
    show_default=True,
    help="Time to live: the leader's lease expires SECS after its last renewal. Use the same for all candidates.",
)
@seconds_option(
    "--delay",
    default=0.0,
    help="After a term is lost, wait SECS more before the next one begins. "
    "Use it when the resource cannot check tokens.",
)
@positive_seconds_option("--max-hold", help="Maximum length of a term; then another candidate may lead.")
@seconds_option(
    "--kill-after",
    help="Time between SIGTERM and SIGKILL when the term is lost; at most a third of --ttl. "
    "Default: 5, or a third of the granted ttl if that is shorter.",
)
@strict_options
@click.option(
    "--holder", type=label, metavar="TEXT", help="Label of the candidate, for display only. Default: host:pid."
)
@click.option("--purpose", type=label, metavar="TEXT", help="Purpose of the election, for display only.")
@audit_options
@telemetry_options
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
    drift: float,
    metrics_file: str | None,
    metrics_group: tuple[str, ...],
    otel: bool,
    audit_file: str | None,
    audit_key_file: str | None,
    **given: Any,
) -> int:
    """Run CMD while this process is the leader of NAME.

    Waits until this process is elected, then runs CMD as `leasehold run` does, with the same signals, terminal,
    environment and exit code. A term is the time for which one process leads; LEASEHOLD_TOKEN is the fencing token of
    the term. If the term is lost, this process stops CMD and becomes a candidate again. When CMD exits, by itself or
    after a signal to `leasehold elect`, this process resigns and exits with the exit code of CMD. It never resigns
    before CMD has ended.

    Exits 69 if the engine does not answer at the start; later it retries until the engine answers.

    With --listen: prints one line per term, beginning with the current one, each term once and in order. With `-o
    json`: one JSON object per term, one per line, described by `leasehold docs reference/json`.
    """
    check_ttl_option(given["ttl"])
    options: LockArguments = {**given, "max_hold": max_hold}  # type: ignore[typeddict-item]  # by click
    if listen:
        usage_error_if(bool(command), "--listen cannot be combined with CMD: it only watches the election")
        print_terms(console, name, options, lasting)
        return exit_codes.OK
    usage_error_if(lasting is not None, "--for can only be used with --listen")
    usage_error_if(not command, "nothing to run: pass CMD after NAME, or --listen")
    usage_error_if(
        command[0].startswith("-"), f"CMD cannot begin with a dash: {command[0]!r}. Is it a misspelt option?"
    )
    if options.get("purpose") is None and is_label(os.path.basename(command[0])):
        options["purpose"] = os.path.basename(command[0])
    run_options = RunOptions(given["ttl"], max_hold, "term", kill_after, drift).checked()
    telemetry = RunTelemetry(console, metrics_file, metrics_group, otel, audit_file, audit_key_file)
    return run_leader(console, name, list(command), options, run_options, telemetry)


def run_leader(
    console: Console,
    name: str,
    argv: list[str],
    options: LockArguments,
    run_options: RunOptions,
    telemetry: RunTelemetry,
) -> int:
    """Run CMD term after term, until it ends for another reason than a lost term."""

    def lock(client: Client) -> Lock:
        return client.election(name, **options).lead()

    with console.client(ttl=run_options.ttl) as client:
        lock(client)
        client.ping()  # fail now if the engine cannot be reached at all
    tries = count(1)
    while True:
        _wait_single_threaded()
        raise_on_signals()  # again: while CMD ran, signals were forwarded to it
        result = RunResult(console.namespace, name, argv, None)
        try:
            RunJob(console, name, argv, lock, run_options, result, exit_codes.BUSY, telemetry).run()
        except Unavailable as unavailable:
            pause = timing.backoff(next(tries), 0.5, _MAX_PAUSE, 1.0)
            console.say(f"{unavailable}; retrying in {pause:.1f} s", error=True)
            time.sleep(pause)
            continue
        if result.outcome != "lost" or result.child_ended_by_itself:
            return result.exit_code
        if result.end_signal is not None:
            return exit_codes.SIGNALLED + result.end_signal
        console.say(f"leadership of {name} is lost; waiting to be elected again")
        tries = count(1)


def _wait_single_threaded() -> None:
    """Wait for the threads of the last client to end, so that the next child is forked by a single-threaded process."""
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
                "at": render.utc(at),
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
    gap = "  (earlier terms may have been missed)" if term.missed else ""
    console.put(f"{clock}  {escape(term.name)}  token {term.token}  {escape(term.holder.label)}{gap}")
