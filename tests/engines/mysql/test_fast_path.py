"""The fast path of the MySQL engine (`fast_path.sql`): a bucket records that it has one grant, or none. The fast path
reads nothing else, so the record must never claim too much.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pymysql
import pytest
from pymysql.constants import CLIENT

from leasehold import Client
from leasehold.core.names import bucket
from leasehold.engines.mysql import schema
from leasehold.engines.mysql.session import literals
from leasehold.engines.sql.engine import SqlEngine
from leasehold.model import Busy, Grant
from tests.support import probe_mysql
from tests.support.timing import check_elapsed

NEIGHBOURS = [name for name in map(str, range(20_000)) if bucket(name) == bucket("job")]  # one bucket with "job"


def bucket_state(mysql) -> str:
    """What the bucket of "job" records about its grants."""
    ((state,),) = mysql.ask(
        "select if(sole_token = token, 'one', if(sole_token = -token, 'none', 'unknown')) from {s}.lh_bucket "
        "where namespace = '' and bucket = %s",
        bucket("job"),
    )
    return state


def lock_until_known_empty(client: Client, mysql) -> None:
    """Lock the name until its bucket is known to be empty again."""
    for _ in range(20):
        with client.lock("job"):
            pass
        if bucket_state(mysql) == "none":
            return
    raise AssertionError("nobody found out")


def test_bucket_records_whether_it_holds_one_grant_or_none(mysql) -> None:
    with Client(mysql.url()) as client:
        lock_until_known_empty(client, mysql)
        with client.lock("job"):
            assert bucket_state(mysql) == "one"
        assert bucket_state(mysql) == "none"
        with client.lock("job"), client.lock(NEIGHBOURS[0]):
            assert bucket_state(mysql) == "unknown"
        assert bucket_state(mysql) == "unknown"
        lock_until_known_empty(client, mysql)


def test_bucket_is_not_searched_while_many_names_are_held(mysql) -> None:
    """A search for other grants in the bucket would take time in proportion to all held names."""
    with Client(mysql.url(), ttl=60) as client:
        leases = [client.lock(f"held {number}").acquire() for number in range(300)]
        for _ in range(20):
            with client.lock("job"):
                pass
        assert bucket_state(mysql) == "unknown"
        for lease in leases:
            lease.release()
        lock_until_known_empty(client, mysql)


def test_queue_without_a_holder_keeps_the_bucket_unknown(mysql) -> None:
    """Such a queue has waiters that were passed over and may return to their positions."""
    with Client(mysql.url(), ttl=60) as client:
        client.inspect()
        key_values = f"'', '{NEIGHBOURS[0]}'"
        far_future = 2**62
        mysql.ask(f"insert into {{s}}.lh_queue values ({key_values}, {bucket('job')}, 'lock', 1, '', 0, '', false)")
        mysql.ask(
            f"insert into {{s}}.lh_waiter values "
            f"({key_values}, 1, 1, 'm', '', '', '', 1, '', 'exclusive', 0, 1, {far_future})"
        )
        for _ in range(20):
            with client.lock("job"):
                assert bucket_state(mysql) == "unknown"


@pytest.mark.extended
@pytest.mark.parametrize("procedures", ["yes", "no"])
def test_release_sees_a_waiter_that_joined_after_the_grant(mysql, wait_until, procedures) -> None:
    with Client(mysql.url(), ttl=60) as holder, Client(mysql.url(procedures=procedures), ttl=60) as waiter:
        lock_until_known_empty(holder, mysql)
        for _ in range(3):
            lease = holder.lock("job").acquire()
            got = threading.Event()

            def wait(got: threading.Event = got) -> None:
                with waiter.lock("job", wait=60):
                    got.set()

            thread = threading.Thread(target=wait)
            thread.start()
            wait_until(lambda: len(holder.inspect("job")) == 2)
            assert bucket_state(mysql) == "unknown"
            released = time.monotonic()
            assert lease.release()
            assert got.wait(60)
            check_elapsed(released, 2.0, "the waiter would have re-checked after 5 s")
            thread.join(30)
            lock_until_known_empty(holder, mysql)


@pytest.mark.parametrize("after", ["start transaction;", "set _ended = row_count() = 1;"])
def test_waiter_that_joins_during_a_release_is_granted(mysql, wait_until, after) -> None:
    """Between its statements the release blocks no other call, and it still sees new waiters."""
    (release,) = (each for each in schema.statements(schema.text(mysql.schema)) if "lh_release_v1(" in each)
    pause = "do get_lock('gate', 30); do release_lock('gate');"
    paused_release = release.replace(after, f"{after} {pause}").replace(
        "procedure if not exists", "or replace procedure"
    )
    assert paused_release.count(pause) == 1
    with (
        Client(mysql.url(), ttl=60) as holder,
        Client(mysql.url(), ttl=60) as waiter,
        closing(mysql.server.connect()) as session,
        ThreadPoolExecutor(2) as pool,
    ):
        lock_until_known_empty(holder, mysql)
        cursor = session.cursor()
        cursor.execute(f"use `{mysql.schema}`")
        cursor.execute(paused_release)
        cursor.execute("do get_lock('gate', 0)")
        lease = holder.lock("job").acquire()
        released = pool.submit(lease.release)
        wait_until(lambda: mysql.ask("select 1 from information_schema.processlist where state = 'User lock'"))
        got = pool.submit(waiter.lock("job", wait=60).acquire)
        wait_until(lambda: mysql.ask("select 1 from {s}.lh_waiter"))
        cursor.execute("do release_lock('gate')")
        assert released.result(30)
        began = time.monotonic()
        assert got.result(60).release()
        check_elapsed(began, 3.0, "the waiter would have re-checked after 5 s")


def test_grant_of_a_client_without_procedures_is_seen(mysql) -> None:
    with Client(mysql.url(), ttl=60) as procedure_client, Client(mysql.url(procedures="no"), ttl=60) as plain_client:
        lock_until_known_empty(procedure_client, mysql)
        with plain_client.lock("job"):
            assert bucket_state(mysql) == "unknown"
            assert procedure_client.lock("job").try_acquire() is None
        with procedure_client.lock("job"), plain_client.lock(NEIGHBOURS[0]):
            assert bucket_state(mysql) == "unknown"


def test_lost_bucket_row_is_recreated_as_unknown(mysql, make_driver) -> None:
    with Client(mysql.url(), ttl=60) as client:
        lock_until_known_empty(client, mysql)
        lease = client.lock("job").acquire()
        mysql.ask("delete from {s}.lh_bucket")
        assert client.lock("job").try_acquire() is None
        assert bucket_state(mysql) == "unknown"
        mysql.ask("update {s}.lh_bucket set sole_token = token + 7")  # an impossible value is not taken for a grant
        driver = make_driver(mysql.url())
        assert isinstance(driver.attempt(driver.claim()), Busy)
        assert lease.release()


def test_expired_grant_does_not_make_the_bucket_free(mysql) -> None:
    with Client(mysql.url(), ttl=60) as client:
        lock_until_known_empty(client, mysql)
        for expiry in ("until = 1", "until = 1, delay = 3600 * 1000000 * 1000000"):
            lease = client.lock("job").acquire()
            mysql.ask(f"update {{s}}.lh_grant set {expiry}")
            assert not lease.release(), "the grant had expired before the release"
            assert bucket_state(mysql) != "none"
        assert client.lock("job").try_acquire() is None, "the delay is still running"


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_procedures_work_in_a_session_with_any_settings(mysql, isolation) -> None:
    """The procedures depend on no setting of the session: isolation, autocommit, how it counts rows."""
    with Client(mysql.url(), ttl=60) as client:
        lock_until_known_empty(client, mysql)
        with mysql.server.connect(autocommit=False, client_flag=CLIENT.FOUND_ROWS) as session:
            cursor = session.cursor()
            cursor.execute(f"set session transaction isolation level {isolation}")
            if isolation == "repeatable read":
                cursor.execute(f"select * from `{mysql.schema}`.lh_grant")  # takes an old snapshot

            def call(verb: str, *values) -> list[tuple]:
                text = b", ".join(literals(values)).decode().replace("%", "%%")
                cursor.execute(f"call `{mysql.schema}`.lh_{verb}_v1({text})")
                return list(cursor.fetchall())

            key = ("", bucket("job"), "job", "m" * 32)
            held = client.lock("job").acquire()
            attempt_args = (*key, "", "me", "here", 1, "", "exclusive", "lock", 1, 60_000_000, 0, 0, False, 0, 1000)
            ((answer, *_),) = call("attempt", *attempt_args)
            assert answer == 0
            held.release()
            ((answer, token, *_),) = call("attempt", *attempt_args)
            assert (answer, token > held.token) == (1, True)
            assert client.lock("job").try_acquire() is None, "the grant was committed"
            assert call("release", *key[:3], "x" * 32, True, True, 1000, token) == [("f",)], "not this claim's grant"
            assert call("release", *key, True, True, 1000, token + 1) == [], "the id hash decides, whatever the token"
            assert call("release", *key, True, True, 1000, token) == [("f",)]
            with client.lock("job"):
                pass


def test_token_cache_stays_bounded_under_many_threads(monkeypatch, make_driver) -> None:
    """While one thread evicted an entry, another changed the cache, and a grant ended in a RuntimeError."""

    async def granted(*_: object) -> Grant:
        return Grant(1, 1.0, None)

    monkeypatch.setattr(SqlEngine, "attempt", granted)
    monkeypatch.setattr(*probe_mysql.MAX_TOKENS, 100)
    interval = sys.getswitchinterval()
    driver = make_driver("mysql://nobody@127.0.0.1:1/nowhere")
    claim = driver.claim()

    def work(number: int) -> None:
        for each in range(8_000):
            driver.attempt(claim._replace(id_hash=f"{number}.{each}"))

    try:
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert len(probe_mysql.remembered_tokens(driver.engine)) <= 100 + 8


# -------------------------------------------------------------- many clients


def check_buckets(mysql, stop: threading.Event, errors: list[object]) -> None:
    """Repeatedly lock all buckets and compare what they record with the grants and queues."""
    with mysql.server.connect(autocommit=False) as session, session.cursor() as cursor:
        cursor.execute("set session transaction isolation level read committed")
        while not stop.is_set():
            try:
                cursor.execute(
                    f"select namespace, bucket, token, sole_token from `{mysql.schema}`.lh_bucket for update"
                )
                recorded = {row[:2]: row[2:] for row in cursor}
                cursor.execute(
                    f"select namespace, bucket, token from `{mysql.schema}`.lh_grant union all "
                    f"select namespace, bucket, 0 from `{mysql.schema}`.lh_queue"
                )
                for *where, row in cursor:
                    token, sole_token = recorded[tuple(where)]
                    if sole_token == -token or (sole_token == token and row != token):
                        errors.append((where, row, token, sole_token))
            except pymysql.OperationalError as error:
                if error.args[0] != 1213:
                    raise
            session.rollback()
            time.sleep(0.005)


def run_clients(mysql, seconds: float) -> tuple[list[object], float]:
    """Run clients with and without procedures in one bucket. Returns errors and the longest wait with wake-ups."""
    names = ["job", *NEIGHBOURS[:2]]
    owners: dict[str, int] = {}
    last_tokens: dict[str, int] = {}
    errors: list[object] = []
    waits: list[float] = []
    stop = threading.Event()
    end_at = time.monotonic() + seconds

    def work(number: int) -> None:
        rng = random.Random(number)
        with Client(mysql.url(procedures="no" if number == 0 else "yes"), ttl=60, call_timeout=30) as client:
            while time.monotonic() < end_at:
                name, wait = rng.choice(names[: 1 + number % 3]), rng.choice([0, 30])
                began = time.monotonic()
                lease = client.lock(name, wait=wait).try_acquire() if not wait else client.lock(name, wait=30).acquire()
                if lease is None:
                    continue
                if wait and name != names[0]:  # on names[0] the client without procedures wakes no waiter
                    waits.append(time.monotonic() - began)
                if owners.setdefault(name, number) != number:
                    errors.append(f"{name}: {number} beside {owners[name]}")
                if lease.token <= last_tokens.get(name, 0):
                    errors.append(f"{name}: {lease.token} after {last_tokens[name]}")
                last_tokens[name] = lease.token
                if rng.random() < 0.5:
                    time.sleep(rng.random() * 0.003)
                owners.pop(name, None)
                if not lease.release():
                    errors.append(f"{name}: {lease.token} was not given back")
                time.sleep(rng.random() * 0.003)

    def run(number: int) -> None:
        try:
            work(number)
        except Exception as error:
            errors.append(error)

    with Client(mysql.url()) as first:
        first.inspect()
    checker = threading.Thread(target=check_buckets, args=(mysql, stop, errors))
    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in (checker, *threads):
        thread.start()
    for thread in threads:
        thread.join(seconds + 60)
    stop.set()
    checker.join(30)
    return errors, max(waits)


def test_clients_in_one_bucket_exclude_each_other(mysql) -> None:
    errors, longest_wait = run_clients(mysql, 4.0)
    assert errors == []
    assert longest_wait < 4.0, "no waiter was missed until its own re-check"


@pytest.mark.faults
def test_clients_in_one_bucket_exclude_each_other_for_a_minute(mysql) -> None:
    errors, longest_wait = run_clients(mysql, 60.0)
    assert errors == []
    assert longest_wait < 4.0
