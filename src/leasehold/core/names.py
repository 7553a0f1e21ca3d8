"""Names of locks: what is allowed, and how a name becomes a safe engine key without collisions.

A name and a namespace are any text. They are carried apart; an engine that needs one key encodes both and joins
them by `:`, which the encoding never makes, so no two pairs meet in one key.
"""

from __future__ import annotations

import zlib

from leasehold.errors import ConfigError

# The interpreter's own, as `random` does: on a core shared with the engine OpenSSL's costs a claim 2 us more, for all
# it touches. The result is the same.
try:
    from _sha2 import sha256  # type: ignore[import-not-found,unused-ignore]
except ImportError:
    try:
        from _sha256 import sha256  # type: ignore[import-not-found,unused-ignore]  # before 3.12
    except ImportError:
        from hashlib import sha256

FORMAT = "lh1"  # every engine key begins with it, so that versions can meet during a roll-out
MAX_NAME_BYTES = 255
BUCKETS = 1024

_HEX = frozenset("0123456789abcdef")
_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_CODES = [chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in range(256)]


def check_name(name: str) -> str:
    """The name itself, or a ConfigError that says what is wrong with it."""
    if _check_text(name, "lock name") == 0:
        raise ConfigError("a lock name needs at least one character")
    return name


def check_namespace(namespace: str) -> str:
    _check_text(namespace, "namespace")
    return namespace


def check_prefix(prefix: str) -> str:
    """The beginning of a name, or nothing."""
    _check_text(prefix, "beginning of a name")
    return prefix


def _check_text(text: str, what: str) -> int:
    if not isinstance(text, str):
        raise ConfigError(f"a {what} is text, not {type(text).__name__}: {text!r}")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise ConfigError(f"a {what} must be encodable as UTF-8: {text!r} has a lone surrogate") from None
    if size > MAX_NAME_BYTES:
        raise ConfigError(
            f"a {what} has at most {MAX_NAME_BYTES} bytes of UTF-8, this one has {size}: {text[:40]!r}..."
        )
    if "\0" in text:
        raise ConfigError(f"a {what} must not hold a NUL character: {text!r}")
    return size


def encode(text: str) -> str:
    """One-to-one into letters, digits, `_`, `-` and `%XX`; `.`, `/`, `{` and `:` are all encoded."""
    return "".join([_CODES[byte] for byte in text.encode()])


def decode(key: str) -> str:
    """The inverse of `encode`."""
    head, *parts = key.split("%")
    raw = head.encode() + b"".join(bytes([int(part[:2], 16)]) + part[2:].encode() for part in parts)
    return raw.decode()


def engine_key(namespace: str, name: str) -> str:
    return f"{encode(namespace)}:{encode(name)}"


def bucket(name: str) -> int:
    """Which of the fixed number of token counters a name uses, so that no name leaves one behind."""
    return zlib.crc32(name.encode()) & (BUCKETS - 1)


def make_claim_id(owner: str, secret: str) -> tuple[str, str]:
    """The id of a new claim: a thread or task (eight hex digits, public) and a secret of its own; and its mark."""
    new_id = f"{owner}.{secret}"
    return new_id, sha256(new_id.encode()).hexdigest()[
        :24
    ] + owner  # what `mark` makes of it, without asking what it is


def hash_id(claim_id: str) -> str:
    """What engines store and compare of a secret id: they could not betray it if they wished to. It ends with the
    owner, if the id names one, so that the claims of one thread or task can be told from those of others."""
    has_owner = claim_id[8:9] == "." and _HEX.issuperset(claim_id[:8])
    digest: str = sha256(claim_id.encode()).hexdigest()
    return digest[:24] + claim_id[:8] if has_owner else digest[:32]


def owner_of(id_hash: str) -> str:
    """The thread or task that a claim with this mark is of; it may be cut short, but for its end."""
    return id_hash[-8:]
