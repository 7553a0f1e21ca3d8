"""Redis servers for a demo: the installed redis-server, started on loopback and stopped with the demo."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from leasehold.blocking import Client
from leasehold.cli.demo.runner import DemoFailed, DemoRunner, WorkerProcess
from leasehold.errors import ConfigError

if TYPE_CHECKING:
    from leasehold.cli.demo.worker import Worker

_PROGRAMS: Final = ("redis-server", "valkey-server")
_TIMEOUT: Final = 30.0
_POLL: Final = 0.02
_OPTIONS: Final = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0")


def server(worker: Worker) -> None:
    """A role: the process becomes the server, and still dies with the demo."""
    os.execv(worker.program, [worker.program, *worker.argv])  # noqa: S606  # without a shell


def find_program() -> str:
    """The path of the installed server. Raises a ConfigError that says how to install what is missing."""
    Client("redis://127.0.0.1").close()  # connects to nothing; raises if the package of the engine is missing
    folders = [*os.get_exec_path(), "/usr/sbin", "/usr/local/sbin"]
    path = os.pathsep.join(filter(os.path.isabs, folders))  # not the working directory, where others may have put one
    for name in _PROGRAMS:
        if found := shutil.which(name, path=path):
            return found
    raise ConfigError(
        "this demo starts its own Redis servers, and redis-server is not installed: apt-get install redis-server, "
        "dnf install redis, or brew install redis"
    )


class DemoRedis:
    """One server; with `primary`, a replica of that server."""

    def __init__(self, runner: DemoRunner, who: str, primary: DemoRedis | None = None) -> None:
        self.port = _free_port()
        self._password = runner.password
        self.url = f"redis://:{self._password}@127.0.0.1:{self.port}"
        # Every user of this machine can connect, and may make an old server write files as the user of this demo. In a
        # file, because all of them can see the command line.
        config = runner.path(f"{who}.conf")
        with open(config, "w") as file:
            file.write(f"requirepass {self._password}\nmasterauth {self._password}\n")
        own = ["--dir", runner.folder, "--logfile", runner.path(f"{who}.log")]
        argv = [config, "--port", str(self.port), *_OPTIONS, *own]
        if primary is not None:
            argv += ["--replicaof", "127.0.0.1", str(primary.port)]
        self._process: WorkerProcess = runner.start("server", who, program=find_program(), argv=argv)
        self._wait_until(lambda: "PONG" in self.execute("PING"), "answered")
        if primary is not None:
            self._wait_until(lambda: "state=online" in primary.execute("INFO replication"), "followed the primary")

    def execute(self, command: str) -> str:
        """The raw replies to a command, and to signing in before it."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=_TIMEOUT) as connection:
            connection.sendall(f"AUTH {self._password}\r\n{command}\r\nQUIT\r\n".encode())
            reply = b""
            while chunk := connection.recv(65_536):
                reply += chunk
        return reply.decode(errors="replace")

    def crash(self) -> None:
        self._process.crash()

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _TIMEOUT
        while True:
            with suppress(OSError):
                if condition():
                    return
            if self._process.ended is not None or time.monotonic() > deadline:
                raise DemoFailed(f"the Redis {self._process.who} never {what}; -v shows its errors")
            time.sleep(_POLL)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
