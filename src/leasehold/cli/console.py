"""What every command is given: the global options, a client made from them, and the two streams.

Data goes to stdout and nowhere else. All words for people go through `say`, to stderr, so that a pipe never meets them.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import click

from leasehold.blocking import Client
from leasehold.cli.run.signals import Interrupted
from leasehold.config import URL_VARIABLE, ClientOptions
from leasehold.errors import ConfigError

Output: TypeAlias = Literal["table", "json"]


@dataclass(frozen=True, slots=True)
class Console:
    url: str | None = None
    namespace: str = ""
    output: Output = "table"
    quiet: bool = False
    verbosity: int = 0

    @property
    def json(self) -> bool:
        return self.output == "json"

    def client(self, *, holder: str | None = None, ttl: float = 30.0) -> Client:
        return Client(self.url, namespace=self.namespace, holder=holder, ttl=ttl)

    def say(self, text: str, *, error: bool = False, detail: bool = False) -> None:
        """A line for people. `error`: said even with -q. `detail`: only with -v."""
        if (self.quiet and not error) or (detail and not self.verbosity):
            return
        say(text)

    def put(self, text: str) -> None:
        """A line of data."""
        try:
            click.echo(text)  # which flushes
        except BrokenPipeError:  # `| head` has seen enough; the interpreter must not try to flush again at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise Interrupted(signal.SIGPIPE) from None

    def put_json(self, value: Any) -> None:
        """One JSON document on one line, so that a stream of them is JSON lines."""
        self.put(json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False))


def say(text: str) -> None:
    write_stderr(f"leasehold: {make_printable(text)}")


def write_stderr(line: str) -> None:
    """To stderr, if it takes it. A pipe whose reader has gone, or a full disk, must not decide what is done next: least
    of all between TERM and KILL.
    """
    try:
        click.echo(line, err=True)
    except OSError:  # what is left in the buffer would fail again at the interpreter's end, and cost the exit code
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def make_printable(text: str) -> str:
    """A name is any text, also one that would move the cursor or change the terminal's title."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape", "replace").decode() for char in text)


def prepare_logs(quiet: bool, verbosity: int) -> None:
    """The library's own words: warnings as they are, the rest with -v and -vv."""
    handler = _ConsoleHandler()
    if not verbosity:
        handler.addFilter(_not_reported_by_command)
    logger = logging.getLogger("leasehold")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel((logging.ERROR if quiet else logging.WARNING, logging.INFO, logging.DEBUG)[min(verbosity, 2)])


class _ConsoleHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())  # no traceback; `-vv` shows that of the command itself


def _not_reported_by_command(record: logging.LogRecord) -> bool:
    """The loss of a lease is the command's to tell, with what it did about it."""
    return not str(record.msg).endswith("is lost: %s")  # which the teller's thread logs, for `Desk.lost`


def use_color() -> bool | None:
    """None: as click finds the stream. https://no-color.org: any value but the empty one says no."""
    return False if os.environ.get("NO_COLOR") else None


# -- the global options: of the program, and of every command as well, because people put them there


def global_options(*, for_command: bool) -> list[click.Option]:
    """Of the program: shown, and read from the environment. Of a command: hidden, and they override the program's."""
    extra: dict[str, Any] = {"expose_value": False, "callback": _store_option}
    if for_command:
        extra["hidden"] = True

    def option(*names: str, env: str | None = None, **settings: Any) -> click.Option:
        return click.Option(names, envvar=None if for_command else env, show_envvar=True, **settings, **extra)

    return [
        option(
            "-u",
            "--url",
            env=URL_VARIABLE,
            metavar="URL",
            help="The engine that decides who holds a name. Default: SQLite in your own state directory, which "
            "excludes the processes of one user on one machine; two users do not exclude each other there.",
        ),
        option(
            "--namespace",
            env="LEASEHOLD_NAMESPACE",
            metavar="TEXT",
            help="Keeps applications apart: the same name in two namespaces is two locks.",
        ),
        option(
            "-o",
            "--output",
            env="LEASEHOLD_OUTPUT",
            type=click.Choice(["table", "json"]),
            help="How data looks on stdout: a table for people (the default), or JSON for programs.",
        ),
        option("-q", "--quiet", is_flag=True, help="Say nothing on stderr but errors; that a name is busy is none."),
        option("-v", "--verbose", count=True, help="Say more on stderr; -vv shows tracebacks as well."),
    ]


def _store_option(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Into the console of this context, which a command's context takes over from the program's."""
    console = ctx.find_object(Console) or Console()
    if value and param.name == "namespace":
        try:
            ClientOptions(namespace=value)
        except ConfigError as bad:
            raise click.BadParameter(str(bad), ctx, param) from None
    if value:
        field = "verbosity" if param.name == "verbose" else str(param.name)
        console = replace(console, **{field: value})
    ctx.obj, ctx.color = console, use_color()
    prepare_logs(console.quiet, console.verbosity)


pass_console = click.make_pass_decorator(Console)
