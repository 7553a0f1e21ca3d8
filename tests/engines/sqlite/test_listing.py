"""Lists of very many claims: bounded, and read in short transactions, so that other verbs come in between."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from leasehold import AsyncClient, Client
from leasehold.errors import ListingTooLong, Unavailable
from tests.support import probe_sqlite
from tests.support.bare_engine import BareEngineDriver

LONG = "x" * 500  # a purpose: fewer than ten thousand claims with it fit into a list

_COPY_GRANT = """
    with recursive number(n) as (select 1 union all select n + 1 from number where n < ?)
    insert into lh_grant select namespace, name || n, token + n, id_hash || n, state, client, label, host, pid, ?,
        mode, delay, ticket, since, heartbeat_expires_at, until, slot, granted_ttl, kind, grant_limit, min_hold,
        process_bound
    from lh_grant, number where name = 'orders/'"""

_PLANT_WAITERS = """
    with recursive number(n) as (select 1 union all select n + 1 from number where n < ?)
    insert into lh_waiter select namespace, name, 0, n, 'w' || n, client, label, host, pid, ?, mode, delay, since, until
    from lh_grant, number"""


def plant_locks(path: Path, count: int, purpose: str = "") -> None:
    """That many copies of the lock orders/."""
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(_COPY_GRANT, (count, purpose))


@pytest.mark.parametrize(
    ("purpose", "count"), [(LONG, 10_000), pytest.param("", 40_000, marks=pytest.mark.extended)], ids=["long", "many"]
)
def test_list_of_more_claims_than_fit_names_the_way_out(path, purpose, count) -> None:
    with Client(f"sqlite://{path}") as client, client.lock("orders/"):
        plant_locks(path, count, purpose)
        with pytest.raises(ListingTooLong, match=r"more than .*,.* claims are live: ask for the names with one prefix"):
            client.inspect()
        assert len(client.inspect("orders/99")) == 1 + 10 + 100
        assert [each.name for each in client.inspect("orders/99", exact=True)] == ["orders/99"]


def test_queue_of_one_name_is_not_read_without_end(path) -> None:
    with Client(f"sqlite://{path}") as client, client.lock("a"), closing(sqlite3.connect(path)) as db:
        with db:
            db.execute("insert into lh_queue select namespace, name, kind, 1, until, '', 0, 0 from lh_grant")
            db.execute(_PLANT_WAITERS, (10_000, LONG))
        with pytest.raises(ListingTooLong):
            client.inspect("a", exact=True)
        with db:
            db.execute("delete from lh_waiter where ticket > 100")
        assert [each.position for each in client.inspect()] == [None, *range(100)]
        with db:
            db.execute("delete from lh_waiter")


@pytest.mark.parametrize("page", [1, 3, 500])
def test_list_of_many_pages_has_every_claim_once(path, monkeypatch, wait_until, page) -> None:
    monkeypatch.setattr(*probe_sqlite.LIST_PAGE, page)
    with Client(f"sqlite://{path}") as client, Client(f"sqlite://{path}", namespace="other") as other:
        names = ["a", "b/1", "b/2", "b/名", "b/\U0010ffff", "b0", "c"]
        leases = [each.lock(name).acquire(wait=0) for name in names for each in (client, other)]
        leases += [client.semaphore("b/s", 5).acquire(wait=0) for _ in range(4)]
        for name in ("b/0", "b/3", "b/4"):
            client.set_limit(name, 3)
        waiter = threading.Thread(target=lambda: client.lock("b/1", wait=60).acquire().release())
        waiter.start()
        wait_until(lambda: len(client.inspect("b/1")) == 2)
        semaphores = ["b/s"] * 4
        found = [each.name for each in client.inspect()]
        assert found == ["a", "b/1", "b/1", "b/2", *semaphores, "b/名", "b/\U0010ffff", "b0", "c"]
        assert [each.name for each in client.inspect("b/")] == found[1:10]
        assert [each.state for each in client.inspect("b/1")] == ["held", "waiting"]
        assert client.inspect("b/5") == []
        for lease in leases:
            lease.release()
        waiter.join(60)


@pytest.mark.parametrize("encoding", ["UTF-16le", "UTF-16be"])
@pytest.mark.parametrize("page", [1, 500])
def test_list_of_a_file_in_another_encoding_is_complete(path, monkeypatch, encoding, page) -> None:
    """An application may have created the file. SQLite orders names by their bytes then: a list showed a name twice, or
    said that another program had edited the file."""
    monkeypatch.setattr(*probe_sqlite.LIST_PAGE, page)
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"pragma encoding = '{encoding}'")
        db.execute("create table orders (number)")
    driver = BareEngineDriver(f"sqlite://{path}")
    names = ["b", "z", "\u0100", "\u0100/1", "\ue000", "\U0001f600"]
    for name in names:
        driver.acquire(driver.claim(name))
    with Client(f"sqlite://{path}") as client:
        client.set_limit("\u0100/2", 3)
        driver.attempt(driver.claim("b", queue=True))
        found = [(each.name, each.state) for each in client.inspect()]
        assert found == sorted([*((name, "held") for name in names), ("b", "waiting")])
        assert [each.name for each in client.inspect("\u0100")] == ["\u0100", "\u0100/1"]
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("pragma encoding").fetchone() == (encoding,)


def test_list_that_does_not_end_before_the_deadline_is_unavailable(path, monkeypatch) -> None:
    monkeypatch.setattr(*probe_sqlite.LIST_PAGE, 1)
    with Client(f"sqlite://{path}") as client, client.lock("orders/"):
        plant_locks(path, 3)
        with pytest.raises(Unavailable, match="did not end before the deadline"):
            probe_sqlite.inspect(client, deadline=0.0)


def test_renewal_waits_for_one_page_of_all_lists(path, monkeypatch) -> None:
    """One thread calls the engine for an event loop, as in a lock server."""
    monkeypatch.setattr(*probe_sqlite.LIST_PAGE, 1)
    transact, began, go = getattr(*probe_sqlite.TRANSACT), threading.Event(), threading.Event()
    order: list[str] = []

    def logged(self, db, job, write):
        if not self._runtime.blocking:
            order.append("write" if write else "page")
            if began.is_set() or not write:
                began.set()
                assert go.wait(60)
        return transact(self, db, job, write)

    async def run() -> list[int]:
        async with AsyncClient(f"sqlite://{path}") as client:
            lease = await client.lock("a", ttl=600, require={"outlives"}).acquire()  # its renewal waits for the disk
            plants = [await client.lock(f"b{number}", ttl=600).acquire() for number in range(10)]
            monkeypatch.setattr(*probe_sqlite.TRANSACT, logged)
            lists = [asyncio.create_task(client.inspect()) for _ in range(5)]
            await asyncio.to_thread(began.wait, 60)
            renewal = asyncio.create_task(lease.renew())
            for _ in range(10):  # until it has asked
                await asyncio.sleep(0)
            asyncio.get_running_loop().call_later(0.05, go.set)
            await renewal
            found = await asyncio.gather(*lists)
            for each in (lease, *plants):
                await each.release()
            return [len(holdings) for holdings in found]

    assert asyncio.run(run()) == [11] * 5
    assert order.index("write") <= 2
    assert order.count("page") >= 55
