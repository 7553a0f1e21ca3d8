"""Every kind of fence with one interface: a number in a real resource, read and written under a lease.

A kind is built from its spec, a dict of plain values, so any number of processes can use the same resource. Each kind
imports what it needs when it is built, which makes a child process start much faster.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import urllib.request
from collections.abc import Callable
from typing import Any

from leasehold import fences

KINDS: dict[str, Callable[[dict[str, Any]], Any]] = {}


def kind(name: str, *arguments: Any) -> Callable[[type], type]:
    def register(number_class: type) -> type:
        KINDS[name] = lambda spec: number_class(spec, *arguments)
        return number_class

    return register


def end(loop: asyncio.AbstractEventLoop, close_coroutine: Any) -> None:
    """Close a connection, then run the loop once more so that its transport closes too."""
    loop.run_until_complete(close_coroutine)
    loop.run_until_complete(asyncio.sleep(0.01))  # pause: transports close later
    loop.close()


class Number:
    """The interface of all kinds: `make` once, then `write`, `read` and `peek`."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.open()

    def open(self) -> None: ...

    def make(self) -> None:
        """Create the resource with the number 0, before any token was presented."""

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
        dead_endpoint = "http://127.0.0.1:1"  # the fence must try the next endpoint
        self.fence = fences.EtcdFence([dead_endpoint, f"http://127.0.0.1:{self.spec['etcd']}"], self.key)

    def make(self) -> None:
        self.tool("put", self.key, "0")

    def tool(self, *arguments: str) -> str:
        """etcdctl, which ignores fences."""
        command = ["etcdctl", f"--endpoints=127.0.0.1:{self.spec['etcd']}"]
        environment = {**os.environ, "ETCDCTL_API": "3"}
        return subprocess.run(
            [*command, *arguments], env=environment, capture_output=True, text=True, check=True
        ).stdout

    def peek(self) -> int:
        return int(self.tool("get", "--print-value-only", self.key))


# ------------------------------------------------------------------ over HTTP


@kind("object", "hash", False)
@kind("object-in-metadata", "version", True)
class ObjectNumber(Number):
    """`hash`: the store's ETag is a hash of the content, as in S3. `version`: every write gets a new ETag."""

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


class HttpxObjectStore:
    """An object store over an async HTTP client, as a user would write it."""

    def __init__(self, url: str) -> None:
        import httpx

        self.client = httpx.AsyncClient(base_url=url)

    async def get(self, key: str) -> fences.StoredObject | None:
        response = await self.client.get(f"/{key}")
        return None if response.status_code == 404 else fences.StoredObject(response.content, response.headers["etag"])

    async def put(self, key: str, body: bytes, metadata: Any, match: str | None) -> str | None:
        condition = {"If-None-Match": "*"} if match is None else {"If-Match": match}
        response = await self.client.put(f"/{key}", content=body, headers=condition)
        return None if response.status_code == 412 else response.headers["etag"]


@kind("object-async", "hash", False)
class AsyncObjectNumber(ObjectNumber):
    def open(self) -> None:
        super().open()
        self.loop = asyncio.new_event_loop()
        self.other = HttpxObjectStore(f"http://127.0.0.1:{self.spec['objects']}/{self.etags}")
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
        with urllib.request.urlopen(self.url, timeout=30) as response:
            return int(response.read())


from tests.support.fence_kinds_sql import connected  # noqa: E402, F401  # and all that enter themselves there
