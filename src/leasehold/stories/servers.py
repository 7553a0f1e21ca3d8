"""Servers of a story's own: the Redis that is installed here, started on loopback and gone with the story."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from leasehold.blocking import Client
from leasehold.errors import ConfigError
from leasehold.stories.stage import Actor, Stage, Strayed

if TYPE_CHECKING:
    from leasehold.stories.actor import Part

_PROGRAMS: Final = ("redis-server", "valkey-server")
_PATIENCE: Final = 30.0
_POLL: Final = 0.02
_PLAIN: Final = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0")


def server(part: Part) -> None:
    """A role: it becomes the server, and stays tied to the story."""
    os.execv(part.program, [part.program, *part.words])  # noqa: S606  # without a shell


def program() -> str:
    """The server that is installed; a ConfigError that says how to get what is missing."""
    Client("redis://127.0.0.1").close()  # asks nobody: it says which package the engine needs, if that is not there
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"])
    for name in _PROGRAMS:
        if found := shutil.which(name, path=path):
            return found
    raise ConfigError(
        "this story needs a Redis server of its own, and redis-server is not installed: apt-get install redis-server, "
        "dnf install redis, or brew install redis"
    )


class Redis:
    """One server; `beside`: as the replica of that one."""

    def __init__(self, stage: Stage, who: str, beside: Redis | None = None) -> None:
        self.port = _free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        words = ["--port", str(self.port), *_PLAIN, "--dir", stage.folder, "--logfile", stage.path(f"{who}.log")]
        if beside is not None:
            words += ["--replicaof", "127.0.0.1", str(beside.port)]
        self._process: Actor = stage.start("server", who, program=program(), words=words)
        self._await(lambda: "PONG" in self.ask("PING"), "answers")
        if beside is not None:
            self._await(lambda: "state=online" in beside.ask("INFO replication"), "follows the primary")

    def ask(self, command: str) -> str:
        """What it answers, as it comes over the wire."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=_PATIENCE) as line:
            line.sendall(f"{command}\r\nQUIT\r\n".encode())
            answer = b""
            while more := line.recv(65_536):
                answer += more
        return answer.decode(errors="replace")

    def crash(self) -> None:
        self._process.crash()

    def _await(self, true: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + _PATIENCE
        while True:
            with suppress(OSError):
                if true():
                    return
            if self._process.ended is not None or time.monotonic() > end:
                raise Strayed(f"the Redis server {self._process.who} never {what}; -v shows more")
            time.sleep(_POLL)


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
