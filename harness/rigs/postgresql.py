"""The rig of the PostgreSQL engine: one server for all cases, a schema per case, and a proxy for each client."""

from __future__ import annotations

from functools import cache
from urllib.parse import quote
from uuid import uuid4

from harness.rigs.sql import SqlRig
from harness.servers.machine import ProxiedMachine
from harness.servers.postgresql import PgBouncer, PostgreSQL, wait_until_gone
from harness.servers.proxy import Proxy
from harness.servers.shared import shared
from leasehold.engines.postgresql.schema import quote_identifier, text
from leasehold.testing.conformance.rig import ClientPath


@shared
def server() -> PostgreSQL:
    """The server."""
    return PostgreSQL().start()


@cache
def pooler(own: bool = False) -> PgBouncer:
    """A pooler of this process, before the server of the run or before its own."""
    return PgBouncer(server(own=own)).start()


class PostgresqlRig(SqlRig):
    scheme = "postgresql"
    server: PostgreSQL

    def __init__(self) -> None:
        self.schema = f'Lease "{uuid4().hex[:8]}'  # a name that needs quoting
        super().__init__(server(own=self.own_server), quote_identifier(self.schema))
        # A client would create the schema, but not within every deadline of a case.
        self.server.ask(text(self.schema).replace("%", "%%"))

    def client_path(self) -> ClientPath:
        return PostgresqlMachine(self)

    def close(self) -> None:
        super().close()
        self.server.ask(f"drop schema if exists {quote_identifier(self.schema)} cascade")


class PostgresqlMachine(ProxiedMachine):
    """One client. Its sessions are found by their application name."""

    def __init__(self, rig: PostgresqlRig) -> None:
        self.rig = rig
        self._application = uuid4().hex
        proxy = Proxy(rig.server.port)
        super().__init__(self._url(proxy.port), [proxy])

    def _url(self, port: int) -> str:
        return f"{self.rig.server.url(port=port)}?schema={quote(self.rig.schema)}&application_name={self._application}"

    def kill_session(self) -> None:
        own_sessions = "from pg_stat_activity where application_name = %s"
        pids = [pid for (pid,) in self.rig.server.ask(f"select pid {own_sessions}", self._application)]
        self.rig.server.ask(f"select pg_terminate_backend(pid) {own_sessions}", self._application)
        wait_until_gone(self.rig.server, pids)


class PooledRig(PostgresqlRig):
    """Behind a pooler in transaction mode, with a direct connection for the session that listens."""

    main_rig = PostgresqlRig

    def client_path(self) -> ClientPath:
        return PooledMachine(self)


class PooledMachine(PostgresqlMachine):
    def __init__(self, rig: PooledRig) -> None:
        super().__init__(rig)
        direct = quote(rig.server.url(port=self.proxies[0].port), safe="")
        self.proxies.append(Proxy(pooler(own=rig.own_server).port))
        self.url = f"{self._url(self.proxies[1].port)}&listen_url={direct}"

    def kill_session(self) -> None:
        for proxy in self.proxies:
            proxy.reset()
