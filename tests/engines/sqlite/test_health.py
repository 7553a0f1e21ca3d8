"""The health probe on real files: room, a full disk, a locked file, unsafe settings."""

import os
import sqlite3
import subprocess
import sys
import tempfile

import pytest

from leasehold import Client
from tests.support.health import RUNTIMES, probe, probe_silent, settings_found, storage_of


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_probe_of_a_file_in_use_shows_room_and_write_time(path, runtime):
    with Client(f"sqlite://{path}") as client, client.lock("job"):
        health = probe(f"sqlite://{path}", runtime=runtime)
        assert (health.engine, health.up, health.has_leader, health.error) == ("sqlite", True, True, None)
        assert (health.voting, health.reachable) == (1, 1)
        (member,) = health.members
        assert (member.member, member.version, member.findings) == (path, sqlite3.sqlite_version, ())
        assert storage_of(member, "database").used == os.path.getsize(path)
        assert storage_of(member, "wal").used == os.path.getsize(f"{path}-wal")
        assert 0 < storage_of(member, "filesystem").used_ratio <= 1
        assert member.round_trip > 0
        assert member.disk_seconds > 0
        assert (member.clock_offset, member.memory, member.replication_lag) == (None, None, None)


def test_probe_writes_and_leaves_the_tables_unchanged(path):
    with Client(f"sqlite://{path}") as client, client.lock("job"):
        before = os.path.getsize(f"{path}-wal"), dump(path)
        probe(f"sqlite://{path}")
        assert os.path.getsize(f"{path}-wal") > before[0]
        assert dump(path) == before[1]
        assert [holding.name for holding in client.inspect()] == ["job"]


def dump(path: str) -> list[str]:
    db = sqlite3.connect(path)
    try:
        return list(db.iterdump())
    finally:
        db.close()


def test_file_that_every_user_can_read_is_a_finding():
    """A lock on the shared memory, for which that is enough, kept all clients from locking for as long as it lasted."""
    with tempfile.TemporaryDirectory(prefix="leasehold-", dir="/tmp") as folder:
        path = os.path.join(folder, "app.db")
        sqlite3.connect(path).close()
        for folder_mode, mode, found in ((0o755, 0o644, ["mode of the file"]), (0o755, 0o640, []), (0o700, 0o644, [])):
            os.chmod(folder, folder_mode)
            os.chmod(path, mode)
            (member,) = probe(f"sqlite://{path}").members
            assert [finding.setting for finding in member.findings] == found


def test_file_behind_a_link_is_judged_by_its_own_folder():
    """The link may be where nobody else gets, and the file where everybody does."""
    with tempfile.TemporaryDirectory(prefix="leasehold-", dir="/tmp") as folder:
        for target_mode, link_mode, found in ((0o755, 0o700, ["mode of the file"]), (0o700, 0o755, [])):
            target, link = (os.path.join(folder, f"{name}-{target_mode:o}") for name in ("target", "link"))
            os.mkdir(target)
            os.mkdir(link)
            sqlite3.connect(f"{target}/app.db").close()
            os.symlink(f"{target}/app.db", f"{link}/app.db")
            for place, mode in ((folder, 0o755), (f"{target}/app.db", 0o644), (target, target_mode), (link, link_mode)):
                os.chmod(place, mode)
            (member,) = probe(f"sqlite://{link}/app.db").members
            assert [finding.setting for finding in member.findings] == found


def test_file_without_sync_is_a_finding(path):
    (member,) = probe(f"sqlite://{path}?durable=no").members
    assert settings_found(member) == {"synchronous": "OFF"}


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_file_locked_by_a_transaction_is_down_by_the_deadline(path, runtime):
    probe(f"sqlite://{path}")
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("begin immediate")
    health = probe_silent(f"sqlite://{path}", runtime)
    db.execute("rollback")
    db.close()
    assert (health.up, health.members[0].disk_seconds) == (False, None)
    assert "was locked until the deadline" in health.error
    assert probe(f"sqlite://{path}", runtime=runtime).up


def test_file_that_is_no_database_is_down(path):
    with open(path, "wb") as file:
        file.write(b"not a database" * 1000)
    os.chmod(path, 0o600)
    health = probe(f"sqlite://{path}")
    assert (health.up, health.members[0].up, health.members[0].round_trip) == (False, False, None)
    assert "not a valid SQLite file" in health.error


FULL_DISK = """
set -e
mount -t tmpfs -o size=400k,mode=700 none "$1"
exec "$2" -c '
import os, sys
from leasehold import Client
from tests.support.health import probe, storage_of
folder = sys.argv[1]
url = f"sqlite://{folder}/locks.db"
with Client(url) as client, client.lock("kept"):
    assert probe(url).up
    with open(f"{folder}/filler", "wb", buffering=0) as filler:
        try:
            while True: filler.write(b"x" * 1024)
        except OSError: pass
    full = probe(url)
    assert (full.up, full.members[0].up, full.members[0].disk_seconds) == (False, True, None), full
    assert storage_of(full.members[0], "filesystem").used_ratio == 1, full
    print(full.error)
    os.unlink(f"{folder}/filler")
    assert probe(url).up
    print("healed")
' "$1"
"""


def test_full_disk_is_down_although_the_file_can_be_read(tmp_path):
    if os.getuid() != 0 or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs root for a small file system of its own")
    small = tmp_path / "small"
    small.mkdir()
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", FULL_DISK, "sh", str(small), sys.executable],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "full" in done.stdout
    assert done.stdout.endswith("healed\n")
