"""The servers of the engine tests, with URLs for record stores."""

from __future__ import annotations

from functools import cache

from harness.rigs import postgresql
from harness.rigs.redis import AOF_ALWAYS
from harness.servers.mysql import MariaDB
from harness.servers.postgresql import PostgreSQL
from harness.servers.redis import RedisServer


class Redis(RedisServer):
    """A Redis whose records survive a restart."""

    def __init__(self) -> None:
        super().__init__(*AOF_ALWAYS)

    def url(self, *, port: int | None = None) -> str:
        return f"redis://127.0.0.1:{port or self.port}/0"


class MySQL(MariaDB):
    """A MariaDB with an account for stores in the database `test`."""

    def ready(self) -> bool:
        if not super().ready():
            return False
        self.run("create user if not exists t identified by 't'", "grant all on test.* to t")
        return True

    def url(self, *, port: int | None = None) -> str:
        return f"mysql://t:t@127.0.0.1:{port or self.port}/test"


@cache
def server(kind: str) -> Redis | PostgreSQL | MySQL:
    """The server of this kind, started once per process."""
    if kind == "postgresql":
        return postgresql.server()
    return Redis().start() if kind == "redis" else MySQL().start()
