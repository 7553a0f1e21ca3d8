"""The engines on SQL servers: connections, forks, secrets, calls per operation. See also ../test_concurrency.py."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from contextlib import suppress

import pytest

from harness.servers.proxy import Proxy
from leasehold import AsyncClient, AsyncLease, Client, ConfigError, NotAcquired, Unavailable
from leasehold.core.timing import HEARTBEAT_INTERVAL
from tests.support.timing import check_elapsed


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
    with Client(sql.named_url("few"), ttl=3) as client, Client(sql.url()) as other:
        client.inspect()
        with other.lock("taken"), suppress(NotAcquired):
            client.lock("taken", wait=2).acquire()
        with client.lock("job"):
            wait_until(
                lambda: len(sql.sessions("few")) == sql.max_connections
            )  # calls, wake-ups, and the watchdog's renewals
        client.inspect()
        assert len(sql.sessions("few")) == sql.max_connections
    wait_until(lambda: not sql.sessions("few"))


def test_lease_of_an_earlier_loop_is_released_in_the_next(sql) -> None:
    """The new loop's connections have not met the server yet. That says nothing about the lease."""
    client = AsyncClient(sql.url())

    async def take() -> AsyncLease:
        return await client.lock("job").acquire()

    async def give_up() -> None:
        client._core.engine()  # opens the engine of the new loop
        releasing = asyncio.create_task(lease.release())
        await asyncio.sleep(0)  # the release starts to connect
        releasing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await releasing
        await client.close()

    lease = asyncio.run(take())
    asyncio.run(give_up())
    with Client(sql.url()) as other:
        assert other.inspect() == []


def test_acquire_release_pair_costs_two_calls(sql) -> None:
    with Client(sql.url()) as client:
        client.inspect()
        sql.start_counting()
        lock = client.lock("job")
        for _ in range(50):
            with lock:
                pass
    assert sql.call_counts() == {"attempt": 50, "release": 50}


@pytest.mark.parametrize("waiters", [2, 30])
def test_handoff_costs_two_calls_however_long_the_queue(sql, wait_until, waiters) -> None:
    with Client(sql.url(), call_timeout=30) as client, Client(sql.url()) as other:
        sql.start_counting()
        lease = other.lock("job", ttl=60).acquire()
        with pytest.raises(NotAcquired):  # from now on the client listens; an earlier waiter would attempt again
            client.lock("job", wait=0.5).acquire()
        lock = client.lock("job", wait=60, ttl=60)

        def work() -> None:
            with lock:
                pass

        threads = [threading.Thread(target=work, daemon=True) for _ in range(waiters)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        wait_until(lambda: len(client.inspect()) == waiters + 1)
        wait_until(
            lambda: not client._core.registry.pending_releases
        )  # do not count the release of the waiter that gave up
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


def test_idle_names_leave_no_rows(sql) -> None:
    with Client(sql.url()) as client:
        for number in range(100):
            with client.lock(f"job-{number}"):
                pass
        assert not client.inspect()
    for table in ("lh_grant", "lh_waiter", "lh_queue"):
        assert sql.ask(f"select count(*) from {{s}}.{table}") == [(0,)]


def test_queue_of_dead_waiters_is_swept(sql) -> None:
    with Client(sql.url()) as client:
        client.ping()
        client.lock("other").acquire().release()
        sql.ask(f"insert into {{s}}.lh_queue values ('', 'dead', 7, 'lock', 1, '', 0{sql.extra_queue_values})")
        sql.ask("insert into {s}.lh_bucket (namespace, bucket, token, ticket) values ('', 7, 0, 0)")
        values = "'', 'dead', false, 1, 'm', '', 'l', 'h', 1, 'p', 'exclusive', 0, 0, 1"
        sql.ask(f"insert into {{s}}.lh_waiter values ({values})")
        for _ in range(64):
            with client.lock("other"):
                pass
    assert sql.ask("select count(*) from {s}.lh_queue") == [(0,)]


# ---------------------------------------------------------------- processes


def test_forked_child_has_its_own_connections(sql) -> None:
    with Client(sql.named_url("fork")) as client:
        lease = client.lock("job", ttl=60).acquire()
        with pytest.raises(NotAcquired):
            client.lock("job", wait=0.05).acquire()
        before = set(sql.sessions("fork"))
        child = os.fork()
        if child == 0:
            try:
                assert lease.lost_reason == "forked"
                with client.lock("child's") as inner:
                    assert inner.held
                os._exit(0 if client.lock("job").try_acquire() is None else 2)
            except BaseException:
                os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert before <= set(sql.sessions("fork")), "the child closed no session of its parent"
        lease.verify()
        assert lease.release()


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


def test_names_may_contain_any_text(sql) -> None:
    names = [
        "o'brien",
        'say "hi"',
        "back\\slash",
        "{curly,brace}",
        "new\nline",
        "ünï…",
        "%s",
        "%(name)s",
        "$1",
        ":x",
        "NULL",
    ]
    with Client(sql.url(), namespace="sp'ace \\ {}") as client:
        leases = [client.lock(name, purpose="p \\ ' \"").acquire() for name in names]
        assert sorted(h.name for h in client.inspect()) == sorted(names)
        assert [h.name for h in client.inspect("say", exact=False)] == ['say "hi"']
        for lease in leases:
            lease.renew()
            assert lease.release()


def test_huge_ttl_and_delay_are_accepted(sql) -> None:
    with Client(sql.url()) as client:
        lease = client.lock("for ever", ttl=1e14, delay=1e14).acquire()
        assert lease.remaining > 1e12
        lease.renew()
        assert lease.release()


def test_secrets_appear_in_no_error_log_or_inspection(sql, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    proxy = Proxy(sql.server.port)
    url = sql.url(user="nobody:s3cret", port=proxy.port)
    try:
        with Client(url, call_timeout=2) as client:
            with pytest.raises(ConfigError) as missing:
                client.ping()
            assert "nobody" in str(missing.value)
            proxy.cut()
            with pytest.raises(Unavailable) as silent:
                client.ping()
            assert "s3cret" not in f"{client!r} {missing.value!r} {silent.value!r} {caplog.text}"
    finally:
        proxy.close()
    with Client(sql.url()) as client:
        lease = client.lock("job").acquire()
        rows = sql.ask("select * from {s}.lh_grant")
        assert lease._claim.id not in str(rows)
        assert lease._claim.id_hash not in str(sql.ask(sql.inspect_query))
        lease.release()


def test_host_name_is_resolved_and_an_unknown_one_is_unavailable(sql) -> None:
    with Client(sql.url().replace("127.0.0.1", "localhost")) as client:
        client.ping()
    nowhere = Client(sql.url().replace("127.0.0.1", "no-such-host.invalid"), call_timeout=5)
    with nowhere as client, pytest.raises(Unavailable, match=r"no-such-host\.invalid"):
        client.ping()
