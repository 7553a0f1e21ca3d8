"""The command `leasehold run` for click: its help, and how it splits its own arguments from those of CMD."""

from __future__ import annotations

from typing import Any

import click

from leasehold.cli import exit_codes
from leasehold.cli.console import Console, pass_console
from leasehold.cli.help import Command
from leasehold.cli.options import name_argument
from leasehold.cli.run.job import RUN_OPTIONS, run_job

EXAMPLES = """
leasehold run nightly-report -- ./report.sh       wait for the lock, then run
leasehold run -n backup -- ./backup.sh            exit 75 at once if it is already running
leasehold run --skip-ok -n hourly -- ./job        exit 0 instead, for cron
leasehold run -w 60 migrate -- alembic upgrade head
leasehold run --slots 3 encode -- ffmpeg ...      up to three at once
leasehold run deploy -c 'make && make install'    through /bin/sh
leasehold run j -- sh -c 'psql -v token=$LEASEHOLD_TOKEN -f step.sql'
"""

RUN_CODES = (
    exit_codes.UNREACHABLE,
    exit_codes.BUSY,
    exit_codes.NOT_PERMITTED,
    exit_codes.CONFIG,
    exit_codes.LOST,
    exit_codes.CANNOT_RUN,
    exit_codes.NOT_FOUND,
    exit_codes.SIGNALLED,
)


class RunCommand(Command):
    """Options may come before or after NAME. Everything from CMD on belongs to CMD, with or without `--` before it."""

    other_codes = (("other", "the exit code of CMD"),)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own_args, command = self._split_args(args)
        # Without CMD, no `--`: an option that lacks its value would take `--` as the value.
        return super().parse_args(ctx, [*own_args, "--", *command] if command else own_args)

    def _split_args(self, args: list[str]) -> tuple[list[str], list[str]]:
        options_with_value = {
            name
            for param in self.params
            if isinstance(param, click.Option) and not param.is_flag and not param.count
            for name in param.opts
        }
        index, positionals = 0, 0
        while index < len(args):
            arg = args[index]
            if arg == "--":
                return args[:index], args[index + 1 :]
            if arg.startswith("--"):
                index += 1 if "=" in arg or arg not in options_with_value else 2
            elif arg.startswith("-") and len(arg) > 1:
                value_letter = next(
                    (
                        letter_index
                        for letter_index, letter in enumerate(arg[1:], 1)
                        if f"-{letter}" in options_with_value
                    ),
                    None,
                )
                index += 2 if value_letter == len(arg) - 1 else 1  # `-w 5` is two words; `-w5` and `-nx` are one
            else:
                positionals += 1
                if positionals == 2:
                    return args[:index], args[index:]
                index += 1
        return args, []


@click.command(
    "run",
    cls=RunCommand,
    examples=EXAMPLES,
    codes=RUN_CODES,
    prints=False,
    options_metavar="[OPTIONS]",
)
@name_argument
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[--] CMD [ARG]...")
@RUN_OPTIONS
@pass_console
def run(console: Console, /, **given: Any) -> int:
    """Hold NAME while CMD runs.

    Acquires NAME, waiting in its queue if it is busy, and runs CMD without a shell. CMD gets stdin, the terminal and
    signals, and the exit code is that of CMD. `leasehold run` renews the lease while CMD runs, and releases it when CMD
    ends. The lock does not cover background processes that CMD leaves behind.

    The environment of CMD contains LEASEHOLD_LOCK, LEASEHOLD_TOKEN, LEASEHOLD_HOLDER, LEASEHOLD_TTL and
    LEASEHOLD_HELD=1; with --slots also LEASEHOLD_SLOT, with -s also LEASEHOLD_SHARED=1. Pass the token to every
    resource that CMD writes to: a resource that refuses older tokens is safe even from a holder that does not know that
    its lease is lost.

    CMD uses the same engine: `leasehold run` passes -u and --namespace on as LEASEHOLD_URL and LEASEHOLD_NAMESPACE. It
    passes no secrets on: it removes LEASEHOLD_LEASE and LEASEHOLD_API_KEY, and if the URL has a password, CMD gets an
    empty LEASEHOLD_URL, so that a `leasehold` in CMD fails instead of using another engine. If CMD needs that URL or
    key, pass it in a variable with another name.

    SIGTERM, SIGINT, SIGHUP and SIGQUIT go to CMD and its process group. `leasehold run` then waits until CMD has ended,
    however long that takes, releases the lease and exits with the exit code of CMD. If the engine does not answer,
    `leasehold run` exits two seconds after the end of CMD, and the lease expires by itself. A signal that comes while
    `leasehold run` still waits for NAME makes it leave the queue and exit with 128+n.

    If the lease cannot be renewed, CMD and its process group get SIGTERM shortly before the lease expires, and SIGKILL
    when it does. With --strict they get SIGTERM as soon as one renewal has failed or is overdue, and SIGKILL
    --kill-after seconds later. If the engine reports that the lease is gone, they get SIGTERM and SIGKILL at once. In
    all cases the exit code is 79. It is also 79 if CMD succeeded but the release shows that the lease was already lost.
    If `leasehold run` and CMD are paused together for longer than the lease lasts, CMD is killed as soon as they
    resume. If only `leasehold run` is stopped, it cannot stop CMD: then only tokens protect the resource.
    """
    return run_job(console, **given)
