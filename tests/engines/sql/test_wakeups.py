"""Which waiters are woken or passed over."""

from __future__ import annotations

import os
import signal
import threading
import time

from leasehold import Client
from leasehold.runtime.base import run_sync
from tests.support import probe_sql
from tests.support.timing import check_elapsed


def test_only_the_head_of_a_long_queue_is_woken_to_recheck(sql, make_driver) -> None:
    driver = make_driver(sql.url())
    driver.acquire(driver.claim())
    queue = [driver.claim(queue=True) for _ in range(4)]
    for claim in queue:
        driver.attempt(claim)
    replies = run_sync(driver.engine.renew(queue, driver.deadline()))
    assert [bool(reply.position) for reply in replies] == [
        False,
        True,
        True,
        True,
    ]  # the watchdog wakes a waiter at position 0


def test_heartbeat_of_a_passed_over_waiter_makes_it_attempt(sql, make_driver) -> None:
    """Also if others are ahead of it: it has no place in the queue until it attempts."""
    driver = make_driver(sql.url())
    driver.acquire(driver.claim())
    queue = [driver.claim(queue=True) for _ in range(3)]
    for claim in queue:
        driver.attempt(claim)
    sql.ask("update {s}.lh_waiter set passed = true where id_hash = %s", queue[1].id_hash)
    replies = run_sync(driver.engine.renew(queue, driver.deadline()))
    assert [bool(reply.position) for reply in replies] == [False, False, True]


def test_killed_waiter_is_passed_over(sql, wait_until) -> None:
    doomed = sql.named_url("doomed")
    with Client(sql.url()) as client, Client(sql.url()) as third:
        lease = client.lock("job", ttl=60).acquire()
        child = os.fork()
        if child == 0:
            try:
                with Client(doomed) as mine:
                    mine.lock("job", wait=60).acquire()
            finally:
                os._exit(1)
        wait_until(lambda: [h.state for h in client.inspect()] == ["held", "waiting"])
        got = []
        thread = threading.Thread(target=lambda: got.append(third.lock("job", wait=30).acquire()), daemon=True)
        thread.start()
        wait_until(lambda: len(client.inspect()) == 3)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        wait_until(lambda: len(sql.sessions("doomed")) <= sql.lingering_sessions)
        began = time.monotonic()
        lease.release()
        thread.join(30)
        assert got
        check_elapsed(began, 2.5, "passed over at once, or at the re-check after a second")
        assert "passed over" in [h.state for h in client.inspect()]
        got[0].release()


def test_sessions_that_end_soon_are_opened_after_ever_longer_pauses(sql, make_driver, wait_until, monkeypatch) -> None:
    """Behind a proxy that cut off each one, a client connected without a pause, and its waiters attempted each time."""
    monkeypatch.setattr(*probe_sql.STABLE_AFTER, 1000.0)  # this machine may be slow
    driver = make_driver(sql.url())
    driver.acquire(driver.claim())
    waiting, pauses = driver.claim(queue=True), []
    for _ in range(7):
        wait_until(lambda: driver.attempt(waiting) and probe_sql.is_listening(driver.engine))
        pauses.append(probe_sql.end_listening(driver.engine))
    assert pauses[0] < 0, "the first one is opened again at once"
    assert pauses[-1] >= 0.5
    monkeypatch.setattr(*probe_sql.STABLE_AFTER, 0.0)
    wait_until(lambda: driver.attempt(waiting) and probe_sql.is_listening(driver.engine))
    assert probe_sql.end_listening(driver.engine) < 0


def test_waiter_polls_until_another_session_may_be_opened(sql, make_driver, monkeypatch) -> None:
    """It slept for 5 s, longer than its reservation lasts: whoever may end sessions of the client could have each
    hand-off take that long."""
    driver = make_driver(sql.url())
    driver.acquire(driver.claim())
    waiting, polls = driver.claim(queue=True), []

    async def record(*_: object, **options: object) -> None:
        polls.append(options["polls"])

    monkeypatch.setattr("leasehold.engines.sql.engine.wait_for_wakeup", record)
    for _ in range(2):
        run_sync(driver.engine.wait(waiting, driver.attempt(waiting), 5.0))
        if probe_sql.is_listening(driver.engine):
            probe_sql.end_listening(driver.engine, pause=600.0)
    assert not probe_sql.is_listening(driver.engine)
    assert polls == [False, True]
