"""What the rigs of the SQL server engines share: one server for many cases, each in its own schema or namespace."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from leasehold.testing.conformance.rig import Rig


class SqlServer(Protocol):
    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def restart(self) -> object: ...

    def ask(self, query: str, *values: Any) -> list[Any]: ...


class SqlRig(Rig):
    ttl: ClassVar[float] = 2.0
    short_call: ClassVar[float] = 0.5
    own_server: ClassVar[bool] = False
    can_cut = can_pause = can_kill = can_count = can_restart = True

    def __init__(self, server: SqlServer, tables: str) -> None:
        """`tables`: the quoted schema that qualifies the table names."""
        super().__init__()
        self.server, self._tables = server, tables

    def pause(self) -> None:
        self.server.pause()

    def resume(self) -> None:
        self.server.resume()

    def restart(self) -> None:
        self.server.restart()

    def residue(self, namespace: str) -> int:
        found = 0
        for table in ("lh_grant", "lh_waiter", "lh_queue"):
            query = f"select count(*) from {self._tables}.{table} where namespace = %s"  # noqa: S608
            found += self.server.ask(query, namespace)[0][0]
        return found
