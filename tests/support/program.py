"""Runs `leasehold ...` as a shell would, in a process of its own, but forked from one that has imported the package:
starting an interpreter takes longer than most commands.

The first call starts that process, the server. For each command the server forks a waiter, which forks the command and
reports its exit status. The command ends as any Python program does, with its exit handlers.
"""

from __future__ import annotations

import atexit
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
from pathlib import Path
from tempfile import TemporaryFile

from tests.support.paths import ROOT

PROGRAM = [sys.executable, "-m", "leasehold"]
_MAX_REQUEST = 1 << 17  # bytes


def run_program(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], stdin: str = "", seconds: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` does with captured output."""
    read_at_start = {key: value for key, value in environment.items() if key.startswith(("PYTHON", "LC_", "LANG"))}
    request = json.dumps([list(arguments), str(folder), dict(environment)]).encode()
    status, status_of_waiter = socket.socketpair()
    with TemporaryFile() as given, TemporaryFile() as out, TemporaryFile() as err, status:
        given.write(stdin.encode())
        given.seek(0)
        files = [given.fileno(), out.fileno(), err.fileno(), status_of_waiter.fileno()]
        socket.send_fds(_server(json.dumps(read_at_start, sort_keys=True)), [request], files)
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
    for package in ("leasehold.cli", "leasehold.engines.sqlite"):
        for module in pkgutil.walk_packages(import_module(package).__path__, f"{package}."):
            with suppress(ImportError):  # of an extra that is not installed
                import_module(module.name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # waiters are not waited for
    while True:
        request, files, *_ = socket.recv_fds(requests, _MAX_REQUEST, 4)
        if not request:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            _run_and_report(files.pop())
            break
        for file in files:
            os.close(file)
    arguments, folder, environment = json.loads(request)
    sys.argv = ["leasehold", *arguments]
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)


def _run_and_report(status: int) -> None:
    """Returns in a forked process; this one waits for it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(status)
        return
    os.write(status, f"{pid}\n".encode())
    os.write(status, f"{os.waitpid(pid, 0)[1]}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
    from leasehold.cli import main

    main()
