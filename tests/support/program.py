"""Runs `leasehold ...` as a shell would, in a process of its own, but forked from one that has imported the package:
starting an interpreter takes longer than most commands.

The first call starts that process, the server. For each command the server forks a waiter, which forks the command and
reports its exit status. The command ends as any Python program does, with its exit handlers. `ForkedProgram` is one in
the background, above all `leasehold serve`.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from tempfile import TemporaryFile

from tests.support.paths import ROOT

PROGRAM = [sys.executable, "-m", "leasehold"]
_MAX_REQUEST = 1 << 17  # bytes
_MODULES_OF_UVICORN = ("uvicorn.loops.uvloop", "uvicorn.protocols.http.httptools_impl", "uvicorn.lifespan.on")
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def run_program(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], stdin: str = "", seconds: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` does with captured output."""
    status, status_of_waiter = socket.socketpair()
    with TemporaryFile() as given, TemporaryFile() as out, TemporaryFile() as err, status:
        given.write(stdin.encode())
        given.seek(0)
        files = [given.fileno(), out.fileno(), err.fileno(), status_of_waiter.fileno()]
        _send(arguments, folder, environment, files)
        status_of_waiter.close()
        status.settimeout(seconds)
        reader = status.makefile()
        try:
            pid = int(reader.readline())
            code = os.waitstatus_to_exitcode(int(reader.readline()))
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired([*PROGRAM, *arguments], seconds) from None
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(
            [*PROGRAM, *arguments], code, *(file.read().decode().replace("\r\n", "\n") for file in (out, err))
        )


class ForkedProgram:
    """What tests use of a `subprocess.Popen`; `output` is the file of its stdout and stderr. It is killed if the tests
    are."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], output: int) -> None:
        self.args = [*PROGRAM, *arguments]
        self.returncode: int | None = None
        self._status, status_of_waiter = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with open(os.devnull) as nothing, status_of_waiter:
            files = [nothing.fileno(), output, output, status_of_waiter.fileno()]
            _send(arguments, Path.cwd(), environment, files)
        self.pid = int(self._status.recv(64))

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._status.settimeout(timeout)
            try:
                status = self._status.recv(64)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0) from None
            self.returncode = os.waitstatus_to_exitcode(int(status))
            self._status.close()
        return self.returncode

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _send(arguments: Sequence[str], folder: Path, environment: Mapping[str, str], files: list[int]) -> None:
    """Files: stdin, stdout, stderr, and the one for the pid and the exit status."""
    read_at_start = {key: value for key, value in environment.items() if key.startswith(("PYTHON", "LC_", "LANG"))}
    request = json.dumps([list(arguments), str(folder), dict(environment)]).encode()
    socket.send_fds(_server(json.dumps(read_at_start, sort_keys=True)), [request], files)


@cache
def _server(read_at_start: str) -> socket.socket:
    """The requests of a server with these variables, which an interpreter reads only when it starts."""
    requests, own_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    variables: dict[str, str] = json.loads(read_at_start)
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), variables.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "tests.support.program", str(own_end.fileno())]
    process = subprocess.Popen(command, env=variables, pass_fds=[own_end.fileno()], cwd="/")
    own_end.close()

    def end() -> None:
        requests.close()
        process.wait()

    atexit.register(end)
    return requests


def serve(requests: socket.socket) -> None:
    """Returns in the processes of commands, with everything set for their `main`, and at the end of the requests."""
    _import_all("leasehold.cli", "leasehold.engines.sqlite")
    imported_server = False
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # waiters are not waited for
    while True:
        request, files, *_ = socket.recv_fds(requests, _MAX_REQUEST, 4)
        if not request:
            os._exit(0)
        arguments, folder, environment = json.loads(request)
        if "serve" in arguments and not imported_server:
            imported_server = True
            _import_all("leasehold.server", "leasehold.engines.redis", *_MODULES_OF_UVICORN)
        gc.freeze()  # so that the garbage collector of a fork does not write to, and copy, what they share
        if os.fork() == 0:
            requests.close()
            _run_and_report(files.pop())
            break
        for file in files:
            os.close(file)
    sys.argv = ["leasehold", *arguments]
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    # Made anew, because they remember whether the file can seek. The former ones stay, so that nothing is closed.
    for name, number, buffered in (("stdout", 1, os.isatty(1)), ("stderr", 2, True)):
        former = getattr(sys, name)
        binary = open(number, "wb", closefd=False)  # noqa: SIM115  # for as long as the process runs
        opened = TextIOWrapper(binary, former.encoding, former.errors, line_buffering=buffered)
        setattr(sys, name, opened)


def _import_all(*names: str) -> None:
    """Modules, and those below them."""
    for name in names:
        with suppress(ImportError):  # of an extra that is not installed
            package = import_module(name)
            for module in pkgutil.walk_packages(getattr(package, "__path__", ()), f"{name}."):
                with suppress(ImportError):
                    import_module(module.name)


def _run_and_report(status: int) -> None:
    """Returns in a forked process; this one waits for it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _end_with_parent()
    pid = os.fork()
    if pid == 0:
        _end_with_parent()
        os.close(status)
        return
    os.write(status, f"{pid}\n".encode())
    os.write(status, f"{os.waitpid(pid, 0)[1]}\n".encode())
    os._exit(0)


def _end_with_parent() -> None:
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
    from leasehold.cli import main

    main()
