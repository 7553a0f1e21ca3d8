"""A file that only the newest holder may replace, among processes of one machine that all use this fence.

A write locks, compares, raises the highest token and fsyncs it. Then it writes a new file in the same folder, fsyncs
it, renames it, fsyncs the folder and unlocks. A crash leaves the old content or the new, never a mixture, and never new
content with an older highest token.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from leasehold import files
from leasehold.config import Duration, check_seconds
from leasehold.errors import ConfigError
from leasehold.fences.rules import LeaseLike, to_bytes, token_for_read, token_for_write
from leasehold.fences.token_file import TokenFile


class File:
    """Fences the file at `path`. The highest token is kept in the same folder, in `.NAME.fence`. `wait`: seconds to
    wait while another process has the fence locked.

    Not promised: protection from programs that write to the file without this fence, or on NFS.
    """

    def __init__(self, path: str | os.PathLike[str], *, wait: Duration = 30.0) -> None:
        self.resource = os.fspath(path)
        self.path = files.resolve(self.resource)  # a rename would replace a symbolic link, not what it points to
        self._folder, self._name = os.path.split(self.path)
        self._token_file = TokenFile(os.path.join(self._folder, f".{self._name}.fence"))
        self._wait = check_seconds("wait", wait)

    def claim(self, lease: LeaseLike) -> None:
        """Only raise the highest token. All methods raise `StaleToken`, and `Unavailable` after `wait` seconds."""
        token_info = token_for_write(lease)
        with self._token_file.locked(self._wait) as fd:
            self._token_file.check_and_raise(fd, lease, token_info, self.resource, "file")

    def read(self, lease: LeaseLike) -> bytes:
        """The content, to base a write on. Older holders are refused from now on, even after FileNotFoundError."""
        token_info = token_for_read(lease)
        with self._token_file.locked(self._wait) as fd:
            self._token_file.check_and_raise(fd, lease, token_info, self.resource, "file")
            with files.open_folder(self._folder) as folder, open(_open_data(folder, self._name), "rb") as file:
                return file.read()

    def write(self, lease: LeaseLike, data: bytes | str) -> None:
        """Replace the content; it is on disk when this returns. Text is written as UTF-8."""
        body, token_info = to_bytes(data), token_for_write(lease)
        with self._token_file.locked(self._wait) as fd:
            self._token_file.check_and_raise(fd, lease, token_info, self.resource, "file")
            self._replace(body)

    def _replace(self, body: bytes) -> None:
        with files.open_folder(self._folder) as folder:
            # All writers use this name, because only the one with the lock gets here. A file left by a crash is
            # unlinked instead of overwritten, because a backup made of hard links may share it.
            new_name = f".{self._name}.new"
            with suppress(FileNotFoundError):
                os.unlink(new_name, dir_fd=folder.fd)
            old = folder.find(self._name)
            if old is not None and not stat.S_ISREG(old.st_mode):
                raise ConfigError(f"{self.path} is not a regular file any more: another user may have replaced it")
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            # 0o600 first: others must not open the file before it has its owner and mode.
            new = os.open(new_name, flags, 0o666 if old is None else 0o600, dir_fd=folder.fd)
            with open(new, "wb") as file:
                if old is not None:
                    with suppress(PermissionError):  # only root may change the owner
                        os.fchown(new, old.st_uid, old.st_gid)
                    # Without setuid and setgid: this user may own the new file, and another one chose the old mode.
                    os.fchmod(new, stat.S_IMODE(old.st_mode) & ~(stat.S_ISUID | stat.S_ISGID))
                file.write(body)
                file.flush()
                os.fsync(new)
            os.replace(new_name, self._name, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
            folder.sync()

    def __repr__(self) -> str:
        return f"<File {self.resource}>"


def _open_data(folder: files.Folder, name: str) -> int:
    """The file itself is the application's: it may belong to any user, but must not be a link to another file."""
    return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder.fd)
