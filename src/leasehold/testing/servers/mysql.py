"""MariaDB as a plain process."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar

import pymysql

from leasehold.testing.servers.process import Server, free_ports, program, scratch


class MariaDB(Server):
    package: ClassVar[str] = "mariadb-server"

    def __init__(self) -> None:
        super().__init__(scratch(), free_ports(1)[0])
        self._mariadbd = program("mariadbd", package=self.package)
        self.data = os.path.join(self.folder, "my", "data")

    def user(self) -> str | None:
        return "mysql"

    def command(self) -> Sequence[str]:
        folder = os.path.dirname(self.data)
        return [
            *(self._mariadbd, "--no-defaults", f"--datadir={self.data}", f"--port={self.port}"),
            *("--bind-address=127.0.0.1", f"--socket={folder}/s.sock", f"--pid-file={folder}/pid"),
            *("--innodb-buffer-pool-size=32M", "--skip-log-bin", "--performance-schema=OFF", "--max-connections=300"),
            "--skip-grant-tables",
        ]

    def start(self) -> MariaDB:
        if not os.path.exists(self.data):
            folder = os.path.dirname(self.data)
            os.makedirs(folder, mode=0o700, exist_ok=True)
            user = []
            if os.getuid() == 0:
                shutil.chown(folder, "mysql")
                user = ["--user=mysql"]
            install = program("mariadb-install-db", package=self.package)
            made = [install, "--no-defaults", f"--datadir={self.data}", "--skip-test-db", *user]
            subprocess.run(made, cwd="/", capture_output=True, timeout=120, check=True)
        return super().start()

    def ready(self) -> bool:
        with suppress(pymysql.OperationalError), self.connect() as session:
            session.cursor().execute("create database if not exists test")
            return True
        return False

    def connect(self, **more: Any) -> Any:
        """A session of the tests' own."""
        return pymysql.connect(host="127.0.0.1", port=self.port, user="root", **{"autocommit": True, **more})
