"""What every command gets: the global options, a client built from them, stdout and stderr.

Data goes to stdout and nowhere else. All messages go through `say` to stderr, so that a pipe contains only data.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Literal, NamedTuple, TextIO, TypeAlias, TypeVar

from leasehold import telemetry
from leasehold.blocking import Client
from leasehold.cli.option import Option, Options, bad_value, choice
from leasehold.cli.run.signals import Interrupted, held_back
from leasehold.config import URL_VARIABLE
from leasehold.core import timing
from leasehold.core.names import check_namespace
from leasehold.core.texts import escape, without_credentials
from leasehold.errors import ConfigError
from leasehold.events import Hook

F = TypeVar("F", bound=Callable[..., Any])

Output: TypeAlias = Literal["table", "json"]
LogFormat: TypeAlias = Literal["text", "json"]


class Console(NamedTuple):
    url: str | None = None
    namespace: str = ""
    output: Output = "table"
    quiet: bool = False
    verbosity: int = 0
    log_format: LogFormat = "text"

    @property
    def json(self) -> bool:
        return self.output == "json"

    def with_option(self, name: str, value: Any) -> Console:
        """With the value of a global option."""
        if value and name == "namespace":
            try:
                check_namespace(value)
            except ConfigError as bad:
                raise bad_value(str(bad)) from None
        if not value and not (value == "" and name == "url"):  # an empty URL is an error, not the default
            return self
        return self._replace(**{"verbosity" if name == "verbose" else name: value})

    def prepare_logs(self) -> None:
        """Print the library's log lines: warnings always, info with -v, debug with -vv. With -q, only errors. What a
        waiter waits for is info that is always printed: a silent wait looks like a hang."""
        global _json_formatter
        _json_formatter = telemetry.JSONFormatter() if self.log_format == "json" else None
        handler = _ConsoleHandler()
        if not self.verbosity:
            handler.addFilter(_not_reported_by_command)
        logger = logging.getLogger("leasehold")
        logger.handlers[:] = [handler]
        logger.propagate = False
        levels = (logging.ERROR if self.quiet else logging.WARNING, logging.INFO, logging.DEBUG)
        logger.setLevel(levels[min(self.verbosity, 2)])
        waiting = logging.NOTSET if self.quiet or self.verbosity else logging.INFO
        logging.getLogger("leasehold.waiting").setLevel(waiting)

    def client(
        self,
        *,
        ttl: float = 30.0,
        in_process: bool = False,
        on_event: Hook | None = None,
        drift: float = timing.DRIFT,
    ) -> Client:
        """The client of this command. `in_process`: allow an engine whose locks no other process sees."""
        with held_back():  # it loads the engine
            client = Client(self.url, namespace=self.namespace, ttl=ttl, on_event=on_event, drift=drift)
        if client._core.config.scheme == "memory" and not in_process:
            client.close()
            raise ConfigError(
                "memory:// locks exist in one process only, so a command would exclude nothing: "
                "use sqlite://, the default, or the URL of a server"
            )
        return client

    def say(self, text: str, *, error: bool = False, detail: bool = False) -> None:
        """Print a message to stderr. `error`: print it even with -q. `detail`: only with -v."""
        if (self.quiet and not error) or (detail and not self.verbosity):
            return
        say(text)

    def put(self, text: str) -> None:
        """Print a line of data to stdout."""
        from click import echo  # only here: `leasehold run` does without

        try:
            echo(text)  # which flushes
        except BrokenPipeError:  # `| head` has ended
            discard_stdout()
            raise Interrupted(signal.SIGPIPE) from None

    def put_json(self, value: Any) -> None:
        """One JSON document on one line, so that a stream of them is JSON lines."""
        self.put(json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False))


def discard_stdout() -> None:
    """Drop what could not be written: the interpreter would try again when it exits, and change the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_terminal(*streams: TextIO | None) -> bool:
    """Of `sys.stdin`, `sys.stdout` and `sys.stderr`. They are None if the caller has closed them: `<&-`."""
    return all(stream is not None and stream.isatty() for stream in streams)


def terminal_width(stream: TextIO | None) -> int | None:
    """In columns. None: the stream is not a terminal."""
    from shutil import get_terminal_size  # only here: `leasehold run` does without

    return get_terminal_size().columns if is_terminal(stream) else None


_json_formatter: logging.Formatter | None = None  # of --log-format json


def say(text: str, level: int = logging.WARNING) -> None:
    text = without_credentials(text)
    if _json_formatter is None:
        write_stderr(f"leasehold: {escape(text)}")
    else:
        write_stderr(_json_formatter.format(logging.LogRecord("leasehold.cli", level, "", 0, "%s", (text,), None)))


def write_stderr(line: str) -> None:
    """Write to stderr if possible. A closed pipe or a full disk must not change what the program does next, in
    particular not between SIGTERM and SIGKILL.
    """
    try:
        if not line.isascii():
            from click import echo  # which finds an encoding that has these characters

            echo(line, err=True)
        elif sys.stderr is not None:  # None if the caller closed it: `2>&-`
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
    except OSError:  # the rest of the buffer would fail again at exit, and change the exit code
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


class _ConsoleHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if _json_formatter is None:
            say(record.getMessage())  # no traceback: `-vv` prints the one of the command itself
        else:
            record.msg, record.args = without_credentials(record.getMessage()), ()
            write_stderr(_json_formatter.format(record))


def _not_reported_by_command(record: logging.LogRecord) -> bool:
    """Drop two lines of `ClientCore`: the loss of a lease, which the command reports itself with what it did about it,
    and the first retry of a release: if the retries fail, too, the next line says so."""
    return getattr(record, "leasehold", {}).get("event") not in ("lost", "release_pending")


def use_color() -> bool | None:
    """False if NO_COLOR is set and not empty (https://no-color.org). None: click decides by the stream."""
    return False if os.environ.get("NO_COLOR") else None


# -- the global options: accepted by the program and by every command, because users write them in both places

GLOBAL_OPTIONS = Options(
    (
        Option(
            "-u",
            "--url",
            envvar=URL_VARIABLE,
            metavar="URL",
            help="URL of the engine that grants the locks. Default: a SQLite file in your state directory, which is "
            "shared by your processes on this machine; other users and machines do not see its locks.",
        ),
        Option(
            "--namespace",
            envvar="LEASEHOLD_NAMESPACE",
            metavar="TEXT",
            help="Namespace to use. The same name in two namespaces is two independent locks.",
        ),
        Option(
            "-o",
            "--output",
            envvar="LEASEHOLD_OUTPUT",
            click_type=partial(choice, "table", "json"),
            help="Format of data on stdout: table (the default) or json.",
        ),
        Option(
            "--log-format",
            envvar="LEASEHOLD_LOG_FORMAT",
            click_type=partial(choice, "text", "json"),
            help="Format of messages on stderr: text (the default) or json, one object per line.",
        ),
        Option("-q", "--quiet", is_flag=True, help="Only print errors to stderr. A busy lock is not an error."),
        Option("-v", "--verbose", count=True, help="Print more to stderr; -vv also prints tracebacks."),
    )
)


def pass_console(command: F) -> F:
    """The command gets the console of its context as the first argument."""

    @wraps(command)
    def with_console(*args: Any, **kwargs: Any) -> Any:
        from click import get_current_context

        context = get_current_context()
        return context.invoke(command, context.find_object(Console), *args, **kwargs)

    return with_console  # type: ignore[return-value]
