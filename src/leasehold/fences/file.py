"""A file that only the newest holder may replace, among processes of one machine that all use this fence.

A write locks, compares, raises the highest token and fsyncs it. Then it writes a new file in the same folder, fsyncs
it, renames it, fsyncs the folder and unlocks. A crash leaves the old content or the new, never a mixture, and never new
content with an older highest token.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from leasehold.fences.rules import LeaseLike, to_bytes, token_for_read, token_for_write
from leasehold.fences.token_file import TokenFile, sync_folder


class File:
    """Fences the file at `path`. The highest token is kept in the same folder, in `.NAME.fence`. `wait`: seconds to
    wait while another process has the fence locked.

    Not promised: protection from programs that write to the file without this fence, or on NFS.
    """

    def __init__(self, path: str | os.PathLike[str], *, wait: float = 30.0) -> None:
        self.path = os.path.realpath(path)  # a rename would replace a symbolic link, not what it points to
        self.resource = os.fspath(path)
        self._folder, name = os.path.split(self.path)
        self._new_path = os.path.join(self._folder, f".{name}.new")
        self._token_file = TokenFile(os.path.join(self._folder, f".{name}.fence"))
        self._wait = wait

    def claim(self, lease: LeaseLike) -> None:
        """Only raise the highest token. All methods raise `StaleToken`, and `Unavailable` after `wait` seconds."""
        token_info = token_for_write(lease)
        with self._token_file.locked(self._wait) as fd:
            self._token_file.check_and_raise(fd, lease, token_info, self.resource)

    def read(self, lease: LeaseLike) -> bytes:
        """The content, to base a write on. Older holders are refused from now on, even after FileNotFoundError."""
        token_info = token_for_read(lease)
        with self._token_file.locked(self._wait) as fd:
            self._token_file.check_and_raise(fd, lease, token_info, self.resource)
            with open(self.path, "rb") as file:
                return file.read()

    def write(self, lease: LeaseLike, data: bytes | str) -> None:
        """Replace the content; it is on disk when this returns. Text is written as UTF-8."""
        body, token_info = to_bytes(data), token_for_write(lease)
        with self._token_file.locked(self._wait) as fd:
            self._token_file.check_and_raise(fd, lease, token_info, self.resource)
            self._replace(body)

    def _replace(self, body: bytes) -> None:
        # All writers use this name, because only the one with the lock gets here. A file left by a crash is unlinked
        # instead of overwritten, because a backup made of hard links may share it.
        with suppress(FileNotFoundError):
            os.unlink(self._new_path)
        try:
            old = os.stat(self.path)
        except FileNotFoundError:
            old = None
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        # 0o600 first: others must not open the file before it has its owner and mode.
        new = os.open(self._new_path, flags, 0o666 if old is None else 0o600)
        with open(new, "wb") as file:
            if old is not None:
                with suppress(PermissionError):  # only root may change the owner
                    os.fchown(new, old.st_uid, old.st_gid)
                os.fchmod(new, stat.S_IMODE(old.st_mode))
            file.write(body)
            file.flush()
            os.fsync(new)
        os.replace(self._new_path, self.path)
        sync_folder(self._folder)

    def __repr__(self) -> str:
        return f"<File {self.resource}>"
