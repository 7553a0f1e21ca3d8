"""PostgreSQL as a plain process: a server, a standby, and a pooler in front of it."""

from __future__ import annotations

import glob
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar, Final

import psycopg

from harness.servers.fake_clock import FakeClock
from harness.servers.folders import scratch
from harness.servers.process import Server, descendants, free_ports, poll, program
from harness.servers.shared import shared

_SETTINGS: Final = (
    *("wal_level=replica", "max_connections=120", "shared_preload_libraries=pg_stat_statements"),
    "dynamic_shared_memory_type=mmap",  # in the folder of the data, so that nothing is left of a server that is killed
)


def _binary(name: str) -> str:
    return program(name, package="postgresql-15", folders=sorted(glob.glob("/usr/lib/postgresql/*/bin"), reverse=True))


class _PostgresUserProcess(Server):
    """A program that refuses to run as root."""

    stop_signal = signal.SIGINT  # SIGTERM waits until every client has disconnected

    def user(self) -> str | None:
        return "postgres"

    def run(self, *command: str) -> str:
        """Run a command as the server's user. Returns its output."""
        prefix = ["setpriv", "--reuid", "postgres", "--regid", "postgres", "--init-groups", "--"]
        done = subprocess.run(
            [*(prefix if os.getuid() == 0 else ()), *command], cwd="/", capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{command[0]}: {done.stderr}"
        return done.stdout

    def make_folder(self, folder: str) -> str:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        if os.getuid() == 0:
            shutil.chown(folder, "postgres")
        return folder

    def is_listening(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True


class PostgreSQL(_PostgresUserProcess):
    package: ClassVar[str] = "postgresql-15"

    def __init__(self, *settings: str, folder: str | None = None, fake_clock: bool = False) -> None:
        folder = folder or scratch()
        super().__init__(folder, free_ports(1)[0])
        self.program = _binary("postgres")
        self._settings = settings
        self._clock = FakeClock(os.path.join(folder, "clock")) if fake_clock else None
        self.data = os.path.join(self.make_folder(os.path.join(folder, "pg")), "data")

    def command(self) -> Sequence[str]:
        location = ["-D", self.data, "-p", str(self.port), "-h", "127.0.0.1", "-k", os.path.dirname(self.data)]
        settings = [argument for setting in (*_SETTINGS, *self._settings) for argument in ("-c", setting)]
        return [*(self._clock.command() if self._clock else ()), self.program, *location, *settings]

    def set_clock(self, seconds: float) -> None:
        """Set the server's clock this many seconds ahead of the true time."""
        assert self._clock is not None
        self._clock.set_offset(seconds)

    def start(self) -> PostgreSQL:
        if not os.path.exists(self.data):
            self.run("cp", "-a", _new_data(), self.data)
        return super().start()

    def ready(self) -> bool:
        with suppress(psycopg.OperationalError), self.connect(connect_timeout=2):
            return True
        return False

    def kill(self) -> None:
        children = descendants(self.pid) if self.running else []
        super().kill()
        # PostgreSQL does not start on its data before all of them have ended, and wait() does not cover grandchildren.
        poll(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in children), 10, lambda: f"{children} have ended")

    def connect(self, dbname: str = "postgres", user: str = "postgres", **options: Any) -> psycopg.Connection[Any]:
        """A direct session for the tests."""
        return psycopg.connect(self.url(dbname, user), autocommit=True, **options)

    def ask(self, query: str, *values: Any, **where: Any) -> list[Any]:
        """All rows of one statement, in a session of its own."""
        with self.connect(**where) as session:
            cursor = session.execute(query.encode(), values)
            return cursor.fetchall() if cursor.description else []

    def url(self, dbname: str = "postgres", user: str = "postgres", port: int | None = None) -> str:
        return f"postgresql://{user}@127.0.0.1:{port or self.port}/{dbname}"

    def standby(self, name: str = "standby") -> PostgreSQL:
        """A standby that follows this server, not yet started."""
        found = PostgreSQL(*self._settings, "wal_retrieve_retry_interval=200ms")
        self.run(_binary("pg_basebackup"), "-d", self.url(), "-D", found.data, "-R", "-X", "stream", "-c", "fast", "-N")
        with open(os.path.join(found.data, "postgresql.auto.conf"), "a", encoding="ascii") as settings:
            settings.write(f"primary_conninfo = '{self.url()}?application_name={name}'\n")
        return found

    def promote(self) -> None:
        self.run(_binary("pg_ctl"), "promote", "-w", "-D", self.data)


@shared
def _new_data() -> str:
    """The data of a new server, for copies: initdb takes a second of a processor."""
    server = PostgreSQL()
    server.run(
        *(_binary("initdb"), "-D", server.data, "-U", "postgres", "-A", "trust", "-E", "UTF8"), *("--locale=C", "-N")
    )
    return server.data


class PgBouncer(_PostgresUserProcess):
    """A pooler in transaction mode: each transaction may run in another session of the server."""

    package: ClassVar[str] = "pgbouncer"
    stop_signal = signal.SIGTERM

    def __init__(self, target: PostgreSQL, *settings: str) -> None:
        super().__init__(scratch(), free_ports(1)[0])
        self._pgbouncer = program("pgbouncer", package="pgbouncer")
        self.make_folder(self.folder)
        os.chmod(self.folder, 0o711)  # noqa: S103
        self._ini = os.path.join(self.folder, "pgbouncer.ini")
        lines = [
            *("[databases]", f"* = host=127.0.0.1 port={target.port} user=postgres", "[pgbouncer]"),
            *("listen_addr=127.0.0.1", f"listen_port={self.port}", "auth_type=any", "unix_socket_dir="),
            *("pool_mode=transaction", "max_client_conn=500", "default_pool_size=5"),
            *settings,
        ]
        with open(self._ini, "w", encoding="ascii") as ini:
            ini.write("\n".join(lines) + "\n")
        os.chmod(self._ini, 0o644)

    def command(self) -> Sequence[str]:
        return [self._pgbouncer, "-q", self._ini]

    def ready(self) -> bool:
        return self.is_listening()


def wait_until_gone(server: PostgreSQL, pids: Sequence[int], seconds: float = 10.0) -> None:
    """Wait until none of these sessions is left."""

    def gone() -> bool:
        return not server.ask("select 1 from pg_stat_activity where pid = any(%s)", list(pids))

    poll(gone, seconds, lambda: f"the sessions {list(pids)} have ended")
