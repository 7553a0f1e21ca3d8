"""What a process does under each approach: acquire, read, and later write one more.

All of them use the same account in a separate database, except the row lock, which needs the account in its own.
`APPROACHES` lists them: a new approach is a class here, or an engine's URL, and a row in `table.py`.
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
_REPLY_TIMEOUT: Final = 0.2  # seconds to wait for one of several servers
_SELECT: Final = "select v from account"
_WRITE: Final = "update account set v = ?"
_DELETE: Final = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end"


class Approach:
    """No lock at all."""

    def __init__(self, urls: list[str], account_db: str) -> None:
        self.urls, self.db = urls, sqlite3.connect(account_db, timeout=60, isolation_level=None)

    def acquire_and_read(self) -> int:
        """Acquire the lock and return the account's value."""
        self.acquire()
        return int(self.db.execute(_SELECT).fetchone()[0])

    def acquire(self) -> None: ...

    def write(self, value: int) -> bool:
        """Return whether the write was accepted."""
        self.db.execute(_WRITE, (value,))
        return True

    def release(self) -> None: ...

    def close(self) -> None:
        self.db.close()


class Optimistic(Approach):
    """No lock: the write counts only if no other write came since the read."""

    def acquire_and_read(self) -> int:
        value, self.version = self.db.execute("select v, version from account").fetchone()
        return int(value)

    def write(self, value: int) -> bool:
        change = "update account set v = ?, version = version + 1 where version = ?"
        return self.db.execute(change, (value, self.version)).rowcount == 1


class Idempotent(Approach):
    """No lock: all processes carry out the same request, and its id is stored in the transaction of its write."""

    request: str | None = "request 1"  # None: a new request each time

    def write(self, value: int) -> bool:
        request = self.request or secrets.token_hex(16)
        self.db.execute("begin immediate")
        try:
            self.db.execute("insert into done values (?)", (request,))
            self.db.execute(_WRITE, (value,))
        except sqlite3.IntegrityError:
            self.db.execute("rollback")
            return False
        self.db.execute("commit")
        return True


class SetNX(Approach):
    """`SET name value NX PX`, released only if the value is still ours: Redis's documented lock for one server."""

    def __init__(self, urls: list[str], account_db: str) -> None:
        super().__init__(urls, account_db)
        self.servers = [redis.Redis.from_url(url, socket_timeout=_REPLY_TIMEOUT) for url in urls]

    def acquire(self) -> None:
        self.value = secrets.token_hex(16)
        while sum(map(self._set_if_absent, self.servers)) <= len(self.servers) // 2:
            self.release()
            time.sleep(_POLL + secrets.randbelow(50) / 1000)

    def _set_if_absent(self, server: Any) -> bool:
        try:
            return bool(server.set("account", self.value, nx=True, px=round(1000 * TTL)))
        except redis.RedisError:
            return False

    def release(self) -> None:
        for server in self.servers:
            try:
                server.eval(_DELETE, 1, "account", self.value)
            except redis.RedisError:
                continue


class NoRowLock(Approach):
    """No lock, with the account in PostgreSQL: only for what a row lock costs."""

    select = _SELECT

    def __init__(self, urls: list[str], account_db: str) -> None:  # noqa: ARG002
        self.db: Any = psycopg.connect(urls[0])

    def acquire_and_read(self) -> int:
        return int(self.db.execute(self.select).fetchone()[0])

    def write(self, value: int) -> bool:
        self.db.execute(_WRITE.replace("?", "%s"), (value,))
        self.db.commit()
        return True


class RowLock(NoRowLock):
    """`SELECT ... FOR UPDATE`, and the write in the same transaction."""

    select = f"{_SELECT} for update"


class Unfenced(Approach):
    """A lease of ours, and a resource that does not check its token."""

    lease: Lease

    def __init__(self, urls: list[str], account_db: str) -> None:
        super().__init__(urls, account_db)
        self.client = Client(urls[0], ttl=TTL, call_timeout=1.0)

    def acquire(self) -> None:
        end = time.monotonic() + 60
        while True:
            try:
                self.lease = self.client.lock("account").acquire(wait=60)
                return
            except LeaseholdError:  # a failover is in progress
                if time.monotonic() > end:
                    raise
                time.sleep(_POLL)

    def release(self) -> None:
        self.lease.release()

    def close(self) -> None:
        self.client.close()
        super().close()


class Fenced(Unfenced):
    """A lease of ours, and a fence at the resource."""

    def acquire_and_read(self) -> int:
        self.acquire()
        self.fence = SQLFence(self.db, "account")
        return int(self.fence.read(self.lease, _SELECT)[0][0])

    def write(self, value: int) -> bool:
        try:
            self.fence.write(self.lease, _WRITE, (value,))
        except StaleToken:
            return False
        return True


APPROACHES: Final[dict[str, Callable[[list[str], str], Approach]]] = {
    "naive": Approach,
    "optimistic": Optimistic,
    "idempotent": Idempotent,
    "set-nx": SetNX,
    "row-lock": RowLock,
    "unfenced": Unfenced,
    "fenced": Fenced,
}
