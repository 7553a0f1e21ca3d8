"""A Redis primary grants a lock and dies before it is replicated; the promoted replica grants the lock again."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Final

from leasehold.cli.demo import DemoResult
from leasehold.cli.demo.redis_server import DemoRedis, server
from leasehold.cli.demo.runner import DemoRunner
from leasehold.errors import StaleToken, Unavailable
from leasehold.fences.sql.row import SQLFence

if TYPE_CHECKING:
    from leasehold.cli.demo.worker import Worker

TITLE: Final = "a Redis failover forgets a lock, and an order is paid twice"
FIX: Final = "a fence at the ledger (leasehold.fences.SQLFence), and min_replicas=1, which refuses to grant such a lock"

_INSERT_PAYMENT: Final = "insert into payments values (?)"


def payer(worker: Worker) -> None:
    with closing(sqlite3.connect(worker.ledger, timeout=30)) as ledger:
        client = worker.client(ttl=30.0)
        lease = client.lock("order/42", wait=30).acquire()
        worker.report("holds", f"acquires order/42 (token {lease.token}) from {worker.whom}")
        worker.wait_go()  # the failover happens here
        lease.check()
        try:
            if worker.fixed:
                SQLFence(ledger, "order/42").write(lease, _INSERT_PAYMENT, (worker.who,))
            else:
                with ledger:
                    ledger.execute(_INSERT_PAYMENT, (worker.who,))
            worker.report("done", "checks its lease: held. Pays", refused=False)
        except StaleToken as stale:
            worker.report("done", f"checks its lease: held. Tries to pay and is refused: {stale}", refused=True)
        worker.wait_go()
        client.close()


def careful(worker: Worker) -> None:
    """Acquire only if a replica has the lock, too."""
    with worker.client(ttl=2.0, call_timeout=1.0) as client:
        try:
            client.lock("order/42").acquire(wait=0)
            worker.report("done", "acquires order/42", granted=True)
        except Unavailable as refused:
            worker.report(
                "done", f"tries to acquire order/42 with min_replicas=1 and is refused: {refused}", granted=False
            )


ROLES: Final = {"payer": payer, "careful": careful, "server": server}


def run(runner: DemoRunner, fixed: bool) -> DemoResult:
    ledger = runner.path(f"ledger-{fixed}.db")
    with closing(sqlite3.connect(ledger)) as connection:
        connection.execute("create table payments (who text)")
        SQLFence(connection, "order/42").create()
    primary = DemoRedis(runner, "primary")
    replica = DemoRedis(runner, "replica", primary=primary)
    runner.log("a Redis primary and its replica are running and in sync")
    replica.execute("REPLICAOF 127.0.0.1 1")  # no server listens there
    runner.log("the replication link breaks: the replica misses all writes from now on")
    granted = False
    if fixed:
        careful_worker = runner.start("careful", "C", url=f"{primary.url}?min_replicas=1")
        granted = careful_worker.wait_for("done")["granted"]
    facts = {"ledger": ledger, "fixed": fixed}
    first = runner.start("payer", "A", url=primary.url, whom="the primary", **facts)
    first.wait_for("holds")
    primary.crash()
    replica.execute("REPLICAOF NO ONE")
    runner.log("the primary crashes and the replica is promoted, as Sentinel would do")
    second = runner.start("payer", "B", url=replica.url, whom="the new primary", **facts)
    second.wait_for("holds")
    second.send_go()
    second.wait_for("done")
    first.send_go()
    refused = first.wait_for("done")["refused"]
    with closing(sqlite3.connect(ledger)) as connection:
        paid = connection.execute("select count(*) from payments").fetchone()[0]
    as_expected = (paid, refused, granted) == ((1, True, False) if fixed else (2, False, False))
    text = "paid once" if paid == 1 else f"paid {paid} times"
    return DemoResult(as_expected, text, {"paid": paid, "refused": refused, **({"granted": granted} if fixed else {})})
