"""The Redis engine compared with two bare EVALSHA calls of redis-py and with other lock packages, on one server.

`python -m bench redis`: blocking pairs, asyncio pairs, ten thousand keys, commands, bytes. Packages that are not
installed or do not work here are left out and reported with the reason: python-redis-lock, pottery, redlock-py,
sherlock, tooz.

CPU time of a blocking pair, client and server on one core, as shares of the base: a bare socket and a script that does
nothing 0.41; the work of the scripts 0.12; a stream with deadlines and a parser 0.09; the engine's verbs 0.10; a claim
with its secret 0.06; lease, watchdog and the rest of the client 0.14. Python takes twice as long here as on an
otherwise idle core, and slows the server by a quarter, because both share one cache. Written as two functions, without
layers and with a socket that is not polled, the same steps cost 0.77. So reaching 0.85 would mean removing half of the
layers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import redis
import redis.asyncio

from bench.cases import Aim, Aims, Notes, Part, Table, one_core, ratio_of, repeat_with, usable_peers
from harness import probe
from harness.servers.redis import RedisServer
from leasehold import AsyncClient, Client
from leasehold.cli.bench.measurement import BenchCase, BenchResult, measure

TITLE = "redis: acquire + release, blocking, against two EVALSHA of redis-py (aim: at most 0.92)"
TITLE_API = "redis: the blocking API against the same requests on the same connection (aim: at most 1.35)"
TITLE_COUNTS = "redis: many keys, and what the server counts"
TITLE_ASYNC = "redis: the same under asyncio, against two EVALSHA of redis.asyncio (aim: at most 0.74)"

BARE = "return 1"  # two round trips that do nothing: the base
# The least that a lock must do: set if absent, delete if mine. No token, no queue.
TAKE = "if redis.call('set', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 1 end return 0"
GIVE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0"


def run(rounds: int) -> list[BenchResult]:
    server = RedisServer().start()
    try:
        return measure(list(blocking_cases(server.port)), rounds)
    finally:
        server.stop()


def blocking_cases(port: int) -> Iterator[BenchCase]:
    plain = redis.Redis(port=port)
    bare, take, give = (plain.script_load(text) for text in (BARE, TAKE, GIVE))

    def two(times: int) -> None:
        for _ in range(times):
            plain.evalsha(bare, 1, "bare", "me")
            plain.evalsha(bare, 1, "bare", "me")

    def least(times: int) -> None:
        for _ in range(times):
            plain.evalsha(take, 1, "least", "me", 30_000)
            plain.evalsha(give, 1, "least", "me")

    yield BenchCase("two EVALSHA of redis-py", two, 300)
    yield BenchCase("the least lock, by redis-py", least, 300)
    client = Client(f"redis://127.0.0.1:{port}")
    ours = client.lock("bench")
    yield BenchCase("leasehold redis://, acquire and release", acquire_release(ours), 300)
    yield BenchCase("leasehold redis://, with", repeat_with(ours), 300)
    for name, lock in peers(port, plain):
        yield BenchCase(name, repeat_with(lock), 100)


def run_api(rounds: int) -> list[BenchResult]:
    server = RedisServer().start()
    try:
        with Client(f"redis://127.0.0.1:{server.port}") as client:
            return measure(list(api_cases(client)), rounds)
    finally:
        server.stop()


def api_cases(client: Client) -> Iterator[BenchCase]:
    """The cost of claims, leases and the watchdog on top of the scripts."""
    lock = client.lock("bench")
    repeat_with(lock)(10)
    claim, requests = probe.new_claim(lock), probe.redis_requests(client)
    name = requests.name_keys("", "bench")
    stream = probe.redis_stream(client, name.tag)
    id_hash, now = bytes.fromhex(claim.id_hash), probe.core(client).runtime.now
    take, give = (packed.split(id_hash) for packed in (requests.attempt(name, claim), requests.release(name, claim)))

    def bare(times: int) -> None:
        for _ in range(times):
            new_id_hash = os.urandom(16)
            stream.call(new_id_hash.join(take), now() + 5)
            stream.call(new_id_hash.join(give), now() + 5)

    yield BenchCase("the same two requests, packed before", bare, 300)
    yield BenchCase("leasehold redis://, acquire and release", acquire_release(lock), 300)
    yield BenchCase("leasehold redis://, with", repeat_with(lock), 300)


def acquire_release(lock: Any) -> Callable[[int], None]:
    def pair(times: int) -> None:
        for _ in range(times):
            lock.acquire().release()

    return pair


class MakeEachTime:
    """Makes a new context manager each time."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __enter__(self) -> None:
        self._now = self._make()
        self._now.__enter__()

    def __exit__(self, *error: object) -> None:
        self._now.__exit__(*error)


def peers(port: int, plain: Any) -> Iterator[tuple[str, Any]]:
    """Locks of other packages with their defaults. None has a token."""
    yield "redis-py Lock", plain.lock("bench:redis-py", timeout=30)
    url = f"redis://127.0.0.1:{port}"

    def python_redis_lock() -> Any:
        import redis_lock

        return redis_lock.Lock(plain, "bench:python-redis-lock", expire=30)

    def pottery() -> Any:
        from pottery import Redlock

        return Redlock(key="bench:pottery", masters={plain}, auto_release_time=30)

    def redlock_py() -> Any:
        from redlock import Redlock

        manager = Redlock([{"host": "127.0.0.1", "port": port}])

        @contextlib.contextmanager
        def lock() -> Iterator[None]:
            held = manager.lock("bench:redlock-py", 30_000)
            yield
            manager.unlock(held)

        return MakeEachTime(lock)

    def sherlock() -> Any:
        import sherlock

        return sherlock.RedisLock("bench", client=plain, expire=30)

    def tooz() -> Any:
        from tooz import coordination

        coordinator = coordination.get_coordinator(url, b"bench")
        coordinator.start()
        return coordinator.get_lock(b"bench")

    def check_key_exists() -> None:
        if not plain.keys("*bench*"):
            raise RuntimeError("it says that it holds, and took no key")

    makers = (python_redis_lock, pottery, redlock_py, sherlock, tooz)
    yield from usable_peers({make.__name__.replace("_", "-"): make for make in makers}, check_key_exists)


# ------------------------------------------------------------------ asyncio


def run_async(rounds: int) -> list[BenchResult]:
    server = RedisServer().start()
    with asyncio.Runner() as runner:
        plain = redis.asyncio.Redis(port=server.port)
        client = AsyncClient(f"redis://127.0.0.1:{server.port}")
        try:
            cases = [
                BenchCase(name, lambda times, work=work: runner.run(work(times)), 300)  # type: ignore[misc]
                for name, work in runner.run(async_cases(plain, client))
            ]
            return measure(cases, rounds)
        finally:
            runner.run(client.close())
            runner.run(plain.aclose())
            server.stop()


async def async_cases(plain: Any, client: AsyncClient) -> list[tuple[str, Callable[[int], Awaitable[None]]]]:
    bare = await plain.script_load(BARE)
    ours, theirs = client.lock("bench"), plain.lock("bench:redis-py", timeout=30)

    async def two(times: int) -> None:
        for _ in range(times):
            await plain.evalsha(bare, 1, "bare", "me")
            await plain.evalsha(bare, 1, "bare", "me")

    async def acquired(times: int) -> None:
        for _ in range(times):
            lease = await ours.acquire()
            await lease.release()

    def inside(lock: Any) -> Callable[[int], Awaitable[None]]:
        async def pair(times: int) -> None:
            for _ in range(times):
                async with lock:
                    pass

        return pair

    return [
        ("two EVALSHA of redis.asyncio", two),
        ("leasehold redis://, acquire and release", acquired),
        ("leasehold redis://, async with", inside(ours)),
        ("redis.asyncio Lock", inside(theirs)),
    ]


def many_keys(rounds: int, keys: int = 10_000, at_once: int = 100) -> str:
    """Acquire and release ten thousand names once each, a hundred tasks at a time."""
    server = RedisServer().start()

    async def run_workers(pair: Callable[[str], Awaitable[None]]) -> float:
        names = iter([f"key/{number}" for number in range(keys)])

        async def worker() -> None:
            for name in names:
                await pair(name)

        began = time.perf_counter()
        await asyncio.gather(*[worker() for _ in range(at_once)])
        return time.perf_counter() - began

    async def main() -> list[tuple[float, float]]:
        plain = redis.asyncio.Redis(port=server.port, max_connections=at_once)
        async with AsyncClient(f"redis://127.0.0.1:{server.port}") as client:

            async def ours(name: str) -> None:
                async with client.lock(name):
                    pass

            async def theirs(name: str) -> None:
                async with plain.lock(name, timeout=30):
                    pass

            found = [(await run_workers(ours), await run_workers(theirs)) for _ in range(rounds)]
        await plain.aclose()
        return found

    try:
        found = asyncio.run(main())
    finally:
        server.stop()
    ratio = sorted(theirs / ours for ours, theirs in found)[len(found) // 2]
    rate = sorted(keys / ours for ours, _ in found)[len(found) // 2]
    return f"{keys} keys, {at_once} at once: {rate:,.0f} pairs a second, {ratio:.1f} x redis.asyncio Lock (aim: 4)"


# ------------------------------------------------------- commands and bytes


def commands(pairs: int = 500) -> list[str]:
    """Commands by the server's count, without the inner commands of scripts."""
    server = RedisServer().start()
    lines = []
    try:
        with Client(f"redis://127.0.0.1:{server.port}") as client:
            lock = client.lock("pair")
            repeat_with(lock)(10)
            before = server.calls().get("evalsha", 0)
            repeat_with(lock)(pairs)
            lines.append(f"commands per pair: {(server.calls()['evalsha'] - before) / pairs:.2f} (aim: 2.0)")
        for waiters in (2, 20, 200):
            lines.append(hand_offs(server, waiters))
    finally:
        server.stop()
    return lines


def hand_offs(server: RedisServer, waiters: int) -> str:
    with Client(f"redis://127.0.0.1:{server.port}", namespace=f"crowd-{waiters}") as client:
        lock = client.lock("hot")
        held = lock.acquire()
        threads = [threading.Thread(target=repeat_with(lock), args=(1,)) for _ in range(waiters)]
        for thread in threads:
            thread.start()
        while sum(holding.state == "waiting" for holding in client.inspect()) < waiters:
            time.sleep(0.05)
        before, began = server.calls(), time.perf_counter()
        held.release()
        for thread in threads:
            thread.join()
        took, after = time.perf_counter() - began, server.calls()
    made = {name: after.get(name, 0) - before.get(name, 0) for name in ("evalsha", "publish")}
    made["evalsha"] -= 1  # the last release has no waiter to hand over to
    each = f"{made['evalsha'] / waiters:.2f} commands and {made['publish'] / waiters:.2f} messages"
    return f"hand-off among {waiters:>3} waiters: {each}, {took / waiters * 1e6:.0f} us (aim: at most 2.1 and messages)"


def sizes(locks: int = 10_000) -> str:
    """What a held lock adds to the server's memory, and what an idle name leaves there."""

    def used(server: RedisServer) -> int:
        return int(server.info("memory")["used_memory"])

    server = RedisServer().start()
    try:
        plain = redis.Redis(port=server.port)
        before = used(server)
        for number in range(locks):
            plain.lock(f"orders/{number:06}", timeout=300).acquire()
        theirs = (used(server) - before) / locks
        server.ask("FLUSHALL")
        with Client(f"redis://127.0.0.1:{server.port}", ttl=300) as client:
            for bucket in range(20_000):  # create the counters, which are never deleted
                client.lock(f"warm/{bucket}").acquire().release()
            before = used(server)
            leases = [client.lock(f"orders/{number:06}").acquire() for number in range(locks)]
            ours = (used(server) - before) / locks
            for lease in leases:
                lease.release()
            left = (used(server) - before) / locks
    finally:
        server.stop()
    return f"bytes per held lock: {ours:.0f}, {ours / theirs:.2f} x redis-py Lock (aim: 1.5); per idle name: {left:.1f}"


def parts(rounds: int) -> Iterator[Part]:
    with one_core():
        yield Table(TITLE, blocking := run(rounds))
        yield Table(TITLE_API, run_api(rounds))
        yield Table(TITLE_ASYNC, awaited := run_async(rounds))
    yield Notes(TITLE_COUNTS, [many_keys(max(2, rounds // 3)), *commands(), sizes()])
    ours = "leasehold redis://, acquire and release"
    yield Aims(
        "redis: aims",
        [
            Aim("Redis: pair, against two EVALSHA of redis-py", ratio_of(blocking, ours, blocking[0].name), 0.92),
            Aim("Redis: asyncio pair, against redis.asyncio", ratio_of(awaited, ours, awaited[0].name), 0.74),
        ],
    )
