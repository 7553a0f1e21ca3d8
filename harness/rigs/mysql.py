"""The rig of the MySQL engine: one MariaDB, a database for each process, and a proxy for each client.

As the manual recommends, clients use an account that may execute the procedures and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from urllib.parse import quote
from uuid import uuid4

from harness.rigs.sql import SqlRig
from harness.servers.machine import ProxiedMachine
from harness.servers.mysql import MariaDB
from harness.servers.process import poll
from harness.servers.proxy import Proxy
from harness.servers.shared import shared
from leasehold.engines.mysql.schema import grants, quote_identifier, statements, text
from leasehold.testing.conformance.rig import ClientPath


@shared
def server() -> MariaDB:
    """The server. It does not fsync, because no test cuts the power."""
    return MariaDB("innodb-flush-method=nosync").start()


class MysqlRig(SqlRig):
    scheme = "mysql"
    server: MariaDB
    options = ""

    def __init__(self) -> None:
        self.database, self.user = self._database_and_user()
        super().__init__(server(own=self.own_server), quote_identifier(self.database))

    @classmethod
    @cache
    def _database_and_user(cls) -> tuple[str, str]:
        """Created once per process: that takes longer than most cases, and longer than some deadlines of a case."""
        database, user = f"Lease `{uuid4().hex[:8]}", f"m{uuid4().hex[:12]}"  # the first name needs quoting
        server(own=cls.own_server).run(
            *statements(text(database)), f"create user {user} identified by 'secret'", *cls.rights(user, database)
        )
        return database, user

    @classmethod
    def rights(cls, user: str, database: str) -> Iterable[str]:
        return statements(grants(user, database))

    def client_path(self) -> ClientPath:
        return MysqlMachine(self)


class NoProceduresRig(MysqlRig):
    """For accounts that may not create or execute procedures."""

    main_rig = MysqlRig
    options = "?procedures=no"

    @classmethod
    def rights(cls, user: str, database: str) -> Iterable[str]:
        return [f"grant select, insert, update, delete on {quote_identifier(database)}.* to {user}"]


class MysqlMachine(ProxiedMachine):
    """One client. Its sessions are found by the source ports of its proxy's connections."""

    def __init__(self, rig: MysqlRig) -> None:
        self._server, proxy = rig.server, Proxy(rig.server.port)
        where = f"{rig.user}:secret@127.0.0.1:{proxy.port}/{quote(rig.database, safe='')}"
        super().__init__(f"mysql://{where}{rig.options}", [proxy])

    def kill_session(self) -> None:
        hosts = [f"127.0.0.1:{port}" for port in self.proxies[0].ports()]
        for session in self._sessions(hosts):
            self._server.run(f"kill {session}", missing=True)
        poll(lambda: not self._sessions(hosts), 20, lambda: "the server has ended the sessions")

    def _sessions(self, hosts: list[str]) -> list[int]:
        found = self._server.ask("select id, host from information_schema.processlist")
        return [number for number, host in found if host in hosts]
