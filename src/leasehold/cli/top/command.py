"""`leasehold top`: the command, its loop and its keys."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from typing import Final

import click

from leasehold.cli import exit_codes, render
from leasehold.cli.console import Console, is_terminal, pass_console, use_color
from leasehold.cli.help import command
from leasehold.cli.options import checked_prefix, live_names, positive_seconds_option
from leasehold.cli.top.screen import Screen, can_show
from leasehold.cli.top.source import Source
from leasehold.cli.top.view import MARKS, Style, View, rows_of
from leasehold.engines.probe import Health
from leasehold.telemetry import EngineHealth

EXAMPLES = """
leasehold top                              all names of the namespace
leasehold top orders/                      only names that begin with orders/
leasehold -u http://locks:7420 top         through a server, with rates and latencies
leasehold top --once                       one table, for a script or an e-mail
"""

_CLOCK_SECONDS: Final = 0.5  # a frame at least this often: times change between two answers of the engine
_COLUMNS: Final = ("NAME", "STATE", "HOLDER", "TOKEN", "HELD", "LEFT", "QUEUE", "OLDEST WAIT")


@command(
    "top",
    EXAMPLES,
    exit_codes.UNREACHABLE,
    exit_codes.CONFIG,
    exit_codes.SIGNALLED,
    short_help="Show locks, holders and queues in full-screen mode.",
)
@click.argument("prefix", type=checked_prefix, default="", shell_complete=live_names)
@click.option("--once", is_flag=True, help="Print one table and exit, as if stdout were not a terminal.")
@positive_seconds_option("--interval", default=0.5, show_default=True, help="Ask the engine every SECS.")
@pass_console
def top(console: Console, prefix: str, once: bool, interval: float) -> None:
    """Show names, who holds them and who waits, kept up to date.

    Shows the names that begin with PREFIX; by default all names of the namespace. Works with any engine; a lock server
    also reports how many acquires per second it serves, how long they take, and how many leases were lost.

    Keys: up and down select a name, enter shows its holders and its queue, s changes the order, / filters, b shows
    only names with waiters, d shows deadlocks, p pauses, ? shows all keys and what the states mean, q quits.

    AT RISK means that the lease was not renewed in time: less than a third of its life is left. The bar LEFT compares
    the time left with the longest that was seen. This command never changes a lock.

    With `--once`, or if stdout is not a terminal: one table. With `-o json`: the array of `leasehold ls`.
    """
    with console.client() as client, closing(Source(console, client, prefix)) as source:
        if once or console.json or not is_terminal(sys.stdin, sys.stdout):
            _print(console, source, prefix)
            return
        title = "  ".join(text for text in (source.engine, console.namespace, prefix) if text)
        view = View(title, Style(use_color() is not False, can_show(MARKS)))
        screen = Screen()
        with closing(EngineHealth(console.url)) as health, _quiet_logs(), screen.open():
            source.start(interval, screen.wake)
            _run(screen, source, view, health)


def _run(screen: Screen, source: Source, view: View, health: EngineHealth) -> None:
    snapshot, now, before = source.snapshot, time.monotonic(), None
    while not view.quits:
        if not view.paused:
            snapshot, now = source.snapshot, time.monotonic()
        clock = datetime.now().strftime("%H:%M:%S")
        lines = view.frame(snapshot, screen.size(), now, clock, _members(health.health))
        if lines != before:
            screen.draw(lines)
            before = lines
        try:
            keys = screen.wait(_CLOCK_SECONDS)
        except EOFError:
            return
        for key in keys:
            view.on_key(key)


def _members(health: Health | None) -> str:
    if health is None:
        return ""
    if health.voting is not None and health.voting > 1:
        return f"{health.reachable}/{health.voting} members"
    up = sum(member.up for member in health.members)
    return f"{up}/{len(health.members)} servers" if len(health.members) > 1 else ""


@contextmanager
def _quiet_logs() -> Iterator[None]:
    """Log lines would be drawn over the screen, which shows what matters of them."""
    logger = logging.getLogger("leasehold")
    before = logger.handlers[:]
    logger.handlers[:] = [logging.NullHandler()]
    try:
        yield
    finally:
        logger.handlers[:] = before


def _print(console: Console, source: Source, prefix: str) -> None:
    snapshot = source.read()
    if console.json:
        console.put_json([render.holding_as_json(holding) for holding in snapshot.holdings])
        return
    rows = rows_of(snapshot, snapshot.at)
    if not rows:
        console.say(f"no holders or waiters{f' of names that begin with {prefix}' if prefix else ''}")
        return
    rows.sort(key=lambda row: (-len(row.queue), row.name))
    shown = [
        (
            row.name,
            row.state,
            row.holder or "-",
            str(row.token or "-"),
            "-" if row.held is None else render.duration(row.held),
            "-" if row.left is None else render.duration(row.left),
            str(len(row.queue)),
            "-" if row.oldest_wait is None else render.duration(row.oldest_wait),
        )
        for row in rows
    ]
    colours = [render.STATE_COLOURS[row.state] for row in rows]
    for line in render.table(_COLUMNS, shown, 1, colours):
        console.put(line)
