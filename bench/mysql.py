"""The MySQL engine compared with a bare upsert and delete of equal durability, and with GET_LOCK; then hand-offs.

`python -m bench mysql` starts its own MariaDB.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from bench.cases import Aim, Aims, Part, Table, ratio_of, repeat_with
from bench.sql import blocked_hand_off, few_against_many, server_counts
from harness.servers.mysql import MariaDB
from leasehold import AsyncClient, Client
from leasehold.cli.bench.measurement import BenchCase, BenchResult, measure

TITLE = "mysql: acquire + release, against a bare upsert and delete, both durable (aim: at most 1.5)"

_NOW = "cast(unix_timestamp(sysdate(6)) * 1000000 as signed)"
_TAKE = f"""insert into bench.bare values ('bench', %s, {_NOW} + 30000000) on duplicate key update
    owner = if(until < {_NOW}, values(owner), owner), until = if(owner = values(owner), values(until), until)"""
_GIVE = "delete from bench.bare where name = 'bench' and owner = %s"


def url(server: MariaDB, more: str = "") -> str:
    return f"mysql://root@127.0.0.1:{server.port}/leasehold{more}"


def run(rounds: int) -> list[BenchResult]:
    server = MariaDB().start()
    try:
        return measure(list(pairs(server, 100)), rounds)
    finally:
        server.kill()


def pairs(server: MariaDB, times: int) -> Iterator[BenchCase]:
    server.run(
        "create database bench",
        "create table bench.bare (name varbinary(255) primary key, owner varbinary(64), until bigint) engine = InnoDB",
    )
    cursor = server.connect().cursor()

    def bare(times: int) -> None:
        for _ in range(times):
            assert cursor.execute(_TAKE, ("me",))
            cursor.execute(_GIVE, ("me",))

    yield BenchCase("bare upsert and delete, PyMySQL", bare, times)
    yield BenchCase("leasehold mysql://, with", repeat_with(Client(url(server)).lock("bench")), times)

    loop = asyncio.new_event_loop()
    theirs = AsyncClient(url(server)).lock("bench")

    async def main(times: int) -> None:
        for _ in range(times):
            async with theirs:
                pass

    yield BenchCase("leasehold mysql://, async with", lambda times: loop.run_until_complete(main(times)), times)
    yield BenchCase(
        "leasehold mysql://, procedures=no", repeat_with(Client(url(server, "?procedures=no")).lock("plain")), times
    )
    yield BenchCase("GET_LOCK: no lease, no token, no queue", get_lock(server), times)


def get_lock(server: MariaDB) -> Callable[[int], None]:
    cursor = server.connect().cursor()

    def pair(times: int) -> None:
        for _ in range(times):
            cursor.execute("select get_lock('bench', 10)")
            cursor.execute("select release_lock('bench')")

    return pair


# ------------------------------------------------------------------ hand-off


def statements(server: MariaDB) -> dict[str, int]:
    """The number of calls that clients sent, by verb, from the server's log."""
    query = "select count(*) from mysql.general_log where command_type = 'Query' and argument like %s"
    verbs = ("attempt", "release", "heartbeat", "renew", "listen")
    return {verb: server.ask(query, f"call `leasehold`.lh_{verb}_v1(%")[0][0] for verb in verbs}


def blocked_get_lock(server: MariaDB, times: int) -> float:
    first, second = server.connect().cursor(), server.connect().cursor()
    return blocked_hand_off(first, second, "select get_lock('line', 10)", "select release_lock('line')", times)


def parts(rounds: int) -> Iterator[Part]:
    results = run(rounds)
    yield Table(TITLE, results)
    ours = ratio_of(results, "leasehold mysql://, with", results[0].name)
    yield Aims("mysql: aims", [Aim("MariaDB: pair, against a bare upsert and delete", ours, 1.5)])
    server = MariaDB().start()
    try:
        server.run("set global log_output = 'TABLE'", "set global general_log = 1")
        waking = f"a blocked GET_LOCK wakes in {blocked_get_lock(server, 20) * 1000:.2f} ms: a connection per waiter"
        yield server_counts("mysql", url(server), lambda: statements(server), waking)
        server.run("set global general_log = 0")
        yield few_against_many("MariaDB", url(server), max(2, rounds // 2))
    finally:
        server.kill()
