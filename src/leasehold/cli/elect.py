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
from leasehold.cli import exits, show
from leasehold.cli.console import Console, pass_console, printable
from leasehold.cli.options import is_label, label, name_argument, refuse, refuse_ttl, seconds, some_seconds
from leasehold.cli.result import Result
from leasehold.cli.run import Job, RunCommand, Running
from leasehold.cli.signals import interruptible
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

_LONGEST_PAUSE = 10.0


@click.command(
    "elect",
    cls=RunCommand,
    examples=EXAMPLES,
    codes=tuple(code for code in exits.MEANING if code not in (exits.OK, exits.USAGE, exits.BUSY, exits.LOST)),
    options_metavar="[OPTIONS]",
)
@name_argument
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[--] [CMD [ARG]...]")
@click.option("--listen", is_flag=True, help="Do not stand for election: print each term as it comes.")
@click.option("--for", "lasting", type=seconds, metavar="SECS", help="With --listen: end after SECS.")
@click.option(
    "--ttl",
    type=some_seconds,
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
@click.option("--max-hold", type=some_seconds, metavar="SECS", help="The longest a term lasts; then another may lead.")
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
    refuse_ttl(given["ttl"])
    options: LockArguments = {**given, "max_hold": max_hold}  # type: ignore[typeddict-item]  # by click
    if listen:
        refuse(bool(command), "--listen and CMD exclude each other: who listens does not stand for election")
        follow(console, name, options, lasting)
        return exits.OK
    refuse(lasting is not None, "--for is for --listen")
    refuse(not command, "nothing to run: give CMD after NAME, or --listen")
    refuse(command[0].startswith("-"), f"CMD cannot begin with a dash: {command[0]}. Is it an option misspelt?")
    if options.get("purpose") is None and is_label(os.path.basename(command[0])):
        options["purpose"] = os.path.basename(command[0])
    running = Running(given["ttl"], max_hold, "term", kill_after)
    return stand(console, name, list(command), options, running)


def stand(console: Console, name: str, words: list[str], options: LockArguments, running: Running) -> int:
    """Term after term, until CMD ends by itself."""

    def lock(client: Client) -> Lock:
        return client.election(name, **options).lead()

    with console.client(ttl=running.ttl) as client:
        lock(client)
        client.ping()  # what cannot work at all is said at once
    tries = count(1)
    while True:
        _alone()
        interruptible()  # while CMD runs, signals are its own
        result = Result(console.namespace, name, words, None)
        try:
            Job(console, name, words, lock, running, result, exits.BUSY).run()
        except Unavailable as silent:
            pause = timing.backoff(next(tries), 0.5, _LONGEST_PAUSE, 1.0)
            console.say(f"{silent}; standing for election again in {pause:.1f} s", error=True)
            time.sleep(pause)
            continue
        if result.outcome != "lost":
            return result.exit_code
        if result.told_to_end is not None:
            return exits.SIGNALLED + result.told_to_end
        console.say(f"{name} is lost; standing for election again")
        tries = count(1)


def _alone() -> None:
    """The next child is forked by a process with one thread: those of the last client end as soon as they can."""
    end = time.monotonic() + 1.0
    while len(sys._current_frames()) > 1 and time.monotonic() < end:
        time.sleep(0.005)


def follow(console: Console, name: str, options: LockArguments, lasting: float | None) -> None:
    with console.client() as client:
        for term in client.election(name, **options).observe(seconds=lasting):
            put_term(console, term)


def put_term(console: Console, term: Term) -> None:
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
                "age": show.rounded(term.age),
                "missed": term.missed,
            }
        )
        return
    clock = at.astimezone().strftime("%H:%M:%S")
    gap = "  (terms may have been missed before it)" if term.missed else ""
    console.put(f"{clock}  {printable(term.name)}  token {term.token}  {printable(term.holder.label)}{gap}")
