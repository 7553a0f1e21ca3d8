"""The program for click: its commands, and what is wrong with a command line."""

from __future__ import annotations

import signal
from typing import Final

import click

from leasehold import __version__
from leasehold.cli import exit_codes
from leasehold.cli.console import say, write_stderr
from leasehold.cli.help import WIDTH, Group
from leasehold.core.texts import without_credentials

_MAX_USAGE_TEXT: Final = 600  # characters

EXAMPLES = """
leasehold run nightly-report -- ./report.sh     one run at a time; others wait in a queue
leasehold run -n backup -- ./backup.sh          exit 75 at once if it is already running
leasehold ls                                    holders and waiters
leasehold -u sqlite:///srv/locks.db ls          the same for another engine
"""

# Each is imported when it is used: a cron job that starts `run` every minute should not load the others.
COMMANDS = {
    "run": "leasehold.cli.run.command:run",
    "elect": "leasehold.cli.elect:elect",
    "ls": "leasehold.cli.ls:ls",
    "get": "leasehold.cli.get:get",
    "watch": "leasehold.cli.watch:watch",
    "top": "leasehold.cli.top.command:top",
    "stats": "leasehold.cli.stats:stats",
    "deadlocks": "leasehold.cli.deadlocks:deadlocks",
    "history": "leasehold.cli.history:history",
    "break": "leasehold.cli.break_:break_",
    "resize": "leasehold.cli.resize:resize",
    "acquire": "leasehold.cli.acquire:acquire",
    "renew": "leasehold.cli.renew:renew",
    "release": "leasehold.cli.release:release",
    "serve": "leasehold.cli.serve:serve",
    "audit": "leasehold.cli.audit:audit",
    "alerts": "leasehold.cli.alerts:alerts",
    "schema": "leasehold.cli.schema:schema",
    "rebase": "leasehold.cli.rebase:rebase",
    "doctor": "leasehold.cli.doctor.command:doctor",
    "demo": "leasehold.cli.demo.command:demo",
    "bench": "leasehold.cli.bench.command:bench",
    "advise": "leasehold.cli.advise:advise",
    "docs": "leasehold.cli.docs:docs",
    "completion": "leasehold.cli.completion:completion",
}


@click.group(
    cls=Group,
    lazy_commands=COMMANDS,
    examples=EXAMPLES,
    codes=exit_codes.MEANING,
    is_program=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDTH, "show_default": False},
)
@click.version_option(__version__, "-V", "--version", prog_name="leasehold", message="%(prog)s %(version)s")
def leasehold() -> None:
    """Distributed locks for the shell, with leases that expire and fencing tokens that only rise.

    Run `leasehold COMMAND --help` for the help of a command, `leasehold docs` for the documentation, and `leasehold
    demo zombie` to see why a lock needs a fence. You can pass the options below before or after the command. SECS is a
    number of seconds, or a duration such as 30s, 10m or 1h30m.

    Output is not coloured if stdout is not a terminal or if NO_COLOR is set. [env var: NO_COLOR]
    """


def explain(error: Exception) -> int | None:
    """Print what is wrong with the command line, and return the exit code. None: the error is none of click's."""
    if isinstance(error, click.Abort):
        return exit_codes.SIGNALLED + signal.SIGINT
    if not isinstance(error, click.ClickException):
        return None
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        write_stderr(error.format_message())
    elif isinstance(error, click.UsageError):
        # click lists choices with line breaks and tabs. Before the cut: it could leave a password without its `@`.
        text = without_credentials(" ".join(error.format_message().split()))
        if len(text) > _MAX_USAGE_TEXT:  # click repeats the value that it refuses, such as a whole file in a variable
            text = f"{text[: _MAX_USAGE_TEXT // 2]} ... {text[-_MAX_USAGE_TEXT // 2 :]}"
        say(text)
        context = error.ctx or _context_of_run()
        write_stderr(context.get_usage())
        write_stderr(f"Try '{context.command_path} --help'.")
    else:
        say(error.format_message())
    return exit_codes.USAGE


def _context_of_run() -> click.Context:
    """Of a `run` that click has not read (`quick.py`)."""
    above = click.Context(leasehold, info_name="leasehold")
    command = leasehold.get_command(above, "run")
    assert command is not None  # noqa: S101  # for the type checker
    return click.Context(command, above, info_name="run")
