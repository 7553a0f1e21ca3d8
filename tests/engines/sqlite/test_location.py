"""Where the database file may be, and what is refused before any grant: paths, permissions, file systems, schema."""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from leasehold import Client, ConfigError, Unavailable
from leasehold.engines.sqlite.location import remote_filesystem, resolve_path
from leasehold.files import Folder
from tests.support import probe, probe_sqlite


def permissions(path: str | Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_file_and_sockets_are_accessible_to_owner_only(tmp_path) -> None:
    path = tmp_path / "new" / "locks.db"
    path.parent.mkdir()
    with Client(f"sqlite://{path}") as client, client.lock("a"):
        assert permissions(path) == permissions(f"{path}-wal") == 0o600
        assert permissions(f"{path}-wakeup") == 0o700
        assert [permissions(entry) for entry in Path(f"{path}-wakeup").iterdir()] == [0o600]
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["locks.db", "locks.db-wakeup"]
    assert not list(Path(f"{path}-wakeup").iterdir())


def test_default_file_is_in_the_state_directory_of_the_user(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("LEASEHOLD_URL", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state %41"))
    with Client() as client, client.lock("a"):
        assert (tmp_path / "state %41" / "leasehold" / "locks.db").is_file()
        assert permissions(tmp_path / "state %41") == permissions(tmp_path / "state %41" / "leasehold") == 0o700
    monkeypatch.setenv("XDG_STATE_HOME", "relative")  # ignored, as the XDG specification requires
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with Client() as client, client.lock("a"):
        assert (tmp_path / "home" / ".local" / "state" / "leasehold" / "locks.db").is_file()


def test_url_path_is_resolved(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert resolve_path("/srv/x.db") == "/srv/x.db"
    assert resolve_path("//srv/x.db") in ("/srv/x.db", "//srv/x.db")  # what SQLAlchemy users write
    assert resolve_path("./x.db") == str(tmp_path / "x.db")
    assert resolve_path("../x.db") == str(tmp_path.parent / "x.db")
    assert resolve_path("~/x.db") == "/home/me/x.db"


def test_third_slash_meant_for_the_working_directory_is_explained(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = f"/{tmp_path.name}-data"  # exists here, not at the root: in SQLAlchemy's URLs it would be this one
    os.mkdir(f".{folder}")
    with Client(f"sqlite://{folder}/locks.db") as client, pytest.raises(ConfigError) as refusal:
        client.lock("a").acquire()
    assert str(refusal.value).endswith(f"for the working directory write sqlite://.{folder}/locks.db")
    with Client(f"sqlite://.{folder}/locks.db") as client, client.lock("a"):
        assert os.path.exists(f".{folder}/locks.db")
    with (
        pytest.raises(ConfigError, match=r"Permission denied: /; .* write sqlite://\./locks\.db"),
        probe_sqlite.mapped_errors("/locks.db"),
    ):
        raise PermissionError(errno.EACCES, "Permission denied", "/")


def test_missing_folder_is_refused_with_the_command_to_make_it(tmp_path) -> None:
    folder = tmp_path / "new folder"
    with Client(f"sqlite://{folder}/locks.db") as client:
        with pytest.raises(ConfigError, match="does not exist") as refusal:
            client.ping()
        subprocess.run(str(refusal.value).split("`")[1], shell=True, check=True)
        client.ping()
    assert permissions(folder) == 0o700


@pytest.mark.parametrize("target", ["x.db", ":memory:", "/srv/", "host/x.db"])
def test_url_without_a_path_is_refused(target) -> None:
    with pytest.raises(ConfigError, match="sqlite:///absolute/path"):
        Client(f"sqlite://{target}")


def test_relative_path_is_fixed_when_the_client_is_made(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Client("sqlite://./x.db") as client:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        with client.lock("a") as lease:
            lease.renew()
    assert (tmp_path / "x.db").is_file()


@pytest.mark.parametrize(
    ("options", "message"), [("?durable=maybe", "yes or no"), ("?sync=1", "known options: durable")]
)
def test_bad_options_are_refused(path, options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        Client(f"sqlite://{path}{options}")


def test_durable_option_sets_the_trait(path) -> None:
    with Client(f"sqlite://{path}") as durable_client, Client(f"sqlite://{path}?durable=no") as fast_client:
        assert durable_client.traits.survives == "restart"
        assert fast_client.traits.survives == "nothing"


def test_file_that_is_not_a_database_is_refused(path, tmp_path) -> None:
    Path(path).write_text("this is not a database, though it is long enough to look like one" * 20)
    with Client(f"sqlite://{path}") as client, pytest.raises(ConfigError, match="not a valid SQLite file"):
        client.lock("a").acquire()
    with Client(f"sqlite://{tmp_path}") as client, pytest.raises(ConfigError, match="not a regular file"):
        client.ping()


def test_damaged_file_is_refused(path) -> None:
    with Client(f"sqlite://{path}") as client, client.lock("a"):
        pass
    with open(path, "r+b") as file:
        file.seek(100)
        file.write(b"\xff" * 30000)
    with Client(f"sqlite://{path}") as client, pytest.raises(ConfigError, match="not a valid SQLite file"):
        client.lock("a").acquire()


def test_schema_that_is_not_text_is_refused(path) -> None:
    """SQLite repeats it in the text of its error, which Python then cannot decode."""
    with Client(f"sqlite://{path}") as client:
        client.ping()
    content = Path(path).read_bytes()
    assert b"lh_waiter (" in content
    Path(path).write_bytes(content.replace(b"lh_waiter (", b"lh_waiter \xff"))
    with Client(f"sqlite://{path}") as client:
        for call in (client.inspect, client.lock("a").acquire):
            with pytest.raises(ConfigError, match="not a valid SQLite file"):
                call()


def test_newer_schema_is_refused(path) -> None:
    with Client(f"sqlite://{path}") as client:
        client.ping()
    with sqlite3.connect(path) as db:
        db.execute("update lh_meta set version = 99")
    db.close()
    with Client(f"sqlite://{path}") as client, pytest.raises(ConfigError, match="newer Leasehold"):
        client.ping()


def test_tables_coexist_with_tables_of_an_application(path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("create table mine (x)")
        db.execute("insert into mine values (7)")
    db.close()
    with Client(f"sqlite://{path}") as client, client.lock("a"):
        pass
    with sqlite3.connect(path) as db:
        assert db.execute("select x from mine").fetchone() == (7,)
    db.close()


def test_file_damaged_while_lease_is_held_raises_unavailable(path, tmp_path) -> None:
    with Client(f"sqlite://{path}?durable=no", call_timeout=0.3) as client:
        lease = client.lock("a").acquire()
        (tmp_path / "bad").write_bytes(b"bad" * 1000)
        os.replace(tmp_path / "bad", path)
        os.unlink(f"{path}-wal")  # otherwise SQLite reads every page from it
        os.unlink(f"{path}-shm")
        probe_sqlite.make_file_check_due(client)
        with pytest.raises(Unavailable, match="not a valid SQLite file"):
            lease.renew()
        assert lease.release() is False  # a pending release, never an error
        with pytest.raises(ConfigError, match="not a valid SQLite file"):
            client.lock("b").acquire()
        probe.registry(client).pending_releases.clear()


def test_file_system_without_hard_links_works(path, monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    with Client(f"sqlite://{path}") as client, client.lock("a"):
        assert permissions(path) == 0o600
    monkeypatch.undo()
    assert not [name for name in os.listdir(os.path.dirname(path)) if name.startswith(".leasehold")]


@pytest.mark.parametrize(("number", "error"), [(errno.ENOSPC, Unavailable), (errno.EACCES, ConfigError)])
def test_file_that_cannot_be_created_raises_matching_error(path, monkeypatch, number, error) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(Folder, "new_file", refuse)
    with Client(f"sqlite://{path}", call_timeout=0.2) as client:
        with pytest.raises(error, match=os.strerror(number)):
            client.lock("a").acquire()
        probe.registry(client).pending_releases.clear()


READ_ONLY = """
import os, sys, tempfile
from leasehold import Client, ConfigError
if os.getuid() == 0:
    with tempfile.TemporaryDirectory() as folder, Client(f"sqlite://{folder}/x") as client, client.lock("a"):
        pass  # loads all modules: nobody may read where they are
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    with Client(f"sqlite://{sys.argv[1]}") as client:
        client.lock("a").acquire()
except ConfigError as error:
    print("refused:", error)
"""


@pytest.mark.parametrize("exists", [False, True])
def test_read_only_location_is_refused(exists) -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to other users
        path = os.path.join(folder, "locks.db")
        if exists:
            with Client(f"sqlite://{path}") as client:
                client.ping()
            os.chmod(path, 0o444)
        os.chmod(folder, 0o555)
        done = subprocess.run(
            [sys.executable, "-c", READ_ONLY, path], capture_output=True, text=True, timeout=60, check=False
        )
        os.chmod(folder, 0o755)
        assert done.stdout.startswith("refused: "), done.stderr
        assert path in done.stdout or folder in done.stdout


MOUNTS = """\
22 1 254:1 / / rw,relatime - ext4 /dev/vda rw
30 22 0:40 / /mnt/share rw - nfs4 server:/x rw
31 22 0:41 / /mnt/with\\040space rw - cifs //server/x rw
32 30 0:42 / /mnt/share/local rw - tmpfs tmpfs rw
33 22 0:43 / /mnt/fuse rw - fuse.sshfs x rw
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/srv", ""),
        ("/mnt/share", "nfs4"),
        ("/mnt/share/a", "nfs4"),
        ("/mnt/shared", ""),
        ("/mnt/with space", "cifs"),
        ("/mnt/share/local", ""),
        ("/mnt/fuse/a", "fuse.sshfs"),
    ],
)
def test_network_file_systems_are_recognised(folder, kind, tmp_path) -> None:
    (tmp_path / "mounts").write_text(MOUNTS)
    assert remote_filesystem(folder, str(tmp_path / "mounts")) == kind
    assert remote_filesystem(folder, str(tmp_path / "absent")) == ""


def test_network_file_system_is_refused(path, monkeypatch) -> None:
    monkeypatch.setattr("leasehold.engines.sqlite.location.remote_filesystem", lambda folder: "nfs4")
    with Client(f"sqlite://{path}") as client, pytest.raises(ConfigError, match=r"nfs4.*local disk"):
        client.lock("a").acquire()


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
