"""Files that a server reads: its settings once, the key file and certificates again when they change."""

from __future__ import annotations

import logging
import os
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from leasehold import files
from leasehold.core.texts import escape, server_text
from leasehold.errors import ConfigError

logger = logging.getLogger("leasehold.server.files")

# Reads the files and returns a function that puts them in force. If it raises, nothing has changed.
ReadFiles: TypeAlias = Callable[[Sequence[Path]], Callable[[], None]]
_Version: TypeAlias = tuple[tuple[int, ...] | None, ...]


class WatchedFiles:
    """Some files that belong together. If they cannot be read, what was read before stays in force."""

    def __init__(self, what: str, paths: Sequence[Path], read: ReadFiles) -> None:
        self._what, self._paths, self._read = what, tuple(paths), read
        self._version: _Version | None = None  # in force, or failed
        self._seen: _Version | None = None

    def load(self) -> None:
        """Read them for the first time. Raises ConfigError."""
        version = self._current_version()
        try:
            self._read(self._paths)()
        except OSError as error:
            raise ConfigError(f"{self._what} cannot be read: {_text(error)}") from None
        self._version = self._seen = version

    def refresh(self, *, force: bool = False) -> None:
        """Read them again if they have changed, but not since the last call; `force`: in any case. Never raises: the
        timer that calls this must continue."""
        version = self._current_version()
        settled, self._seen = version == self._seen, version
        if not force and (version == self._version or not settled):
            return  # unchanged, or perhaps still being written: an empty file would revoke every key
        self._version = version  # also after a failure, which is then logged once
        try:
            self._read(self._paths)()
        except (OSError, ConfigError) as error:
            logger.error("%s cannot be read, so the old content stays in force: %s", self._what, _text(error))
        except Exception:  # a bug: the server must continue with what it has
            logger.exception("%s cannot be read, so the old content stays in force", self._what)
        else:
            logger.info("%s has been read again", self._what)

    def _current_version(self) -> _Version:
        return tuple(_version(path) for path in self._paths)


def read_toml(path: Path, most: int) -> dict[str, Any]:
    """The content of a TOML file of at most `most` bytes. Raises ConfigError; OSError if it cannot be read."""
    content = files.read_file(str(path), most)
    try:
        return tomllib.loads(content.decode())
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8") from None
    except (ValueError, RecursionError) as bad:  # ValueError: also a number of very many digits
        raise ConfigError(f"{path} is not TOML: {server_text(bad)}") from None


def _version(path: Path) -> tuple[int, ...] | None:
    """`ctime` changes with the owner and the mode as well, which decide whether a file is accepted."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return escape(f"{error.filename}: {error.strerror}")
    return escape(str(error))
