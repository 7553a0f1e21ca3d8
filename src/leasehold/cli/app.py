"""The program: its global options, its commands, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence

import click

from leasehold import __version__
from leasehold.cli import exits, show
from leasehold.cli.acquire import acquire
from leasehold.cli.breaking import break_
from leasehold.cli.completion import completion
from leasehold.cli.console import Console, Output, coloured, prepare_logs, say
from leasehold.cli.get import get
from leasehold.cli.ls import ls
from leasehold.cli.manual import WIDTH, Group
from leasehold.cli.release import release
from leasehold.cli.renew import renew
from leasehold.cli.run import run
from leasehold.cli.signals import Interrupted, interruptible
from leasehold.cli.watch import watch
from leasehold.config import URL_VARIABLE, ClientOptions
from leasehold.errors import ConfigError, LeaseholdError, NotAcquired

EXAMPLES = """
leasehold run nightly-report -- ./report.sh     one at a time; others stand in line
leasehold run -n backup -- ./backup.sh          or exit 75 at once if it is running already
leasehold ls                                    who holds what, who waits
leasehold -u redis://cache run j -- make        the same between machines
"""


@click.group(
    cls=Group,
    examples=EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDTH, "show_default": False},
)
@click.option(
    "-u",
    "--url",
    envvar=URL_VARIABLE,
    show_envvar=True,
    metavar="URL",
    help="The engine that decides who holds a name. Default: SQLite in your own state directory, which excludes the "
    "processes of one user on one machine; two users do not exclude each other there.",
)
@click.option(
    "--namespace",
    envvar="LEASEHOLD_NAMESPACE",
    show_envvar=True,
    default="",
    metavar="TEXT",
    help="Keeps applications apart: the same name in two namespaces is two locks.",
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json"]),
    envvar="LEASEHOLD_OUTPUT",
    show_envvar=True,
    default="table",
    help="How data looks on stdout: a table for people (the default), or JSON for programs.",
)
@click.option("-q", "--quiet", is_flag=True, help="Say nothing on stderr but errors; that a name is busy is none.")
@click.option("-v", "--verbose", count=True, help="Say more on stderr; -vv shows tracebacks as well.")
@click.version_option(__version__, "-V", "--version", prog_name="leasehold", message="%(prog)s %(version)s")
@click.pass_context
def leasehold(ctx: click.Context, url: str | None, namespace: str, output: Output, quiet: bool, verbose: int) -> None:
    """Distributed locks for the shell: leases that end by themselves, and tokens that only rise.

    Global options stand before the command: `leasehold -o json ls`. `leasehold COMMAND --help` is the manual of a
    command.

    Colours are left out when stdout is no terminal, or when NO_COLOR is set. [env var: NO_COLOR]
    """
    try:
        ClientOptions(namespace=namespace)
    except ConfigError as bad:
        raise click.BadParameter(str(bad), ctx, param_hint="--namespace") from None
    ctx.color = coloured()
    prepare_logs(quiet, verbose)
    ctx.obj = Console(url or None, namespace, output, quiet, verbose)


for command in (run, ls, get, watch, break_, acquire, renew, release, completion):
    leasehold.add_command(command)


def start(arguments: Sequence[str] | None = None) -> int:
    """Run the program and give its exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        interruptible()
        code = leasehold.main(arguments, prog_name="leasehold", standalone_mode=False)
        return code if isinstance(code, int) else exits.OK
    except click.UsageError as bad:
        _explain_usage(bad)
        return exits.USAGE
    except click.ClickException as bad:
        say(bad.format_message())
        return exits.USAGE
    except NotAcquired as busy:
        say(show.busy_text(busy))
        return exits.BUSY
    except LeaseholdError as error:
        _trace()
        say(str(error))
        return exits.of(error)
    except Interrupted as interrupted:
        return exits.SIGNALLED + interrupted.signum
    except (KeyboardInterrupt, click.Abort):
        return exits.SIGNALLED + signal.SIGINT
    except BrokenPipeError:  # `| head`: whoever read has seen enough, and the exit must not try to flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exits.SIGNALLED + signal.SIGPIPE
    except PermissionError as denied:
        _trace()
        say(f"not permitted: {denied}")
        return exits.NOT_PERMITTED
    except Exception as bug:
        if not _trace():
            say(f"this is a fault in leasehold: {type(bug).__name__}: {bug}; -vv shows where. Please report it")
        return 70  # EX_SOFTWARE: no promise speaks of it


def _explain_usage(bad: click.UsageError) -> None:
    say(bad.format_message())
    if bad.ctx is not None:
        click.echo(bad.ctx.get_usage(), err=True)
        click.echo(f"Try '{bad.ctx.command_path} --help'.", err=True)


def _trace() -> bool:
    """Show where it happened, if `-vv` asked for everything."""
    if logging.getLogger("leasehold").level != logging.DEBUG:
        return False
    traceback.print_exc()
    return True
