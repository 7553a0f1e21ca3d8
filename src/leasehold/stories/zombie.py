"""A holder is paused between its check and its write, for longer than its ttl, and sells what its successor sold."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Final

from leasehold.errors import StaleToken
from leasehold.fences.sql.row import SQLFence
from leasehold.stories import Outcome
from leasehold.stories.stage import Stage

if TYPE_CHECKING:
    from leasehold.stories.actor import Part

TITLE: Final = "a paused holder sells the last teapot a second time"
CURE: Final = "a fence at the table of stock: leasehold.fences.SQLFence"

_LOOK: Final = "select quantity from stock"
_TTL: Final = 1.0


def seller(part: Part) -> None:
    with closing(sqlite3.connect(part.shop, timeout=30)) as shop:
        client = part.client(ttl=part.ttl)
        fence = SQLFence(shop, "stock")
        lease = client.lock("stock/teapot", wait=30).acquire()
        rows = fence.read(lease, _LOOK) if part.cured else shop.execute(_LOOK).fetchall()
        part.say("looked", f"holds stock/teapot with token {lease.token}, and sees {rows[0][0]} left")
        lease.check()
        part.say("checked", "checks its lease: HELD. About to sell")
        part.cue()  # the pause strikes here
        try:
            if part.cured:
                with fence.transaction(lease) as cursor:
                    sell(cursor, rows[0][0], part.who)
            else:
                with shop:
                    sell(shop.cursor(), rows[0][0], part.who)
            part.say("done", "sells one", refused=False)
        except StaleToken as stale:
            part.say("done", f"is refused: {stale}", refused=True)
        client.close()


def sell(cursor: sqlite3.Cursor, seen: int, who: str) -> None:
    cursor.execute("update stock set quantity = ?", (seen - 1,))
    cursor.execute("insert into sales values (?)", (who,))


ROLES: Final = {"seller": seller}


def play(stage: Stage, cured: bool) -> Outcome:
    shop = stage.path(f"shop-{cured}.db")
    with closing(sqlite3.connect(shop)) as made:
        made.executescript("create table stock (quantity integer); create table sales (who text)")
        made.execute("insert into stock values (1)")
        made.commit()
        SQLFence(made, "stock").create()
    first = stage.start("seller", "A", shop=shop, ttl=_TTL, cured=cured)
    first.hear("checked")
    first.pause()
    second = stage.start("seller", "B", shop=shop, ttl=30.0, cured=cured)
    second.hear("checked")  # once A's lease has lapsed
    second.go()
    second.hear("done")
    first.resume()
    first.go()
    refused = first.hear("done")["refused"]
    with closing(sqlite3.connect(shop)) as made:
        sold = made.execute("select count(*) from sales").fetchone()[0]
    seen = (sold, refused) == ((1, True) if cured else (2, False))
    return Outcome(seen, f"{sold} sold of 1", {"sold": sold, "refused": refused})
