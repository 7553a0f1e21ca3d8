"""What a verb costs: which transactions wait for the disk."""

from __future__ import annotations

import threading

import pytest

from leasehold import Client
from leasehold.core.queue_entry import Notification
from leasehold.engines.sqlite import engine as engine_module
from leasehold.engines.sqlite.boot_clock import BootClock
from leasehold.engines.sqlite.connection import NeedsSync
from leasehold.engines.sqlite.engine import open_with_clock
from leasehold.model import Busy
from tests.support import probe, probe_sqlite

SYNCED, NOT_SYNCED = 2, 1


@pytest.fixture
def levels(monkeypatch) -> list[int]:
    """The synchronous level of each write transaction that was committed and changed something."""
    original, found = getattr(*probe_sqlite.TRANSACT), []

    def transaction(self, db, job, write):
        (level,) = db.execute("pragma synchronous").fetchone()
        before = db.total_changes
        answer = original(self, db, job, write)
        if db.total_changes != before:
            found.append(level)
        return answer

    monkeypatch.setattr(*probe_sqlite.TRANSACT, transaction)
    return found


def acquire_renew_release(client: Client, name: str = "a", **options) -> None:
    lease = client.lock(name, **options).acquire()
    lease.renew()
    lease.release()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [NOT_SYNCED] * 3),
        ({"delay": 5.0}, [SYNCED, SYNCED, NOT_SYNCED]),
        ({"require": {"outlives"}}, [SYNCED, SYNCED, NOT_SYNCED]),
        ({"min_hold": 60.0}, [SYNCED] * 3),  # the release writes that the name stays occupied
    ],
    ids=["plain", "delay", "outlives", "min_hold"],
)
def test_only_what_must_survive_a_power_cut_waits_for_the_disk(path, levels, options, expected) -> None:
    with Client(f"sqlite://{path}") as client:
        client.lock("first").acquire().release()  # raises the ceiling of tokens
        levels.clear()
        acquire_renew_release(client, **options)
        assert levels == expected
    with Client(f"sqlite://{path}?durable=no") as client:
        levels.clear()
        acquire_renew_release(client, "b", **options)
        assert set(levels) == {NOT_SYNCED}


def test_waiters_and_hand_offs_do_not_wait_for_the_disk(path, levels, wait_until) -> None:
    with Client(f"sqlite://{path}") as holder, Client(f"sqlite://{path}") as client:
        held = holder.lock("a").acquire()
        levels.clear()
        waiter = threading.Thread(target=lambda: client.lock("a", wait=60).acquire().release())
        waiter.start()
        wait_until(lambda: [h.state for h in holder.inspect()] == ["held", "waiting"])
        probe.make_heartbeat_due(client)
        probe.registry(client).wake_watchdog(0.0)
        held.release()
        waiter.join(60)
        assert set(levels) == {NOT_SYNCED}
        assert len(levels) >= 4


def test_lasting_grant_waits_for_the_disk_in_a_client_that_has_waited(path, levels) -> None:
    """Such a client queues at once, also for a name that is free."""
    with Client(f"sqlite://{path}") as client:
        client.lock("first").acquire().release()
        probe.registry(client).shared["contended"] = True
        levels.clear()
        lease = client.lock("a", delay=5.0).acquire()
        assert levels == [SYNCED]
        lease.release()


@pytest.mark.parametrize("has_waited", [False, True])
def test_uncontended_pair_takes_ten_statements(path, has_waited) -> None:
    """Also in a client that has waited, and therefore queues at once."""
    with Client(f"sqlite://{path}") as client:
        client.lock("first").acquire().release()
        if has_waited:
            probe.registry(client).shared["contended"] = True
        statements = []
        probe_sqlite.database(client).set_trace_callback(statements.append)
        client.lock("a").acquire().release()
        assert len(statements) == 10


@pytest.fixture
def decisions(monkeypatch) -> list[str]:
    """The names whose state the engine loaded, because it had something to decide."""
    original, found = engine_module.RowLockState.__init__, list[str]()

    def load(self, db, boot_clock, namespace, name, *args) -> None:
        found.append(name)
        original(self, db, boot_clock, namespace, name, *args)

    monkeypatch.setattr(engine_module.RowLockState, "__init__", load)
    return found


def test_hand_offs_of_a_crowd_load_no_queue_and_are_pushed(path, make_driver, wait_until, decisions) -> None:
    driver = make_driver(f"sqlite://{path}")
    holder, *queue = (
        driver.acquire(driver.claim(process_bound=True)),
        *(driver.claim(queue=True, process_bound=True) for _ in range(3)),
    )
    for waiter in queue:
        assert isinstance(driver.attempt(waiter), Busy)
    decisions.clear()
    for _ in range(4):
        driver.release(holder)
        wait_until(lambda: driver.registry.waiting[queue[0].id_hash].woken)
        holder = driver.acquire(queue.pop(0))
        queue.append(driver.claim(queue=True, process_bound=True))
        assert driver.attempt(queue[-1]).position == 2
        assert driver.registry.waiting[queue[-1].id_hash].holders, "it would not notice that its holder has ended"
    assert not decisions


def test_pairs_after_a_crowd_load_no_queue(path, make_driver, decisions) -> None:
    driver = make_driver(f"sqlite://{path}")
    holder, waiter = driver.acquire(driver.claim(process_bound=True)), driver.claim(queue=True, process_bound=True)
    driver.attempt(waiter)
    driver.release(holder)
    driver.release(driver.acquire(waiter))
    decisions.clear()
    for _ in range(3):
        driver.release(driver.acquire(driver.claim(queue=True, process_bound=True)))
    assert not decisions


def test_transaction_repeated_with_a_sync_notifies_once(path, make_driver, monkeypatch) -> None:
    """It finds out that it must wait for the disk after it has made notifications."""
    driver, sent, runs = make_driver(f"sqlite://{path}"), [], []
    driver.acquire(driver.claim())
    monkeypatch.setattr(probe_sqlite.wakeups(driver.engine), "send", lambda *args, **_: bool(sent.append(args)) or True)

    def decide(_db, notifications) -> None:
        runs.append(probe_sqlite.connection(driver.engine).synced)
        notifications.append(("", "job", Notification("client", "recheck", "waiter")))
        if not probe_sqlite.connection(driver.engine).synced:
            raise NeedsSync

    probe_sqlite.decide(driver.engine, decide, driver.deadline())
    assert runs == [False, True]
    assert len(sent) == 1


def test_break_waits_for_the_disk(path, levels) -> None:
    with Client(f"sqlite://{path}") as client:
        lease = client.lock("a").acquire()
        levels.clear()
        assert client.break_lock("a", token=lease.token)
        assert levels == [SYNCED]


def test_ceiling_of_tokens_is_raised_with_a_sync_once_per_step(path, levels, monkeypatch) -> None:
    wall = [1000.0]
    here = BootClock.of_this_machine()
    clock = BootClock(here.machine, here.boot, here.time_namespace, wall=lambda: wall[0])
    monkeypatch.setattr(*probe_sqlite.CEILING_STEP, 5_000_000)  # five seconds
    with Client(f"sqlite://{path}", engine=lambda config, *args: open_with_clock(config, *args, clock)) as client:
        client.ping()
        levels.clear()
        for _ in range(20):
            client.lock("a").acquire().release()
            wall[0] += 1.0
        assert levels.count(SYNCED) == 4  # at 0, 6, 12 and 18 s
        assert levels[0] == SYNCED


def test_every_write_waits_for_the_disk_if_the_boot_is_unknown(path, levels) -> None:
    clock = BootClock("machine", "", "")
    with Client(f"sqlite://{path}", engine=lambda config, *args: open_with_clock(config, *args, clock)) as client:
        acquire_renew_release(client)
        assert set(levels) == {SYNCED}


def test_log_is_moved_into_the_file_every_4000_pages(path) -> None:
    with Client(f"sqlite://{path}") as client:
        client.ping()
        (pages,) = probe_sqlite.database(client).execute("pragma wal_autocheckpoint").fetchone()
        assert pages == 4000  # a checkpoint waits for the disk, and is the only thing in a plain pair that does
