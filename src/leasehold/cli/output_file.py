"""A file that a command writes at its end, whatever other users of the machine have put there."""

from __future__ import annotations

import errno
import os
import stat

from leasehold.cli.option import usage_error
from leasehold.errors import ConfigError
from leasehold.files import open_folder


class OutputFile:
    def __init__(self, option: str, path: str) -> None:
        """Refuse a path that cannot work now, rather than after an hour of work."""
        self._folder_path, self._name = os.path.split(os.path.abspath(path))
        try:
            with open_folder(self._folder_path) as folder:
                found = folder.find(self._name)
                if not path or (found is not None and not stat.S_ISREG(found.st_mode)):
                    raise usage_error(
                        f"{option} {path!r} is not a regular file (a symbolic link is not followed); "
                        "choose another path"
                    )
                if not os.access(".", os.W_OK | os.X_OK, dir_fd=folder.fd):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), self._folder_path)
        except (FileNotFoundError, NotADirectoryError):
            raise usage_error(f"{option} {path!r}: its directory does not exist") from None
        except ConfigError as unsafe:
            raise usage_error(f"{option} {path!r}: {unsafe}") from None

    def write(self, text: str) -> None:
        """Write the file atomically: readers never see half of it. Raises `OSError`."""
        try:
            with open_folder(self._folder_path) as folder, folder.new_file(0o600) as (fd, temporary):
                with open(fd, "w", encoding="utf-8", closefd=False) as file:
                    file.write(text)
                os.replace(temporary, self._name, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
        except ConfigError as unsafe:  # since the command began, another user has put a link there
            raise PermissionError(errno.EPERM, str(unsafe)) from None
