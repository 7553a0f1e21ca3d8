"""Every kind of fence in one shape: a number at a real resource, to be read and written under a lease.

A kind is made from its spec, a dict of plain values, so that any number of processes stand before the same resource.
What a kind needs is imported when it is made: a process starts in a fraction of the time.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import urllib.request
from collections.abc import Callable
from typing import Any, ClassVar

from leasehold import fences

KINDS: dict[str, Callable[[dict[str, Any]], Any]] = {}


def kind(name: str, *more: Any) -> Callable[[type], type]:
    def enter(made: type) -> type:
        KINDS[name] = lambda spec: made(spec, *more)
        return made

    return enter


def end(loop: asyncio.AbstractEventLoop, closing: Any) -> None:
    """Close a connection, and give its transport the turn of the loop that it needs."""
    loop.run_until_complete(closing)
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()


class Number:
    """What all kinds have: `make` once, then `write`, `read` and `peek`."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.open()

    def open(self) -> None: ...

    def make(self) -> None:
        """Bring the resource about, with the number 0, before any token was shown."""

    def write(self, lease: Any, value: int) -> None:
        self.fence.write(lease, str(value))

    def read(self, lease: Any) -> int:
        return int(self.fence.read(lease))

    def peek(self) -> int:
        raise NotImplementedError

    def close(self) -> None: ...


# ------------------------------------------------------------------------ files


@kind("file")
class FileNumber(Number):
    def open(self) -> None:
        self.fence = fences.File(self.spec["path"])

    def make(self) -> None:
        with open(self.spec["path"], "w") as file:
            file.write("0")

    def peek(self) -> int:
        with open(self.spec["path"]) as file:
            return int(file.read())


# -------------------------------------------------------------------------- SQL


def connected(database: str, spec: dict[str, Any]) -> Any:
    if database == "sqlite":
        return sqlite3.connect(spec["path"], timeout=60)
    if database == "postgresql":
        import psycopg

        return psycopg.connect(f"host=127.0.0.1 port={spec['postgresql']} user=postgres dbname=postgres")
    import pymysql

    return pymysql.connect(host="127.0.0.1", port=spec["mysql"], user="root", database="test")


async def connected_async(database: str, spec: dict[str, Any]) -> Any:
    if database == "sqlite":
        import aiosqlite

        return await aiosqlite.connect(spec["path"], timeout=60)
    if database == "postgresql":
        import psycopg

        where = f"host=127.0.0.1 port={spec['postgresql']} user=postgres dbname=postgres"
        return await psycopg.AsyncConnection.connect(where)
    import aiomysql

    return await aiomysql.connect(host="127.0.0.1", port=spec["mysql"], user="root", db="test")


class SQLNumber(Number):
    """A table of its own for each test: `acct_<run>`, with one row."""

    def __init__(self, spec: dict[str, Any], database: str) -> None:
        self.database, self.table = database, f"acct_{spec['run']}"
        self.marks = f"marks_{spec['run']}"
        self.mark = "?" if database == "sqlite" else "%s"
        super().__init__(spec)

    def open(self) -> None:
        self.connection = connected(self.database, self.spec)

    def make(self) -> None:
        cursor = self.connection.cursor()
        cursor.execute(f"create table {self.table} (id integer primary key, v integer not null, fence bigint)")
        cursor.execute(f"insert into {self.table} values (1, 0, null)")
        cursor.execute(fences.sql_schema(self.database, self.marks))
        self.connection.commit()

    def peek(self) -> int:
        cursor = self.connection.cursor()
        cursor.execute(f"select v from {self.table} where id = 1")
        (value,) = cursor.fetchone()
        self.connection.commit()
        return value

    def close(self) -> None:
        self.connection.close()


class Row(SQLNumber):
    def open(self) -> None:
        super().open()
        self.fence = fences.SQLFence(self.connection, "acct/1", table=self.marks)

    def write(self, lease: Any, value: int) -> None:
        self.fence.write(lease, f"update {self.table} set v = {self.mark} where id = 1", (value,))

    def read(self, lease: Any) -> int:
        return self.fence.read(lease, f"select v from {self.table} where id = {self.mark}", (1,))[0][0]


class Transaction(Row):
    """Any statements under one claim: several of them, and the caller's own commit."""

    def write(self, lease: Any, value: int) -> None:
        with self.fence.transaction(lease) as cursor:
            cursor.execute(f"update {self.table} set v = -1 where id = 1")
            cursor.execute(f"update {self.table} set v = {self.mark} where id = 1", (value,))


class Column(SQLNumber):
    def open(self) -> None:
        super().open()
        self.fence = fences.SQLColumn(self.connection, self.table)

    def write(self, lease: Any, value: int) -> None:
        self.fence.write(lease, 1, v=value)

    def read(self, lease: Any) -> int:
        return self.fence.read(lease, 1, "v")[0]


class AsyncSQL(SQLNumber):
    def __init__(self, spec: dict[str, Any], database: str, form: str) -> None:
        self.form, self.loop = form, asyncio.new_event_loop()
        super().__init__(spec, database)

    def open(self) -> None:
        super().open()
        self.other = self.loop.run_until_complete(connected_async(self.database, self.spec))
        if self.form == "row":
            self.fence = fences.AsyncSQLFence(self.other, "acct/1", table=self.marks)
        else:
            self.fence = fences.AsyncSQLColumn(self.other, self.table)

    def write(self, lease: Any, value: int) -> None:
        if self.form == "column":
            self.loop.run_until_complete(self.fence.write(lease, 1, v=value))
        else:
            statement = f"update {self.table} set v = {self.mark} where id = 1"
            self.loop.run_until_complete(self.fence.write(lease, statement, (value,)))

    def read(self, lease: Any) -> int:
        if self.form == "column":
            return self.loop.run_until_complete(self.fence.read(lease, 1, "v"))[0]
        return self.loop.run_until_complete(self.fence.read(lease, f"select v from {self.table} where id = 1"))[0][0]

    def close(self) -> None:
        super().close()
        closing = self.other.ensure_closed if self.database == "mysql" else self.other.close
        end(self.loop, closing())


class Alchemy(SQLNumber):
    """An ORM class over the same table."""

    urls: ClassVar = {
        "sqlite": "sqlite:///{path}",
        "postgresql": "postgresql+psycopg://postgres@127.0.0.1:{postgresql}/postgres",
        "mysql": "mysql+pymysql://root@127.0.0.1:{mysql}/test",
    }

    def __init__(self, spec: dict[str, Any], database: str, form: str) -> None:
        self.form = form
        super().__init__(spec, database)

    def open(self) -> None:
        super().open()
        import sqlalchemy as sa
        from sqlalchemy.orm import declarative_base

        self.sa = sa

        class Acct(declarative_base()):  # type: ignore[misc]
            __tablename__ = self.table
            id = sa.Column(sa.Integer, primary_key=True)
            v = sa.Column(sa.Integer, nullable=False)
            fence = sa.Column(sa.BigInteger)

        self.acct = Acct
        self.engine = self.engined()

    def engined(self) -> Any:
        return self.sa.create_engine(self.urls[self.database].format(**self.spec))

    def write(self, lease: Any, value: int) -> None:
        from sqlalchemy.orm import Session

        with Session(self.engine) as session, session.begin():
            if self.form == "column":
                fences.AlchemyColumn(session, self.acct).write(lease, 1, v=value)
            elif self.form == "core":
                statement = self.sa.update(self.acct).where(self.acct.id == 1).values(v=value)
                fences.AlchemyFence(session, "acct/1", table=self.marks).write(lease, statement)
            else:
                fences.AlchemyFence(session, "acct/1", table=self.marks).claim(lease)
                session.get_one(self.acct, 1).v = value

    def read(self, lease: Any) -> int:
        from sqlalchemy.orm import Session

        with Session(self.engine) as session, session.begin():
            if self.form == "column":
                return fences.AlchemyColumn(session, self.acct).read(lease, 1, "v")[0]
            query = self.sa.select(self.acct.v).where(self.acct.id == 1)
            return fences.AlchemyFence(session, "acct/1", table=self.marks).read(lease, query).scalar_one()

    def close(self) -> None:
        super().close()
        self.engine.dispose()


class AsyncAlchemy(Alchemy):
    urls: ClassVar = {
        "sqlite": "sqlite+aiosqlite:///{path}",
        "postgresql": "postgresql+psycopg://postgres@127.0.0.1:{postgresql}/postgres",
        "mysql": "mysql+aiomysql://root@127.0.0.1:{mysql}/test",
    }

    def engined(self) -> Any:
        from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

        self.loop, self.session = asyncio.new_event_loop(), AsyncSession
        return create_async_engine(self.urls[self.database].format(**self.spec))

    def write(self, lease: Any, value: int) -> None:
        async def work() -> None:
            async with self.session(self.engine) as session, session.begin():
                if self.form == "column":
                    await fences.AsyncAlchemyColumn(session, self.acct).write(lease, 1, v=value)
                else:
                    await fences.AsyncAlchemyFence(session, "acct/1", table=self.marks).claim(lease)
                    (await session.get_one(self.acct, 1)).v = value

        self.loop.run_until_complete(work())

    def read(self, lease: Any) -> int:
        async def work() -> int:
            async with self.session(self.engine) as session, session.begin():
                if self.form == "column":
                    return (await fences.AsyncAlchemyColumn(session, self.acct).read(lease, 1, "v"))[0]
                query = self.sa.select(self.acct.v).where(self.acct.id == 1)
                fence = fences.AsyncAlchemyFence(session, "acct/1", table=self.marks)
                return (await fence.read(lease, query)).scalar_one()

        return self.loop.run_until_complete(work())

    def close(self) -> None:
        SQLNumber.close(self)
        end(self.loop, self.engine.dispose())


for each in ("sqlite", "postgresql", "mysql"):
    kind(f"{each}-row", each)(Row)
    kind(f"{each}-transaction", each)(Transaction)
    kind(f"{each}-column", each)(Column)
    kind(f"{each}-row-async", each, "row")(AsyncSQL)
    kind(f"{each}-column-async", each, "column")(AsyncSQL)
    for form in ("orm", "core", "column"):
        kind(f"alchemy-{each}-{form}", each, form)(Alchemy)
    for form in ("orm", "column"):
        kind(f"alchemy-{each}-{form}-async", each, form)(AsyncAlchemy)


# ------------------------------------------------------------ Redis and ZooKeeper


@kind("redis")
class RedisNumber(Number):
    def open(self) -> None:
        import redis

        self.client = redis.Redis(port=self.spec["redis"])
        self.key = f"acct:{self.spec['run']}"
        self.fence = fences.RedisFence(self.client, self.key)

    def make(self) -> None:
        self.client.set(self.key, 0)

    def peek(self) -> int:
        return int(self.client.get(self.key))

    def close(self) -> None:
        self.client.close()


@kind("redis-async")
class AsyncRedisNumber(RedisNumber):
    def open(self) -> None:
        super().open()
        import redis.asyncio

        self.loop = asyncio.new_event_loop()
        self.other = redis.asyncio.Redis(port=self.spec["redis"], decode_responses=True)
        self.fence = fences.AsyncRedisFence(self.other, self.key)

    def write(self, lease: Any, value: int) -> None:
        self.loop.run_until_complete(self.fence.write(lease, value, "EX", 600))

    def read(self, lease: Any) -> int:
        return int(self.loop.run_until_complete(self.fence.read(lease)))

    def close(self) -> None:
        super().close()
        end(self.loop, self.other.aclose())


@kind("zookeeper")
class ZooKeeperNumber(Number):
    def open(self) -> None:
        import kazoo.client

        self.client = kazoo.client.KazooClient(f"127.0.0.1:{self.spec['zookeeper']}", timeout=30)
        self.client.start(60)
        self.path = f"/accts/{self.spec['run']}/1"
        self.fence = fences.ZooKeeperFence(self.client, self.path)

    def make(self) -> None:
        self.client.create(self.path, b"0", makepath=True)

    def peek(self) -> int:
        return int(self.client.get(self.path)[0])

    def close(self) -> None:
        self.client.stop()
        self.client.close()


@kind("etcd")
class EtcdNumber(Number):
    def open(self) -> None:
        self.key = f"/accts/{self.spec['run']}/1"
        dead = "http://127.0.0.1:1"  # the next one is tried
        self.fence = fences.EtcdFence([dead, f"http://127.0.0.1:{self.spec['etcd']}"], self.key)

    def make(self) -> None:
        self.tool("put", self.key, "0")

    def tool(self, *words: str) -> str:
        """etcd's own tool, which knows nothing of fences."""
        where = ["etcdctl", f"--endpoints=127.0.0.1:{self.spec['etcd']}"]
        environment = {**os.environ, "ETCDCTL_API": "3"}
        return subprocess.run([*where, *words], env=environment, capture_output=True, text=True, check=True).stdout

    def peek(self) -> int:
        return int(self.tool("get", "--print-value-only", self.key))


# ------------------------------------------------------------------ over HTTP


@kind("object", "hash", False)
@kind("object-in-metadata", "version", True)
class ObjectNumber(Number):
    """`hash`: the store's ETag is one of the content, as S3's is; `version`: each write has its own."""

    def __init__(self, spec: dict[str, Any], etags: str, in_metadata: bool) -> None:
        self.etags, self.in_metadata = etags, in_metadata
        super().__init__(spec)

    def open(self) -> None:
        self.store = fences.HTTPObjects(f"http://127.0.0.1:{self.spec['objects']}/{self.etags}")
        self.key = f"acct/{self.spec['run']}"
        self.fence = fences.ObjectFence(self.store, self.key, in_metadata=self.in_metadata)

    def make(self) -> None:
        assert self.store.put(self.key, b"0", {"colour": "blue"}, None)

    def peek(self) -> int:
        return int(self.fence.peek() or b"")


class AwaitedObjects:
    """A store over a client that is awaited, as a user would write it."""

    def __init__(self, url: str) -> None:
        import httpx

        self.client = httpx.AsyncClient(base_url=url)

    async def get(self, key: str) -> fences.Stored | None:
        answer = await self.client.get(f"/{key}")
        return None if answer.status_code == 404 else fences.Stored(answer.content, answer.headers["etag"])

    async def put(self, key: str, body: bytes, metadata: Any, match: str | None) -> str | None:
        condition = {"If-None-Match": "*"} if match is None else {"If-Match": match}
        answer = await self.client.put(f"/{key}", content=body, headers=condition)
        return None if answer.status_code == 412 else answer.headers["etag"]


@kind("object-async", "hash", False)
class AsyncObjectNumber(ObjectNumber):
    def open(self) -> None:
        super().open()
        self.loop = asyncio.new_event_loop()
        self.other = AwaitedObjects(f"http://127.0.0.1:{self.spec['objects']}/{self.etags}")
        self.fence = fences.AsyncObjectFence(self.other, self.key)

    def write(self, lease: Any, value: int) -> None:
        self.loop.run_until_complete(self.fence.write(lease, str(value)))

    def read(self, lease: Any) -> int:
        return int(self.loop.run_until_complete(self.fence.read(lease)))

    def peek(self) -> int:
        return int(self.loop.run_until_complete(self.fence.peek()))

    def close(self) -> None:
        end(self.loop, self.other.client.aclose())


@kind("http-wsgi", "wsgi")
@kind("http-asgi", "asgi")
class ServiceNumber(Number):
    def __init__(self, spec: dict[str, Any], side: str) -> None:
        self.side = side
        super().__init__(spec)

    def open(self) -> None:
        self.url = f"http://127.0.0.1:{self.spec[self.side]}/accts/{self.spec['run']}"
        self.fence = fences.HTTPFence(self.url)

    def peek(self) -> int:
        with urllib.request.urlopen(self.url, timeout=30) as answer:
            return int(answer.read())
