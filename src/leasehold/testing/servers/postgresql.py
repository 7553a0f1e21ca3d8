"""PostgreSQL as a plain process."""

from __future__ import annotations

import glob
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar

import psycopg

from leasehold.testing.servers.process import Server, free_ports, program, scratch


def _binary(name: str) -> str:
    return program(name, package="postgresql-15", folders=sorted(glob.glob("/usr/lib/postgresql/*/bin"), reverse=True))


class PostgreSQL(Server):
    package: ClassVar[str] = "postgresql-15"
    stop_signal = signal.SIGINT  # SIGTERM waits for every client to leave

    def __init__(self, *settings: str) -> None:
        super().__init__(scratch(), free_ports(1)[0])
        self._postgres, self._settings = _binary("postgres"), settings
        self.data = os.path.join(self.folder, "pg", "data")

    def user(self) -> str | None:
        return "postgres"  # it refuses to run as root

    def command(self) -> Sequence[str]:
        settings = [word for setting in self._settings for word in ("-c", setting)]
        place = ["-D", self.data, "-p", str(self.port), "-h", "127.0.0.1", "-k", os.path.dirname(self.data)]
        return [self._postgres, *place, *settings]

    def start(self) -> PostgreSQL:
        if not os.path.exists(self.data):
            os.makedirs(os.path.dirname(self.data), mode=0o700, exist_ok=True)
            user = []
            if os.getuid() == 0:
                shutil.chown(os.path.dirname(self.data), "postgres")
                user = ["setpriv", "--reuid", "postgres", "--regid", "postgres", "--init-groups", "--"]
            made = [*user, _binary("initdb"), "-D", self.data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "-N"]
            subprocess.run([*made, "--locale=C"], cwd="/", capture_output=True, timeout=120, check=True)
        return super().start()

    def ready(self) -> bool:
        with suppress(psycopg.OperationalError), self.connect(connect_timeout=2):
            return True
        return False

    def connect(self, dbname: str = "postgres", user: str = "postgres", **more: Any) -> psycopg.Connection[Any]:
        """A session of the tests' own, straight to the server."""
        return psycopg.connect(
            host="127.0.0.1", port=self.port, dbname=dbname, user=user, **{"autocommit": True, **more}
        )
