"""Ways to take one name from many workers, for `bench.loop`: ours, and what else there is for each engine.

Each is a context manager of one process: it is given a place and yields a function that takes the name, and gives what
`release` gives back. Processes are spawned, so they are found by name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from leasehold import Client

NAME: Final = "hot"
LONG: Final = 600.0


class Held(Protocol):
    def release(self) -> object: ...


Take = Callable[[], Held]


class Given:
    """What has been taken, by the function that gives it back."""

    def __init__(self, release: Callable[[], object]) -> None:
        self.release = release


def taken(lock: Any) -> Any:
    """For those whose lock is released itself."""
    lock.acquire()
    return lock


@contextmanager
def leasehold(place: str) -> Iterator[Take]:
    with Client(place) as client:
        yield lambda: client.lock(NAME, ttl=30).acquire()


# -------------------------------------------------------------------- Redis


BATON: Final = "bench:baton"


@contextmanager
def baton(place: str) -> Iterator[Take]:
    """The floor: BLPOP to wait, LPUSH to hand on, and neither lease, token nor holder."""
    import redis

    plain = redis.Redis.from_url(place)

    def take() -> Given:
        while plain.blpop([BATON], timeout=5) is None:
            continue
        return Given(lambda: plain.lpush(BATON, "1"))

    yield take
    plain.close()


@contextmanager
def redis_py(place: str) -> Iterator[Take]:
    import redis

    plain = redis.Redis.from_url(place)
    yield lambda: taken(plain.lock(NAME, timeout=30))
    plain.close()


@contextmanager
def python_redis_lock(place: str) -> Iterator[Take]:
    import redis
    import redis_lock

    plain = redis.Redis.from_url(place)
    yield lambda: taken(redis_lock.Lock(plain, NAME, expire=30))
    plain.close()


# ------------------------------------------------------------------- others


@contextmanager
def etcd_packaged(place: str) -> Iterator[Take]:
    """etcd's own lock service, each worker with a lease of its own, which nobody renews here."""
    import grpc

    def field(number: int, value: bytes | int) -> bytes:
        if isinstance(value, int):
            return bytes([number << 3]) + varint(value)
        return bytes([number << 3 | 2]) + varint(len(value)) + value

    channel = grpc.insecure_channel(urlsplit(place).netloc)
    grant, lock, unlock = (
        channel.unary_unary(f"/{path}")
        for path in ("etcdserverpb.Lease/LeaseGrant", "v3lockpb.Lock/Lock", "v3lockpb.Lock/Unlock")
    )
    mine = threading.local()

    def take() -> Given:
        if not hasattr(mine, "lease"):
            mine.lease = number_of(grant(field(1, 120), timeout=LONG), 2)
        key = bytes_of(lock(field(1, NAME.encode()) + field(2, mine.lease), timeout=LONG), 2)
        return Given(lambda: unlock(field(1, key), timeout=LONG))

    yield take
    channel.close()


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def fields(message: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Of a protocol buffer message: numbers and bytes."""
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
def kazoo(place: str) -> Iterator[Take]:
    from kazoo.client import KazooClient

    client = KazooClient(urlsplit(place).netloc)
    client.start()
    yield lambda: taken(client.Lock(f"/{NAME}"))
    client.stop()
    client.close()


@contextmanager
def advisory(place: str) -> Iterator[Take]:
    """A connection for each worker."""
    import psycopg

    mine, opened = threading.local(), list[Any]()

    def take() -> Given:
        if not hasattr(mine, "db"):
            mine.db = psycopg.connect(place, autocommit=True)
            opened.append(mine.db)
        mine.db.execute("select pg_advisory_lock(1)")
        return Given(lambda: mine.db.execute("select pg_advisory_unlock(1)"))

    yield take
    for db in opened:
        db.close()


@contextmanager
def get_lock(place: str) -> Iterator[Take]:
    """A connection for each worker."""
    import pymysql

    where, mine, opened = urlsplit(place), threading.local(), list[Any]()

    def take() -> Given:
        if not hasattr(mine, "cursor"):
            db = pymysql.connect(host=where.hostname, port=where.port or 3306, user=where.username, autocommit=True)
            opened.append(db)
            mine.cursor = db.cursor()
        mine.cursor.execute("select get_lock('hot', 600)")
        return Given(lambda: mine.cursor.execute("select release_lock('hot')"))

    yield take
    for db in opened:
        db.close()


@contextmanager
def file_lock(place: str) -> Iterator[Take]:
    """It polls; one object for each worker, as its threads would share the holder otherwise."""
    from filelock import FileLock

    path = f"{urlsplit(place).path}.filelock"
    yield lambda: taken(FileLock(path))


@contextmanager
def plain(_place: str) -> Iterator[Take]:
    lock = threading.Lock()
    yield lambda: taken(lock)


TAKERS: Final[dict[str, Callable[[str], AbstractContextManager[Take]]]] = {
    "leasehold": leasehold,
    "a bare baton": baton,
    "redis-py Lock": redis_py,
    "python-redis-lock": python_redis_lock,
    "etcd's lock service": etcd_packaged,
    "kazoo's Lock": kazoo,
    "advisory lock": advisory,
    "GET_LOCK": get_lock,
    "filelock": file_lock,
    "threading.Lock": plain,
}

NEEDS: Final = {
    "redis-py Lock": "redis",
    "python-redis-lock": "redis_lock",
    "etcd's lock service": "grpc",
    "kazoo's Lock": "kazoo",
    "advisory lock": "psycopg",
    "GET_LOCK": "pymysql",
    "filelock": "filelock",
    "threading.Lock": "threading",
}
