"""The program: global options, commands, and the one place that turns an error into a message and an exit code."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Final

import click

from leasehold import __version__
from leasehold.cli import exit_codes, render
from leasehold.cli.console import discard_stdout, say, write_stderr
from leasehold.cli.help import WIDTH, Group
from leasehold.cli.run.signals import Interrupted, raise_on_signals
from leasehold.errors import LeaseholdError, NotAcquired

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


def start(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        raise_on_signals()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # a name may have characters the locale lacks
        code = leasehold.main(arguments, prog_name="leasehold", standalone_mode=False)
        return code if isinstance(code, int) else exit_codes.OK
    except click.UsageError as bad:
        _explain_usage(bad)
        return exit_codes.USAGE
    except click.ClickException as bad:
        say(bad.format_message())
        return exit_codes.USAGE
    except NotAcquired as busy:
        say(render.busy_text(busy))
        return exit_codes.BUSY
    except LeaseholdError as error:
        _print_traceback()
        say(str(error))
        return exit_codes.code_for(error)
    except Interrupted as interrupted:
        return exit_codes.SIGNALLED + interrupted.signum
    except (KeyboardInterrupt, click.Abort):
        return exit_codes.SIGNALLED + signal.SIGINT
    except PermissionError as denied:
        _print_traceback()
        say(f"not permitted: {denied}")
        return exit_codes.NOT_PERMITTED
    except OSError as error:
        return _explain_os_error(error)
    except Exception as bug:
        return _report_bug(bug)


def _explain_os_error(error: OSError) -> int:
    """What the system refused. Engines map their own errors (E9) and errors of files name the file, so what is left is
    stdout, or a working directory that is gone."""
    if not isinstance(error, FileNotFoundError) and error.filename is None:
        _print_traceback()
        discard_stdout()
        say(f"the output could not be written to stdout: {error.strerror or error}")
        return exit_codes.OUTPUT
    try:
        os.getcwd()
    except FileNotFoundError:
        say("the working directory has been deleted: change to one that exists, or pass absolute paths")
        return exit_codes.CONFIG
    return _report_bug(error)


def _report_bug(bug: Exception) -> int:
    if not _print_traceback():
        say(f"bug in leasehold: {type(bug).__name__}: {bug}; run with -vv for a traceback, and please report it")
    return 70  # EX_SOFTWARE: a bug, so it has no documented exit code


def _explain_usage(bad: click.UsageError) -> None:
    if isinstance(bad, click.exceptions.NoArgsIsHelpError):
        write_stderr(bad.format_message())
        return
    text = " ".join(bad.format_message().split())  # click lists choices with line breaks and tabs
    if len(text) > _MAX_USAGE_TEXT:  # click repeats the value that it refuses, such as a whole file in a variable
        text = f"{text[: _MAX_USAGE_TEXT // 2]} ... {text[-_MAX_USAGE_TEXT // 2 :]}"
    say(text)
    if bad.ctx is not None:
        write_stderr(bad.ctx.get_usage())
        write_stderr(f"Try '{bad.ctx.command_path} --help'.")


def _print_traceback() -> bool:
    """Print the traceback if `-vv` was given. False: it was not, and nothing was printed."""
    if logging.getLogger("leasehold").level != logging.DEBUG:
        return False
    write_stderr(traceback.format_exc().rstrip("\n"))
    return True
