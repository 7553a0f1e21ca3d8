"""Bugs of the SQLite engine that attacks found, each with its cause."""

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
    """SQLite names the WAL after the path: through a second path the same file had a second WAL and a second holder."""
    holder = child("hold", f"sqlite://{path}", "a", 60)
    holder.read_message()
    os.link(path, f"{path}.too")
    with Client(f"sqlite://{path}.too") as client, pytest.raises(ConfigError, match="hard link"):
        client.lock("a").acquire(wait=0)
    os.unlink(f"{path}.too")
    with Client(f"sqlite://{path}") as client:
        assert client.lock("a").try_acquire() is None


def test_leftover_link_of_a_killed_creator_is_removed(path) -> None:
    """A client creates the file under a temporary name and links it. If it is killed in between, that name stays."""
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
    """`docker -v locks.db:/data/locks.db` shares the file but not the WAL next to it: two leases were HELD."""
    if os.getuid() != 0 or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs root for a mount of its own")
    command = ["unshare", "-m", "sh", "-c", BIND, "sh", str(tmp_path), sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "mount its whole folder" in done.stdout, done.stderr


def test_wal_removed_while_in_use_is_detected(url, path, wait_until) -> None:
    """The engine compared only the inode of the database file. If -wal and -shm were removed, old and new clients
    each had their own WAL, and the leases of both stayed HELD."""
    with Client(url, ttl=600) as client:
        lease = client.lock("a").acquire()
        lease.renew()
        for suffix in ("-wal", "-shm"):
            os.unlink(path + suffix)
        client._core._engine._connection._file_check_at = 0.0
        lease.renew()  # detects it: closing writes the WAL back, then it reopens
        inodes = [os.stat(path + suffix).st_ino for suffix in ("", "-wal", "-shm")]
        assert [inode for _, inode in client._core._engine._connection._inodes] == inodes
        with sqlite3.connect(path) as other:
            assert other.execute("select count(*) from lh_grant").fetchone() == (1,)
        other.close()


# ------------------------------------------------------------- lost files


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


# ------------------------------------------------------------- wake-ups


def test_waiter_through_symbolic_link_is_woken(url, path, child) -> None:
    """The socket folder was named after the link: other clients took its waiters for dead and passed them over."""
    with Client(url) as client:
        lease = client.lock("a").acquire()
        os.symlink(path, f"{path}.link")
        waiter = child("wait", f"sqlite://{path}.link", "a", 60)
        assert waiter.read_message() == "waiting"
        released = boot_time()
        lease.release()
        assert waiter.read_message()["at"] - released < MAX_HANDOFF_SECONDS


def test_sockets_belong_to_the_group_of_the_file(monkeypatch) -> None:
    """Each socket had its creator's group, so users who share a file by its group could not write to each other's
    sockets. Every hand-off between two users took until the waiter's next poll, up to 5 s."""
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
    """Only the socket's name was checked: a socket whose listener had died stayed, and its waiters were passed over."""
    with Client(url) as client:
        with client.lock("a"):
            pass
        wakeup_socket = client._core._engine._wakeup_socket
        before, sock = wakeup_socket.address, wakeup_socket._socket
        sock.shutdown(socket.SHUT_RDWR)
        os.unlink(os.path.join(f"{path}-wakeup", before))
        Path(f"{path}-wakeup", before).touch()  # the name exists, but no socket
        lease = client.lock("a").acquire(wait=1)
        wakeup_socket.ensure_bound(client._core.runtime)
        assert wakeup_socket.address != before
        lease.release()


def test_empty_message_does_not_end_the_wakeup_thread(url, path) -> None:
    """The thread took an empty message for the end of the socket: the client's waiters were passed over."""
    with Client(url) as client:
        client.lock("a").acquire(wait=1).release()
        wakeup_socket = client._core._engine._wakeup_socket
        address = wakeup_socket.ensure_bound(client._core.runtime)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            for _ in range(50):  # more than the socket buffers: all but the last few have been read
                sender.sendto(b"", os.path.join(f"{path}-wakeup", address))
        assert wakeup_socket.ensure_bound(client._core.runtime) == address


def test_child_forked_during_bind_does_not_inherit_the_socket(url, monkeypatch) -> None:
    """The socket was registered only after it was bound. A child forked in between kept it open, so a killed parent
    seemed alive for as long as the child lived."""
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
    """The head is stopped, so it is reachable when the name is reserved for it but cannot claim it; then it is
    killed. Its reachability was not checked again until the reservation expired."""
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


# ------------------------------------------- interrupts and exhausted resources


def test_release_in_signal_handler_does_not_wait_for_own_transaction(url, monkeypatch) -> None:
    """The release waited for its own thread until the deadline and held the write lock, which blocked every client."""
    durations = []
    with Client(url, call_timeout=3) as client:
        lease = client.lock("other").acquire()

        def release_inside_transaction(*args):
            began = time.monotonic()
            lease.release()  # as a signal handler or finaliser does, on the same thread
            durations.append(time.monotonic() - began)
            return acquire_uncontended(*args)

        monkeypatch.setattr("leasehold.engines.sqlite.engine.acquire_uncontended", release_inside_transaction)
        with client.lock("a", wait=0):
            pass
        assert durations[0] < 1
        with client.lock("other", wait=5):  # the pending release was retried
            pass


def test_interrupt_before_rollback_does_not_keep_the_write_lock(url, path) -> None:
    """A second Ctrl-C before the rollback of the first left the connection inside its transaction."""
    with Client(url, call_timeout=1) as client:
        client.ping()
        file = client._core._engine._connection
        file._db.execute("begin immediate")  # the state after the second Ctrl-C
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


def test_client_without_socket_descriptor_still_acquires(url, monkeypatch) -> None:
    """The socket was created outside the `try`, so the engine raised OSError (E9)."""

    def refuse(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("leasehold.engines.sqlite.wakeup_socket.socket.socket", refuse)
    with Client(url) as client, client.lock("a", wait=0):
        assert not client._core._engine._wakeup_socket.address


def test_socket_without_listener_thread_is_not_announced(url, path, monkeypatch) -> None:
    """The address was announced before its listener ran: without a thread, nothing read the wake-ups sent there."""
    with Client(url) as client:
        client.ping()
        runtime = client._core.runtime

        def refuse(start, name: str) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(runtime, "start_thread", refuse)
        assert client._core._engine._wakeup_socket.ensure_bound(runtime) == ""
        assert not list(Path(f"{path}-wakeup").iterdir())


# -------------------------------------------------------------- errors (E9)


@pytest.mark.parametrize(
    "ask",
    [lambda client: client.inspect("\ud800"), lambda client: client.semaphore("s", 1 << 70).acquire(wait=0)],
    ids=["text that is no UTF-8", "a limit beyond 64 bits"],
)
def test_values_sqlite_cannot_store_raise_leasehold_error(url, ask) -> None:
    """Binding a value may raise UnicodeEncodeError or OverflowError, which are not sqlite3.Error."""
    with Client(url) as client, pytest.raises(LeaseholdError):
        ask(client)


@pytest.mark.parametrize("parts", [["x" * 100] * 6, ["y" * 252]], ids=["long", "long name"])
def test_too_long_path_raises_config_error(tmp_path, parts) -> None:
    """It was Unavailable, although a retry never helps: SQLite accepts 512 bytes, suffixes included."""
    with Client(f"sqlite://{tmp_path}/{'/'.join(parts)}") as client, pytest.raises(ConfigError, match="too long"):
        client.ping()


def test_missing_home_raises_config_error_naming_xdg_state_home(monkeypatch) -> None:
    monkeypatch.delenv("LEASEHOLD_URL", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", "relative")
    with pytest.raises(ConfigError, match="XDG_STATE_HOME"):
        Client()


def test_clients_can_open_the_file_while_others_are_busy(url) -> None:
    """Opening a file checks every connection of the process. Busy connections that are intact must not delay it."""
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
