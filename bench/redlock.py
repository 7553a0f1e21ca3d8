"""The Redlock engine on five servers, beside a bare scatter of the same two commands, and beside other packages.

`python -m bench redlock`: blocking pairs, asyncio pairs, commands by node.
The base sends two EVALSHA that do nothing to each of five servers at once over raw sockets, and reads all replies: no
majority, no token, no deadline. Packages that are not installed are left out: redlock-py, pottery.

Where a pair goes beyond the base, in CPU time on two cores: half of it is the scripts of five servers, each of which
runs rarely and finds its caches cold (24 us a call beyond one that does nothing, 5 where nothing else runs); a fifth
is ten questions and answers on sockets that never block; the rest is engine and recipes.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import hiredis
import redis

from bench.cases import Notes, Part, Table, repeated
from leasehold import AsyncClient, Client
from leasehold.engines.redis.server import pack
from leasehold.speed.rounds import Case, Result, measure
from leasehold.testing.servers.redlock import Nodes

TITLE = "redlock: acquire + release on five nodes, blocking, against a bare scatter (aim: at most 2.0)"
TITLE_COUNTS = "redlock: what the servers count"
TITLE_ASYNC = "redlock: the same under asyncio"


class Scatter:
    """The least there is: all sends, then all reads."""

    def __init__(self, ports: list[int]) -> None:
        self._lines = [(socket.create_connection(("127.0.0.1", port)), hiredis.Reader()) for port in ports]
        for sock, _ in self._lines:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        (sha, *_) = self.ask(pack("SCRIPT", "LOAD", "return 1"))
        self._bare = pack("EVALSHA", sha, 1, "bare", "me")

    def ask(self, data: bytes) -> list[Any]:
        for sock, _ in self._lines:
            sock.sendall(data)
        return [self._read(sock, reader) for sock, reader in self._lines]

    @staticmethod
    def _read(sock: socket.socket, reader: Any) -> Any:
        while (reply := reader.gets()) is False:
            reader.feed(sock.recv(4096))
        return reply

    def pairs(self, times: int) -> None:
        for _ in range(times):
            self.ask(self._bare)
            self.ask(self._bare)


def run(rounds: int) -> list[Result]:
    nodes = Nodes()
    try:
        return measure(list(blocking(nodes)), rounds)
    finally:
        nodes.close()


def blocking(nodes: Nodes) -> Iterator[Case]:
    ports = [node.port for node in nodes.all]
    yield Case("two bare EVALSHA to each of five, raw sockets", Scatter(ports).pairs, 200)
    ours = Client(nodes.url).lock("bench")

    def acquired(times: int) -> None:
        for _ in range(times):
            ours.acquire().release()

    yield Case("leasehold redlock://, acquire and release", acquired, 200)
    yield Case("leasehold redlock://, with", repeated(ours), 200)
    yield from peers(ports)


def peers(ports: list[int]) -> Iterator[Case]:
    try:
        from redlock import Redlock
    except ImportError:
        print("not installed: redlock-py", file=sys.stderr)
    else:
        manager = Redlock([{"host": "127.0.0.1", "port": port} for port in ports])

        def pairs(times: int) -> None:
            for _ in range(times):
                manager.unlock(manager.lock("redlock-py", 30_000))

        yield Case("redlock-py, without a token", pairs, 50)
    try:
        from pottery import Redlock as Pottery
    except ImportError:
        print("not installed: pottery", file=sys.stderr)
    else:
        masters = {redis.Redis(port=port) for port in ports}
        yield Case("pottery, without a token", repeated(Pottery(key="pottery", masters=masters)), 20)


def run_async(rounds: int) -> list[Result]:
    nodes = Nodes()

    async def pairs(times: int) -> float:
        async with AsyncClient(nodes.url) as client:
            lock = client.lock("bench")
            async with lock:
                pass
            began = time.perf_counter()
            for _ in range(times):
                async with lock:
                    pass
            return (time.perf_counter() - began) / times

    def ours(times: int) -> None:
        asyncio.run(pairs(times))

    try:
        base = Case("two bare EVALSHA to each of five, raw sockets", Scatter([n.port for n in nodes.all]).pairs, 200)
        return measure([base, Case("leasehold redlock://, async with", ours, 200)], rounds)
    finally:
        nodes.close()


def commands(pairs: int = 500) -> str:
    """By the count of each server, its scripts' inner commands left out."""
    nodes = Nodes()
    try:
        with Client(nodes.url) as client:
            lock = client.lock("pair")
            repeated(lock)(10)
            before = [node.calls().get("evalsha", 0) for node in nodes.all]
            repeated(lock)(pairs)
            each = [(node.calls()["evalsha"] - old) / pairs for node, old in zip(nodes.all, before, strict=True)]
    finally:
        nodes.close()
    return "commands per pair, by node: " + ", ".join(f"{count:.2f}" for count in each) + " (aim: 2.0)"


def parts(rounds: int) -> Iterator[Part]:
    yield Table(TITLE, run(rounds))
    yield Table(TITLE_ASYNC, run_async(rounds))
    yield Notes(TITLE_COUNTS, [commands()])
