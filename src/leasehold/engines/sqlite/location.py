"""Where a file of leases may be and who may use it. Unsuitable paths are refused here, before any grant.

In a folder that a group shares, another member may create a rollback journal at any moment, and SQLite does what a
journal says: it can name a second file, which SQLite removes. Checking for a journal first would leave a race. So
Leasehold makes SQLite ignore every journal there (`_lock_against_journals`). Leasehold needs none: its files are in WAL
mode from the moment they have their name.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from leasehold.errors import ConfigError, Unavailable
from leasehold.files import TEMPORARY_PREFIX, Folder, NotPrivate, make_folders, open_folder

# On these, locks do not work, or are not visible to every machine that can write the file.
_REMOTE_FILESYSTEMS: Final = frozenset(
    """
    9p afs beegfs ceph cifs coda davfs gfs2 glusterfs gpfs lustre ncpfs nfs nfs4 ocfs2 orangefs prl_fs smb2 smb3 smbfs
    vboxsf virtiofs vmhgfs fuse.ceph fuse.davfs fuse.gcsfuse fuse.glusterfs fuse.grpcfuse fuse.juicefs fuse.osxfs
    fuse.rclone fuse.s3fs fuse.sshfs
    """.split()  # noqa: SIM905  # one item per line would be three times as long
)

PAGE_SIZE: Final = 1024  # small: SQLite writes whole pages, and a verb changes two rows
_COMPANIONS: Final = ("-wal", "-shm", "-journal")  # what SQLite keeps next to a database
_RESERVED_BYTE: Final = 0x40000001  # of a database: a process that writes a rollback journal locks it
_OPEN_TRIES: Final = 20
_RESOURCE_ERRNOS: Final = (errno.ENOSPC, errno.EDQUOT, errno.ENFILE, errno.EMFILE, errno.ENOMEM, errno.EIO)


def resolve_path(target: str) -> str:
    """The absolute path of a URL: `sqlite:///srv/x.db`, `sqlite://./x.db` in the working directory, `sqlite://~/x.db`
    in the home directory, `sqlite://` in the user's state directory."""
    if not target:
        target = f"{_default_folder()}/locks.db"
    if target.startswith("~/"):
        target = os.path.expanduser(target)
        if not os.path.isabs(target):
            raise ConfigError(
                "this user has no home directory for the lock file: set HOME or XDG_STATE_HOME, or name a file with "
                "the URL sqlite:///absolute/path.db"
            )
    if not target.startswith(("/", "./", "../")) or target.endswith("/") or "\0" in target:
        raise ConfigError(
            "a sqlite:// URL names a file: sqlite:///absolute/path.db, sqlite://./path.db in the working directory, "
            "sqlite://~/path.db in the home directory, or sqlite:// for the default; for locks within one process use "
            "memory://"
        )
    return os.path.abspath(target)


def _default_folder() -> str:
    state = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # the XDG specification says to ignore a relative path
        state = "~/.local/state"
    return f"{state}/leasehold"


def connect(path: str, timeout: float, *, trust_folder: bool = False) -> sqlite3.Connection:
    """A connection to the file, which is created if it does not exist. No row has been read from the file yet. Raises
    BlockingIOError while other processes create or replace the file."""
    real_path = prepare(path, trust_folder)
    with _mapped_errors(path), open_folder(os.path.dirname(real_path)) as folder:
        if not folder.shared:
            return _open_database(real_path, timeout)
        return _open_shared_database(real_path, timeout, folder)


def _open_database(real_path: str, timeout: float) -> sqlite3.Connection:
    db = sqlite3.connect(real_path, timeout=timeout, isolation_level=None, check_same_thread=False)
    try:
        db.execute("pragma trusted_schema = off")  # functions in a schema that others wrote must do no harm
        db.text_factory = os.fsdecode
        opened = db.execute("pragma database_list").fetchone()[2]
        db.text_factory = str
        if opened != real_path:  # in a shared folder, another member may have made it a link since `prepare`
            raise ConfigError(f"{real_path} is a symbolic link, which is not followed: name the file itself")
    except BaseException:
        db.close()
        raise
    return db


def _open_shared_database(real_path: str, timeout: float, folder: Folder) -> sqlite3.Connection:
    """Open a file that other users may replace at any moment, so that SQLite ignores journals."""
    if sys.platform != "linux" or not os.path.isdir("/proc/self/fd"):
        raise ConfigError(f"{folder.path} is shared by a group, which Leasehold supports only on Linux, with /proc")
    for _ in range(_OPEN_TRIES):
        inode = _lock_against_journals(folder, os.path.basename(real_path))
        before = _open_files()
        db = _open_database(real_path, timeout)
        try:
            # SQLite opens the file by its name, so it may be another one than the locked one; and another thread may
            # have opened a file meanwhile. In both cases trying again is enough.
            if all(opened[1:] in _LOCKS for opened in _open_files() - before):
                db.execute("pragma schema_version")  # here SQLite would look for a journal
                if db.execute("pragma journal_mode").fetchone()[0] == "wal":
                    db.set_authorizer(_permit)
                    return db
                _set_lock(_LOCKS[inode], fcntl.F_UNLCK)
                raise ConfigError(
                    f"{real_path} is not in WAL mode, so a member of the group could make SQLite remove files of "
                    "yours: convert it with the statement `pragma journal_mode = wal`, or remove it"
                )
        except BaseException:
            db.close()
            raise
        db.close()
    raise BlockingIOError(errno.EAGAIN, "the file was replaced while it was opened", real_path)


def _permit(_action: int, _first: str | None, _second: str | None, _database: str | None, inside: str | None) -> int:
    """For SQLite's compiler: nothing that a trigger or a view does, because another member may have added it."""
    return sqlite3.SQLITE_OK if inside is None else sqlite3.SQLITE_DENY


# Descriptors of databases in shared folders, by device and inode. They are never closed: that would drop the locks that
# SQLite has on the same file in this process.
_LOCKS: Final[dict[tuple[int, int], int]] = {}


def _lock_against_journals(folder: Folder, name: str) -> tuple[int, int]:
    """Lock the byte that the writer of a rollback journal locks, and return the file's device and inode. SQLite then
    takes every journal for that of a running transaction, and leaves it alone. Writers in WAL mode do not use this
    byte. The lock belongs to the descriptor, not to the process, so SQLite in this process sees it too."""
    found = folder.find(name)
    inode = (found.st_dev, found.st_ino) if found is not None else (0, 0)
    if inode not in _LOCKS:
        try:
            fd = folder.open_file(name, os.O_RDONLY)
        except FileNotFoundError as gone:
            raise BlockingIOError(errno.EAGAIN, "the file was removed while it was opened", name) from gone
        opened = os.fstat(fd)
        inode = opened.st_dev, opened.st_ino
        _LOCKS[inode] = fd
    _set_lock(_LOCKS[inode], fcntl.F_RDLCK)
    return inode


def _set_lock(fd: int, kind: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, _RESERVED_BYTE, 1, 0))


def _open_files() -> set[tuple[int, int, int]]:
    """The regular files that this process has open: descriptor, device and inode."""
    found = set()
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # closed meanwhile, as the descriptor of this very list
            status = os.fstat(fd)
            if stat.S_ISREG(status.st_mode):
                found.add((fd, status.st_dev, status.st_ino))
    return found


def prepare(path: str, trust_folder: bool = False) -> str:
    """Create the file, readable by its owner only, if it does not exist. Returns its path without symbolic links.
    Raises ConfigError if it cannot hold locks, for example on a file system that is not local, or where another user
    could swap it, unless `trust_folder` says that everyone who could is trusted.

    The database and its companions are not opened here: closing a descriptor of them would drop the locks that SQLite
    has on them in this process. Their status is enough, because no other user can swap them in a private folder."""
    folder_path, name = os.path.split(path)
    if len(os.fsencode(name)) > 240 or len(os.fsencode(os.path.realpath(path))) > 490:
        # room for `-journal`; SQLite's own limit is 512
        raise ConfigError(f"{path} is too long a path for SQLite: choose a shorter one")
    with _mapped_errors(path), _open_folder(path, private=not trust_folder) as folder:
        if kind := remote_filesystem(folder.path):
            raise ConfigError(
                f"{folder_path} is on a network or shared file system ({kind}), where SQLite's locks are not "
                "reliable: choose a path on a local disk, or an engine for several machines"
            )
        for suffix in ("", *_COMPANIONS):
            if (found := folder.find(name + suffix)) is not None:
                folder.check_file(name + suffix, found)
                if suffix and found.st_nlink > 1:  # SQLite would write into the file that has the other name
                    raise ConfigError(f"{path}{suffix} has a second name (a hard link): remove this one")
        if folder.find(name) is None:
            with _removing_leftovers(folder, name):
                _create(folder, name)
        _refuse_second_names(folder, name)
        return os.path.join(folder.path, name)


@contextmanager
def _mapped_errors(path: str) -> Iterator[None]:
    """Map the errors of the system (E9). BlockingIOError passes: another process creates or replaces the file."""
    try:
        yield
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno in _RESOURCE_ERRNOS:
            raise Unavailable(f"{path} cannot be opened or created now: {error.strerror}", engine="sqlite") from error
        hint = _hint_at_working_directory(path)
        raise ConfigError(f"{path} cannot be used for locks: {error.strerror}: {error.filename}{hint}") from error


def _hint_at_working_directory(path: str) -> str:
    """For those who know `sqlite:///x.db` from SQLAlchemy, where it is a file in the working directory."""
    if not os.path.isdir(f".{os.path.dirname(path)}"):
        return ""
    return f"; sqlite:// with a third slash begins an absolute path: for the working directory write sqlite://.{path}"


def _open_folder(path: str, private: bool) -> Folder:
    """The folder of the file with this path."""
    folder = os.path.dirname(path)
    try:
        if folder == os.path.abspath(os.path.expanduser(_default_folder())):
            make_folders(folder, private=private)
        return open_folder(folder, private=private)
    except FileNotFoundError:
        import shlex  # only here: most commands do without

        raise ConfigError(
            f"the folder {folder} does not exist: `mkdir -p -m 700 {shlex.quote(folder)}`"
            f"{_hint_at_working_directory(path)}"
        ) from None
    except NotPrivate as refusal:
        raise ConfigError(
            f"{refusal}; if you trust every user who could, as in most containers, add ?trust_folder=yes to the URL"
        ) from None


def _create(folder: Folder, name: str) -> None:
    with folder.new_file() as (fd, temporary):
        if folder.shared:
            os.write(fd, _empty_database())
        try:
            os.link(temporary, name, src_dir_fd=folder.fd, dst_dir_fd=folder.fd, follow_symlinks=False)
        except FileExistsError:
            return  # another process created it first
        except OSError as error:
            if error.errno in _RESOURCE_ERRNOS:
                raise
            # Without hard links: another process that creates the file now would lose it.
            os.replace(temporary, name, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)


def _empty_database() -> bytes:
    """One page of a database without tables, in WAL mode."""
    db = sqlite3.connect(":memory:", isolation_level=None)
    try:
        db.execute(f"pragma page_size = {PAGE_SIZE}")
        db.execute("pragma user_version = 0")  # writes the page
        page = db.serialize()
    finally:
        db.close()
    return page[:18] + b"\2\2" + page[20:]  # the versions for writers and readers: 2 is WAL


@contextmanager
def _removing_leftovers(folder: Folder, name: str) -> Iterator[None]:
    """Remove the log and shared memory of a removed database before a new one is created under its name. Processes that
    still have the old database open use them; the new one must not. Raises BlockingIOError while another process does
    the same.

    The log is removed last because it is locked meanwhile: a process must not remove what a faster one has created.
    """
    for locked_suffix in ("-wal", "-shm"):
        with suppress(FileNotFoundError):
            handle = folder.open_file(name + locked_suffix, os.O_RDONLY)
            break
    else:
        yield
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locked = folder.find(name + locked_suffix)
        if folder.find(name) is not None or locked is None or not os.path.samestat(os.fstat(handle), locked):
            raise BlockingIOError(errno.EAGAIN, "another process was first", name)
        for suffix in ("-shm", "-wal"):
            with suppress(FileNotFoundError):
                os.unlink(name + suffix, dir_fd=folder.fd)
        yield
    finally:
        os.close(handle)


def _refuse_second_names(folder: Folder, name: str) -> None:
    """SQLite finds the log by the name of the file: under two names, one file would have two logs and diverge."""
    path = os.path.join(folder.path, name)
    if _is_mount_point(path):
        raise ConfigError(f"{path} is mounted as a single file, without its log: mount its whole folder instead")
    found = folder.find(name)
    if found is not None and found.st_nlink > 1:
        # For a moment while the file is created, and for ever if its creator was killed then.
        for entry in os.scandir(folder.path):
            if entry.name.startswith(TEMPORARY_PREFIX) and entry.inode() == found.st_ino:
                with suppress(FileNotFoundError):
                    os.unlink(entry.name, dir_fd=folder.fd)
        found = folder.find(name)
        if found is not None and found.st_nlink > 1:
            raise ConfigError(f"{path} has a second name (a hard link), which breaks its locks: remove one name")


def inodes(path: str) -> list[tuple[int, int]]:
    """The device and inode of the database, its log and its shared memory. Raises OSError if one is missing."""
    found = [os.stat(path + suffix, follow_symlinks=False) for suffix in ("", "-wal", "-shm")]
    return [(each.st_dev, each.st_ino) for each in found]


def inodes_match(path: str, known: list[tuple[int, int]]) -> bool:
    """Whether these files, or as many of them as are known, are still the known ones."""
    try:
        found = [os.stat(path + suffix, follow_symlinks=False) for suffix in ("", "-wal", "-shm")[: len(known)]]
    except OSError:
        return False
    return [(each.st_dev, each.st_ino) for each in found] == known


def remote_filesystem(folder: str, mounts: str = "/proc/self/mountinfo") -> str:
    """The type of the file system if several machines may share it; empty if it is local or unknown."""
    real, longest, found = os.path.realpath(folder), -1, ""
    for mount_point, kind in _mounts(mounts):
        contains = mount_point == "/" or real == mount_point or real.startswith(mount_point + "/")
        if contains and len(mount_point) >= longest:  # of two mounts on one point, the later one is visible
            longest, found = len(mount_point), kind
    return found if found in _REMOTE_FILESYSTEMS else ""


def _is_mount_point(real: str) -> bool:
    return any(mount_point == real for mount_point, _ in _mounts("/proc/self/mountinfo"))


def _mounts(mounts: str) -> Iterator[tuple[str, str]]:
    """The mount points and the types of their file systems; nothing if the system does not list them."""
    try:
        lines = Path(mounts).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split(" ")
        if "-" in fields:
            yield _unescape(fields[4]), fields[fields.index("-") + 1]


def _unescape(text: str) -> str:
    for code, plain in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, plain)
    return text


def is_writable(path: str) -> bool:
    """False: the path is read-only for this process, so retrying does not help."""
    folder = os.path.dirname(path)
    try:
        read_only = bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
    except OSError:
        return False
    return not read_only and os.access(folder, os.W_OK) and (not os.path.exists(path) or os.access(path, os.W_OK))
