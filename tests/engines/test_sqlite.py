"""The SQLite engine in one process: wake-ups, what waits for the disk, nothing left behind."""

from __future__ import annotations

import gc
import math
import os
import sqlite3
import threading
import time
from pathlib import Path

import pytest

from leasehold import Client, LeaseLost, Unavailable
from leasehold.book import Book
from leasehold.config import EngineConfig
from leasehold.core.timing import RESERVATION
from leasehold.engines.sqlite import file as file_module
from leasehold.engines.sqlite.engine import Flight, SqliteEngine, opened
from leasehold.engines.sqlite.host import Host
from leasehold.engines.sqlite.idle import taken
from leasehold.engines.sqlite.mail import Mail
from leasehold.model import Alive, Busy, Claim, Grant, Holder
from leasehold.runtime.base import step
from leasehold.runtime.threads import Threads


def rows(path: str) -> int:
    db = sqlite3.connect(path)
    tables = ("lh_grant", "lh_waiter", "lh_line")
    found = sum(db.execute(f"select count(*) from {table}").fetchone()[0] for table in tables)
    db.close()
    return found


# ------------------------------------------------------------------- use


def test_an_idle_name_leaves_nothing(url, path) -> None:
    with Client(url) as client:
        for number in range(50):
            with client.lock(f"n{number}"):
                assert rows(path) == 1
        with client.semaphore("s", 3), client.rwlock("r").read(), client.rwlock("r").read():
            assert rows(path) == 3
        assert rows(path) == 0


def test_lapsed_names_nobody_asks_about_are_swept(url, path) -> None:
    now = [1000.0]
    runtime = Threads()
    book = Book(runtime, os.urandom(8).hex())
    engine = opened(EngineConfig.parse(url, 5.0), runtime, book, Host("m", "b", "n", lambda: now[0]))

    def attempt(name: str) -> Claim:
        claim = Claim("", name, "secret", name, Holder("h"), 10.0)
        assert isinstance(step(engine.attempt(claim, math.inf)), Grant)
        return claim

    for number in range(100):
        attempt(f"old{number}")
    now[0] += 20.0
    assert rows(path) == 100
    for number in range(200):
        step(engine.release(attempt(f"new{number}"), math.inf))
    assert rows(path) == 0
    step(engine.close())


def test_any_name_and_any_namespace(url) -> None:
    names = ["a", "A", "é", "e\u0301", "a/b", "%", "'; drop table lh_grant; --", "名", "x" * 255, " ", "_", "\n"]
    with Client(url, namespace="n's") as one, Client(url, namespace="other") as two:
        leases = [client.lock(name).acquire(wait=0) for client in (one, two) for name in names]
        assert {seen.name for seen in one.inspect()} == set(names)
        assert {seen.name for seen in two.inspect("a")} == {"a", "a/b"}
        assert [seen.name for seen in two.inspect("a", exact=True)] == ["a"]
        assert all(lease.release() for lease in leases)


def test_the_secret_is_not_in_the_file(url, path) -> None:
    with Client(url) as client, client.lock("a") as lease:
        secret = lease._claim.id.encode()
        assert all(secret not in Path(f"{path}{end}").read_bytes() for end in ("", "-wal"))


def test_tokens_rise_over_clients_and_a_wall_clock_gone_back(url, path) -> None:
    tokens = []
    for ahead in (0, 1 << 40, 0):
        with Client(url) as client:
            with client.lock("a") as lease:
                tokens.append(lease.token)
            if ahead:
                db = sqlite3.connect(path, isolation_level=None)
                db.execute("update lh_meta set token = token + ?", (ahead,))
                db.close()
    assert tokens == sorted(set(tokens))
    assert tokens[2] > (1 << 40)
    assert tokens[2] < 1 << 53


def engine_of(client: Client) -> SqliteEngine:
    engine = client._desk._engine
    assert isinstance(engine, SqliteEngine)
    return engine


def test_a_batch_of_renewals_without_an_answer_is_unavailable_for_each(url, path) -> None:
    with Client(url) as client, client.lock("a") as lease:
        engine, claims = engine_of(client), [lease._renewal()] * 120
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("begin immediate")
        replies = step(engine.renew(claims, time.clock_gettime(time.CLOCK_BOOTTIME) + 0.1))
        assert [type(reply) for reply in replies] == [Unavailable] * 120
        other.execute("rollback")
        other.close()
        replies = step(engine.renew(claims, math.inf))
        assert [type(reply) for reply in replies] == [Alive] * 120


def test_an_attempt_given_up_writes_nothing_or_is_undone(url, path, monkeypatch) -> None:
    claim = Claim("", "a", "secret", "mark", Holder("h"), 60.0)
    with Client(url) as client:
        engine, flight = engine_of(client), Flight(sync=True)
        flight.abandoned = True  # before the worker came to it
        with pytest.raises(Unavailable):
            engine._attempt(claim, flight)
        assert rows(path) == 0
        flight = Flight(sync=True)

        def late(*asked) -> Grant | None:
            flight.abandoned = True  # while it runs: its release may be over by now
            return taken(*asked)

        monkeypatch.setattr("leasehold.engines.sqlite.engine.taken", late)
        assert isinstance(engine._attempt(claim, flight), Grant)
        assert rows(path) == 0


@pytest.mark.parametrize("durable", ["yes", "no"])
def test_every_grant_renewal_and_release_waits_for_the_disk_and_no_waiter_does(
    path, monkeypatch, until, durable
) -> None:
    url = f"sqlite://{path}?durable={durable}"
    true, seen = file_module.File._transaction, []

    def transaction(self, db, job, write):
        (level,) = db.execute("pragma synchronous").fetchone()
        answer = true(self, db, job, write)
        seen.append((level, answer))
        return answer

    monkeypatch.setattr(file_module.File, "_transaction", transaction)
    full = 2 if durable == "yes" else 1
    with Client(url) as holder, Client(url) as client:
        held = holder.lock("a").acquire()
        waiter = threading.Thread(target=lambda: client.lock("a", wait=60).acquire().release())
        waiter.start()
        until(lambda: [h.state for h in holder.inspect()] == ["held", "waiting"])
        client._desk.dog._beat_at = 0.0
        client._desk.book.stir(0.0)
        until(lambda: any(answer == [Alive(15.0, 0)] for _, answer in seen))  # a beat
        held.renew()
        held.release()
        waiter.join(20)
        client.lock("b").acquire().release()  # free, though the client queues at once by now
        assert [level for level, answer in seen if isinstance(answer, Grant) or answer is True] == [full] * 6
        assert {level for level, answer in seen if answer == [Alive(15.0, 0)]} == {1}
        assert next(level for level, answer in seen if isinstance(answer, Busy) and answer.place == 0) == 1
        renewals = [(level, answer[0]) for level, answer in seen if isinstance(answer, list)]
        assert [level for level, reply in renewals if isinstance(reply, Alive) and reply.ttl > 15.0] == [full]


# --------------------------------------------------------------- wake-ups


def test_a_lost_mailbox_is_replaced(url, path, until) -> None:
    with Client(url) as one, Client(url) as two:
        lease = one.lock("a").acquire()
        taken = []
        thread = threading.Thread(target=lambda: taken.append(two.lock("a").acquire()))
        thread.start()
        until(lambda: len(one.inspect("a")) == 2)
        for box in Path(f"{path}-mail").iterdir():
            box.unlink()
        until(
            lambda: two._desk._engine._mail.address and Path(f"{path}-mail", two._desk._engine._mail.address).exists()
        )
        released = time.monotonic()
        lease.release()
        thread.join(30)
        assert time.monotonic() - released < 2
        taken[0].release()


def test_one_that_dies_between_its_turn_and_the_telling_is_passed_over(url, path, until, child, monkeypatch) -> None:
    with Client(url) as client:
        lease = client.lock("a").acquire()
        dead = child("wait", url, "a", 60)
        assert dead.hear() == "waiting"
        next_ = child("wait", url, "a", 60)
        assert next_.hear() == "waiting"
        dead.kill()
        asked = []
        true = Mail.reachable

        def reachable(self, address: str) -> bool:
            asked.append(address)
            return len(asked) == 1 or true(self, address)  # it was still there when the turn was given

        monkeypatch.setattr(Mail, "reachable", reachable)
        began = time.monotonic()
        lease.release()
        next_.hear()
        assert time.monotonic() - began < RESERVATION / 2


def test_without_a_mailbox_waiting_still_ends(url, monkeypatch) -> None:
    def refuse(self) -> int:
        raise PermissionError("no place for a socket")

    monkeypatch.setattr("leasehold.engines.sqlite.mail.Mail._make_folder", refuse)
    with Client(url) as one, Client(url) as two:
        lease = one.lock("a").acquire()
        threading.Timer(0.3, lease.release).start()
        began = time.monotonic()
        with two.lock("a"):
            assert time.monotonic() - began < 4


def test_a_long_path_has_mail_too(tmp_path, until) -> None:
    folder = tmp_path / ("deep" * 20) / ("er" * 20)
    with Client(f"sqlite://{folder}/locks.db?durable=no") as one:
        lease = one.lock("a", ttl=600).acquire()
        assert one.break_lock("a", token=lease.token)
        assert lease.wait_lost(5)


def test_what_the_killed_left_is_cleared_away(url, path, child, monkeypatch) -> None:
    one = child("hold", url, "a", 1)
    one.hear()
    one.kill()
    mail = Path(f"{path}-mail")
    assert len(list(mail.iterdir())) == 1
    monkeypatch.setattr("leasehold.engines.sqlite.mail._STALE", -1.0)
    with Client(url) as client, client.lock("b"):
        assert len(list(mail.iterdir())) == 1  # our own
    assert not list(mail.iterdir())


def test_a_dropped_client_leaves_no_thread_and_no_socket(url, path, until) -> None:
    client = Client(url)
    with client.lock("a"):
        pass
    assert len(list(Path(f"{path}-mail").iterdir())) == 1
    del client
    until(lambda: gc.collect() >= 0 and not list(Path(f"{path}-mail").iterdir()))  # its parts know each other
    until(lambda: not any("leasehold-mail" in thread.name for thread in threading.enumerate()))


def test_a_replaced_file_is_noticed(url, path, until) -> None:
    with Client(url) as one, Client(url) as two:
        lease = one.lock("a", ttl=600).acquire()
        for end in ("", "-wal", "-shm"):
            os.unlink(f"{path}{end}")
        until(lambda: two.lock("b").call(lambda: os.path.exists(path)))
        until(lambda: not one.inspect())
        with two.lock("a", wait=0) as second:
            assert second.token > lease.token
        with pytest.raises(LeaseLost):
            lease.renew()
