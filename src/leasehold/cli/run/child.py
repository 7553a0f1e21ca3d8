"""The process that runs CMD: forked before there is any thread, started once the lease is granted.

Forking first keeps the rest simple. The child asks the kernel to kill it when its parent dies, moves to its own process
group and then waits on a pipe, all in a copy of a process that has one thread and no secret yet. After the grant the
parent sends the environment, and the child becomes CMD. If the lease is never granted, the parent closes the pipe, and
the child exits.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, NoReturn

from leasehold.cli.run.orphan_killer import OrphanKiller
from leasehold.cli.run.parent_death import die_with_parent
from leasehold.cli.run.signals import TERMINATING, held_back

_NEVER_STARTED: Final = 0


class CannotRun(Exception):
    """CMD could not be executed."""

    def __init__(self, program: str, number: int) -> None:
        self.program, self.number = program, number
        super().__init__(f"{program}: {os.strerror(number)}")

    @property
    def missing(self) -> bool:
        return self.number in (errno.ENOENT, errno.ENOTDIR)


class Child:
    """CMD, and everything else in its process group."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        self.status: int | None = None  # as `os.waitpid` returned it; None while it runs
        go_reader, self._go_writer = os.pipe()
        self._failure_reader, failure_writer = os.pipe()
        parent = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # None if the caller closed it: `>&-`
                stream.flush()
        with held_back() as signal_mask:
            self.pid = os.fork()
            if self.pid == 0:
                os.close(self._go_writer)
                os.close(self._failure_reader)
                _run_command(self.command, parent, go_reader, failure_writer, signal_mask)
            os.close(go_reader)
            os.close(failure_writer)
            with suppress(OSError):  # parent and child both do this, so that it is done before either goes on
                os.setpgid(self.pid, self.pid)
            self._orphan_killer = OrphanKiller(self.pid)

    def start(self, environment: Mapping[str, str | None]) -> None:
        """Become CMD, with these variables set (None: taken out). Raises `CannotRun`."""
        with suppress(BrokenPipeError):  # it was killed while it waited: `poll` finds out how
            os.write(self._go_writer, json.dumps(environment).encode())
        os.close(self._go_writer)
        self._go_writer = -1
        with os.fdopen(self._failure_reader, "rb") as pipe:
            report = pipe.read()  # ends when CMD runs: exec closes the other end
        self._failure_reader = -1
        if report:
            self._reap()
            raise CannotRun(self.command[0], int(report))

    def keep_open(self, descriptor: int, ttl: float) -> None:
        """If this process dies, keep a copy of the descriptor open until CMD and its group are gone."""
        self._orphan_killer.keep_open(descriptor, ttl)

    def abandon(self) -> None:
        """End a child that was never started, and dismiss its orphan killer."""
        if self._go_writer >= 0:
            os.close(self._go_writer)
            os.close(self._failure_reader)
            self._go_writer = self._failure_reader = -1
            self._reap()
        self._orphan_killer.dismiss()

    # ------------------------------------------------------------ watching

    def poll(self) -> int | None:
        """The signal that stopped it since the last call, or None. Sets `status` once it has ended."""
        while self.status is None:
            found, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
            if found == 0:
                return None
            if os.WIFSTOPPED(status):
                return os.WSTOPSIG(status)
            self.status = status
        return None

    @property
    def ended(self) -> bool:
        return self.status is not None

    @property
    def exit_code(self) -> int:
        """As a shell reports it: its own code, or 128 plus the signal that ended it."""
        assert self.status is not None  # noqa: S101  # for the type checker
        code = os.waitstatus_to_exitcode(self.status)
        return code if code >= 0 else 128 - code

    def signal(self, signum: int) -> None:
        """Signal CMD only."""
        if not self.ended:  # once reaped, its pid may belong to another process
            with suppress(PermissionError):  # CMD runs as another user, e.g. under sudo: it cannot be signalled
                os.kill(self.pid, signum)

    def signal_group(self, signum: int) -> bool:
        """Signal every process of its group. False: the group is empty."""
        try:
            os.killpg(self.pid, signum)
        except ProcessLookupError:
            return False
        except PermissionError:  # the rest runs as another user, or (macOS) is dead but not yet reaped
            return not self.ended
        return True

    def _reap(self) -> None:
        _, self.status = os.waitpid(self.pid, 0)


def _run_command(
    command: list[str], parent: int, go_reader: int, failure_writer: int, signal_mask: set[int | signal.Signals]
) -> NoReturn:
    """In the child: wait for the environment, then exec CMD. Whatever happens, never return into the parent's code."""
    try:
        os.setpgid(0, 0)
        die_with_parent(parent)
        for signum in TERMINATING:  # drop our handlers, keep `nohup`
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
        message = b""
        while chunk := os.read(go_reader, 65536):
            message += chunk
        if not message:
            os._exit(_NEVER_STARTED)
        environment = dict(os.environ)
        for name, value in json.loads(message).items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = value
        for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and exec would pass that on to CMD
            signal.signal(signum, signal.SIG_DFL)
        if not command[0]:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))  # as shells report an empty command
        os.execvpe(command[0], command, environment)  # noqa: S606  # without a shell, as documented
    except OSError as error:
        os.write(failure_writer, str(error.errno or errno.EIO).encode())
    except BaseException:  # one of our signal handlers raised, or a bug: report that CMD does not run
        os.write(failure_writer, str(errno.EINTR).encode())
    finally:
        os._exit(127)
