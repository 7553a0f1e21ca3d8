"""The SQLite engine in forked children: a file of their own, and the parent's left alone."""

from __future__ import annotations

import os
import sqlite3
import threading
from pathlib import Path

import pytest

from leasehold import Client, ConfigError, Unavailable
from leasehold.engines.sqlite import file as file_module


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


def test_nobody_opens_the_file_while_the_process_forks(url) -> None:
    """A watchdog that starts just then, say: its connection would not be closed before the fork."""
    file_module._freeze_all()
    with Client(url, call_timeout=0.2) as client:
        try:
            with pytest.raises(Unavailable):
                client.ping()
        finally:
            file_module._thaw_all()
        client.ping()


def test_of_two_threads_that_fork_each_lets_go_of_its_own(url, monkeypatch) -> None:
    """The second froze a file made since the first began. The first could not let go of that, and so of no other
    either: the process could not open a file of locks again."""
    monkeypatch.setattr(file_module, "_TO_FINISH", 0.05)
    frozen, over = threading.Event(), threading.Event()

    def fork() -> None:
        file_module._freeze_all()
        frozen.set()
        over.wait(30)
        file_module._thaw_all()

    with Client(url) as client:
        client.ping()
        file_module._freeze_all()
        newcomer = Client(url)
        other = threading.Thread(target=fork)
        other.start()
        frozen.wait(30)
        try:
            file_module._thaw_all()
        finally:
            over.set()
            other.join(30)
        assert not file_module._FORKING
        client.ping()
        newcomer.close()


def test_two_threads_that_fork_do_not_wait_for_each_other(url, monkeypatch) -> None:
    """A set gives its files in another order once there are more of them: each thread had what the other waited for."""
    orders: list[list[file_module.File]] = []
    monkeypatch.setattr(file_module.File, "freeze", lambda file: orders[-1].append(file))
    with Client(url), Client(url):
        found = file_module._all()
        for order in (found, found[::-1]):
            orders.append([])
            monkeypatch.setattr(file_module, "_all", order.copy)
            file_module._freeze_all()
            file_module._thaw_all()
    assert orders[0] == orders[1]


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
