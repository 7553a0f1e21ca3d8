"""The network between a holder and a majority of the servers falls silent, and the holder keeps writing beside the next
holder. With the fix it stops before the next one is granted the lock, learns why it is refused, and continues later."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
import time
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit

from leasehold.blocking import Client, Lease
from leasehold.cli.demo import DemoResult
from leasehold.cli.demo.redis_server import DemoRedis, find_program, server
from leasehold.cli.demo.runner import DemoRunner, WorkerProcess
from leasehold.errors import ConfigError, LeaseLost, StaleToken, Unavailable
from leasehold.fences.sql.row import SQLFence

if TYPE_CHECKING:
    from leasehold.cli.demo.worker import Worker

TITLE: Final = "the network splits, and the holder on the wrong side keeps writing beside the next holder"
FIX: Final = "the holder calls lease.check() before each write, and the ledger has a fence (leasehold.fences.SQLFence)"

_TTL: Final = 3.0
_CALL_TIMEOUT: Final = 1.0
_STEP: Final = 0.1
_STEPS: Final = 10  # of the next holder
_INSERT: Final = "insert into writes values (?)"
_PORTS: Final = {"redis": 6379, "redlock": 6379, "etcd": 2379, "zookeeper": 2181, "postgresql": 5432, "mysql": 3306}
_NODES: Final = 3  # of its own, if there is no URL


# ------------------------------------------------------------------ what the processes do


def first_holder(worker: Worker) -> None:
    """Writes until it is told to stop; with the fix, until its lease is lost."""
    client = worker.client(ttl=_TTL, call_timeout=_CALL_TIMEOUT)
    lease = client.lock("ledger").acquire(wait=30)
    worker.report("began", f"acquires ledger (token {lease.token}) and writes every {_STEP} s", token=lease.token)
    writes: list[float] = []
    stops = False
    with closing(sqlite3.connect(worker.ledger, timeout=30)) as ledger:
        while not stops:
            stops = worker.go_within(_STEP)
            now = time.monotonic()  # before the check: only the fence can catch a pause between check and write
            try:
                write(worker, ledger, lease)
                writes.append(now)
            except (LeaseLost, StaleToken) as error:
                stops = True
                worker.report("stopped", f"stops: {error}")
    worker.report("wrote", f"wrote {len(writes)} times", writes=writes)
    if worker.fixed:
        take_part_again(worker, client)
    os._exit(0)  # the lease cannot be released from here: it expires, or has expired


def write(worker: Worker, ledger: sqlite3.Connection, lease: Lease) -> None:
    if worker.fixed:
        lease.check()
        SQLFence(ledger, "ledger").write(lease, _INSERT, (worker.who,))
    else:
        with ledger:
            ledger.execute(_INSERT, (worker.who,))


def take_part_again(worker: Worker, client: Client) -> None:
    try:
        client.lock("ledger").acquire(wait=0).release()
        worker.report("refused", "acquires ledger although it is cut off", refused=False, no_majority=False)
    except Unavailable as error:
        why = f"{error} (no_majority={error.no_majority})"
        worker.report(
            "refused", f"tries to acquire ledger: Unavailable: {why}", refused=True, no_majority=error.no_majority
        )
    worker.wait_go()
    with client.lock("ledger", wait=60, on_unavailable="wait") as lease:
        worker.report("again", f"acquires ledger (token {lease.token})", token=lease.token)


def next_holder(worker: Worker) -> None:
    with worker.client(ttl=30.0) as client, client.lock("ledger", wait=60) as lease:
        began = time.monotonic()
        worker.report("began", f"acquires ledger (token {lease.token}) and writes {_STEPS} times")
        with closing(sqlite3.connect(worker.ledger, timeout=30)) as ledger:
            for _ in range(_STEPS):
                write(worker, ledger, lease)
                time.sleep(_STEP)
        worker.report("done", "is done and releases ledger", began=began, token=lease.token)


def network(worker: Worker) -> None:
    """Forwards connections to the servers. When it is told to, it drops what the cut ones carry; then it heals."""
    asyncio.run(Network(worker).run())


class Network:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._open = [asyncio.Event() for _ in worker.targets]  # one for each server: packets pass
        self._streams: set[asyncio.StreamWriter] = set()

    async def run(self) -> None:
        servers = []
        for number, (host, port) in enumerate(self._worker.targets):
            self._open[number].set()
            connect = partial(self._connect, number, host, port)
            servers.append(await asyncio.start_server(connect, "127.0.0.1", 0))
        ports = [each.sockets[0].getsockname()[1] for each in servers]
        self._worker.report("ready", ports=ports)
        await asyncio.to_thread(sys.stdin.readline)
        for number in self._worker.cut:
            self._open[number].clear()
        self._worker.report("cut")
        await asyncio.to_thread(sys.stdin.readline)
        for stream in self._streams:  # connections that lost packets end, as they would by timeouts
            stream.transport.abort()
        for each in self._open:
            each.set()
        self._worker.report("healed")
        await asyncio.Event().wait()  # it ends with the demo

    async def _connect(
        self, number: int, host: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await self._open[number].wait()
        with suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection(host, port)
            self._streams |= {writer, far_writer}
            await asyncio.gather(self._forward(number, reader, far_writer), self._forward(number, far_reader, writer))

    async def _forward(self, number: int, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(65_536):
                await self._open[number].wait()
                target.write(data)
                await target.drain()
        target.close()


ROLES: Final = {"first": first_holder, "next": next_holder, "network": network, "server": server}


# ------------------------------------------------------------------ the demo


class Servers(NamedTuple):
    url: str
    targets: list[tuple[str, int]]
    cut: list[int]  # the numbers of those that the first holder cannot reach after the split

    def url_through(self, ports: list[int]) -> str:
        """The URL with the ports of the network in the place of the servers."""
        parts = urlsplit(self.url)
        user = parts.netloc.rpartition("@")[0]
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        return parts._replace(netloc=f"{user}@{hosts}" if user else hosts).geturl()


def check(url: str | None) -> None:
    """Raise a ConfigError if the demo cannot run on this engine."""
    if url is None:
        find_program()
    else:
        _servers_of(url)


def _servers_of(url: str) -> Servers:
    """Those of a URL: all of them are cut off, because any of them may reach the others."""
    parts = urlsplit(url)
    default = _PORTS.get(parts.scheme, 80 if parts.scheme == "http" else 0)
    hosts = [host for host in parts.netloc.rpartition("@")[2].split(",") if host]
    if not default or not hosts:
        raise ConfigError(
            f"the demo partition puts a proxy between client and servers, which {parts.scheme}:// does not allow: "
            f"use one of {', '.join(f'{scheme}://' for scheme in (*_PORTS, 'http'))}, or no URL"
        )
    targets = []
    for host in hosts:
        name, _, port = host.rpartition(":") if host.rpartition(":")[2].isdecimal() else (host, "", str(default))
        targets.append((name.strip("[]"), int(port)))
    return Servers(url, targets, list(range(len(targets))))


def _start_servers(runner: DemoRunner) -> Servers:
    """Those of the URL, or three Redis nodes of its own, of which the first holder still reaches one."""
    if runner.url != runner.own_url:
        return _servers_of(runner.url)
    nodes = [DemoRedis(runner, f"node-{number}") for number in range(1, _NODES + 1)]
    runner.log(f"{_NODES} Redis nodes are running, one at each of {_NODES} sites; a majority of them decides (Redlock)")
    url = f"redlock://:{runner.password}@{','.join(f'127.0.0.1:{node.port}' for node in nodes)}"
    return Servers(url, [("127.0.0.1", node.port) for node in nodes], [1, 2])


def run(runner: DemoRunner, fixed: bool) -> DemoResult:
    ledger = runner.path(f"ledger-{fixed}.db")
    with closing(sqlite3.connect(ledger)) as connection:
        connection.execute("create table writes (who text)")
        SQLFence(connection, "ledger").create()
    servers = _start_servers(runner)
    between = runner.start("network", "network", targets=servers.targets, cut=servers.cut)
    url = servers.url_through(between.wait_for("ready")["ports"])
    facts = {"ledger": ledger, "fixed": fixed}
    first = runner.start("first", "A", url=url, **facts)
    first_token = first.wait_for("began")["token"]
    _order(between, "cut")
    some = f"{len(servers.cut)} of {len(servers.targets)} servers" if len(servers.targets) > 1 else "the server"
    runner.log(f"the network between A and {some} falls silent; the ledger is still within A's reach")
    second = runner.start("next", "B", url=servers.url, **facts)
    messages = list(second.messages_until("done"))
    successor = messages[-1]
    if not fixed:
        first.send_go()
    messages += first.messages_until("refused" if fixed else "wrote")
    runner.log_messages(messages)
    wrote = next(message for message in messages if message["event"] == "wrote")
    overlap = sum(at > successor["began"] for at in wrote["writes"])
    text, result = f"A wrote {overlap} times after B had acquired the lock", {"overlap": overlap}
    if not fixed:
        return DemoResult(overlap > 0, text, result)
    _order(between, "healed")
    runner.log("the network works again")
    first.send_go()
    again = first.wait_for("again")
    refused = messages[-1]["refused"]
    rising = first_token < successor["token"] < again["token"]
    as_expected = overlap == 0 and refused and rising
    return DemoResult(as_expected, text, result | {"refused": refused, "no_majority": messages[-1]["no_majority"]})


def _order(between: WorkerProcess, event: str) -> None:
    between.send_go()
    between.wait_for(event)
