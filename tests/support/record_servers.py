"""The servers that keep records: those that engines are tested on, with a URL for a store."""

from __future__ import annotations

from functools import cache

from harness.rigs import postgresql
from harness.rigs.redis import AOF_ALWAYS
from harness.servers.mysql import MariaDB
from harness.servers.postgresql import PostgreSQL
from harness.servers.redis import RedisServer


class Redis(RedisServer):
    """A record that was written is there after a restart."""

    def __init__(self) -> None:
        super().__init__(*AOF_ALWAYS)

    def url(self, *, port: int | None = None) -> str:
        return f"redis://127.0.0.1:{port or self.port}/0"


class MySQL(MariaDB):
    """With an account for the stores, in the database `test`."""

    def ready(self) -> bool:
        if not super().ready():
            return False
        self.run("create user if not exists t identified by 't'", "grant all on test.* to t")
        return True

    def url(self, *, port: int | None = None) -> str:
        return f"mysql://t:t@127.0.0.1:{port or self.port}/test"


@cache
def server(kind: str) -> Redis | PostgreSQL | MySQL:
    """Started once per process, and kept."""
    if kind == "postgresql":
        return postgresql.server()
    return Redis().start() if kind == "redis" else MySQL().start()
