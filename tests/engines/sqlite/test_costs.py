"""What a verb costs: which transactions wait for the disk."""

from __future__ import annotations

import threading

import pytest

from leasehold import Client
from leasehold.engines.sqlite import connection as file_module
from leasehold.model import Alive, Busy, Grant
from tests.support import probe


@pytest.mark.parametrize("durable", ["yes", "no"])
def test_grants_renewals_and_releases_sync_to_disk_but_waiters_do_not(path, monkeypatch, wait_until, durable) -> None:
    url = f"sqlite://{path}?durable={durable}"
    original, transactions = file_module.SqliteConnection._transact, []

    def transaction(self, db, job, write):
        (level,) = db.execute("pragma synchronous").fetchone()
        answer = original(self, db, job, write)
        transactions.append((level, answer))
        return answer

    monkeypatch.setattr(file_module.SqliteConnection, "_transact", transaction)
    grant_level = 2 if durable == "yes" else 1
    with Client(url) as holder, Client(url) as client:
        held = holder.lock("a").acquire()
        waiter = threading.Thread(target=lambda: client.lock("a", wait=60).acquire().release())
        waiter.start()
        wait_until(lambda: [h.state for h in holder.inspect()] == ["held", "waiting"])
        probe.watchdog(client)._next_heartbeat_at = 0.0
        probe.registry(client).wake_watchdog(0.0)
        wait_until(lambda: any(answer == [Alive(15.0, 0)] for _, answer in transactions))  # a heartbeat
        held.renew()
        held.release()
        waiter.join(20)
        client.lock("b").acquire().release()  # uncontended, although this client now queues at once
        assert [level for level, answer in transactions if isinstance(answer, Grant) or answer is True] == [
            grant_level
        ] * 6
        assert {level for level, answer in transactions if answer == [Alive(15.0, 0)]} == {1}
        assert next(level for level, answer in transactions if isinstance(answer, Busy) and answer.position == 0) == 1
        renewals = [(level, answer[0]) for level, answer in transactions if isinstance(answer, list)]
        assert [level for level, reply in renewals if isinstance(reply, Alive) and reply.ttl > 15.0] == [grant_level]
