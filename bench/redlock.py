"""The Redlock engine on five servers compared with a bare scatter of the same two commands, and with other packages.

`python -m bench redlock`: blocking pairs, asyncio pairs, commands by node.
The base sends two EVALSHA that do nothing to five servers at once over raw sockets, and reads all replies: no majority,
no token, no deadline. Packages that are not installed are left out: redlock-py, pottery.

CPU time of a pair beyond the base, on two cores: half of it is in the scripts of five servers, each of which runs
rarely and finds its caches cold (24 us a call beyond a script that does nothing; 5 us on an idle machine). A fifth is
ten requests and replies on non-blocking sockets. The rest is the engine and the client.
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

from bench.cases import Notes, Part, Table, repeat_with
from harness.servers.redlock import RedlockNodes
from leasehold import AsyncClient, Client
from leasehold.cli.bench.measurement import BenchCase, BenchResult, measure
from leasehold.engines.redis.server import encode_command

TITLE = "redlock: acquire + release on five nodes, blocking, against a bare scatter (aim: at most 2.0)"
TITLE_COUNTS = "redlock: what the servers count"
TITLE_ASYNC = "redlock: the same under asyncio"


class Scatter:
    """The lower bound: all sends, then all reads."""

    def __init__(self, ports: list[int]) -> None:
        self._connections = [(socket.create_connection(("127.0.0.1", port)), hiredis.Reader()) for port in ports]
        for sock, _ in self._connections:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        (sha, *_) = self.ask(encode_command("SCRIPT", "LOAD", "return 1"))
        self._bare = encode_command("EVALSHA", sha, 1, "bare", "me")

    def ask(self, data: bytes) -> list[Any]:
        for sock, _ in self._connections:
            sock.sendall(data)
        return [self._read(sock, reader) for sock, reader in self._connections]

    @staticmethod
    def _read(sock: socket.socket, reader: Any) -> Any:
        while (reply := reader.gets()) is False:
            reader.feed(sock.recv(4096))
        return reply

    def pairs(self, times: int) -> None:
        for _ in range(times):
            self.ask(self._bare)
            self.ask(self._bare)


def run(rounds: int) -> list[BenchResult]:
    nodes = RedlockNodes()
    try:
        return measure(list(blocking(nodes)), rounds)
    finally:
        nodes.close()


def blocking(nodes: RedlockNodes) -> Iterator[BenchCase]:
    ports = [node.port for node in nodes.all]
    yield BenchCase("two bare EVALSHA to each of five, raw sockets", Scatter(ports).pairs, 200)
    ours = Client(nodes.url).lock("bench")

    def acquired(times: int) -> None:
        for _ in range(times):
            ours.acquire().release()

    yield BenchCase("leasehold redlock://, acquire and release", acquired, 200)
    yield BenchCase("leasehold redlock://, with", repeat_with(ours), 200)
    yield from peers(ports)


def peers(ports: list[int]) -> Iterator[BenchCase]:
    try:
        from redlock import Redlock
    except ImportError:
        print("not installed: redlock-py", file=sys.stderr)
    else:
        manager = Redlock([{"host": "127.0.0.1", "port": port} for port in ports])

        def pairs(times: int) -> None:
            for _ in range(times):
                manager.unlock(manager.lock("redlock-py", 30_000))

        yield BenchCase("redlock-py, without a token", pairs, 50)
    try:
        from pottery import Redlock as Pottery
    except ImportError:
        print("not installed: pottery", file=sys.stderr)
    else:
        masters = {redis.Redis(port=port) for port in ports}
        yield BenchCase("pottery, without a token", repeat_with(Pottery(key="pottery", masters=masters)), 20)


def run_async(rounds: int) -> list[BenchResult]:
    nodes = RedlockNodes()

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
        base = BenchCase(
            "two bare EVALSHA to each of five, raw sockets", Scatter([n.port for n in nodes.all]).pairs, 200
        )
        return measure([base, BenchCase("leasehold redlock://, async with", ours, 200)], rounds)
    finally:
        nodes.close()


def commands(pairs: int = 500) -> str:
    """Commands by each server's count, without the inner commands of scripts."""
    nodes = RedlockNodes()
    try:
        with Client(nodes.url) as client:
            lock = client.lock("pair")
            repeat_with(lock)(10)
            before = [node.calls().get("evalsha", 0) for node in nodes.all]
            repeat_with(lock)(pairs)
            each = [(node.calls()["evalsha"] - old) / pairs for node, old in zip(nodes.all, before, strict=True)]
    finally:
        nodes.close()
    return "commands per pair, by node: " + ", ".join(f"{count:.2f}" for count in each) + " (aim: 2.0)"


def parts(rounds: int) -> Iterator[Part]:
    yield Table(TITLE, run(rounds))
    yield Table(TITLE_ASYNC, run_async(rounds))
    yield Notes(TITLE_COUNTS, [commands()])
