"""The PostgreSQL engine compared with a bare upsert and delete of equal durability, and with advisory locks; then
hand-offs.

`python -m bench postgresql` starts its own server. Packages that do not work here are reported: pals, tooz.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from bench.cases import Aim, Aims, Part, Table, ratio_of, repeat_with, usable_peers
from bench.sql import blocked_hand_off, few_against_many, server_counts
from harness.servers.postgresql import PostgreSQL
from leasehold import AsyncClient, Client
from leasehold.cli.bench.measurement import BenchCase, BenchResult, measure

TITLE = "postgresql: acquire + release, against a bare upsert and delete, both durable (aim: at most 1.3)"

_TAKE = """insert into bare values ('bench', %s, clock_timestamp() + interval '30 s') on conflict (name)
    do update set owner = excluded.owner, until = excluded.until where bare.until < clock_timestamp()"""
_GIVE = "delete from bare where name = 'bench' and owner = %s"


def run(rounds: int) -> list[BenchResult]:
    server = PostgreSQL().start()
    try:
        return measure(list(pairs(server, 100)), rounds)
    finally:
        server.kill()


def pairs(server: PostgreSQL, times: int) -> Iterator[BenchCase]:
    db = server.connect(prepare_threshold=0)
    db.execute("create table bare (name text primary key, owner text, until timestamptz) with (fillfactor = 50)")

    def bare(times: int) -> None:
        for _ in range(times):
            assert db.execute(_TAKE, ("me",)).rowcount
            db.execute(_GIVE, ("me",))

    yield BenchCase("bare upsert and delete, psycopg", bare, times)
    ours = Client(server.url()).lock("bench")
    yield BenchCase("leasehold postgresql://, with", repeat_with(ours), times)

    loop = asyncio.new_event_loop()
    theirs = AsyncClient(server.url()).lock("bench")

    async def main(times: int) -> None:
        for _ in range(times):
            async with theirs:
                pass

    yield BenchCase("leasehold postgresql://, async with", lambda times: loop.run_until_complete(main(times)), times)
    yield BenchCase("advisory lock: no lease, no token, no queue", advisory(server), times)
    for name, lock in peers(server):
        yield BenchCase(name, repeat_with(lock), times)


def advisory(server: PostgreSQL) -> Callable[[int], None]:
    db = server.connect(prepare_threshold=0)

    def pair(times: int) -> None:
        for _ in range(times):
            db.execute("select pg_advisory_lock(7)")
            db.execute("select pg_advisory_unlock(7)")

    return pair


def peers(server: PostgreSQL) -> Iterator[tuple[str, Any]]:
    def pals() -> Any:
        import pals

        return pals.Locker("bench", server.url()).lock("bench")

    def tooz() -> Any:
        from tooz import coordination

        coordinator = coordination.get_coordinator(server.url(), b"bench")
        coordinator.start()
        return coordinator.get_lock(b"bench")

    yield from usable_peers({"pals (advisory locks)": pals, "tooz (advisory locks)": tooz})


# ------------------------------------------------------------------ hand-off


def statements(server: PostgreSQL) -> dict[str, int]:
    """The server's count of our statements, by verb."""
    query = "select substring(query from 'lh_([a-z]+)_v1'), sum(calls)::integer from pg_stat_statements"
    rows = server.ask(query + " where query like 'select %%\"leasehold\".lh\\_%%' group by 1")
    return dict(rows)


def blocked_advisory(server: PostgreSQL, times: int) -> float:
    with server.connect() as first, server.connect() as second:
        return blocked_hand_off(first, second, "select pg_advisory_lock(9)", "select pg_advisory_unlock(9)", times)


def parts(rounds: int) -> Iterator[Part]:
    results = run(rounds)
    yield Table(TITLE, results)
    ours = ratio_of(results, "leasehold postgresql://, with", results[0].name)
    yield Aims("postgresql: aims", [Aim("PostgreSQL: pair, against a bare upsert and delete", ours, 1.3)])
    server = PostgreSQL().start()
    try:
        server.ask("create extension pg_stat_statements")
        took = blocked_advisory(server, 20) * 1000
        waking = f"a blocked advisory lock wakes in {took:.2f} ms: a connection per waiter"
        yield server_counts("postgresql", server.url(), lambda: statements(server), waking)
        yield few_against_many("PostgreSQL", server.url(), max(2, rounds // 2))
    finally:
        server.kill()
