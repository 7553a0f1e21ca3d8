"""Files that other users of this machine may try to swap: the only place that opens, checks and creates them.

`leasehold run` often runs as root, and a file of Leasehold decides who holds a lock. So another user must not choose
which file is read, written or removed. Three rules:

- A symbolic link is followed only where no other user can change it; as the last part of a path only by `resolve`.
- A file is used only if its owner is this user, root or the owner of its folder; in a folder that a group shares
  (setgid and writable by its group), any member of the group.
- New files are for this user only (0600), or for the group where the folder is shared (0660). They get their name when
  they are complete.

A *private* folder is one that no other user could swap: each folder above it belongs to this user or to root, and none
is writable by everyone, unless its sticky bit protects what is in it. SQLite needs such a folder, because it opens its
files by their paths.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Final

from leasehold.errors import ConfigError

TEMPORARY_PREFIX: Final = ".leasehold-"

_MAX_LINKS: Final = 40  # as the kernel allows
# O_PATH needs no right to read the folders on the way.
_FOLDER: Final = (
    0
    if sys.platform == "win32"
    else os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_PATH if sys.platform == "linux" else 0)
)


class NotPrivate(ConfigError):
    """Another user could swap the folder, or what is in it."""


class Folder:
    """An open folder. Files in it are found by its descriptor, so it does not matter if its path is swapped."""

    def __init__(self, fd: int, path: str) -> None:
        self.fd = fd
        self.path = path  # without symbolic links
        self.status = os.fstat(fd)

    @property
    def shared(self) -> bool:
        """Whether the members of a group share the files in it."""
        return self.status.st_mode & (stat.S_ISGID | stat.S_IWGRP) == stat.S_ISGID | stat.S_IWGRP

    @property
    def file_mode(self) -> int:
        """The mode of a new file."""
        return 0o660 if self.shared else 0o600

    def find(self, name: str) -> os.stat_result | None:
        """The status of what has this name; None: nothing has it. Follows no link."""
        try:
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def check_file(self, name: str, found: os.stat_result) -> None:
        """Raise ConfigError unless this is a regular file that only trusted users can write."""
        path = os.path.join(self.path, name)
        if stat.S_ISLNK(found.st_mode):
            raise ConfigError(f"{path} is a symbolic link, which is not followed: name the file itself")
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{path} is not a regular file: choose another path")
        self._check_owner(path, found)

    def open_file(self, name: str, flags: int, *, create: bool = False) -> int:
        """The descriptor of a file, after checking owner and mode on it."""
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO would wait for its other end
        while True:
            try:
                fd = os.open(name, flags, dir_fd=self.fd)
                break
            except FileNotFoundError as error:
                if not create:
                    raise self._with_path(error, name) from None
            except OSError as error:
                if (found := self.find(name)) is not None:
                    self.check_file(name, found)  # says more than "Too many levels of symbolic links"
                raise self._with_path(error, name) from None
            try:
                fd = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self.fd)
            except FileExistsError:
                continue  # another process was first
            os.fchmod(fd, self.file_mode)  # whatever the umask
            return fd
        try:
            self.check_file(name, os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _with_path(self, error: OSError, name: str) -> OSError:
        return OSError(error.errno, error.strerror, os.path.join(self.path, name))

    def open_folder(self, name: str) -> Folder:
        """A folder inside this one that trusted users own. It can be listed."""
        path = os.path.join(self.path, name)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        folder = Folder(os.open(name, flags, dir_fd=self.fd), path)
        try:
            self._check_owner(path, folder.status)
        except BaseException:
            folder.close()
            raise
        return folder

    @contextmanager
    def new_file(self, mode: int | None = None) -> Iterator[tuple[int, str]]:
        """The descriptor and the temporary name of a new file. The name is removed at the end if it still exists."""
        name = TEMPORARY_PREFIX + os.urandom(8).hex()
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.fd)
        try:
            os.fchmod(fd, self.file_mode if mode is None else mode)
            yield fd, name
        finally:
            os.close(fd)
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.fd)

    def sync(self) -> None:
        """Write the names in the folder to disk."""
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        os.close(self.fd)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_owner(self, path: str, found: os.stat_result) -> None:
        of_group = self.shared and found.st_gid == self.status.st_gid and found.st_mode & 0o060 == 0o060
        if found.st_uid not in (0, os.geteuid(), self.status.st_uid) and not of_group:
            raise ConfigError(
                f"{path} belongs to {_user_name(found.st_uid)}, whose files are not trusted here: remove it, or choose "
                "another path; docs/how-to/share-a-file.md says how several users can share one"
            )
        if found.st_mode & stat.S_IWOTH:
            raise ConfigError(f"{path} can be written by every user: `chmod o-w {path}`")


def open_folder(path: str, *, private: bool = False) -> Folder:
    """Open a folder, following only links that no other user can change. Raises ConfigError, for `private` also
    NotPrivate; OSError if there is no such folder."""
    if sys.platform == "win32":
        raise ConfigError(f"{path}: Leasehold cannot check on Windows who may change files, so it opens none here")
    parts = os.path.abspath(path).split("/")[:0:-1]  # the next one is the last
    folder, links = Folder(os.open("/", _FOLDER), "/"), 0
    try:
        while True:
            if private:
                _check_private(folder, is_last=not any(parts))
            if not any(parts):
                return folder
            if not (part := parts.pop()):
                continue
            try:
                inner = Folder(os.open(part, _FOLDER, dir_fd=folder.fd), _join(folder.path, part))
            except OSError as error:
                found = folder.find(part)
                if found is None or not stat.S_ISLNK(found.st_mode):
                    raise OSError(error.errno, error.strerror, _join(folder.path, part)) from None
                target, links = _read_link(folder, part, found), links + 1
                if links > _MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path) from None
                parts += target.split("/")[::-1]
                if not target.startswith("/"):
                    continue
                inner = Folder(os.open("/", _FOLDER), "/")
            folder.close()
            folder = inner
    except BaseException:
        folder.close()
        raise


def make_folders(path: str, *, private: bool = True) -> None:
    """Create what is missing of a folder and the folders above it, for this user only. `os.makedirs` would make those
    above public, and follow links of other users. Raises ConfigError, for `private` also NotPrivate: nothing is created
    in a folder of another user, who could neither use nor remove it."""
    if not os.path.isdir(path):
        parent_path, name = os.path.split(path)
        make_folders(parent_path, private=private)
        with open_folder(parent_path) as parent, suppress(FileExistsError):
            if private:
                _check_private(parent, is_last=False)
            os.mkdir(name, 0o700, dir_fd=parent.fd)


def resolve(path: str) -> str:
    """The absolute path of a file, after following symbolic links that no other user can change. Raises ConfigError for
    other links."""
    path = os.path.abspath(path)
    for _ in range(_MAX_LINKS):
        folder_path, name = os.path.split(path)
        try:
            with open_folder(folder_path) as folder:
                path = _join(folder.path, name)
                found = folder.find(name)
                if found is None or not stat.S_ISLNK(found.st_mode):
                    return path
                path = _join(folder.path, _read_link(folder, name, found))
        except FileNotFoundError:
            return path
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


@contextmanager
def opened(path: str) -> Iterator[int]:
    """The descriptor of a file to read that no other user can have changed or chosen. Follows the links that `resolve`
    follows. Raises ConfigError; OSError if it cannot be read."""
    folder_path, name = os.path.split(resolve(path))
    with open_folder(folder_path) as folder:
        fd = folder.open_file(name, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def read_file(path: str, most: int) -> bytes:
    """What is in a file of at most `most` bytes. Raises as `opened` does."""
    with opened(path) as fd, open(fd, "rb", closefd=False) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ConfigError(f"{path} has more than {most} bytes, too many for such a file: name another file")
    return content


def _join(folder: str, part: str) -> str:
    return os.path.normpath(os.path.join(folder, part))  # `folder` has no links, so `..` means the folder above


def _read_link(folder: Folder, name: str, found: os.stat_result) -> str:
    mode = folder.status.st_mode
    protected = not mode & stat.S_IWOTH or mode & stat.S_ISVTX
    if not (protected and _is_trusted(folder.status.st_uid) and found.st_uid in (0, os.geteuid())):
        raise ConfigError(
            f"{_join(folder.path, name)} is a symbolic link that {_user_name(found.st_uid)} could change, so it is not "
            "followed: name its target"
        )
    return os.readlink(name, dir_fd=folder.fd)


def _check_private(folder: Folder, *, is_last: bool) -> None:
    owner, mode = folder.status.st_uid, folder.status.st_mode
    if not _is_trusted(owner, is_last):
        raise NotPrivate(
            f"{folder.path} belongs to {_user_name(owner)}, who could replace every file in it: use a folder that "
            "belongs to you or to root"
        )
    if mode & stat.S_IWOTH and (is_last or not mode & stat.S_ISVTX):
        raise NotPrivate(
            f"{folder.path} can be written by every user, so another user could replace your files: use a folder of "
            "your own, such as one made by `mkdir -m 700 FOLDER`"
        )


def _is_trusted(uid: int, is_last: bool = False) -> bool:
    return uid in (0, os.geteuid()) or (not is_last and uid == _unmapped_user())


@cache
def _unmapped_user() -> int:
    """In a user namespace, the uid shown for users outside of it, such as the real root; else -1. All these
    users look the same, and the folders above our own are nearly always root's, so this uid is trusted there."""
    try:
        rows = [[int(field) for field in row.split()] for row in Path("/proc/self/uid_map").read_text().splitlines()]
        unmapped = int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return -1
    return -1 if any(first <= unmapped < first + count for first, _, count in rows) else unmapped


def _user_name(uid: int) -> str:
    try:
        import pwd  # Windows has none

        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"
