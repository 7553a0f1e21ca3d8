"""`leasehold advise`: whether a lock is the right tool at all, and if so which engine and which ttl."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Final, NamedTuple

import click

from leasehold.cli.console import Console, is_terminal, pass_console
from leasehold.cli.help import command
from leasehold.cli.options import seconds_option
from leasehold.config import advise_ttl

EXAMPLES = """
leasehold advise                                         asks, one question after the other
leasehold advise --danger damage --where machines --have redis
leasehold -o json advise --danger twice-harmless --where machine
"""


class Tool(NamedTuple):
    """What fits one danger. `code`: one line to begin with. Only a tool with an engine has a ttl."""

    use: str
    why: str
    code: str
    page: str
    engine: bool = False


DANGERS: Final = {
    "row": "a row is inserted twice, or written from an old value",
    "message": "the same message or request is handled twice",
    "count": "writers overwrite each other's part of a sum, a set or a document",
    "cache": "many callers compute the same answer at once",
    "twice-harmless": "the work is done twice: wasteful, but harmless",
    "damage": "two writers damage a file, an account, a device, another service",
    "too-many": "too many do it at the same time",
    "rate": "too many do it per second",
    "leader": "of many processes one has to lead",
    "items": "many workers share many items, and each item must have one writer",
    "steps": "several services change together, and a process may die halfway",
    "window": "nobody may work while a migration runs",
    "threads": "two threads or tasks of one program conflict",
}
WHERE: Final = {
    "process": "in one process",
    "machine": "in several processes of one machine",
    "machines": "on several machines",
}
HAVE: Final = ("postgresql", "mysql", "redis", "etcd", "zookeeper", "nothing")

TOOLS: Final[Mapping[str, Tool]] = {
    "row": Tool(
        "your database, without a lock",
        "it decides in one atomic step: a unique constraint prevents a second insert; an update that compares a "
        "version, or SELECT ... FOR UPDATE, prevents a write from an old value",
        "UPDATE orders SET state = 'paid', version = version + 1 WHERE id = 42 AND version = 7",
        "how-to/optimistic-updates",
    ),
    "message": Tool(
        "an idempotency key, without a lock",
        "a record per message says that the message was handled; written in your own transaction, it is exact",
        'client.once(f"payment/{message_id}", charge)',
        "how-to/run-once",
    ),
    "count": Tool(
        "an operation that merges, without a lock",
        "an atomic increment, adding to a set, or a data type that merges (a CRDT) needs no order among its writers",
        "UPDATE stock SET sold = sold + 1 WHERE id = 42",
        "how-to/optimistic-updates",
    ),
    "cache": Tool(
        "one caller at a time per key (single-flight)",
        "the first computes, the others wait for its lock and then read its answer; no fence is needed",
        'with client.lock(f"render/{key}", wait=5): ...',
        "tutorial",
        engine=True,
    ),
    "twice-harmless": Tool(
        "a lock without a fence",
        "it avoids the second run; if a pause lets two run once in a long while, nothing is damaged",
        "leasehold run -n nightly-report -- ./report.sh",
        "how-to/cron-job-once",
        engine=True,
    ),
    "damage": Tool(
        "a lock and a fence",
        "no lock stops a holder that is paused and then writes late; the resource can refuse its older token",
        "with client.lock('stock') as lease: fence.write(lease, data)",
        "fencing",
        engine=True,
    ),
    "too-many": Tool(
        "a semaphore (a bulkhead)",
        "a fixed number of permits; a holder that dies gives its permit back after its ttl",
        'with client.semaphore("encoders", limit=3): ...',
        "how-to/bulkhead",
        engine=True,
    ),
    "rate": Tool(
        "a rate limit, without a lock",
        "a lock limits how many run at once, not how many start per second: a counter does that",
        "limits.strategies.SlidingWindowCounterRateLimiter(storage).hit(rate, key)",
        "how-to/rate-limits",
    ),
    "leader": Tool(
        "an election",
        "a lock that is held for a long time, with observers; the leader stops when it can no longer be sure",
        'with client.election("scheduler").lead() as lease: ...',
        "how-to/leader-election",
        engine=True,
    ),
    "items": Tool(
        "a lock per partition of the items (single writer)",
        "a checksum sends each item to a partition, and its holder is the only writer: two requests per partition, not "
        "per item; the storage compares the token",
        'lease = client.lock(f"partition/{zlib.crc32(item) % 64}").try_acquire()',
        "how-to/partitions",
        engine=True,
    ),
    "steps": Tool(
        "a saga: a record per step, and a lock around all of them",
        "the records say what was done and what must be undone, and the lock decides who continues; a lock alone knows "
        "neither",
        'client.once(f"saga/{order}/charge", charge, order, keep=None)',
        "how-to/saga",
        engine=True,
    ),
    "window": Tool(
        "a read-write lock (a maintenance window)",
        "work holds it as a reader, the migration as the writer: it begins when the work under way has ended",
        'with client.rwlock("shop/maintenance").write(wait=60): ...',
        "how-to/maintenance-window",
        engine=True,
    ),
    "threads": Tool(
        "the standard library, without an engine",
        "threading.Lock and asyncio.Lock need no lease: their holders end with the process",
        "with threading.Lock(): ...",
        "choosing",
    ),
}


class EngineAdvice(NamedTuple):
    url: str
    why: str
    page: str


SQLITE: Final = EngineAdvice(
    "sqlite://", "the default: no server to run, one file for all processes", "guarantees/sqlite"
)
IN_DATABASE: Final = "as available as your database, and a transaction can contain the fence"
ENGINES: Final[Mapping[str, EngineAdvice]] = {
    "postgresql": EngineAdvice("postgresql://user@host/db", IN_DATABASE, "guarantees/postgresql"),
    "mysql": EngineAdvice("mysql://user@host/db", IN_DATABASE, "guarantees/mysql"),
    "redis": EngineAdvice("redis://host", "fast; a failover can lose a grant, so use a fence", "guarantees/redis"),
    "etcd": EngineAdvice("etcd://h1,h2,h3", "survives the loss of a minority of its members", "guarantees/etcd"),
    "zookeeper": EngineAdvice(
        "zookeeper://h1,h2,h3", "survives the loss of a minority of its members", "guarantees/zookeeper"
    ),
}


def choose_engine(where: str, have: tuple[str, ...], survive: bool) -> EngineAdvice:
    if where == "process":
        return EngineAdvice("memory://", "locks of one process need no server, and end with it", "guarantees/memory")
    if where == "machine":
        return SQLITE
    order = ("etcd", "zookeeper") if survive else ("postgresql", "mysql", "redis", "etcd", "zookeeper")
    for name in order:
        if name in have:
            return ENGINES[name]
    if survive:
        return ENGINES["etcd"]._replace(why="you would have to run it: three members survive the loss of one")
    return EngineAdvice(
        "http://host:7420", "a lock server over SQLite, on one of your machines: `leasehold serve`", "server/tutorial"
    )


@command("advise", EXAMPLES, short_help="Say whether you need a lock, and which.")
@click.option(
    "--danger",
    type=click.Choice(list(DANGERS)),
    metavar="WORD",
    help=f"What goes wrong if two callers do the work at once: {', '.join(DANGERS)}.",
)
@click.option("--where", type=click.Choice(list(WHERE)), help="Where the callers run.")
@click.option(
    "--have", type=click.Choice(HAVE), multiple=True, help="A server that you already run. Repeat for several."
)
@click.option("--survive", is_flag=True, help="Locks must survive the loss of a machine.")
@seconds_option("--pause", default="2s", show_default=True, help="The longest the program may stall.")
@seconds_option("--network", default="1s", show_default=True, help="The slowest answer to survive.")
@pass_console
def advise(
    console: Console,
    danger: str | None,
    where: str | None,
    have: tuple[str, ...],
    survive: bool,
    pause: float,
    network: float,
) -> None:
    """Say what protects you if two processes do the same work at once: often it is not a lock.

    In a terminal, this command asks for what the options do not say. It changes nothing and connects to nothing. The
    reasons are in `leasehold docs choosing`.

    With `-o json`: one object, described by `leasehold docs reference/json`.
    """
    danger = danger or _ask("What goes wrong if two callers do the work at once?", DANGERS, "--danger")
    tool = TOOLS[danger]
    engine = None
    if tool.engine:
        where = where or _ask("Where do the callers run?", WHERE, "--where")
        if where == "machines" and not have:
            have = (_ask("Which of these do you run already?", {name: name for name in HAVE}, "--have"),)
        engine = choose_engine(where, have, survive)
    _print(console, tool, engine, advise_ttl(pause, network) if engine else None)


def _ask(question: str, answers: Mapping[str, str], option: str) -> str:
    if not is_terminal(sys.stdin):
        raise click.UsageError(f"stdin is not a terminal, so pass {option}: {', '.join(answers)}")
    click.echo(f"{question}\n", err=True)
    for number, text in enumerate(answers.values(), 1):
        click.echo(f"  {number:>2}  {text}", err=True)
    chosen = click.prompt("\nNumber", type=click.IntRange(1, len(answers)), err=True)
    click.echo(err=True)
    return list(answers)[chosen - 1]


def _print(console: Console, tool: Tool, engine: EngineAdvice | None, ttl: float | None) -> None:
    if console.json:
        console.put_json(
            {
                "use": tool.use,
                "why": tool.why,
                "code": tool.code,
                "page": tool.page,
                "engine": engine._asdict() if engine else None,
                "ttl": round(ttl, 1) if ttl else None,
            }
        )
        return
    console.put(f"Use       {tool.use}")
    console.put(f"Because   {tool.why}")
    console.put(f"Begin     {tool.code}")
    if engine and ttl:
        console.put(f"Engine    {engine.url}: {engine.why}")
        console.put(f"ttl       {ttl:.1f} s: a holder that dies keeps the name for that long")
    pages = [tool.page, *([engine.page] if engine else [])]
    console.put(f"Read      {', '.join(f'leasehold docs {page}' for page in pages)}")
