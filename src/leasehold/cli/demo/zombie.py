"""A holder is paused between its check and its write for longer than its ttl, and sells what its successor has sold."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Final

from leasehold.cli.demo import DemoResult
from leasehold.cli.demo.runner import DemoRunner
from leasehold.errors import StaleToken
from leasehold.fences.sql.row import SQLFence

if TYPE_CHECKING:
    from leasehold.cli.demo.worker import Worker

TITLE: Final = "a paused holder sells the last teapot a second time"
FIX: Final = "a fence at the stock table: leasehold.fences.SQLFence"

_SELECT_QUANTITY: Final = "select quantity from stock"
_TTL: Final = 1.0


def seller(worker: Worker) -> None:
    with closing(sqlite3.connect(worker.shop, timeout=30)) as shop:
        client = worker.client(ttl=worker.ttl)
        fence = SQLFence(shop, "stock")
        lease = client.lock("stock/teapot", wait=30).acquire()
        rows = fence.read(lease, _SELECT_QUANTITY) if worker.fixed else shop.execute(_SELECT_QUANTITY).fetchall()
        worker.report("looked", f"acquires stock/teapot (token {lease.token}) and reads the stock: {rows[0][0]} left")
        lease.check()
        worker.report("checked", "checks its lease: held. About to sell")
        worker.wait_go()  # the pause happens here
        try:
            if worker.fixed:
                with fence.transaction(lease) as cursor:
                    sell(cursor, rows[0][0], worker.who)
            else:
                with shop:
                    sell(shop.cursor(), rows[0][0], worker.who)
            worker.report("done", "sells one", refused=False)
        except StaleToken as stale:
            worker.report("done", f"is refused: {stale}", refused=True)
        client.close()


def sell(cursor: sqlite3.Cursor, quantity: int, who: str) -> None:
    cursor.execute("update stock set quantity = ?", (quantity - 1,))
    cursor.execute("insert into sales values (?)", (who,))


ROLES: Final = {"seller": seller}


def run(runner: DemoRunner, fixed: bool) -> DemoResult:
    shop = runner.path(f"shop-{fixed}.db")
    with closing(sqlite3.connect(shop)) as connection:
        connection.executescript("create table stock (quantity integer); create table sales (who text)")
        connection.execute("insert into stock values (1)")
        connection.commit()
        SQLFence(connection, "stock").create()
    first = runner.start("seller", "A", shop=shop, ttl=_TTL, fixed=fixed)
    first.wait_for("checked")
    first.pause()
    second = runner.start("seller", "B", shop=shop, ttl=30.0, fixed=fixed)
    second.wait_for("checked")  # once A's lease has expired
    second.send_go()
    second.wait_for("done")
    first.resume()
    first.send_go()
    refused = first.wait_for("done")["refused"]
    with closing(sqlite3.connect(shop)) as connection:
        sold = connection.execute("select count(*) from sales").fetchone()[0]
    as_expected = (sold, refused) == ((1, True) if fixed else (2, False))
    return DemoResult(as_expected, f"{sold} sold of a stock of 1", {"sold": sold, "refused": refused})
