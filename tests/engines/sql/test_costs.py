"""What the engines on SQL servers cost: calls per operation, and connections."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress

import pytest

from leasehold import AsyncClient, Client, Unavailable
from leasehold.core.timing import HEARTBEAT_INTERVAL
from tests.support import probe
from tests.support.contention import wait_in_vain


def is_listening(client: Client) -> bool:
    """Whether wake-ups can reach the client."""
    return bool(probe.engine_state(client)[probe.core(client).engine_name].address)


def test_acquire_release_pair_costs_two_calls(sql) -> None:
    with Client(sql.url()) as client:
        client.inspect()
        sql.start_counting()
        lock = client.lock("job")
        for _ in range(50):
            with lock:
                pass
    assert sql.call_counts() == {"attempt": 50, "release": 50}


def test_dead_claims_that_were_passed_over_leave_a_lasting_queue(sql, make_driver) -> None:
    driver = make_driver(sql.url())
    driver.acquire(driver.claim())
    driver.attempt(driver.claim(queue=True))
    for ticket, until in ((-3, 2**60), (-2, 1), (-1, 1)):
        values = f"'', 'job', true, {ticket}, 'passed{ticket}', '', 'l', 'h', 1, 'p', 'exclusive', 0, 1, {until}"
        sql.ask(f"insert into {{s}}.lh_waiter values ({values})")
    for _ in range(16):
        assert driver.attempt(driver.claim(queue=True)).position, "a claim that joins behind others decides nothing"
    assert sql.ask("select count(*) from {s}.lh_waiter") == [(18,)]
    left = sql.ask("select id_hash from {s}.lh_waiter where ticket < 0")
    assert left == [("passed-3",)], "one whose client is alive keeps its place"


@pytest.mark.parametrize("waiters", [2, 30])
def test_handoff_costs_two_calls_however_long_the_queue(sql, wait_until, waiters) -> None:
    with Client(sql.url(), call_timeout=30) as client, Client(sql.url()) as other:
        sql.start_counting()
        lease = other.lock("job", ttl=60).acquire()
        # From now on the client listens; an earlier waiter would attempt again.
        wait_in_vain(client.lock("job"), lambda: is_listening(client))
        lock = client.lock("job", wait=60, ttl=60)

        def work() -> None:
            with lock:
                pass

        threads = [threading.Thread(target=work, daemon=True) for _ in range(waiters)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        wait_until(lambda: len(client.inspect()) == waiters + 1)
        wait_until(lambda: not probe.pending_releases(client))  # do not count the release of the waiter that gave up
        before = sql.call_counts()
        lease.release()
        for thread in threads:
            thread.join(60)
        after = sql.call_counts()
        unprompted = waiters * int((time.monotonic() - began) / HEARTBEAT_INTERVAL)  # re-checks on a slow machine
    attempts = after["attempt"] - before["attempt"]
    released = after["release"] - before.get("release", 0)
    assert released == waiters + 1
    assert attempts <= 1.1 * waiters + 1 + unprompted, "one attempt per wake-up; the next waiter may re-check"
    listen_calls = after.get("listen", 0) - before.get("listen", 0)  # on MySQL a wake-up is a call too
    assert listen_calls <= 1.1 * waiters + 2 + unprompted


@pytest.mark.extended
def test_many_tasks_use_no_more_connections_than_promised(sql) -> None:
    async def main() -> None:
        async with AsyncClient(sql.named_url("crowd"), call_timeout=30) as client:
            lock = client.lock("hot", wait=100)

            async def work() -> None:
                async with lock:
                    await asyncio.sleep(0)

            await asyncio.gather(*(work() for _ in range(200)))
            assert len(sql.sessions("crowd")) <= sql.max_connections

    asyncio.run(main())


def test_client_uses_no_more_connections_than_promised(sql, wait_until) -> None:
    with Client(sql.named_url("few"), ttl=9) as client, Client(sql.url()) as other:
        client.inspect()
        with other.lock("taken"):
            wait_in_vain(client.lock("taken"), lambda: is_listening(client))
        with client.lock("job"):
            wait_until(
                lambda: len(sql.sessions("few")) == sql.max_connections
            )  # calls, wake-ups, and the watchdog's renewals
        client.inspect()
        assert len(sql.sessions("few")) == sql.max_connections
    wait_until(lambda: not sql.sessions("few"))


def test_cancelled_calls_do_not_exhaust_the_connections(sql, wait_until) -> None:
    async def impatient() -> None:
        async with AsyncClient(sql.named_url("impatient"), call_timeout=8) as client:
            await client.ping()
            for number in range(40):
                with suppress(TimeoutError, Unavailable):
                    await asyncio.wait_for(client.lock("job", wait=5).acquire(), 0.05)
                if number % 10 == 9:
                    assert (
                        len(await asyncio.to_thread(sql.sessions, "impatient")) <= sql.max_connections + 2 * 4
                    )  # plus sessions that the server has not ended yet

    with Client(sql.url()) as client:
        client.lock("job").acquire().release()
    with sql.lock_all_buckets():
        asyncio.run(impatient())
    wait_until(lambda: not sql.sessions("impatient"))
    wait_until(lambda: not sql.ask("select 1 from {s}.lh_grant union select 1 from {s}.lh_queue"), 60)
