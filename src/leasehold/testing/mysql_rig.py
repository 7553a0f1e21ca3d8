"""The rig of the MySQL engine: one MariaDB for all cases, a database for each, and a proxy before each client.

Clients use accounts that may execute the procedures and nothing else; so does whoever follows the manual.
"""

from __future__ import annotations

from functools import cache
from typing import ClassVar
from urllib.parse import quote
from uuid import uuid4

from leasehold.engines.mysql.schema import grants, quoted, statements, text
from leasehold.testing.rig import Machine, Rig
from leasehold.testing.servers.machine import ProxiedMachine
from leasehold.testing.servers.mysql import MariaDB
from leasehold.testing.servers.process import poll
from leasehold.testing.servers.proxy import Proxy


@cache
def server() -> MariaDB:
    """Started once, and kept as long as the process. It leaves writing to the system: tests kill it, but cut no power."""
    return MariaDB("innodb-flush-method=nosync").start()


class MysqlRig(Rig):
    scheme = "mysql"
    ttl: ClassVar[float] = 2.0
    short_call: ClassVar[float] = 0.5
    options = ""
    can_cut = can_pause = can_kill = can_count = can_restart = True

    def __init__(self) -> None:
        super().__init__()
        self.server = server()
        self.database = f"Lease `{uuid4().hex[:8]}"  # a name that needs its quotes
        self.server.run(*statements(text(self.database)))  # a client would, but not within every deadline of a case

    def machine(self) -> Machine:
        return MysqlMachine(self)

    def pause(self) -> None:
        self.server.pause()

    def resume(self) -> None:
        self.server.resume()

    def restart(self) -> None:
        self.server.restart()

    def residue(self, namespace: str) -> int:
        found = 0
        for table in ("lh_grant", "lh_waiter", "lh_line"):
            query = f"select count(*) from {quoted(self.database)}.{table} where namespace = %s"  # noqa: S608
            found += self.server.ask(query, namespace)[0][0]
        return found

    def close(self) -> None:
        super().close()
        self.server.run(f"drop database if exists {quoted(self.database)}")


class PlainRig(MysqlRig):
    """For accounts that may not have procedures."""

    beside = MysqlRig
    options = "?procedures=no"


class MysqlMachine(ProxiedMachine):
    """One client, with an account of its own: its sessions are found by that."""

    def __init__(self, rig: MysqlRig) -> None:
        self.rig, self._user = rig, f"m{uuid4().hex[:12]}"
        rig.server.run(f"create user {self._user} identified by 'secret'")
        if rig.options:
            tables = f"grant select, insert, update, delete on {quoted(rig.database)}.* to {self._user}"
            rig.server.run(tables.replace("_", "\\_"))
        else:
            rig.server.run(*statements(grants(self._user, rig.database)))
        proxy = Proxy(rig.server.port)
        super().__init__(
            f"mysql://{self._user}:secret@127.0.0.1:{proxy.port}/{quote(rig.database, safe='')}{rig.options}", [proxy]
        )

    def kill_session(self) -> None:
        for session in self._sessions():
            self.rig.server.run(f"kill {session}", missing=True)
        poll(lambda: not self._sessions(), 20, lambda: "the server has ended the sessions")

    def _sessions(self) -> list[int]:
        query = "select id from information_schema.processlist where user = %s"
        return [number for (number,) in self.rig.server.ask(query, self._user)]

    def close(self) -> None:
        super().close()
        self.rig.server.run(f"drop user {self._user}")
