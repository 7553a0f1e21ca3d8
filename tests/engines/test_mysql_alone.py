"""What a bucket of the MySQL engine says of itself: that nobody else is in it, or nobody at all (`alone.sql`). Whoever
takes that way looks at nothing else, so it must never be said too much.
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
from leasehold.engines.mysql import engine, schema
from leasehold.engines.mysql.wire import literals
from leasehold.engines.sql.engine import SqlEngine
from leasehold.model import Busy, Grant

NEIGHBOURS = [name for name in map(str, range(20_000)) if bucket(name) == bucket("job")]  # one bucket with "job"


def known(mysql) -> str:
    """What is said of the bucket of "job"."""
    ((said,),) = mysql.ask(
        "select if(alone = token, 'one', if(alone = -token, 'none', 'unknown')) from {s}.lh_bucket "
        "where namespace = '' and bucket = %s",
        bucket("job"),
    )
    return said


def learn(client: Client, mysql) -> None:
    """Take the name until its bucket is known to be empty again."""
    for _ in range(20):
        with client.lock("job"):
            pass
        if known(mysql) == "none":
            return
    raise AssertionError("nobody found out")


def test_what_a_bucket_says_of_itself(mysql) -> None:
    with Client(mysql.url()) as client:
        learn(client, mysql)
        with client.lock("job"):
            assert known(mysql) == "one"
        assert known(mysql) == "none"
        with client.lock("job"), client.lock(NEIGHBOURS[0]):
            assert known(mysql) == "unknown"
        assert known(mysql) == "unknown"
        learn(client, mysql)


def test_a_bucket_that_has_many_around_it_is_not_searched(mysql) -> None:
    """A search for others in it would take as long as there are names held."""
    with Client(mysql.url(), ttl=60) as client:
        leases = [client.lock(f"held {number}").acquire() for number in range(300)]
        for _ in range(20):
            with client.lock("job"):
                pass
        assert known(mysql) == "unknown"
        for lease in leases:
            lease.release()
        learn(client, mysql)


def test_a_line_without_a_holder_is_found(mysql) -> None:
    """As of those who were passed over, and may come back to their places."""
    with Client(mysql.url(), ttl=60) as client:
        client.inspect()
        where = f"'', '{NEIGHBOURS[0]}'"
        far = 2**62
        mysql.ask(f"insert into {{s}}.lh_line values ({where}, {bucket('job')}, 'lock', 1, '', 0, '')")
        mysql.ask(
            f"insert into {{s}}.lh_waiter values ({where}, 1, 1, 'm', '', '', '', 1, '', 'exclusive', 0, 1, {far})"
        )
        for _ in range(20):
            with client.lock("job"):
                assert known(mysql) == "unknown"


@pytest.mark.parametrize("procedures", ["yes", "no"])
def test_whoever_joins_is_seen_by_the_release(mysql, until, procedures) -> None:
    with Client(mysql.url(), ttl=60) as holder, Client(mysql.url(procedures=procedures), ttl=60) as waiter:
        learn(holder, mysql)
        for _ in range(3):
            lease = holder.lock("job").acquire()
            got = threading.Event()

            def wait(got: threading.Event = got) -> None:
                with waiter.lock("job", wait=60):
                    got.set()

            thread = threading.Thread(target=wait)
            thread.start()
            until(lambda: len(holder.inspect("job")) == 2)
            assert known(mysql) == "unknown"
            assert lease.release()
            assert got.wait(2.0), "it would have looked by itself after 5 s"
            thread.join(30)
            learn(holder, mysql)


@pytest.mark.parametrize("after", ["start transaction;", "set _ended = row_count() = 1;"])
def test_whoever_joins_in_the_midst_of_a_release_has_its_turn(mysql, until, after) -> None:
    """Between its statements nobody is kept waiting, and it still sees who came."""
    (release,) = (each for each in schema.statements(schema.text(mysql.schema)) if "lh_release_v1(" in each)
    waits = "do get_lock('gate', 30); do release_lock('gate');"
    halting = release.replace(after, f"{after} {waits}").replace("procedure if not exists", "or replace procedure")
    assert halting.count(waits) == 1
    with (
        Client(mysql.url(), ttl=60) as holder,
        Client(mysql.url(), ttl=60) as waiter,
        closing(mysql.server.connect()) as session,
        ThreadPoolExecutor(2) as pool,
    ):
        learn(holder, mysql)
        cursor = session.cursor()
        cursor.execute(f"use `{mysql.schema}`")
        cursor.execute(halting)
        cursor.execute("do get_lock('gate', 0)")
        lease = holder.lock("job").acquire()
        released = pool.submit(lease.release)
        until(lambda: mysql.ask("select 1 from information_schema.processlist where state = 'User lock'"))
        got = pool.submit(waiter.lock("job", wait=60).acquire)
        until(lambda: mysql.ask("select 1 from {s}.lh_waiter"))
        cursor.execute("do release_lock('gate')")
        assert released.result(30)
        assert got.result(3).release(), "it would have looked by itself after 5 s"


def test_a_grant_of_a_client_without_procedures_is_seen(mysql) -> None:
    with Client(mysql.url(), ttl=60) as rich, Client(mysql.url(procedures="no"), ttl=60) as poor:
        learn(rich, mysql)
        with poor.lock("job"):
            assert known(mysql) == "unknown"
            assert rich.lock("job").try_acquire() is None
        with rich.lock("job"), poor.lock(NEIGHBOURS[0]):
            assert known(mysql) == "unknown"


def test_a_bucket_that_was_lost_knows_nothing(mysql, bare) -> None:
    with Client(mysql.url(), ttl=60) as client:
        learn(client, mysql)
        lease = client.lock("job").acquire()
        mysql.ask("delete from {s}.lh_bucket")
        assert client.lock("job").try_acquire() is None
        assert known(mysql) == "unknown"
        mysql.ask("update {s}.lh_bucket set alone = token + 7")  # nonsense is not taken for a grant
        one = bare(mysql.url())
        assert isinstance(one.attempt(one.claim()), Busy)
        assert lease.release()


def test_what_lapsed_or_was_broken_is_no_free_bucket(mysql) -> None:
    with Client(mysql.url(), ttl=60) as client:
        learn(client, mysql)
        for over in ("until = 1", "until = 1, delay = 3600 * 1000000 * 1000000"):
            lease = client.lock("job").acquire()
            mysql.ask(f"update {{s}}.lh_grant set {over}")
            assert not lease.release(), "too late"
            assert known(mysql) != "none"
        assert client.lock("job").try_acquire() is None, "its delay runs"


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_by_hand_in_a_session_of_any_kind(mysql, isolation) -> None:
    """The procedures need nothing of a session: not how it isolates, commits, or counts rows."""
    with Client(mysql.url(), ttl=60) as client:
        learn(client, mysql)
        with mysql.server.connect(autocommit=False, client_flag=CLIENT.FOUND_ROWS) as session:
            cursor = session.cursor()
            cursor.execute(f"set session transaction isolation level {isolation}")
            if isolation == "repeatable read":
                cursor.execute(f"select * from `{mysql.schema}`.lh_grant")  # a snapshot from before

            def call(verb: str, *values) -> list[tuple]:
                text = b", ".join(literals(values)).decode().replace("%", "%%")
                cursor.execute(f"call `{mysql.schema}`.lh_{verb}_v1({text})")
                return list(cursor.fetchall())

            key = ("", bucket("job"), "job", "m" * 32)
            held = client.lock("job").acquire()
            taking = (*key, "", "me", "here", 1, "", "exclusive", "lock", 1, 60_000_000, 0, False, 0, 1000)
            ((answer, *_),) = call("attempt", *taking)
            assert answer == 0
            held.release()
            ((answer, token, *_),) = call("attempt", *taking)
            assert (answer, token > held.token) == (1, True)
            assert client.lock("job").try_acquire() is None, "it was committed"
            assert call("release", *key[:3], "x" * 32, 0, True, 1000, token) == [("f",)], "somebody else's"
            assert call("release", *key, 0, True, 1000, token + 1) == [], "by its mark, whatever the token"
            assert call("release", *key, 0, True, 1000, token) == [("f",)]
            with client.lock("job"):
                pass


def test_what_threads_remember_of_their_grants_is_bounded(monkeypatch, bare) -> None:
    """Whoever made room for another was disturbed by a third, and a grant ended in a RuntimeError."""

    async def granted(*_: object) -> Grant:
        return Grant(1, 1.0, None)

    monkeypatch.setattr(SqlEngine, "attempt", granted)
    monkeypatch.setattr(engine, "_MOST_TOKENS", 100)
    interval = sys.getswitchinterval()
    one = bare("mysql://nobody@127.0.0.1:1/nowhere")
    claim = one.claim()

    def work(number: int) -> None:
        for each in range(8_000):
            one.attempt(claim._replace(mark=f"{number}.{each}"))

    try:
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert len(one.engine._tokens) <= 100 + 8


# ------------------------------------------------------------------- crowds


def watched(mysql, over: threading.Event, wrong: list[object]) -> None:
    """Compare all that buckets say with what is there, again and again, with all of them locked."""
    with mysql.server.connect(autocommit=False) as session, session.cursor() as cursor:
        cursor.execute("set session transaction isolation level read committed")
        while not over.is_set():
            try:
                cursor.execute(f"select namespace, bucket, token, alone from `{mysql.schema}`.lh_bucket for update")
                said = {row[:2]: row[2:] for row in cursor}
                cursor.execute(
                    f"select namespace, bucket, token from `{mysql.schema}`.lh_grant union all "
                    f"select namespace, bucket, 0 from `{mysql.schema}`.lh_line"
                )
                for *where, row in cursor:
                    token, alone = said[tuple(where)]
                    if alone == -token or (alone == token and row != token):
                        wrong.append((where, row, token, alone))
            except pymysql.OperationalError as error:
                if error.args[0] != 1213:
                    raise
            session.rollback()
            time.sleep(0.005)


def crowd(mysql, seconds: float) -> tuple[list[object], float]:
    """Clients of both kinds on names of one bucket: what went wrong, and the longest wait for those who are woken."""
    names = ["job", *NEIGHBOURS[:2]]
    owners: dict[str, int] = {}
    last: dict[str, int] = {}
    wrong: list[object] = []
    waits: list[float] = []
    over = threading.Event()
    until = time.monotonic() + seconds

    def work(number: int) -> None:
        rng = random.Random(number)
        with Client(mysql.url(procedures="no" if number == 0 else "yes"), ttl=60, call_timeout=30) as client:
            while time.monotonic() < until:
                name, wait = rng.choice(names[: 1 + number % 3]), rng.choice([0, 30])
                began = time.monotonic()
                lease = client.lock(name, wait=wait).try_acquire() if not wait else client.lock(name, wait=30).acquire()
                if lease is None:
                    continue
                if wait and name != names[0]:  # there one without procedures wakes nobody: the next looks by itself
                    waits.append(time.monotonic() - began)
                if owners.setdefault(name, number) != number:
                    wrong.append(f"{name}: {number} beside {owners[name]}")
                if lease.token <= last.get(name, 0):
                    wrong.append(f"{name}: {lease.token} after {last[name]}")
                last[name] = lease.token
                if rng.random() < 0.5:
                    time.sleep(rng.random() * 0.003)
                owners.pop(name, None)
                if not lease.release():
                    wrong.append(f"{name}: {lease.token} was not given back")
                time.sleep(rng.random() * 0.003)

    def run(number: int) -> None:
        try:
            work(number)
        except Exception as error:
            wrong.append(error)

    with Client(mysql.url()) as first:
        first.inspect()
    watcher = threading.Thread(target=watched, args=(mysql, over, wrong))
    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in (watcher, *threads):
        thread.start()
    for thread in threads:
        thread.join(seconds + 60)
    over.set()
    watcher.join(30)
    return wrong, max(waits)


def test_a_crowd_in_one_bucket(mysql) -> None:
    wrong, longest = crowd(mysql, 4.0)
    assert wrong == []
    assert longest < 4.0, "nobody was forgotten until it looked by itself"


@pytest.mark.faults
def test_a_crowd_in_one_bucket_for_long(mysql) -> None:
    wrong, longest = crowd(mysql, 60.0)
    assert wrong == []
    assert longest < 4.0
