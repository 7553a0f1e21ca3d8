"""Other users of the machine: files that they plant, links that they make, and one file that several users share.

The tests with a second user need root: they give files to another uid, or run code as one.
"""

from __future__ import annotations

import errno
import os
import socket
import sqlite3
import stat
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from leasehold import Client, ConfigError, Unavailable
from leasehold.core.queue_entry import Notification
from leasehold.engines.sqlite import location
from leasehold.engines.sqlite.wakeup_socket import WakeupSocket
from tests.support import probe, probe_sqlite
from tests.support.sqlite_files import ENDLESS, try_lock

STRANGER, GROUP = 65533, 65532
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root to act as a second user")


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that every user may write, as /tmp is: world-writable and sticky."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o1777)
        yield Path(folder)


def plant_link(path: Path, target: Path) -> None:
    path.symlink_to(target)
    os.lchown(path, STRANGER, STRANGER)


def run_once(folder: Path) -> ConfigError | None:
    """What `leasehold run` does with the file in this folder. Returns the refusal."""
    try:
        with Client(f"sqlite://{folder}/locks.db", call_timeout=5) as client, client.lock("a", wait=0):
            return None
    except ConfigError as refusal:
        return refusal


# ------------------------------------------------------------ planted links


@needs_root
@pytest.mark.parametrize("sticky", [True, False])
def test_planted_socket_folder_removes_no_files_elsewhere(shared_folder, tmp_path, monkeypatch, sticky) -> None:
    """A stranger made `locks.db-wakeup` a link: the sweep of old sockets removed every old file behind it."""
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    old_socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    old_socket.bind(str(tmp_path / "0123456789abcdef1"))
    old_socket.close()
    monkeypatch.setattr(*probe_sqlite.STALE_AFTER, -1.0)
    if not sticky:
        os.chmod(shared_folder, 0o700)
    plant_link(shared_folder / "locks.db-wakeup", tmp_path)
    assert run_once(shared_folder) is not None or not sticky
    assert sorted(os.listdir(tmp_path)) == ["0123456789abcdef1", "precious"]


@needs_root
@pytest.mark.parametrize("mode", [0o1777, 0o700])
def test_planted_link_as_database_removes_no_log_elsewhere(shared_folder, tmp_path, mode) -> None:
    """A dangling `locks.db -> x` removed the victim's `x-wal`, as the leftover of a removed database."""
    (tmp_path / "x-wal").write_text("the log of another database")
    os.chmod(shared_folder, mode)
    plant_link(shared_folder / "locks.db", tmp_path / "x")
    assert run_once(shared_folder) is not None
    assert os.listdir(tmp_path) == ["x-wal"]


def test_sweep_removes_only_sockets_of_this_user(url, path, monkeypatch) -> None:
    monkeypatch.setattr(*probe_sqlite.STALE_AFTER, -1.0)
    folder = Path(f"{path}-wakeup")
    folder.mkdir(0o700)
    (folder / "0123456789abcdef1").touch()
    (folder / "notes").mkdir()
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    dead.bind(str(folder / "fedcba98765432101"))
    dead.close()
    foreign = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    foreign.bind(str(folder / "app.sock"))
    foreign.close()
    with Client(url) as client, client.lock("a", wait=0):
        pass
    assert sorted(os.listdir(folder)) == ["0123456789abcdef1", "app.sock", "notes"]


def test_database_file_does_not_contain_the_claim_id(url, path) -> None:
    with Client(url) as client, client.lock("a") as lease:
        secret = probe.claim(lease).id.encode()
        assert all(secret not in Path(f"{path}{suffix}").read_bytes() for suffix in ("", "-wal"))


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


# ------------------------------------------------------ files of other users


@needs_root
@pytest.mark.parametrize("name", ["locks.db", "locks.db-wal", "locks.db-shm", "locks.db-journal"])
def test_file_of_another_user_is_refused(tmp_path, name) -> None:
    (tmp_path / name).touch(0o666)
    os.chown(tmp_path / name, STRANGER, STRANGER)
    assert f"{tmp_path}/{name} belongs to user {STRANGER}" in str(run_once(tmp_path))


@pytest.mark.parametrize("name", ["locks.db", "locks.db-wal", "locks.db-shm", "locks.db-journal"])
def test_file_that_is_a_link_is_refused(tmp_path, name) -> None:
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    assert "is a symbolic link" in str(run_once(tmp_path))
    assert os.listdir(tmp_path) == [name]


def test_file_that_every_user_can_write_is_refused(path, tmp_path) -> None:
    Path(path).touch()
    os.chmod(path, 0o666)
    assert f"chmod o-w {path}" in str(run_once(tmp_path))


@needs_root
@pytest.mark.parametrize("level", [0, 1])
def test_folder_that_another_user_owns_is_refused(tmp_path, level) -> None:
    folder = tmp_path / "theirs" / "ours"
    folder.mkdir(parents=True)
    os.chown((folder, folder.parent)[level], STRANGER, STRANGER)
    assert f"belongs to user {STRANGER}, who could replace" in str(run_once(folder))
    assert not os.listdir(folder)


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_folder_that_every_user_can_write_is_refused(tmp_path, mode) -> None:
    """SQLite opens its log and journal by name: in /tmp itself, another user could make these first."""
    os.chmod(tmp_path, mode)
    assert "can be written by every user" in str(run_once(tmp_path))
    assert "add ?trust_folder=yes to the URL" in str(run_once(tmp_path))
    (tmp_path / "ours").mkdir(0o700)
    assert (run_once(tmp_path / "ours") is None) == (mode == 0o1777)  # the sticky bit keeps others from renaming it


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_folder_of_every_user_is_used_if_the_url_trusts_it(tmp_path, mode) -> None:
    os.chmod(tmp_path, mode)
    url = f"sqlite://{tmp_path}/locks.db?trust_folder=yes"
    with Client(url) as one, Client(url) as two:
        with one.lock("a", wait=0):
            assert two.lock("a").try_acquire() is None
            assert os.listdir(f"{tmp_path}/locks.db-wakeup")  # waiters are notified there as well
        assert one.once("b", lambda: 7) == two.once("b", lambda: 8)
    assert (tmp_path / "locks.db").stat().st_mode & 0o777 == 0o600


@needs_root
@pytest.mark.parametrize("name", ["locks.db", "locks.db-wal", "locks.db-journal"])
def test_trusted_folder_does_not_make_files_of_others_trusted(tmp_path, name) -> None:
    os.chmod(tmp_path, 0o777)
    (tmp_path / name).touch(0o600)
    os.chown(tmp_path / name, STRANGER, STRANGER)
    url = f"sqlite://{tmp_path}/locks.db?trust_folder=yes"
    with Client(url) as client, pytest.raises(ConfigError, match="whose files are not trusted here"):
        client.ping()


@pytest.mark.parametrize("suffix", ["-wal", "-shm", "-journal"])
def test_second_name_of_another_file_as_companion_is_refused(tmp_path, suffix) -> None:
    """SQLite truncates its shared memory and overwrites its log: a hard link would lose the file behind it."""
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    os.link(precious, tmp_path / f"locks.db{suffix}")
    assert "has a second name" in str(run_once(tmp_path))
    assert precious.read_text() == "keep me"


@needs_root
def test_folder_through_a_link_of_another_user_is_refused(shared_folder, tmp_path) -> None:
    plant_link(shared_folder / "jobs", tmp_path)
    assert f"is a symbolic link that user {STRANGER} could change" in str(run_once(shared_folder / "jobs"))
    os.lchown(shared_folder / "jobs", 0, 0)
    assert run_once(shared_folder / "jobs") is None


@needs_root
def test_state_directory_of_another_user_is_refused(tmp_path, monkeypatch) -> None:
    """`sudo` may keep HOME: root would use a file that the user can replace. It left folders of root's in HOME, which
    the user could neither use nor remove."""
    monkeypatch.delenv("LEASEHOLD_URL", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home" / "state"))
    (tmp_path / "home").mkdir()
    os.chown(tmp_path / "home", STRANGER, STRANGER)
    with Client() as client, pytest.raises(ConfigError, match=f"belongs to user {STRANGER}"):
        client.ping()
    assert os.listdir(tmp_path / "home") == []


def test_state_directory_is_created_in_a_folder_for_all(shared_folder, monkeypatch) -> None:
    """Such as /tmp: the sticky bit keeps other users from replacing what is created there."""
    monkeypatch.delenv("LEASEHOLD_URL", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(shared_folder / "own" / "state"))
    with Client() as client:
        client.ping()
    assert {stat.S_IMODE(each.stat().st_mode) for each in (shared_folder / "own", shared_folder / "own/state")} == {
        0o700
    }


@needs_root
def test_state_directory_behind_a_planted_link_is_not_created(shared_folder, tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("LEASEHOLD_URL", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(shared_folder / "state"))
    plant_link(shared_folder / "state", tmp_path)
    with Client() as client, pytest.raises(ConfigError, match=f"user {STRANGER} could change"):
        client.ping()
    assert not os.listdir(tmp_path)


def test_address_in_an_edited_row_leads_to_no_other_socket(url, path, tmp_path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as victim, Client(url) as client:
        victim.bind(str(tmp_path / "victim"))
        victim.setblocking(False)
        with client.lock("a"):
            os.link(tmp_path / "victim", Path(f"{path}-wakeup", "app.sock"))
            wakeup_socket = probe_sqlite.wakeups(client)
            for address in (f"{tmp_path}/victim", "../victim", "app.sock"):
                assert not wakeup_socket.is_reachable(address)
                assert not wakeup_socket.send("", "a", Notification(address, "reserved", "0" * 32))
        with pytest.raises(BlockingIOError):
            victim.recv(100)


@needs_root
@pytest.mark.parametrize("target", ["socket", "file", "nothing"])
def test_link_that_a_member_planted_leads_to_no_other_socket(group_folder, tmp_path, target) -> None:
    """The datagram of root was sent to whichever socket a member of the group chose."""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as victim,
        Client(f"sqlite://{group_folder}/locks.db") as client,
        client.lock("a"),
    ):
        victim.setblocking(False)
        if target == "socket":
            victim.bind(str(tmp_path / "victim"))
        elif target == "file":
            (tmp_path / "victim").touch()
        address = "0123456789abcdef1"
        plant_link(group_folder / "locks.db-wakeup" / address, tmp_path / "victim")
        wakeup_socket = probe_sqlite.wakeups(client)
        assert wakeup_socket.is_reachable(wakeup_socket.ensure_bound(probe.runtime(client)))
        assert not wakeup_socket.is_reachable(address)
        assert not wakeup_socket.send("", "a", Notification(address, "reserved", "0" * 32))
        with pytest.raises(BlockingIOError):
            victim.recv(100)


@needs_root
def test_socket_is_not_made_behind_a_link_planted_while_it_is_bound(group_folder, tmp_path, monkeypatch) -> None:
    folder, others = Path(f"{group_folder}/locks.db-wakeup"), []
    choose_address, set_socket_mode = getattr(*probe_sqlite.CHOOSE_ADDRESS), getattr(*probe_sqlite.SET_SOCKET_MODE)

    def choose_and_swap(self: WakeupSocket, name: str) -> str:
        if not folder.is_symlink():
            folder.rename(f"{folder}.old")
            plant_link(folder, tmp_path)
        return choose_address(self, name)

    def look_and_set_mode(*args: object) -> None:
        others.append(os.listdir(tmp_path))
        set_socket_mode(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(*probe_sqlite.CHOOSE_ADDRESS, choose_and_swap)
    monkeypatch.setattr(*probe_sqlite.SET_SOCKET_MODE, look_and_set_mode)
    with Client(f"sqlite://{group_folder}/locks.db") as client, client.lock("a"):
        pass
    assert others == [[]]


@needs_root
def test_planted_socket_folder_makes_clients_poll(tmp_path) -> None:
    folder = tmp_path / "locks.db-wakeup"
    folder.mkdir()
    os.chown(folder, STRANGER, STRANGER)
    with Client(f"sqlite://{tmp_path}/locks.db") as one, Client(f"sqlite://{tmp_path}/locks.db") as two:
        lease = one.lock("a").acquire()
        threading.Timer(0.2, lease.release).start()
        with two.lock("a", wait=30):
            assert not os.listdir(folder)


# ------------------------------------------------- one file for several users

MEMBER = """
import os, sys, tempfile
from leasehold import Client, LeaseholdError
url, uid, groups, action = sys.argv[1], int(sys.argv[2]), [int(g) for g in sys.argv[3].split(",") if g], sys.argv[4]
with tempfile.TemporaryDirectory() as folder, Client(f"sqlite://{folder}/x") as client, client.lock("a"):
    pass  # loads all modules: another user may not read where they are
os.umask(0o077)
os.setgroups(groups); os.setgid(uid); os.setuid(uid)
try:
    with Client(url, ttl=60, call_timeout=5) as client:
        with client.lock("job", wait=30 if action == "wait" else 0) as lease:
            print(lease.token, flush=True)
            if action == "hold":
                sys.stdin.readline()
except LeaseholdError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
"""


def start_member(url: str, uid: int, groups: str, action: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", MEMBER, url, str(uid), groups, action]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=60)
    assert not err
    return out.strip()


def check_access(folder: Path) -> None:
    """The group has access to everything in the folder, and no other user has."""
    for entry in folder.rglob("*"):
        expected = 0o770 if entry.is_dir() else 0o660
        assert (entry.stat().st_gid, stat.S_IMODE(entry.stat().st_mode) & 0o777) == (GROUP, expected), entry


@needs_root
def test_two_users_of_a_group_share_one_file(wait_until) -> None:
    """As docs/how-to/share-a-file.md says: `install -d -o root -g GROUP -m 2770 FOLDER`."""
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, 0o755)
        folder = Path(parent, "locks")
        folder.mkdir()
        os.chown(folder, 0, GROUP)
        os.chmod(folder, 0o2770)
        url = f"sqlite://{folder}/locks.db"
        holder = start_member(url, 64001, str(GROUP), "hold")
        first = int(holder.stdout.readline())
        refused = finish(start_member(url, 64002, str(GROUP), "try"))
        assert refused.startswith("NotAcquired")
        waiter = start_member(url, 64002, str(GROUP), "wait")
        with Client(url) as root:
            wait_until(lambda: [holding.state for holding in root.inspect()] == ["held", "waiting"])
            check_access(folder)  # of the sockets too: each user can notify the other
            holder.stdin.write("\n")
            assert finish(holder) == ""
            assert int(finish(waiter)) > first
        stranger = finish(start_member(url, 64003, "", "try"))
        assert stranger.startswith("ConfigError")
        check_access(folder)


@pytest.fixture
def group_folder() -> Iterator[Path]:
    """As docs/how-to/share-a-file.md says."""
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, 0, GROUP)
        os.chmod(folder, 0o2770)
        yield Path(folder)


JOURNAL_MARK = bytes.fromhex("d9d505f920a163d7")


def plant_journal(database: Path, victim: Path) -> None:
    """A journal of a transaction over two files: SQLite removes the file that it names once it has been undone."""
    content = database.read_bytes()
    page_size = int.from_bytes(content[16:18], "big")
    header = JOURNAL_MARK + struct.pack(">IIIII", 0, 0, len(content) // page_size, 512, page_size)
    name = os.fsencode(victim)
    end = struct.pack(">I", 2**30 // page_size + 1) + name + struct.pack(">II", len(name), sum(name)) + JOURNAL_MARK
    journal = Path(f"{database}-journal")
    journal.write_bytes(header.ljust(512, b"\0") + end)
    journal.chmod(0o660)
    os.chown(journal, STRANGER, GROUP)


@needs_root
@pytest.mark.parametrize(
    "planted",
    [
        "create trigger t after insert on leasehold_records begin insert into junk values (new.name); end",
        "drop table leasehold_records; create view leasehold_records (name, version, data, until) as "
        f"select null, x, x, x from ({ENDLESS})",
    ],
)
def test_statements_that_a_member_plants_beside_records_do_not_run(group_folder, planted) -> None:
    """They ran with the rights, and in the time, of the member who wrote a record."""
    with Client(f"sqlite://{group_folder}/locks.db", call_timeout=5) as client:
        assert client.once("first", int) == 0
        db = sqlite3.connect(f"{group_folder}/locks.db.records", isolation_level=None, timeout=30)
        db.executescript(f"create table junk (x); {planted}")
        with pytest.raises(ConfigError, match="a trigger or a view on the table leasehold_records"):
            client.once("second", int)
        assert db.execute("select count(*) from junk").fetchone() == (0,)
        db.close()


def use_file(folder: Path, use: str) -> None:
    with Client(f"sqlite://{folder}/locks.db", call_timeout=5) as client:
        if use == "locks":
            try_lock(client)
        else:
            client.once(os.urandom(4).hex(), lambda: "done")


@needs_root
@pytest.mark.parametrize("use", ["locks", "records"])
def test_planted_journal_removes_no_file_of_another_member(group_folder, tmp_path, use) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    use_file(group_folder, use)
    plant_journal(group_folder / ("locks.db" if use == "locks" else "locks.db.records"), precious)
    use_file(group_folder, use)
    assert precious.read_text() == "keep me"


@needs_root
@pytest.mark.parametrize("use", ["locks", "records"])
def test_journal_planted_after_the_check_removes_no_file(group_folder, tmp_path, monkeypatch, use) -> None:
    """SQLite looks for a journal by its name, long after Leasehold has checked the folder."""
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    use_file(group_folder, use)
    open_database = getattr(*probe_sqlite.OPEN_DATABASE)

    def open_and_plant(real_path: str, timeout: float) -> sqlite3.Connection:
        db = open_database(real_path, timeout)
        plant_journal(Path(real_path), precious)
        return db

    monkeypatch.setattr(*probe_sqlite.OPEN_DATABASE, open_and_plant)
    use_file(group_folder, use)
    assert precious.read_text() == "keep me"


@needs_root
def test_file_swapped_while_it_is_opened_is_not_used_unlocked(group_folder, tmp_path, monkeypatch) -> None:
    """The lock against journals is on one file; a member makes SQLite open another one, with a journal to it."""
    precious, other = tmp_path / "precious", group_folder / "other.db"
    precious.write_text("keep me")
    use_file(group_folder, "locks")
    other.write_bytes((group_folder / "locks.db").read_bytes())
    other.chmod(0o660)
    open_database = getattr(*probe_sqlite.OPEN_DATABASE)

    def swap_while_opening(real_path: str, timeout: float) -> sqlite3.Connection:
        os.rename(real_path, group_folder / "aside")
        os.rename(other, real_path)
        db = open_database(real_path, timeout)
        plant_journal(Path(real_path), precious)
        os.rename(real_path, other)
        os.rename(group_folder / "aside", real_path)
        return db

    monkeypatch.setattr(*probe_sqlite.OPEN_DATABASE, swap_while_opening)
    monkeypatch.setattr(*probe_sqlite.FILE_LOCKS, {})
    with (
        Client(f"sqlite://{group_folder}/locks.db", call_timeout=3) as client,
        pytest.raises(Unavailable),
    ):
        client.ping()
    assert precious.read_text() == "keep me"


@needs_root
def test_shared_file_removed_while_it_is_opened_is_created_again(group_folder, monkeypatch) -> None:
    use_file(group_folder, "locks")
    lock, removed = getattr(*probe_sqlite.LOCK_AGAINST_JOURNALS), []

    def remove_and_lock(*arguments: object) -> object:
        if not removed:
            removed.append(os.unlink(group_folder / "locks.db"))
        return lock(*arguments)

    monkeypatch.setattr(*probe_sqlite.LOCK_AGAINST_JOURNALS, remove_and_lock)
    use_file(group_folder, "locks")
    assert removed


@needs_root
@pytest.mark.parametrize(("number", "error"), [(errno.EMFILE, Unavailable), (errno.EACCES, ConfigError)])
def test_shared_file_that_cannot_be_opened_raises_matching_error(group_folder, monkeypatch, number, error) -> None:
    use_file(group_folder, "locks")

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number), "locks.db")

    monkeypatch.setattr(*probe_sqlite.LOCK_AGAINST_JOURNALS, refuse)
    with (
        Client(f"sqlite://{group_folder}/locks.db", call_timeout=3) as client,
        pytest.raises(error, match=os.strerror(number)),
    ):
        client.ping()


@needs_root
@pytest.mark.parametrize("content", ["empty", "rollback"])
def test_shared_file_that_is_not_in_wal_mode_is_refused(group_folder, content) -> None:
    database = group_folder / "locks.db"
    db = sqlite3.connect(database)
    if content == "rollback":
        db.execute("create table mine (x)")
    db.close()
    database.touch()
    database.chmod(0o660)
    assert "pragma journal_mode = wal" in str(run_once(group_folder))
    db = sqlite3.connect(database)
    db.execute("pragma journal_mode = wal")
    db.close()
    assert run_once(group_folder) is None


@needs_root
def test_journal_lock_of_a_shared_file_hinders_no_other_process(group_folder) -> None:
    """The lock is kept until the process ends: others must be able to write, to close and to fork meanwhile."""
    url = f"sqlite://{group_folder}/locks.db"
    with Client(url) as client:
        with client.lock("a"):
            assert finish(start_member(url, STRANGER, str(GROUP), "try")) != ""
        if (child := os.fork()) == 0:
            with Client(url) as inner:
                try_lock(inner)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        try_lock(client)
    assert not (group_folder / "locks.db-wal").exists()


def test_file_that_becomes_a_link_while_it_is_opened_is_refused(path, tmp_path, monkeypatch) -> None:
    """A member of the group can replace the file between its check and SQLite's opening. SQLite follows links: it
    would create Leasehold's tables in any database of the user."""
    victim = tmp_path / "victim.db"
    db = sqlite3.connect(victim)
    db.execute("create table precious (x)")
    db.close()
    before = victim.read_bytes()
    prepare = location.prepare

    def prepare_and_swap(checked: str, trust_folder: bool) -> str:
        found = prepare(checked, trust_folder)
        os.unlink(path)
        os.symlink(victim, path)
        return found

    monkeypatch.setattr(location, "prepare", prepare_and_swap)
    with Client(f"sqlite://{path}") as client, pytest.raises(ConfigError, match="is a symbolic link"):
        client.lock("a").acquire(wait=0)
    assert victim.read_bytes() == before
    assert not os.path.exists(f"{victim}-wal")
