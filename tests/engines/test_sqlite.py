"""The SQLite engine in one process and its forks: both faces, many threads, wake-ups, nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import sqlite3
import threading
import time
from pathlib import Path

import pytest

from leasehold import AsyncClient, Client, ConfigError, LeaseLost, Mismatch, Unavailable
from leasehold.book import Book
from leasehold.config import EngineConfig
from leasehold.core.timing import RESERVATION
from leasehold.engines.sqlite import file as file_module
from leasehold.engines.sqlite.engine import Flight, SqliteEngine, opened
from leasehold.engines.sqlite.host import Host
from leasehold.engines.sqlite.mail import Mail
from leasehold.engines.sqlite.rows import RowLine
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


def test_another_kind_of_a_live_name_is_refused(url) -> None:
    with Client(url) as one, Client(url) as two:
        with one.lock("a"), pytest.raises(Mismatch):
            two.semaphore("a", 2).acquire(wait=0)
        with two.semaphore("a", 2):
            pass


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


def test_many_threads_on_one_client(url) -> None:
    inside, most, done = [0], [0], []

    def work(client: Client) -> None:
        for _ in range(10):
            with client.semaphore("s", 3):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1
            with client.lock("l"):
                done.append(1)

    with Client(url) as client:
        threads = [threading.Thread(target=work, args=(client,)) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(done) == 200
        assert most[0] <= 3
        assert client.inspect() == []


def test_both_faces_stand_in_one_line(url) -> None:
    async def asyncio_side(blocking: Client) -> None:
        async with AsyncClient(url) as client:
            order = []
            held = blocking.lock("a").acquire()

            async def one(number: int) -> None:
                async with client.lock("a"):
                    order.append(number)

            tasks = []
            for number in range(10):
                tasks.append(asyncio.create_task(one(number)))
                while len(await client.inspect("a")) < number + 2:
                    await asyncio.sleep(0.001)
            held.release()
            await asyncio.gather(*tasks)
            assert order == list(range(10))

    with Client(url) as blocking:
        asyncio.run(asyncio_side(blocking))


def test_cancelled_at_any_moment_nothing_stays(url, path, until) -> None:
    async def main() -> None:
        async with AsyncClient(url) as client:
            for turns in range(40):
                task = asyncio.create_task(client.lock("a").acquire())
                for _ in range(turns % 8):
                    await asyncio.sleep(0)
                if turns >= 8:
                    await asyncio.sleep(turns * 2e-5)
                task.cancel()
                try:
                    lease = await task
                except asyncio.CancelledError:
                    continue
                await lease.release()
            end = time.monotonic() + 20
            while await client.inspect():
                assert time.monotonic() < end
                await asyncio.sleep(0.01)

    asyncio.run(main())
    assert rows(path) == 0


def test_a_client_goes_with_its_last_loop(url) -> None:
    client = AsyncClient(url)

    async def use() -> int:
        async with client.lock("a") as lease:
            return lease.token

    tokens = [asyncio.run(use()) for _ in range(3)]
    assert tokens == sorted(set(tokens))
    asyncio.run(client.close())


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
        true = RowLine.save

        def save(self) -> None:
            true(self)
            flight.abandoned = True  # while it ran: its release may be over by now

        monkeypatch.setattr(RowLine, "save", save)
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


def test_a_break_is_told_at_once(url) -> None:
    with Client(url) as client, Client(url) as operator:
        lease = client.lock("a", ttl=600).acquire()
        assert operator.break_lock("a", token=lease.token)
        assert lease.wait_lost(5)
        assert lease.lost_reason == "broken"
        with pytest.raises(LeaseLost):
            lease.check()


def test_a_hand_off_is_pushed(url, until) -> None:
    with Client(url) as one, Client(url) as two:
        lease = one.lock("a").acquire()
        taken = []
        thread = threading.Thread(target=lambda: taken.append((two.lock("a").acquire(), time.monotonic())))
        thread.start()
        until(lambda: len(one.inspect("a")) == 2)
        released = time.monotonic()
        lease.release()
        thread.join(30)
        assert taken[0][1] - released < 2  # polling would take up to five
        taken[0][0].release()


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


# ------------------------------------------------------------------- fork


def test_a_forked_child_opens_its_own(url, path, in_fork) -> None:
    with Client(url) as client:
        lease = client.lock("a").acquire()

        def child() -> None:
            assert not lease.held
            assert client.lock("a").try_acquire() is None
            with client.lock("b"):
                assert {seen.name for seen in client.inspect()} == {"a", "b"}
            client.close()
            assert len(list(Path(f"{path}-mail").iterdir())) == 1  # the parent's

        for _ in range(3):
            in_fork(child)
        lease.renew()
        assert lease.release()


def test_a_fork_in_the_midst_of_other_threads_transactions(url, path, in_fork) -> None:
    """The child must get a file it can use, and the parent's threads must not notice."""
    over = threading.Event()
    failed, kept = [], len(file_module._KEPT)

    def churn(client: Client, number: int) -> None:
        try:
            while not over.is_set():
                with client.lock(f"n{number}"):
                    pass
        except BaseException as error:
            failed.append(error)

    with Client(url) as client:
        threads = [threading.Thread(target=churn, args=(client, number)) for number in range(3)]
        for thread in threads:
            thread.start()

        def child() -> None:
            assert len(file_module._KEPT) == kept
            for number in range(20):
                with client.lock(f"child{number}"):
                    pass

        for _ in range(10):
            in_fork(child)
        over.set()
        for thread in threads:
            thread.join(30)
        assert not failed
    db = sqlite3.connect(path)
    assert db.execute("pragma integrity_check").fetchone() == ("ok",)
    db.close()


def test_a_child_and_its_parent_stay_in_one_world(url, path, in_fork) -> None:
    """A connection carried across the fork would part them here: the parent's close removes the log it shares."""
    client = Client(url)
    with client.lock("before"):
        pass
    (there, ready), (go, on) = os.pipe(), os.pipe()

    def child() -> None:
        with client.lock("child", ttl=600):
            os.write(ready, b".")
            os.read(go, 1)
            assert client.lock("third").try_acquire() is None

    thread = threading.Thread(target=in_fork, args=(child,))
    thread.start()
    os.read(there, 1)
    client.close()
    with Client(url) as third, third.lock("third", wait=0):
        assert third.lock("child").try_acquire() is None
        os.write(on, b".")
        thread.join(30)
    for end in (there, ready, go, on):
        os.close(end)


def test_a_child_forked_inside_a_transaction_is_refused_the_file(url, monkeypatch, in_fork) -> None:
    monkeypatch.setattr(file_module, "_TO_FINISH", 0.05)
    with Client(url) as client:
        client.ping()

        def child() -> None:
            with pytest.raises(ConfigError, match="forked inside a transaction"):
                client.lock("a").acquire()
            with Client(url) as other, pytest.raises(ConfigError, match="forked inside a transaction"):
                other.ping()

        client._desk._engine._file.once(lambda db: in_fork(child))
        with client.lock("a"):
            pass


def test_a_waiter_in_a_forked_child_is_woken(url, until, in_fork) -> None:
    with Client(url) as client:
        lease = client.lock("a").acquire()
        got, ready = os.pipe()

        def child() -> None:
            os.close(got)
            began = time.monotonic()
            with client.lock("a", wait=30):
                os.write(ready, b"%f" % (time.monotonic() - began))

        thread = threading.Thread(target=in_fork, args=(child,))
        thread.start()
        until(lambda: len(client.inspect("a")) == 2)
        lease.release()
        waited = float(os.read(got, 100))
        thread.join(30)
        os.close(got)
        os.close(ready)
        assert waited < 4
