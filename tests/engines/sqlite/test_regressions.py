"""Attacks on the SQLite engine that once succeeded, each with the mechanism that made it succeed."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from leasehold import Client, ConfigError, LeaseholdError, Unavailable
from leasehold.core.timing import RESERVATION_TTL
from leasehold.engines.sqlite import connection as file_module
from leasehold.engines.sqlite.fast_path import acquire_uncontended
from leasehold.engines.sqlite.wakeup_socket import WakeupSocket

MAX_HANDOFF_SECONDS = 1.5


def boot_time() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


# ----------------------------------------------------------- two holders


def test_hard_link_to_the_file_is_refused(path, child) -> None:
    """SQLite names its log after the path: under a second name the same file had a second log, and a second holder."""
    holder = child("hold", f"sqlite://{path}", "a", 60)
    holder.read_message()
    os.link(path, f"{path}.too")
    with Client(f"sqlite://{path}.too") as client, pytest.raises(ConfigError, match="hard link"):
        client.lock("a").acquire(wait=0)
    os.unlink(f"{path}.too")
    with Client(f"sqlite://{path}") as client:
        assert client.lock("a").try_acquire() is None


def test_leftover_link_of_a_killed_creator_is_removed(path) -> None:
    """The file is made under another name and linked: a maker killed in between leaves that name for ever."""
    with Client(f"sqlite://{path}") as client:
        client.ping()
    os.link(path, os.path.join(os.path.dirname(path), ".leasehold-killed"))
    with Client(f"sqlite://{path}") as client, client.lock("a", wait=0):
        assert os.stat(path).st_nlink == 1


BIND = """
set -e
mkdir "$1/real" "$1/view"; : > "$1/real/l.db"; : > "$1/view/l.db"
mount --bind "$1/real/l.db" "$1/view/l.db"
exec "$2" -c '
import sys
from leasehold import Client, ConfigError
with Client(f"sqlite://{sys.argv[1]}/view/l.db") as client:
    try: print(client.lock("a").acquire(wait=0))
    except ConfigError as error: print(error)
' "$1"
"""


def test_file_mounted_without_its_folder_is_refused(tmp_path) -> None:
    """`docker -v locks.db:/data/locks.db`: each side has a log of its own beside the one file. Both were HELD."""
    if os.getuid() != 0 or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs root for a mount of its own")
    command = ["unshare", "-m", "sh", "-c", BIND, "sh", str(tmp_path), sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "mount its whole folder" in done.stdout, done.stderr


def test_wal_removed_while_in_use_is_detected(url, path, wait_until) -> None:
    """Only the file's own inode was compared: with log and shared memory removed, old and new clients were both HELD
    for as long as they liked, each in a log of its own."""
    with Client(url, ttl=600) as client:
        lease = client.lock("a").acquire()
        lease.renew()
        for suffix in ("-wal", "-shm"):
            os.unlink(path + suffix)
        client._core._engine._connection._file_check_at = 0.0
        lease.renew()  # noticed: closed, which saves the log, and opened again
        inodes = [os.stat(path + suffix).st_ino for suffix in ("", "-wal", "-shm")]
        assert [inode for _, inode in client._core._engine._connection._inodes] == inodes
        with sqlite3.connect(path) as other:
            assert other.execute("select count(*) from lh_grant").fetchone() == (1,)
        other.close()


# ------------------------------------------------------- the file is lost


def test_idle_client_of_removed_file_does_not_block_new_clients(url, path, child) -> None:
    """`rm locks.db` leaves -shm behind, which idle clients have mapped: a new file met an index of the old log, and
    everybody had "disk I/O error" until the last idle client went away."""
    idle_client = child("hold", url, "a", 60)
    idle_client.read_message()
    os.unlink(path)
    with Client(url, call_timeout=1) as client, client.lock("b", wait=0) as lease:
        lease.renew()
        assert [holding.name for holding in client.inspect()] == ["b"]


def test_emptied_meta_table_is_filled_again(url, path) -> None:
    """No row in lh_meta was an IndexError across the seam (E9)."""
    with Client(url) as client:
        client.ping()
        with sqlite3.connect(path) as other:
            other.execute("delete from lh_meta")
        other.close()
        with client.lock("a", wait=0):
            pass


# ------------------------------------------------------------- wake-ups


def test_waiter_through_symbolic_link_is_woken(url, path, child) -> None:
    """The folder of sockets was named after the link: its waiters looked dead to the rest, and were passed over."""
    with Client(url) as client:
        lease = client.lock("a").acquire()
        os.symlink(path, f"{path}.link")
        waiter = child("wait", f"sqlite://{path}.link", "a", 60)
        assert waiter.read_message() == "waiting"
        released = boot_time()
        lease.release()
        assert waiter.read_message()["at"] - released < MAX_HANDOFF_SECONDS


def test_sockets_belong_to_the_group_of_the_file(monkeypatch) -> None:
    """Users who share a file by its group could not write to each other's sockets, which had their makers' groups:
    every hand-off between two users took until the waiter looked by itself, up to 5 s."""
    if os.getuid() != 0:
        pytest.skip("needs root to give a file to another group")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "locks.db")
        Path(path).touch(0o660)
        os.chmod(path, 0o660)
        os.chown(path, -1, 7777)
        with Client(f"sqlite://{path}") as client, client.lock("a"):
            socket_folder = Path(f"{path}-wakeup")
            assert {(entry.stat().st_gid, entry.stat().st_mode & 0o777) for entry in socket_folder.iterdir()} == {
                (7777, 0o660)
            }
            assert (socket_folder.stat().st_gid, socket_folder.stat().st_mode & 0o777) == (7777, 0o770)


def test_socket_without_a_reader_is_replaced(url, path) -> None:
    """The box was looked for by name alone: one whose listener had died stayed, and its waiters were passed over."""
    with Client(url) as client:
        with client.lock("a"):
            pass
        wakeup_socket = client._core._engine._wakeup_socket
        before, sock = wakeup_socket.address, wakeup_socket._socket
        sock.shutdown(socket.SHUT_RDWR)
        os.unlink(os.path.join(f"{path}-wakeup", before))
        Path(f"{path}-wakeup", before).touch()  # the name is there
        lease = client.lock("a").acquire(wait=1)
        wakeup_socket.ensure_bound(client._core.runtime)
        assert wakeup_socket.address != before
        lease.release()


def test_child_forked_during_bind_does_not_inherit_the_socket(url, monkeypatch) -> None:
    """It was made known only when it was bound: a child forked in between kept it open, and a killed parent then
    looked alive for as long as the child lived."""
    forked, original = [], WakeupSocket._remove_stale_sockets

    def sweep(self) -> None:
        pid = os.fork()
        if not pid:
            os._exit(1 if bound_sockets() else 0)
        forked.append(os.waitpid(pid, 0)[1])
        original(self)

    monkeypatch.setattr(WakeupSocket, "_remove_stale_sockets", sweep)
    with Client(url) as client, client.lock("a"):
        assert forked == [0]


def bound_sockets() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                sock = socket.socket(fileno=os.dup(int(fd)))
                name = sock.getsockname()
                sock.detach()
                found += [name] if isinstance(name, str) and "-wakeup/" in name else []
        except OSError:
            continue
    return found


def test_head_killed_after_its_reservation_does_not_delay_next_waiter(url, child) -> None:
    """It was there when it was given its turn (stopped, so it could not claim) and is dead a moment later. Nobody asks
    again whether it is reachable until the reservation ends."""
    with Client(url) as client:
        lease = client.lock("a").acquire()
        head, second = child("wait", url, "a", 60), None
        assert head.read_message() == "waiting"
        second = child("wait", url, "a", 60)
        assert second.read_message() == "waiting"
        head.signal(signal.SIGSTOP)
        lease.release()
        released = boot_time()
        head.kill()
        waited = second.read_message(RESERVATION_TTL + 10)["at"] - released
        assert waited < MAX_HANDOFF_SECONDS


# ------------------------------------------- interrupted, and out of everything


def test_release_in_signal_handler_does_not_wait_for_own_transaction(url, monkeypatch) -> None:
    """It waited for its own thread until the deadline, with the write lock held: everybody on the machine with it."""
    durations = []
    with Client(url, call_timeout=3) as client:
        lease = client.lock("other").acquire()

        def release_inside_transaction(*args):
            began = time.monotonic()
            lease.release()  # as a handler or finaliser does, on this very thread
            durations.append(time.monotonic() - began)
            return acquire_uncontended(*args)

        monkeypatch.setattr("leasehold.engines.sqlite.engine.acquire_uncontended", release_inside_transaction)
        with client.lock("a", wait=0):
            pass
        assert durations[0] < 1
        with client.lock("other", wait=5):  # the release was owed, and came
            pass


def test_interrupt_before_rollback_does_not_keep_the_write_lock(url, path) -> None:
    """Two Ctrl-C, the second between the job and its rollback, left the connection inside its transaction."""
    with Client(url, call_timeout=1) as client:
        client.ping()
        file = client._core._engine._connection
        file._db.execute("begin immediate")  # what is left then
        client.ping()
        assert not file._db.in_transaction


def exhaust_descriptors() -> list[int]:
    descriptors = []
    try:
        while True:
            descriptors.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return descriptors


def test_client_without_file_descriptors_raises_unavailable(url) -> None:
    """Ids that could not be read for want of descriptors were taken for empty ones: such a client took the file over
    as another machine, and everybody else was refused with a ConfigError."""
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


def test_client_without_socket_descriptor_still_acquires(url, monkeypatch) -> None:
    """The socket was made outside the `try`: OSError crossed the seam (E9)."""

    def refuse(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("leasehold.engines.sqlite.wakeup_socket.socket.socket", refuse)
    with Client(url) as client, client.lock("a", wait=0):
        assert not client._core._engine._wakeup_socket.address


def test_socket_without_listener_thread_is_not_announced(url, path, monkeypatch) -> None:
    """The address was known before its listener ran: without a thread, turns were given to a box nobody reads."""
    with Client(url) as client:
        client.ping()
        runtime = client._core.runtime

        def refuse(start, name: str) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(runtime, "start_thread", refuse)
        assert client._core._engine._wakeup_socket.ensure_bound(runtime) == ""
        assert not list(Path(f"{path}-wakeup").iterdir())


# ------------------------------------------------------------ the seam (E9)


@pytest.mark.parametrize(
    "ask",
    [lambda client: client.inspect("\ud800"), lambda client: client.semaphore("s", 1 << 70).acquire(wait=0)],
    ids=["text that is no UTF-8", "a limit beyond 64 bits"],
)
def test_values_sqlite_cannot_store_raise_leasehold_error(url, ask) -> None:
    """UnicodeEncodeError and OverflowError come from binding a value, and are no sqlite3.Error."""
    with Client(url) as client, pytest.raises(LeaseholdError):
        ask(client)


@pytest.mark.parametrize("parts", [["x" * 100] * 6, ["y" * 252]], ids=["long", "long name"])
def test_too_long_path_raises_config_error(tmp_path, parts) -> None:
    """It was Unavailable, though waiting never mends it: SQLite takes 512 bytes, and a name must leave room."""
    with Client(f"sqlite://{tmp_path}/{'/'.join(parts)}") as client, pytest.raises(ConfigError, match="too long"):
        client.ping()


def test_missing_home_raises_config_error_naming_xdg_state_home(monkeypatch) -> None:
    monkeypatch.delenv("LEASEHOLD_URL", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", "relative")
    with pytest.raises(ConfigError, match="XDG_STATE_HOME"):
        Client()


def test_clients_can_open_the_file_while_others_are_busy(url) -> None:
    """Opening looks at every connection of the process: the busy ones that are sound must not hold it up."""
    stopped, connections_before = threading.Event(), len(file_module._NEVER_CLOSED)

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
    assert len(file_module._NEVER_CLOSED) == connections_before


def test_removed_folder_is_created_again(tmp_path) -> None:
    folder = tmp_path / "gone"
    with Client(f"sqlite://{folder}/l.db?durable=no") as client:
        with client.lock("a"):
            pass
        shutil.rmtree(folder)
        client._core._engine._connection._file_check_at = 0.0
        with client.lock("a", wait=0) as lease:
            assert lease.held
            assert os.stat(folder).st_mode & 0o777 == 0o700
