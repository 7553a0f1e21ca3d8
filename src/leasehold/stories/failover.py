"""A primary acknowledges a lock, dies before its replica has heard of it, and the replica grants the lock again."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Final

from leasehold.errors import StaleToken, Unavailable
from leasehold.fences.sql.row import SQLFence
from leasehold.stories import Outcome
from leasehold.stories.servers import Redis, server
from leasehold.stories.stage import Stage

if TYPE_CHECKING:
    from leasehold.stories.actor import Part

TITLE: Final = "a fail-over of Redis forgets a lock, and one order is paid twice"
CURE: Final = "a fence at the ledger: leasehold.fences.SQLFence; and min_replicas=1, which grants no such lock at all"

_PAY: Final = "insert into payments values (?)"


def payer(part: Part) -> None:
    with closing(sqlite3.connect(part.ledger, timeout=30)) as ledger:
        client = part.client(ttl=30.0)
        lease = client.lock("order/42", wait=30).acquire()
        part.say("holds", f"holds order/42 with token {lease.token}: {part.whom} has acknowledged it")
        part.cue()  # the fail-over strikes here
        lease.check()
        try:
            if part.cured:
                SQLFence(ledger, "order/42").write(lease, _PAY, (part.who,))
            else:
                with ledger:
                    ledger.execute(_PAY, (part.who,))
            part.say("done", "checks its lease: HELD. Pays", refused=False)
        except StaleToken as stale:
            part.say("done", f"checks its lease: HELD. Pays, and is refused: {stale}", refused=True)
        part.cue()
        client.close()


def careful(part: Part) -> None:
    """Asks for a lock that a replica has as well."""
    with part.client(ttl=2.0, call_timeout=1.0) as client:
        try:
            client.lock("order/42").acquire(wait=0)
            part.say("done", "is granted order/42", granted=True)
        except Unavailable as refused:
            part.say("done", f"asks with min_replicas=1, and gets no lock: {refused}", granted=False)


ROLES: Final = {"payer": payer, "careful": careful, "server": server}


def play(stage: Stage, cured: bool) -> Outcome:
    ledger = stage.path(f"ledger-{cured}.db")
    with closing(sqlite3.connect(ledger)) as made:
        made.execute("create table payments (who text)")
        SQLFence(made, "order/42").create()
    primary = Redis(stage, "primary")
    replica = Redis(stage, "replica", beside=primary)
    stage.tell("a Redis primary and its replica are up, and in step")
    replica.ask("REPLICAOF 127.0.0.1 1")  # where nobody is
    stage.tell("the link between the two breaks: the replica hears nothing of what comes now")
    granted = False
    if cured:
        asks = stage.start("careful", "C", url=f"{primary.url}?min_replicas=1")
        granted = asks.hear("done")["granted"]
    facts = {"ledger": ledger, "cured": cured}
    first = stage.start("payer", "A", url=primary.url, whom="the primary", **facts)
    first.hear("holds")
    primary.crash()
    replica.ask("REPLICAOF NO ONE")
    stage.tell("the primary dies, and the replica is promoted, as Sentinel would do it")
    second = stage.start("payer", "B", url=replica.url, whom="the new primary", **facts)
    second.hear("holds")
    second.go()
    second.hear("done")
    first.go()
    refused = first.hear("done")["refused"]
    with closing(sqlite3.connect(ledger)) as made:
        paid = made.execute("select count(*) from payments").fetchone()[0]
    seen = (paid, refused, granted) == ((1, True, False) if cured else (2, False, False))
    text = "paid once" if paid == 1 else f"paid {paid} times"
    return Outcome(seen, text, {"paid": paid, "refused": refused, **({"granted": granted} if cured else {})})
