"""The file of API keys: who has one, until when, and what it may do. It contains hashes, never a key.

A key is `lh_WHO_SECRET`. WHO is public, so that logs can name it. The secret has 256 random bits, so its SHA-256 needs
no salt and no slow hash. One entry per WHO: to rotate a key, create one with another WHO, and revoke the old one when
no caller uses it any more.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from leasehold import files
from leasehold.config import did_you_mean
from leasehold.core.names import check_namespace, check_prefix
from leasehold.errors import ConfigError
from leasehold.fences.token_file import TokenFile
from leasehold.server.watched_files import read_toml

VERBS: Final = ("read", "lock", "break")
ANY_NAMESPACE: Final = "*"
_MAX_FILE: Final = 8 * 1024 * 1024  # bytes; about 20,000 keys
_LOCK_WAIT: Final = 10.0
_WHO: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NAME: Final = re.compile(r"[!-~]{1,255}")  # of a certificate: DNS or URI, such as spiffe://shop/web
_KEY: Final = re.compile(rb"lh_([A-Za-z0-9][A-Za-z0-9._-]{0,63})_[0-9a-f]{64}")
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_FIELDS: Final = ("who", "sha256", "created", "expires", "allow")
_HEADER: Final = "# Written by `leasehold serve key`. Contains hashes of API keys, and no key.\n"


@dataclass(frozen=True, slots=True)
class Right:
    """Some verbs for the names of a namespace that begin with a prefix. The namespace `*` means every namespace."""

    verbs: frozenset[str]
    namespace: str
    prefix: str

    def covers(self, verb: str, namespace: str, name: str) -> bool:
        return verb in self.verbs and self.namespace in (namespace, ANY_NAMESPACE) and name.startswith(self.prefix)

    @classmethod
    def parse(cls, text: str) -> Right:
        """A right written as VERBS:NAMESPACE:PREFIX. Raises ConfigError."""
        parts = text.split(":", 2)  # a prefix may contain colons
        if len(parts) != 3:
            raise ConfigError(
                f"a right is written VERBS:NAMESPACE:PREFIX, such as lock,read:shop:orders/, not {text!r}; "
                "leave NAMESPACE empty for the default namespace, and PREFIX for all names"
            )
        return cls.make([verb.strip() for verb in parts[0].split(",")], parts[1], parts[2])

    @classmethod
    def make(cls, verbs: Sequence[str], namespace: str, prefix: str) -> Right:
        unknown = [verb for verb in verbs if verb not in VERBS]
        if unknown or not verbs:
            shown = ", ".join(repr(verb) for verb in unknown) or "none"
            raise ConfigError(f"the verbs of a right are {', '.join(VERBS)}, not {shown}")
        return cls(frozenset(verbs), check_namespace(namespace), check_prefix(prefix))

    def __str__(self) -> str:
        return f"{','.join(verb for verb in VERBS if verb in self.verbs)}:{self.namespace}:{self.prefix}"


@dataclass(frozen=True, slots=True)
class Key:
    """An entry of the file. Without `sha256` it is for a client certificate with the name `who`."""

    who: str
    sha256: bytes | None
    created: datetime
    expires: datetime | None
    allow: tuple[Right, ...]

    def expired(self, now: float) -> bool:
        return self.expires is not None and self.expires.timestamp() <= now


def who_of(key: bytes) -> str | None:
    """The public part of an API key; None: this is no key."""
    found = _KEY.fullmatch(key)
    return found[1].decode("ascii") if found else None


def read(path: Path) -> Mapping[str, Key]:
    """The entries, by `who`. Raises ConfigError; OSError if the file cannot be read."""
    content = read_toml(path, _MAX_FILE)
    unknown = set(content) - {"key"}
    entries = content.get("key", [])
    if unknown or not isinstance(entries, list):
        raise ConfigError(f"{path} must contain nothing but entries [[key]]: use `leasehold serve key` to change it")
    found: dict[str, Key] = {}
    for number, entry in enumerate(entries, 1):
        try:
            key = _parse(entry)
            if key.who in found:
                raise ConfigError(f"{key.who} has an entry already")
        except ConfigError as bad:
            raise ConfigError(f"{path}, entry {number}: {bad}") from None
        found[key.who] = key
    return found


def create(
    path: Path,
    who: str,
    allow: Sequence[Right],
    *,
    now: datetime,
    expires: datetime | None = None,
    certificate: bool = False,
) -> str | None:
    """Add an entry. Returns the key, which is stored nowhere; for a certificate there is none. Raises ConfigError."""
    if not (_NAME if certificate else _WHO).fullmatch(who):
        known = "printable ASCII without spaces" if certificate else "1 to 64 letters, digits, '.', '-' and '_'"
        raise ConfigError(f"WHO must be {known}{'' if certificate else ', beginning with a letter or digit'}")
    if not allow:
        raise ConfigError("a key without rights is of no use: pass --allow VERBS:NAMESPACE:PREFIX")
    key = None if certificate else f"lh_{who}_{secrets.token_hex(32)}"
    hashed = None if key is None else hashlib.sha256(key.encode()).digest()
    entry = Key(who, hashed, now, expires, tuple(allow))
    with _changed(path) as entries:
        if who in entries:
            raise ConfigError(
                f"{who} has a key in {path}: to rotate it, create a key with another WHO, such as {who[:60]}-2, and "
                f"revoke {who} when no caller uses it any more"
            )
        entries[who] = entry
    return key


def revoke(path: Path, who: str) -> None:
    """Remove the entry. Servers that use the file refuse the key a few seconds later. Raises ConfigError."""
    with _changed(path, create=False) as entries:
        if entries.pop(who, None) is None:
            raise ConfigError(f"{path} has no key of {who!r}{did_you_mean(who, entries)}")


@contextmanager
def _changed(path: Path, *, create: bool = True) -> Iterator[dict[str, Key]]:
    """The entries, to be changed. The file is locked meanwhile, and replaced as a whole at the end."""
    folder_path, name = os.path.split(os.path.abspath(path))
    try:
        with files.open_folder(folder_path) as folder:
            if not create and folder.find(name) is None:
                raise ConfigError(f"{path} does not exist")
            with TokenFile(os.path.join(folder.path, name)).locked(_LOCK_WAIT) as locked:
                entries = dict(read(path))
                yield entries
                _replace(folder, name, entries, os.fstat(locked))
    except PermissionError:
        raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be changed: {error.filename or path}: {error.strerror}") from None


def _replace(folder: files.Folder, name: str, entries: Mapping[str, Key], old: os.stat_result) -> None:
    with folder.new_file(old.st_mode & 0o777) as (fd, temporary), os.fdopen(os.dup(fd), "wb") as file:
        if os.geteuid() == 0:  # else the server, another user, could no longer read it
            os.fchown(fd, old.st_uid, old.st_gid)
        file.write(_HEADER.encode())
        file.writelines(_format(entry).encode() for entry in entries.values())
        file.flush()
        os.fsync(fd)
        os.rename(temporary, name, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
    folder.sync()


def _parse(entry: Any) -> Key:
    if not isinstance(entry, dict):
        raise ConfigError("it is not a table")
    for word in entry:
        if word not in _FIELDS:
            raise ConfigError(f"unknown word {word!r}{did_you_mean(word, _FIELDS)}; known: {', '.join(_FIELDS)}")
    who, hashed = entry.get("who"), entry.get("sha256")
    if not isinstance(who, str) or not (_WHO if hashed is not None else _NAME).fullmatch(who):
        raise ConfigError("`who` must be 1 to 64 letters, digits, '.', '-' and '_', or the name of a certificate")
    if hashed is not None and not (isinstance(hashed, str) and _HASH.fullmatch(hashed)):
        raise ConfigError("`sha256` must be 64 hexadecimal digits")
    created = _time(entry, "created")
    if created is None:
        raise ConfigError("`created` is missing")
    allow = entry.get("allow")
    if not isinstance(allow, list) or not allow:
        raise ConfigError("`allow` must be a list of rights")
    rights = tuple(_parse_right(right) for right in allow)
    return Key(who, None if hashed is None else bytes.fromhex(hashed), created, _time(entry, "expires"), rights)


def _parse_right(right: Any) -> Right:
    if not isinstance(right, dict) or set(right) != {"verbs", "namespace", "prefix"}:
        raise ConfigError("a right has `verbs`, `namespace` and `prefix`")
    verbs = right["verbs"]
    if not isinstance(verbs, list) or not all(isinstance(verb, str) for verb in verbs):
        raise ConfigError(f"`verbs` must be a list of {', '.join(VERBS)}")
    return Right.make(verbs, right["namespace"], right["prefix"])


def _time(entry: Mapping[str, Any], word: str) -> datetime | None:
    value = entry.get(word)
    if value is None:
        return None
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise ConfigError(f"`{word}` must be a time with its zone, such as 2030-01-31T12:00:00Z")
    return value


def _format(key: Key) -> str:
    lines = ["", "[[key]]", f"who = {_quote(key.who)}"]
    if key.sha256 is not None:
        lines.append(f"sha256 = {_quote(key.sha256.hex())}")
    lines.append(f"created = {_format_time(key.created)}")
    if key.expires is not None:
        lines.append(f"expires = {_format_time(key.expires)}")
    lines.append("allow = [")
    for right in key.allow:
        verbs = ", ".join(_quote(verb) for verb in VERBS if verb in right.verbs)
        lines.append(
            f"    {{ verbs = [{verbs}], namespace = {_quote(right.namespace)}, prefix = {_quote(right.prefix)} }},"
        )
    lines.append("]")
    return "\n".join(lines) + "\n"


def _format_time(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _quote(text: str) -> str:
    """A basic string of TOML."""
    escaped = (f"\\{char}" if char in '"\\' else char if char.isprintable() else f"\\U{ord(char):08X}" for char in text)
    return f'"{"".join(escaped)}"'
