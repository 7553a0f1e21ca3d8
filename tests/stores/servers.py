"""The servers that keep records, as plain processes: the least that these tests need of them."""

from __future__ import annotations

import glob
import os
import shutil
import signal
import socket
import subprocess
from contextlib import closing
from functools import cache
from typing import Any

from leasehold.testing.servers.process import Server, free_ports, program, scratch


class Local(Server):
    """On a free port, in a folder of its own, perhaps as a user of its own."""

    owner: str | None = None

    def __init__(self) -> None:
        super().__init__(scratch(), free_ports(1)[0])
        self.data = os.path.join(self.folder, "data")
        os.mkdir(self.data, 0o700)
        if self.owner and os.getuid() == 0:
            shutil.chown(self.data, self.owner)

    def user(self) -> str | None:
        return self.owner

    def run(self, *command: str) -> None:
        tie = ["setpriv", "--reuid", self.owner, "--regid", self.owner, "--init-groups", "--"] if self.owner else []
        tie = tie if os.getuid() == 0 else []
        done = subprocess.run([*tie, *command], cwd="/", capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{command[0]}: {done.stdout}{done.stderr}"

    def ready(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True


class Redis(Local):
    package = "redis-server"

    def command(self) -> list[str]:
        where = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", self.data]
        return [
            program("redis-server", package=self.package),
            *where,
            "--save",
            "",
            "--appendonly",
            "yes",
            "--appendfsync",
            "always",
        ]

    def ready(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), timeout=1) as link:
            link.sendall(b"PING\r\n")
            return link.recv(5) == b"+PONG"

    def url(self, port: int | None = None) -> str:
        return f"redis://127.0.0.1:{port or self.port}/0"


class PostgreSQL(Local):
    package = "postgresql-15"
    owner = "postgres"
    stop_signal = signal.SIGINT

    def __init__(self) -> None:
        self.binaries = sorted(glob.glob("/usr/lib/postgresql/*/bin"), reverse=True)
        initdb = program("initdb", package=self.package, folders=self.binaries)
        super().__init__()
        self.run(initdb, "-D", f"{self.data}/db", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "-N")

    def command(self) -> list[str]:
        postgres = program("postgres", package=self.package, folders=self.binaries)
        where = ["-D", f"{self.data}/db", "-p", str(self.port), "-h", "127.0.0.1", "-k", self.data]
        return [postgres, *where, "-c", "max_connections=120"]

    def ready(self) -> bool:
        import psycopg

        try:
            self.connect().close()
        except psycopg.OperationalError:
            return False
        return True

    def connect(self) -> Any:
        """Each statement committed by itself."""
        import psycopg

        return psycopg.connect(self.url(), connect_timeout=2, autocommit=True)

    def url(self, port: int | None = None) -> str:
        return f"postgresql://postgres@127.0.0.1:{port or self.port}/postgres"


class MariaDB(Local):
    package = "mariadb-server"
    owner = "mysql"

    def __init__(self) -> None:
        install = program("mariadb-install-db", package=self.package)
        super().__init__()
        how = ("--auth-root-authentication-method=normal", "--skip-test-db")
        self.run(install, "--no-defaults", f"--datadir={self.data}/db", *how)

    def command(self) -> list[str]:
        where = [f"--datadir={self.data}/db", f"--socket={self.data}/s.sock", f"--pid-file={self.data}/pid"]
        net = [f"--port={self.port}", "--bind-address=127.0.0.1", "--skip-log-bin", "--innodb-buffer-pool-size=32M"]
        how = ["--max-connections=300", "--skip-name-resolve"]  # else 127.0.0.1 would be root@localhost's
        return [program("mariadbd", package=self.package), "--no-defaults", *where, *net, *how]

    def ready(self) -> bool:
        import pymysql

        super().ready()  # the driver leaks a socket when nobody is there
        try:
            with closing(self.connect(None)) as link, link.cursor() as ask:
                ask.execute("create database if not exists shop")
                ask.execute("create user if not exists t@'127.0.0.1' identified by 't'")
                ask.execute("grant all on *.* to t@'127.0.0.1'")
        except pymysql.OperationalError:
            return False
        return True

    def connect(self, database: str | None = "shop") -> Any:
        import pymysql

        return pymysql.connect(unix_socket=f"{self.data}/s.sock", user="root", database=database, autocommit=True)

    def url(self, port: int | None = None) -> str:
        return f"mysql://t:t@127.0.0.1:{port or self.port}/shop"


KINDS = {"redis": Redis, "postgresql": PostgreSQL, "mysql": MariaDB}


@cache
def server(kind: str) -> Local:
    """Started once per process, and kept."""
    return KINDS[kind]().start()
