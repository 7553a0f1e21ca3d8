"""Full disks, lost files, exhausted resources, interrupts: no grant is lost, and clients recover."""

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import threading
import time

import pytest

from leasehold import Client, LeaseLost, Unavailable
from leasehold.engines.sql.fair_mutex import ON_BEHALF_OF
from leasehold.engines.sqlite.connection import DatabaseLocked
from leasehold.engines.sqlite.fast_path import acquire_uncontended
from tests.support import probe_sqlite


def test_file_at_its_page_limit_is_unavailable_then_recovers(path) -> None:
    with Client(f"sqlite://{path}?durable=no", call_timeout=1) as client:
        kept = client.lock("kept").acquire()
        db = probe_sqlite.database(client)
        (used,) = db.execute("pragma page_count").fetchone()
        db.execute(f"pragma max_page_count = {used + 20}")
        leases = []
        with pytest.raises(Unavailable, match="full"):
            for number in range(2000):
                leases.append(client.lock(f"{number:0200}").acquire(wait=0))
        kept.renew()
        assert {holding.name for holding in client.inspect()} == {"kept", *(lease.name for lease in leases)}
        db.execute("pragma max_page_count = 1000000")
        with client.lock("more", wait=0) as new_lease:
            assert new_lease.token > leases[-1].token


def test_file_size_limit_is_unavailable_then_recovers(path, url, child) -> None:
    process = child("limit", url, path)
    full = process.read_message()
    assert full["error"] == "Unavailable", full
    assert full["held"]
    healed = process.read_message()
    assert healed["kept"]
    assert healed["verified"]
    assert healed["token"] > healed["before"]


FULL_DISK = """
set -e
mount -t tmpfs -o size=400k,mode=700 none "$1"
exec "$2" -c '
import os, sys
from leasehold import Client, Unavailable
folder = sys.argv[1]
with Client(f"sqlite://{folder}/locks.db", call_timeout=1) as client:
    kept = client.lock("kept").acquire()
    with open(f"{folder}/filler", "wb", buffering=0) as filler:
        try:
            while True: filler.write(b"x" * 1024)
        except OSError: pass
    leases = []
    try:
        while len(leases) < 5000: leases.append(client.lock(f"n{len(leases)}").acquire(wait=0))
    except Unavailable as error: print("unavailable:", error)
    assert kept.held
    os.unlink(f"{folder}/filler")
    after = client.lock("after").acquire(wait=0)
    kept.renew()
    assert after.token > kept.token
    assert {one.name for one in client.inspect()} == {"kept", "after", *(one.name for one in leases)}
    print("healed")
' "$1"
"""


def test_full_disk_is_unavailable_loses_nothing_and_recovers(tmp_path) -> None:
    if os.getuid() != 0 or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs root for a small file system of its own; RLIMIT_FSIZE is the rootless form")
    small = tmp_path / "small"
    small.mkdir()
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", FULL_DISK, "sh", str(small), sys.executable],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "unavailable: " in done.stdout
    assert done.stdout.endswith("healed\n")


def test_replaced_database_file_is_detected(url, path, wait_until) -> None:
    with Client(url) as one, Client(url) as two:
        lease = one.lock("a", ttl=600).acquire()
        for suffix in ("", "-wal", "-shm"):
            os.unlink(f"{path}{suffix}")
        wait_until(lambda: two.lock("b").call(lambda: os.path.exists(path)))
        wait_until(lambda: not one.inspect())
        with two.lock("a", wait=0) as second:
            assert second.token > lease.token
        with pytest.raises(LeaseLost):
            lease.renew()


def test_wal_removed_while_in_use_is_detected(url, path, wait_until) -> None:
    """The engine compared only the inode of the database file. If -wal and -shm were removed, old and new clients
    each had their own WAL, and the leases of both stayed HELD."""
    with Client(url, ttl=600) as client:
        lease = client.lock("a").acquire()
        lease.renew()
        for suffix in ("-wal", "-shm"):
            os.unlink(path + suffix)
        probe_sqlite.make_file_check_due(client)
        lease.renew()  # detects it: closing writes the WAL back, then it reopens
        inodes = [os.stat(path + suffix).st_ino for suffix in ("", "-wal", "-shm")]
        assert probe_sqlite.inodes(client) == inodes
        with sqlite3.connect(path) as other:
            assert other.execute("select count(*) from lh_grant").fetchone() == (1,)
        other.close()


def test_idle_client_of_removed_file_does_not_block_new_clients(url, path, child) -> None:
    """`rm locks.db` leaves -shm behind, which idle clients have mapped. The new file was used with the index of the
    old WAL, and every client got "disk I/O error" until the last idle client closed."""
    idle_client = child("hold", url, "a", 60)
    idle_client.read_message()
    os.unlink(path)
    with Client(url, call_timeout=1) as client, client.lock("b", wait=0) as lease:
        lease.renew()
        assert [holding.name for holding in client.inspect()] == ["b"]


def test_emptied_meta_table_is_filled_again(url, path) -> None:
    """If lh_meta had no row, the engine raised IndexError (E9)."""
    with Client(url) as client:
        client.ping()
        with sqlite3.connect(path) as other:
            other.execute("delete from lh_meta")
        other.close()
        with client.lock("a", wait=0):
            pass


def test_removed_folder_is_refused_and_its_lease_at_risk(tmp_path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    with Client(f"sqlite://{folder}/l.db?durable=no", call_timeout=0.5) as client:
        lease = client.lock("a").acquire()
        shutil.rmtree(folder)
        probe_sqlite.make_file_check_due(client)
        with pytest.raises(Unavailable, match="does not exist: `mkdir -p -m 700"):
            lease.renew()
        folder.mkdir()
        with client.lock("a", wait=0):
            pass
        lease.release()


def test_release_in_signal_handler_does_not_wait_for_own_transaction(url, monkeypatch) -> None:
    """The release waited for its own thread until the deadline and held the write lock, which blocked every client."""
    durations = []
    with Client(url, call_timeout=60) as client:
        lease = client.lock("other").acquire()

        def release_inside_transaction(*args):
            began = time.monotonic()
            lease.release()  # as a signal handler or finaliser does, on the same thread
            durations.append(time.monotonic() - began)
            return acquire_uncontended(*args)

        monkeypatch.setattr("leasehold.engines.sqlite.engine.acquire_uncontended", release_inside_transaction)
        with client.lock("a", wait=0):
            pass
        assert durations[0] < 30
        with client.lock("other", wait=60):  # the pending release was retried
            pass


def test_interrupt_before_rollback_does_not_keep_the_write_lock(url, path) -> None:
    """A second Ctrl-C before the rollback of the first left the connection inside its transaction."""
    with Client(url, call_timeout=1) as client:
        client.ping()
        probe_sqlite.database(client).execute("begin immediate")  # the state after the second Ctrl-C
        client.ping()
        assert not probe_sqlite.database(client).in_transaction


def exhaust_descriptors() -> list[int]:
    descriptors = []
    try:
        while True:
            descriptors.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return descriptors


def test_client_without_file_descriptors_raises_unavailable(url) -> None:
    """A client without free descriptors could not read the machine's ids and took them for empty. It then took the
    file over as another machine, and every other client got a ConfigError."""
    with Client(url) as client:
        client.ping()
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
        descriptors = exhaust_descriptors()
        try:
            with pytest.raises(Unavailable, match="Too many open files"):
                Client(url)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        with client.lock("a", wait=0):
            pass


def test_clients_can_open_the_file_while_others_are_busy(url) -> None:
    """Opening a file checks every connection of the process. Busy connections that are intact must not delay it."""
    stopped, connections_before = threading.Event(), probe_sqlite.connections_never_closed()

    def churn(client: Client) -> None:
        while not stopped.is_set():
            with client.lock("a"):
                pass

    with Client(url) as busy_client:
        threads = [threading.Thread(target=churn, args=(busy_client,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for number in range(30):
                with Client(url, call_timeout=2) as client, client.lock(f"n{number}", wait=0):
                    pass
        finally:
            stopped.set()
            for thread in threads:
                thread.join(30)
    assert probe_sqlite.connections_never_closed() == connections_before


@pytest.mark.parametrize(
    ("others", "their_key", "key", "longest"),
    [(0, "", "", 0.01), (20, "", "", 0.21), (0, "", "web", 0.01), (20, "web", "web", 0.21), (20, "web", "cron", 0.02)],
)
def test_calls_that_find_the_file_locked_retry_as_often_as_one(
    path, make_driver, monkeypatch, others, their_key, key, longest
) -> None:
    """And none sleeps beyond its deadline. On a lock server with several workers, thousands of calls for one API key
    made the renewals for another one retry so rarely that they failed."""
    driver, now, pauses = make_driver(f"sqlite://{path}"), [0.0], []

    async def sleep(seconds: float) -> None:
        now[0] += seconds
        pauses.append(seconds)

    def find_it_locked(_deadline: float) -> None:
        raise DatabaseLocked

    monkeypatch.setattr(driver.runtime, "now", lambda: now[0])
    monkeypatch.setattr(driver.runtime, "sleep", sleep)
    monkeypatch.setattr(driver.runtime, "random", lambda: 1.0)
    probe_sqlite.pretend_retrying(driver.engine, others, their_key)
    token = ON_BEHALF_OF.set(key)
    try:
        with pytest.raises(Unavailable, match="locked by other processes"):
            probe_sqlite.run_with_retry(driver.engine, 1.0, find_it_locked)
    finally:
        ON_BEHALF_OF.reset(token)
    assert max(pauses) == pytest.approx(longest)
    assert now[0] == pytest.approx(1.0)
    assert probe_sqlite.retrying(driver.engine) == {"": set(), their_key: set(range(others))}
