"""Ways to acquire one name from many workers, for `bench.contention`: ours, and other locks for each engine.

Each is a context manager, used once per process. It is given a URL and yields a function that acquires the name and
returns an object with `release`. Processes are spawned, so they find the adapters by name.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from shutil import which
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from leasehold import Client

NAME: Final = "hot"
TIMEOUT: Final = 600.0


class Held(Protocol):
    def release(self) -> object: ...


Acquire = Callable[[], Held]


class Releasable:
    """An acquired lock, with the function that releases it."""

    def __init__(self, release: Callable[[], object]) -> None:
        self.release = release


def acquire_and_return(lock: Any) -> Any:
    """For packages whose lock object is itself released."""
    lock.acquire()
    return lock


@contextmanager
def leasehold(url: str) -> Iterator[Acquire]:
    with Client(url) as client:
        yield lambda: client.lock(NAME, ttl=30).acquire()


@contextmanager
def leasehold_not_durable(url: str) -> Iterator[Acquire]:
    with leasehold(f"{url}?durable=no") as acquire:
        yield acquire


# -------------------------------------------------------------------- Redis


BATON: Final = "bench:baton"


@contextmanager
def baton(url: str) -> Iterator[Acquire]:
    """The lower bound: BLPOP to wait, LPUSH to hand over; no lease, token or holder."""
    import redis

    redis_client = redis.Redis.from_url(url)

    def acquire() -> Releasable:
        while redis_client.blpop([BATON], timeout=5) is None:
            continue
        return Releasable(lambda: redis_client.lpush(BATON, "1"))

    yield acquire
    redis_client.close()


@contextmanager
def redis_py(url: str) -> Iterator[Acquire]:
    import redis

    redis_client = redis.Redis.from_url(url)
    yield lambda: acquire_and_return(redis_client.lock(NAME, timeout=30))
    redis_client.close()


@contextmanager
def python_redis_lock(url: str) -> Iterator[Acquire]:
    import redis
    import redis_lock

    redis_client = redis.Redis.from_url(url)
    yield lambda: acquire_and_return(redis_lock.Lock(redis_client, NAME, expire=30))
    redis_client.close()


# ------------------------------------------------------------------- others


@contextmanager
def etcd_packaged(url: str) -> Iterator[Acquire]:
    """etcd's own lock service. Each worker has its own lease, which is not renewed here."""
    import grpc

    def field(number: int, value: bytes | int) -> bytes:
        if isinstance(value, int):
            return bytes([number << 3]) + varint(value)
        return bytes([number << 3 | 2]) + varint(len(value)) + value

    channel = grpc.insecure_channel(urlsplit(url).netloc)
    grant, lock, unlock = (
        channel.unary_unary(f"/{path}")
        for path in ("etcdserverpb.Lease/LeaseGrant", "v3lockpb.Lock/Lock", "v3lockpb.Lock/Unlock")
    )
    thread_local = threading.local()

    def acquire() -> Releasable:
        if not hasattr(thread_local, "lease"):
            thread_local.lease = number_of(grant(field(1, 120), timeout=TIMEOUT), 2)
        key = bytes_of(lock(field(1, NAME.encode()) + field(2, thread_local.lease), timeout=TIMEOUT), 2)
        return Releasable(lambda: unlock(field(1, key), timeout=TIMEOUT))

    yield acquire
    channel.close()


@contextmanager
def etcdctl(url: str) -> Iterator[Acquire]:
    """A process that holds the lock until it is interrupted. It prints the lock's key when it holds it."""
    program = [which("etcdctl") or "etcdctl", "--endpoints", urlsplit(url).netloc, "lock", NAME]

    def acquire() -> Releasable:
        process = subprocess.Popen(program, env={**os.environ, "ETCDCTL_API": "3"}, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()

        def release() -> None:
            process.send_signal(signal.SIGINT)
            process.communicate()

        return Releasable(release)

    yield acquire


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def fields(message: bytes) -> Iterator[tuple[int, bytes | int]]:
    """The fields of a protocol buffer message: numbers and bytes."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(message):
        tag = number()
        if tag & 7 == 0:
            yield tag >> 3, number()
        else:
            size = number()
            yield tag >> 3, message[at : at + size]
            at += size


def number_of(message: bytes, field: int) -> int:
    return next(value for number, value in fields(message) if number == field and isinstance(value, int))


def bytes_of(message: bytes, field: int) -> bytes:
    return next(value for number, value in fields(message) if number == field and isinstance(value, bytes))


@contextmanager
def kazoo(url: str) -> Iterator[Acquire]:
    from kazoo.client import KazooClient

    client = KazooClient(urlsplit(url).netloc)
    client.start()
    yield lambda: acquire_and_return(client.Lock(f"/{NAME}"))
    client.stop()
    client.close()


@contextmanager
def advisory(url: str) -> Iterator[Acquire]:
    """One connection per worker."""
    import psycopg

    thread_local, opened = threading.local(), list[Any]()

    def acquire() -> Releasable:
        if not hasattr(thread_local, "db"):
            thread_local.db = psycopg.connect(url, autocommit=True)
            opened.append(thread_local.db)
        thread_local.db.execute("select pg_advisory_lock(1)")
        return Releasable(lambda: thread_local.db.execute("select pg_advisory_unlock(1)"))

    yield acquire
    for db in opened:
        db.close()


@contextmanager
def get_lock(url: str) -> Iterator[Acquire]:
    """One connection per worker."""
    import pymysql

    parts, thread_local, opened = urlsplit(url), threading.local(), list[Any]()

    def acquire() -> Releasable:
        if not hasattr(thread_local, "cursor"):
            db = pymysql.connect(host=parts.hostname, port=parts.port or 3306, user=parts.username, autocommit=True)
            opened.append(db)
            thread_local.cursor = db.cursor()
        thread_local.cursor.execute("select get_lock('hot', 600)")
        return Releasable(lambda: thread_local.cursor.execute("select release_lock('hot')"))

    yield acquire
    for db in opened:
        db.close()


@contextmanager
def file_lock(url: str) -> Iterator[Acquire]:
    """It polls. One object per worker, because threads that share an object would share the lock."""
    from filelock import FileLock

    path = f"{urlsplit(url).path}.filelock"
    yield lambda: acquire_and_return(FileLock(path))


@contextmanager
def threading_lock(_place: str) -> Iterator[Acquire]:
    lock = threading.Lock()
    yield lambda: acquire_and_return(lock)


ADAPTERS: Final[dict[str, Callable[[str], AbstractContextManager[Acquire]]]] = {
    "leasehold": leasehold,
    "leasehold, durable=no": leasehold_not_durable,
    "a bare baton": baton,
    "redis-py Lock": redis_py,
    "python-redis-lock": python_redis_lock,
    "etcd's lock service": etcd_packaged,
    "etcdctl lock": etcdctl,
    "kazoo's Lock": kazoo,
    "advisory lock": advisory,
    "GET_LOCK": get_lock,
    "filelock": file_lock,
    "threading.Lock": threading_lock,
}

REQUIRED_PACKAGES: Final = {
    "a bare baton": "redis",
    "leasehold, durable=no": "leasehold",
    "etcdctl lock": "subprocess",
    "redis-py Lock": "redis",
    "python-redis-lock": "redis_lock",
    "etcd's lock service": "grpc",
    "kazoo's Lock": "kazoo",
    "advisory lock": "psycopg",
    "GET_LOCK": "pymysql",
    "filelock": "filelock",
    "threading.Lock": "threading",
}
