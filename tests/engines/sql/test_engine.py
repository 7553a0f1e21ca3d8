"""The engines on SQL servers: event loops, forks, unusual values, and nothing left. See also ../test_concurrency.py."""

from __future__ import annotations

import asyncio
import os

import pytest

from leasehold import AsyncClient, AsyncLease, Client, ConfigError, NotAcquired, Unavailable
from leasehold.model import Busy
from tests.support import probe


def test_lease_of_an_earlier_loop_is_released_in_the_next(sql) -> None:
    """The new loop's connections have not met the server yet. That says nothing about the lease."""
    client = AsyncClient(sql.url())

    async def take() -> AsyncLease:
        return await client.lock("job").acquire()

    async def give_up() -> None:
        probe.core(client).engine()  # opens the engine of the new loop
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


def test_idle_names_leave_no_rows(sql) -> None:
    with Client(sql.url()) as client:
        for number in range(100):
            with client.lock(f"job-{number}"):
                pass
        assert not client.inspect()
    for table in ("lh_grant", "lh_waiter", "lh_queue"):
        assert sql.ask(f"select count(*) from {{s}}.{table}") == [(0,)]


def test_position_counts_at_most_a_thousand_waiters(sql, make_driver) -> None:
    """With every claim that joined, the server read the whole queue."""
    driver = make_driver(sql.url())
    driver.acquire(driver.claim())
    sql.ask(f"insert into {{s}}.lh_queue values ('', 'job', 7, 'lock', 1, '', 0{sql.extra_queue_values})")
    row = "('', 'job', {passed}, {ticket}, 'w{ticket}', '', 'l', 'h', 1, 'p', 'exclusive', 0, 0, {until})"
    rows = [row.format(passed="false", ticket=ticket, until=2**60) for ticket in range(-1200, 0)]
    sql.ask(f"insert into {{s}}.lh_waiter values {', '.join(rows)}")
    first, second = driver.claim(queue=True), driver.claim(queue=True)
    assert [driver.attempt(claim).position for claim in (first, second, first)] == [1000] * 3
    sql.ask("delete from {s}.lh_waiter where ticket < -300")
    assert [driver.attempt(claim).position for claim in (first, second)] == [300, 301]


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
    with Client(sql.url(), max_ttl=1e14) as client:
        lease = client.lock("for ever", ttl=1e14, delay=1e14).acquire()
        assert lease.remaining > 1e12
        lease.renew()
        assert lease.release()


def test_host_name_is_resolved_and_an_unknown_one_is_unavailable(sql) -> None:
    with Client(sql.url().replace("127.0.0.1", "localhost")) as client:
        client.ping()
    nowhere = Client(sql.url().replace("127.0.0.1", "no-such-host.invalid"), call_timeout=5)
    with nowhere as client, pytest.raises(Unavailable, match=r"no-such-host\.invalid"):
        client.ping()


def test_release_of_an_expired_reservation_leaves_nothing(sql, make_driver) -> None:
    driver = make_driver(sql.url())
    held, waiter = driver.acquire(driver.claim()), driver.claim(queue=True)
    assert isinstance(driver.attempt(waiter), Busy)
    assert driver.release(held)
    sql.ask("update {s}.lh_grant set until = 1 where state = 1")  # the waiter did not use its reservation in time
    assert not driver.release(waiter)
    assert sql.ask("select name from {s}.lh_waiter union select name from {s}.lh_queue") == []


def test_huge_call_timeout_is_accepted(sql) -> None:
    with Client(sql.url(), call_timeout=1e12, ttl=1e12, max_ttl=1e12) as client, client.lock("job") as lease:
        lease.renew()
        assert len(client.inspect()) == 1


@pytest.mark.parametrize("prefix", ["a\0b", "\ud800"])
def test_prefix_with_invalid_characters_is_refused(sql, prefix) -> None:
    with Client(sql.url()) as client, pytest.raises(ConfigError):
        client.inspect(prefix)
