"""The one place that runs a command, and turns an error into a message and an exit code."""

from __future__ import annotations

import errno
import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from leasehold.cli import exit_codes, quick, render
from leasehold.cli.console import discard_stdout, say, write_stderr
from leasehold.cli.run.signals import Interrupted, held_back, raise_on_signals
from leasehold.core.texts import without_credentials
from leasehold.errors import LeaseholdError, NotAcquired

_STDERR: Final = 2
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def start(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    try:
        _keep_standard_descriptors()
        raise_on_signals()
        return _run(sys.argv[1:] if arguments is None else list(arguments))
    except Interrupted as interrupted:  # also one that comes while an error is explained
        return exit_codes.SIGNALLED + interrupted.signum
    except KeyboardInterrupt:
        return exit_codes.SIGNALLED + signal.SIGINT


def _keep_standard_descriptors() -> None:
    """Open what the caller has closed of 0 to 2, for this process and not for CMD. A file that got such a descriptor,
    as the audit file did, would get what a library prints to stderr."""
    with suppress(OSError):
        while (fd := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
            pass
        os.close(fd)


def _run(arguments: Sequence[str]) -> int:
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # a name may have characters the locale lacks
        with held_back():
            run = quick.understood(arguments)
        if run is not None:
            return run()
        with held_back():
            from leasehold.cli.program import leasehold  # and with it click

        code = leasehold.main(arguments, prog_name="leasehold", standalone_mode=False)
        return code if isinstance(code, int) else exit_codes.OK
    except NotAcquired as busy:
        say(render.busy_text(busy))
        return exit_codes.BUSY
    except LeaseholdError as error:
        _print_traceback()
        say(str(error))
        return exit_codes.code_for(error)
    except PermissionError as denied:
        _print_traceback()
        say(f"not permitted: {denied}")
        return exit_codes.NOT_PERMITTED
    except OSError as error:
        return _explain_os_error(error)
    except Exception as error:
        from leasehold.cli.program import explain

        code = explain(error)
        return _report_bug(error) if code is None else code


def _explain_os_error(error: OSError) -> int:
    """What the system refused. Engines map their own errors (E9) and errors of files name the file, so what is left is
    a limit of this process, stdout, or a working directory that is gone."""
    # EAGAIN comes from fork, or, with `characters_written`, from a stdout that must not block.
    if error.errno in _EXHAUSTED or (error.errno == errno.EAGAIN and not hasattr(error, "characters_written")):
        _print_traceback()
        say(f"the system has no process, memory or open file left for this command: {error.strerror}; see `ulimit -a`")
        return exit_codes.UNREACHABLE
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


def _print_traceback() -> bool:
    """Print the traceback if `-vv` was given. False: it was not, and nothing was printed."""
    if logging.getLogger("leasehold").level != logging.DEBUG:
        return False
    write_stderr(without_credentials(traceback.format_exc().rstrip("\n")))
    return True
