"""What a process does under each approach: wait for its turn, read, and later write one more.

All of them keep the same account, in a database of its own, but for the row lock, which needs the account beside it.
`MAKERS` says which is which: an approach more is a class here, or an engine's URL, and a line in `table.py`.
"""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Callable
from typing import Any, Final

import psycopg
import redis

from leasehold import Client, Lease, LeaseholdError, StaleToken
from leasehold.fences import SQLFence

TTL: Final = 2.0
_POLL: Final = 0.02
_ANSWER: Final = 0.2  # seconds for one of several servers
_OPEN: Final = "select v from account"
_WRITE: Final = "update account set v = ?"
_DELETE: Final = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end"


class Approach:
    """No lock at all."""

    def __init__(self, where: list[str], ledger: str) -> None:
        self.where, self.db = where, sqlite3.connect(ledger, timeout=60, isolation_level=None)

    def enter(self) -> int:
        """Wait for its turn; the account as it is."""
        self.take()
        return int(self.db.execute(_OPEN).fetchone()[0])

    def take(self) -> None: ...

    def write(self, value: int) -> bool:
        """Whether it was accepted."""
        self.db.execute(_WRITE, (value,))
        return True

    def leave(self) -> None: ...


class SetNX(Approach):
    """`SET name value NX PX`, given back by whoever's value it is: the recipe of Redis for one server."""

    def take(self) -> None:
        self.value = secrets.token_hex(16)
        self.servers = [redis.Redis.from_url(url, socket_timeout=_ANSWER) for url in self.where]
        while sum(map(self._taken, self.servers)) <= len(self.servers) // 2:
            self.leave()
            time.sleep(_POLL + secrets.randbelow(50) / 1000)

    def _taken(self, server: Any) -> bool:
        try:
            return bool(server.set("account", self.value, nx=True, px=round(1000 * TTL)))
        except redis.RedisError:
            return False

    def leave(self) -> None:
        for server in self.servers:
            try:
                server.eval(_DELETE, 1, "account", self.value)
            except redis.RedisError:
                continue


class RowLock(Approach):
    """`SELECT ... FOR UPDATE`, and the write in the same transaction."""

    def __init__(self, where: list[str], ledger: str) -> None:  # noqa: ARG002
        self.db: Any = psycopg.connect(where[0])

    def enter(self) -> int:
        return int(self.db.execute(f"{_OPEN} for update").fetchone()[0])

    def write(self, value: int) -> bool:
        self.db.execute(_WRITE.replace("?", "%s"), (value,))
        self.db.commit()
        return True


class Unfenced(Approach):
    """A lease of ours, and a resource that does not look at its token."""

    lease: Lease

    def take(self) -> None:
        self.client = Client(self.where[0], ttl=TTL, call_timeout=1.0)
        end = time.monotonic() + 60
        while True:
            try:
                self.lease = self.client.lock("account").acquire(wait=60)
                return
            except LeaseholdError:  # a fail-over is under way
                if time.monotonic() > end:
                    raise
                time.sleep(_POLL)

    def leave(self) -> None:
        self.lease.release()
        self.client.close()


class Fenced(Unfenced):
    """A lease of ours, and a fence at the resource."""

    def enter(self) -> int:
        self.take()
        self.fence = SQLFence(self.db, "account")
        return int(self.fence.read(self.lease, _OPEN)[0][0])

    def write(self, value: int) -> bool:
        try:
            self.fence.write(self.lease, _WRITE, (value,))
        except StaleToken:
            return False
        return True


MAKERS: Final[dict[str, Callable[[list[str], str], Approach]]] = {
    "naive": Approach,
    "set-nx": SetNX,
    "row-lock": RowLock,
    "unfenced": Unfenced,
    "fenced": Fenced,
}
