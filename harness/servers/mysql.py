"""MariaDB as a plain process."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar, Final

import pymysql
from pymysql.constants import ER

from harness.servers.fake_clock import FakeClock
from harness.servers.folders import scratch
from harness.servers.process import Server, free_ports, program
from harness.servers.shared import shared

_LOG_SIZE: Final = "--innodb-log-file-size=16M"  # of 96, which many servers at once would keep in memory


class MariaDB(Server):
    package: ClassVar[str] = "mariadb-server"

    def __init__(self, *settings: str, folder: str | None = None, fake_clock: bool = False) -> None:
        """`settings`: options of the server, without the leading dashes."""
        super().__init__(folder or scratch(), free_ports(1)[0])
        self._clock = FakeClock(os.path.join(self.folder, "clock")) if fake_clock else None
        self._settings = settings
        self._mariadbd = program("mariadbd", package=self.package)
        self.data = os.path.join(self.folder, "my", "data")

    def user(self) -> str | None:
        return "mysql"

    def command(self) -> Sequence[str]:
        folder = os.path.dirname(self.data)
        return [
            *(self._clock.command() if self._clock else ()),
            *(self._mariadbd, "--no-defaults", f"--datadir={self.data}", f"--port={self.port}"),
            *(
                "--bind-address=127.0.0.1",
                f"--socket={folder}/s.sock",
                f"--pid-file={folder}/pid",
                f"--tmpdir={folder}",
            ),
            *("--innodb-buffer-pool-size=32M", _LOG_SIZE, "--skip-log-bin", "--performance-schema=OFF"),
            "--max-connections=500",
            *(f"--{setting}" for setting in self._settings),
        ]

    def start(self) -> MariaDB:
        if not os.path.exists(self.data):
            _make_folder(os.path.dirname(self.data))
            subprocess.run([program("cp", package="coreutils"), "-a", _new_data(), self.data], check=True)
        return super().start()

    def ready(self) -> bool:
        with suppress(pymysql.OperationalError), self.connect() as session:
            session.cursor().execute("create database if not exists test")
            return True
        return False

    def set_clock(self, seconds: float) -> None:
        """Set the server's clock this many seconds ahead of the true time."""
        assert self._clock is not None
        self._clock.set_offset(seconds)

    def follow(self, primary: MariaDB) -> None:
        """Replicate from the start of the primary's log. Both servers need a binary log and their own server id."""
        primary.run("create user if not exists replica", "grant replication slave on *.* to replica")
        self.run(
            f"change master to master_host = '127.0.0.1', master_port = {primary.port}, master_user = 'replica', "
            "master_use_gtid = slave_pos, master_connect_retry = 1",
            "start slave",
        )

    def connect(self, **options: Any) -> Any:
        """A session for the tests."""
        return pymysql.connect(host="127.0.0.1", port=self.port, **{"user": "root", "autocommit": True, **options})

    def ask(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """All rows of one statement, with bytes decoded as text."""
        with self.connect() as session, session.cursor() as cursor:
            cursor.execute(query, values or None)
            return [tuple(each.decode() if isinstance(each, bytes) else each for each in row) for row in cursor]

    def run(self, *script: str, missing: bool = False) -> None:
        """Run statements in one session. `missing`: ignore the error that a session to kill does not exist."""
        with self.connect() as session, session.cursor() as cursor:
            for statement in script:
                try:
                    cursor.execute(statement)
                except pymysql.OperationalError as error:
                    if not missing or error.args[0] != ER.NO_SUCH_THREAD:
                        raise


def _make_folder(path: str) -> None:
    os.makedirs(path, mode=0o700, exist_ok=True)
    if os.getuid() == 0:
        shutil.chown(path, "mysql")


@shared
def _new_data() -> str:
    """The data of a new server, for copies: the program that makes them takes half a second of a processor."""
    install = program("mariadb-install-db", package=MariaDB.package)
    data = os.path.join(scratch(), "my", "data")
    _make_folder(os.path.dirname(data))
    command = [install, "--no-defaults", f"--datadir={data}", "--skip-test-db", _LOG_SIZE]
    command.append("--auth-root-authentication-method=normal")
    if os.getuid() == 0:
        command.append("--user=mysql")
    # In a shared folder for temporary files, each server that starts removes those of the others.
    environment = {**os.environ, "TMPDIR": os.path.dirname(data)}
    done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"mariadb-install-db failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return data
