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
from leasehold.core.timing import RESERVATION
from leasehold.engines.sqlite import file as file_module
from leasehold.engines.sqlite.idle import taken
from leasehold.engines.sqlite.mail import Mail

NOBODY_WAITS_LONGER = 1.5


def boot_time() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


# ----------------------------------------------------------- two holders


def test_a_hard_link_is_refused(path, child) -> None:
    """SQLite names its log after the path: under a second name the same file had a second log, and a second holder."""
    holder = child("hold", f"sqlite://{path}", "a", 60)
    holder.hear()
    os.link(path, f"{path}.too")
    with Client(f"sqlite://{path}.too") as client, pytest.raises(ConfigError, match="hard link"):
        client.lock("a").acquire(wait=0)
    os.unlink(f"{path}.too")
    with Client(f"sqlite://{path}") as client:
        assert client.lock("a").try_acquire() is None


def test_what_a_killed_maker_left_is_no_second_name(path) -> None:
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


def test_a_file_mounted_without_its_folder_is_refused(tmp_path) -> None:
    """`docker -v locks.db:/data/locks.db`: each side has a log of its own beside the one file. Both were HELD."""
    if os.getuid() != 0 or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs root for a mount of its own")
    command = ["unshare", "-m", "sh", "-c", BIND, "sh", str(tmp_path), sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "mount its whole folder" in done.stdout, done.stderr


def test_a_log_removed_in_use_is_noticed(url, path, until) -> None:
    """Only the file's own inode was compared: with log and shared memory removed, old and new clients were both HELD
    for as long as they liked, each in a log of its own."""
    with Client(url, ttl=600) as client:
        lease = client.lock("a").acquire()
        lease.renew()
        for end in ("-wal", "-shm"):
            os.unlink(path + end)
        client._desk._engine._file._look_at = 0.0
        lease.renew()  # noticed: closed, which saves the log, and opened again
        taken = [os.stat(path + end).st_ino for end in ("", "-wal", "-shm")]
        assert [inode for _, inode in client._desk._engine._file._nodes] == taken
        with sqlite3.connect(path) as other:
            assert other.execute("select count(*) from lh_grant").fetchone() == (1,)
        other.close()


# ------------------------------------------------------- the file is lost


def test_an_idle_client_of_a_removed_file_does_not_block_the_new_one(url, path, child) -> None:
    """`rm locks.db` leaves -shm behind, which idle clients have mapped: a new file met an index of the old log, and
    everybody had "disk I/O error" until the last idle client went away."""
    idle = child("hold", url, "a", 60)
    idle.hear()
    os.unlink(path)
    with Client(url, call_timeout=1) as client, client.lock("b", wait=0) as lease:
        lease.renew()
        assert [one.name for one in client.inspect()] == ["b"]


def test_emptied_tables_are_filled_again(url, path) -> None:
    """No row in lh_meta was an IndexError across the seam (E9)."""
    with Client(url) as client:
        client.ping()
        with sqlite3.connect(path) as other:
            other.execute("delete from lh_meta")
        other.close()
        with client.lock("a", wait=0):
            pass


# ------------------------------------------------------------- wake-ups


def test_a_waiter_by_a_symbolic_link_is_woken(url, path, child) -> None:
    """The folder of sockets was named after the link: its waiters looked dead to the rest, and were passed over."""
    with Client(url) as client:
        lease = client.lock("a").acquire()
        os.symlink(path, f"{path}.link")
        waiter = child("wait", f"sqlite://{path}.link", "a", 60)
        assert waiter.hear() == "waiting"
        released = boot_time()
        lease.release()
        assert waiter.hear()["at"] - released < NOBODY_WAITS_LONGER


def test_sockets_belong_to_the_files_group(monkeypatch) -> None:
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
            mail = Path(f"{path}-mail")
            assert {(one.stat().st_gid, one.stat().st_mode & 0o777) for one in mail.iterdir()} == {(7777, 0o660)}
            assert (mail.stat().st_gid, mail.stat().st_mode & 0o777) == (7777, 0o770)


def test_a_socket_nobody_reads_is_replaced(url, path) -> None:
    """The box was looked for by name alone: one whose listener had died stayed, and its waiters were passed over."""
    with Client(url) as client:
        with client.lock("a"):
            pass
        mail = client._desk._engine._mail
        before, box = mail.address, mail._box
        box.shutdown(socket.SHUT_RDWR)
        os.unlink(os.path.join(f"{path}-mail", before))
        Path(f"{path}-mail", before).touch()  # the name is there
        lease = client.lock("a").acquire(wait=1)
        mail.ready(client._desk.runtime)
        assert mail.address != before
        lease.release()


def test_a_child_forked_while_the_socket_is_made_has_no_copy_of_it(url, monkeypatch) -> None:
    """It was made known only when it was bound: a child forked in between kept it open, and a killed parent then
    looked alive for as long as the child lived."""
    forked, true = [], Mail._sweep

    def sweep(self) -> None:
        pid = os.fork()
        if not pid:
            os._exit(1 if bound_sockets() else 0)
        forked.append(os.waitpid(pid, 0)[1])
        true(self)

    monkeypatch.setattr(Mail, "_sweep", sweep)
    with Client(url) as client, client.lock("a"):
        assert forked == [0]


def bound_sockets() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                one = socket.socket(fileno=os.dup(int(fd)))
                name = one.getsockname()
                one.detach()
                found += [name] if isinstance(name, str) and "-mail/" in name else []
        except OSError:
            continue
    return found


def test_a_head_killed_between_its_turn_and_its_claim_holds_up_nobody(url, child) -> None:
    """It was there when it was given its turn (stopped, so it could not claim) and is dead a moment later. Nobody asks
    again whether it is reachable until the reservation ends."""
    with Client(url) as client:
        lease = client.lock("a").acquire()
        head, second = child("wait", url, "a", 60), None
        assert head.hear() == "waiting"
        second = child("wait", url, "a", 60)
        assert second.hear() == "waiting"
        head.signal(signal.SIGSTOP)
        lease.release()
        released = boot_time()
        head.kill()
        waited = second.hear(RESERVATION + 10)["at"] - released
        assert waited < NOBODY_WAITS_LONGER


# ------------------------------------------- interrupted, and out of everything


def test_a_signal_handler_inside_a_transaction_does_not_wait_for_it(url, monkeypatch) -> None:
    """It waited for its own thread until the deadline, with the write lock held: everybody on the machine with it."""
    told = []
    with Client(url, call_timeout=3) as client:
        lease = client.lock("other").acquire()

        def interrupted(*asked):
            began = time.monotonic()
            lease.release()  # as a handler or finaliser does, on this very thread
            told.append(time.monotonic() - began)
            return taken(*asked)

        monkeypatch.setattr("leasehold.engines.sqlite.engine.taken", interrupted)
        with client.lock("a", wait=0):
            pass
        assert told[0] < 1
        with client.lock("other", wait=5):  # the release was owed, and came
            pass


def test_an_interrupt_before_the_rollback_does_not_keep_the_write_lock(url, path) -> None:
    """Two Ctrl-C, the second between the job and its rollback, left the connection inside its transaction."""
    with Client(url, call_timeout=1) as client:
        client.ping()
        file = client._desk._engine._file
        file._db.execute("begin immediate")  # what is left then
        client.ping()
        assert not file._db.in_transaction


def starved() -> list[int]:
    taken = []
    try:
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return taken


def test_a_client_made_without_descriptors_believes_in_no_other_machine(url) -> None:
    """Ids that could not be read for want of descriptors were taken for empty ones: such a client took the file over
    as another machine, and everybody else was refused with a ConfigError."""
    with Client(url) as client:
        client.ping()
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
        taken = starved()
        try:
            with pytest.raises(Unavailable, match="Too many open files"):
                Client(url)
        finally:
            for one in taken:
                os.close(one)
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        with client.lock("a", wait=0):
            pass


def test_without_a_descriptor_for_a_socket_waiting_is_by_looking(url, monkeypatch) -> None:
    """The socket was made outside the `try`: OSError crossed the seam (E9)."""

    def refuse(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("leasehold.engines.sqlite.mail.socket.socket", refuse)
    with Client(url) as client, client.lock("a", wait=0):
        assert not client._desk._engine._mail.address


def test_without_a_thread_for_the_socket_it_is_not_announced(url, path, monkeypatch) -> None:
    """The address was known before its listener ran: without a thread, turns were given to a box nobody reads."""
    with Client(url) as client:
        client.ping()
        runtime = client._desk.runtime

        def refuse(start, name: str) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(runtime, "aside", refuse)
        assert client._desk._engine._mail.ready(runtime) == ""
        assert not list(Path(f"{path}-mail").iterdir())


# ------------------------------------------------------------ the seam (E9)


@pytest.mark.parametrize(
    "ask",
    [lambda client: client.inspect("\ud800"), lambda client: client.semaphore("s", 1 << 70).acquire(wait=0)],
    ids=["text that is no UTF-8", "a limit beyond 64 bits"],
)
def test_values_sqlite_cannot_store_are_refused_in_our_words(url, ask) -> None:
    """UnicodeEncodeError and OverflowError come from binding a value, and are no sqlite3.Error."""
    with Client(url) as client, pytest.raises(LeaseholdError):
        ask(client)


@pytest.mark.parametrize("parts", [["x" * 100] * 6, ["y" * 252]], ids=["long", "long name"])
def test_too_long_a_path_is_a_config_error(tmp_path, parts) -> None:
    """It was Unavailable, though waiting never mends it: SQLite takes 512 bytes, and a name must leave room."""
    with Client(f"sqlite://{tmp_path}/{'/'.join(parts)}") as client, pytest.raises(ConfigError, match="too long"):
        client.ping()


def test_without_a_home_the_error_says_so(monkeypatch) -> None:
    monkeypatch.delenv("LEASEHOLD_URL", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", "relative")
    with pytest.raises(ConfigError, match="XDG_STATE_HOME"):
        Client()


def test_many_clients_open_while_others_are_busy(url) -> None:
    """Opening looks at every connection of the process: the busy ones that are sound must not hold it up."""
    over, kept = threading.Event(), len(file_module._KEPT)

    def churn(client: Client) -> None:
        while not over.is_set():
            with client.lock("a"):
                pass

    with Client(url) as busy:
        threads = [threading.Thread(target=churn, args=(busy,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for number in range(30):
                with Client(url, call_timeout=2) as client, client.lock(f"n{number}", wait=0):
                    pass
        finally:
            over.set()
            for thread in threads:
                thread.join(30)
    assert len(file_module._KEPT) == kept


def test_a_removed_folder_is_made_anew(tmp_path) -> None:
    folder = tmp_path / "gone"
    with Client(f"sqlite://{folder}/l.db?durable=no") as client:
        with client.lock("a"):
            pass
        shutil.rmtree(folder)
        client._desk._engine._file._look_at = 0.0
        with client.lock("a", wait=0) as lease:
            assert lease.held
            assert os.stat(folder).st_mode & 0o777 == 0o700
