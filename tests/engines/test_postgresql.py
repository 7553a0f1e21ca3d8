"""The PostgreSQL engine on a real server: crowds, cancellations, forks, secrets, and what it costs the server."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import threading
import time

import pytest

from leasehold import AsyncClient, Client, ConfigError, LeaseLost, NotAcquired, Unavailable
from leasehold.config import EngineConfig
from leasehold.core.timing import BEAT_EVERY
from leasehold.engines.postgresql.url import parsed
from leasehold.testing.servers.proxy import Proxy


def spawn(*jobs):
    threads = [threading.Thread(target=job, daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)


def test_thirty_threads_on_one_client(database) -> None:
    inside, tokens, most = [], [], []

    def work() -> None:
        for _ in range(5):
            with lock as lease:
                inside.append(lease)
                most.append(len(inside))
                tokens.append(lease.token)
                inside.remove(lease)

    with Client(database.url(), call_timeout=30) as client:
        lock = client.lock("hot", wait=100)
        spawn(*[work] * 30)
    assert (max(most), len(tokens)) == (1, 150)
    assert tokens == sorted(set(tokens))


def test_two_hundred_tasks_on_one_client(database) -> None:
    inside, tokens = [], []

    async def main() -> None:
        async with AsyncClient(database.url(application_name="crowd"), call_timeout=30) as client:
            lock = client.lock("hot", wait=100)

            async def work() -> None:
                async with lock as lease:
                    inside.append(lease)
                    assert inside == [lease]
                    tokens.append(lease.token)
                    await asyncio.sleep(0)
                    inside.remove(lease)

            await asyncio.gather(*(work() for _ in range(200)))
            assert len(database.sessions("crowd")) <= 3

    asyncio.run(main())
    assert len(tokens) == 200
    assert tokens == sorted(set(tokens))


def test_a_hundred_random_cancellations_leave_nothing(database, until) -> None:
    chance = random.Random(5)

    async def main() -> None:
        async with AsyncClient(database.url(), call_timeout=30) as client, AsyncClient(database.url()) as other:
            await client.ping()

            async def work(name: str) -> None:
                async with client.lock(name, wait=30, ttl=60):
                    await asyncio.sleep(chance.random() * 0.01)

            for _ in range(10):
                tasks = [asyncio.create_task(work(f"n{chance.randrange(3)}")) for _ in range(10)]
                for task in tasks:
                    await asyncio.sleep(chance.random() * 0.01)
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            end = time.monotonic() + 30
            while await other.inspect():
                assert time.monotonic() < end, await other.inspect()
                await asyncio.sleep(0.02)

    asyncio.run(main())


def test_at_most_three_connections(database, until) -> None:
    with Client(database.url(application_name="three"), ttl=0.6) as client:
        with client.lock("job"):
            until(lambda: len(database.sessions("three")) == 3)  # calls, wake-ups, and the watchdog's renewals
        client.inspect()
        assert len(database.sessions("three")) == 3
    until(lambda: not database.sessions("three"))


# ------------------------------------------------------------- what it costs


def calls(database) -> dict[str, int]:
    """The server's own count of our statements, by verb; heart-beats and renewals are named, and left out of sums."""
    database.ask("create extension if not exists pg_stat_statements")
    rows = database.ask(
        "select substring(query from 'lh_([a-z]+)_v1'), sum(calls)::integer from pg_stat_statements "
        "where query like %s group by 1",
        f'select * from "{database.schema}".lh\\_%',
    )
    return {verb: count for verb, count in rows if verb in ("attempt", "release", "beat", "renew")}


def test_a_pair_is_two_calls(database) -> None:
    with Client(database.url()) as client:
        lock = client.lock("job")
        for _ in range(50):
            with lock:
                pass
    assert calls(database) == {"attempt": 50, "release": 50}


@pytest.mark.parametrize("waiters", [2, 30])
def test_a_hand_off_is_two_calls_however_long_the_line(database, until, waiters) -> None:
    with Client(database.url(), call_timeout=30) as client, Client(database.url()) as other:
        lease = other.lock("job", ttl=60).acquire()
        lock = client.lock("job", wait=60, ttl=60)

        def work() -> None:
            with lock:
                pass

        threads = [threading.Thread(target=work, daemon=True) for _ in range(waiters)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        until(lambda: len(client.inspect()) == waiters + 1)
        before = calls(database)
        lease.release()
        for thread in threads:
            thread.join(60)
        after = calls(database)
        unprompted = waiters * int((time.monotonic() - began) / BEAT_EVERY)  # on a machine as slow as that
    asked = after["attempt"] - before["attempt"]
    released = after["release"] - before.get("release", 0)
    assert released == waiters + 1
    assert asked <= 1.1 * waiters + 1 + unprompted, "each claims its turn once; the next may look after a second"


def test_nothing_is_left_of_idle_names(database) -> None:
    with Client(database.url()) as client:
        for number in range(100):
            with client.lock(f"job-{number}"):
                pass
        assert not client.inspect()
    for table in ("lh_grant", "lh_waiter", "lh_line"):
        assert database.ask(f"select count(*) from {{s}}.{table}") == [(0,)]


def test_a_whole_line_that_died_is_swept(database) -> None:
    with Client(database.url()) as client:
        client.ping()
        client.lock("other").acquire().release()
        database.ask("insert into {s}.lh_line values ('', 'dead', 7, 'lock', 1, '', 0)")
        database.ask("insert into {s}.lh_bucket values ('', 7, 0, 0)")
        values = "'', 'dead', false, 1, 'm', '', 'l', 'h', 1, 'p', 'exclusive', 0, 0, 1"
        database.ask(f"insert into {{s}}.lh_waiter values ({values})")
        for _ in range(64):
            with client.lock("other"):
                pass
    assert database.ask("select count(*) from {s}.lh_line") == [(0,)]


# ---------------------------------------------------------------- processes


def test_a_forked_child_has_connections_of_its_own(database) -> None:
    with Client(database.url(application_name="fork")) as client:
        lease = client.lock("job", ttl=60).acquire()
        with pytest.raises(NotAcquired):
            client.lock("job", wait=0.05).acquire()
        before = set(database.sessions("fork"))
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
        assert before <= set(database.sessions("fork")), "the child has hurt no session of its parent"
        lease.verify()
        assert lease.release()


def test_a_waiter_that_was_killed_holds_up_nobody(database, until) -> None:
    with Client(database.url()) as client, Client(database.url()) as third:
        lease = client.lock("job", ttl=60).acquire()
        child = os.fork()
        if child == 0:
            try:
                with Client(database.url()) as mine:
                    mine.lock("job", wait=60).acquire()
            finally:
                os._exit(1)
        until(lambda: [h.state for h in client.inspect()] == ["held", "waiting"])
        got = []
        thread = threading.Thread(target=lambda: got.append(third.lock("job", wait=30).acquire()), daemon=True)
        thread.start()
        until(lambda: len(client.inspect()) == 3)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        until(lambda: len(database.sessions("leasehold")) <= 6)
        began = time.monotonic()
        lease.release()
        thread.join(30)
        assert got
        assert time.monotonic() - began < 2.5, "passed over at once, at the latest by the look after a second"
        assert "passed over" in [h.state for h in client.inspect()]
        got[0].release()


def test_a_client_in_a_new_loop_connects_anew(database) -> None:
    client = AsyncClient(database.url())

    async def once() -> int:
        async with client.lock("job") as lease:
            return lease.token

    assert asyncio.run(once()) < asyncio.run(once())
    asyncio.run(client.close())


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://localhost/db?nope=1",
        "postgresql://localhost/db?create=maybe",
        "postgresql://localhost/db?listen=maybe",
        "postgresql://localhost/db?connect_timeout=3",
        "postgresql://localhost/db?schema=",
        "postgresql://localhost/db?schema=" + "x" * 64,
        "postgresql://localhost/db?listen=no&listen_url=postgresql%3A%2F%2Fdirect",
        "postgresql://localhost/db?listen_url=mysql%3A%2F%2Fdirect",
        "postgresql://user:s3cret@[::1/db",
        "postgresql://user:s3cret%@host/db",
        "postgresql://a,b/db?port=1,2,3",
    ],
)
def test_a_url_that_cannot_work_is_refused_when_the_client_is_made(url) -> None:
    with pytest.raises(ConfigError) as caught:
        Client(url)
    assert "s3cret" not in str(caught.value)


def test_what_a_url_says() -> None:
    def options(url: str):
        return parsed(EngineConfig.parse(url, 5.0))

    one = options("postgresql://u:p%40ss@h:7/d?schema=a%20b&sslmode=require&application_name=x")
    (host,) = one.target.hosts
    wanted = {"user": "u", "password": "p@ss", "host": "h", "port": "7", "dbname": "d", "sslmode": "require"}
    assert wanted.items() <= host.items()
    assert (one.schema, one.listen, one.pooled, host["application_name"]) == ("a b", one.target, False, "x")
    two = options("postgresql://a:1,b:2/d?listen_url=postgresql%3A%2F%2Fc%2Fd%3Fsslmode%3Ddisable&create=no")
    assert [(each["host"], each["port"]) for each in two.target.hosts] == [("a", "1"), ("b", "2")]
    assert two.target.hosts[0]["target_session_attrs"] == "read-write"
    assert two.listen is not None
    assert two.listen.hosts[0]["sslmode"] == "disable"
    assert (two.pooled, two.create) == (True, False)
    assert options("postgresql://h/d?listen=no").listen is None
    assert "p@ss" not in repr(one)


def test_names_of_any_text(database) -> None:
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
    with Client(database.url(), namespace="sp'ace \\ {}") as client:
        leases = [client.lock(name, purpose="p \\ ' \"").acquire() for name in names]
        assert sorted(h.name for h in client.inspect()) == sorted(names)
        assert [h.name for h in client.inspect("say", exact=False)] == ['say "hi"']
        for lease in leases:
            lease.renew()
            assert lease.release()


def test_lives_beyond_reason(database) -> None:
    with Client(database.url()) as client:
        lease = client.lock("for ever", ttl=1e14, delay=1e14).acquire()
        assert lease.remaining > 1e12
        lease.renew()
        assert lease.release()


def test_no_secret_is_shown(database, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    proxy = Proxy(database.server.port)
    url = database.url(user="nobody:s3cret", port=proxy.port)
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
    with Client(database.url()) as client:
        lease = client.lock("job").acquire()
        shown = database.ask("select * from {s}.lh_grant")
        assert lease._claim.id not in str(shown)
        assert lease._claim.mark not in str(database.ask("select * from {s}.lh_inspect_v1('', '', false)"))
        lease.release()


def test_a_host_by_name_and_one_that_does_not_exist(database) -> None:
    with Client(database.url().replace("127.0.0.1", "localhost")) as client:
        client.ping()
    nowhere = Client(database.url().replace("127.0.0.1", "no-such-host.invalid"), call_timeout=5)
    with nowhere as client, pytest.raises(Unavailable, match=r"no-such-host\.invalid"):
        client.ping()


def test_the_first_host_that_answers_is_taken(database) -> None:
    dead = Proxy(1)
    dead.cut()
    try:
        url = database.url().replace("@127.0.0.1", f"@127.0.0.1:{dead.port},127.0.0.1")
        with Client(url, call_timeout=2) as client, client.lock("job") as lease:
            assert lease.held
    finally:
        dead.close()


def test_a_lost_lease_is_told_by_a_push(database, until) -> None:
    with Client(database.url()) as client, Client(database.url()) as operator:
        lease = client.lock("job", ttl=300).acquire()
        assert operator.break_lock("job", token=lease.token)
        until(lambda: not lease.held)
        with pytest.raises(LeaseLost, match="broke"):
            lease.check()
