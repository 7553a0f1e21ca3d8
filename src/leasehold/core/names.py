"""Names of locks: what is allowed, and how a name becomes a safe engine key without collisions.

A name and a namespace are any text, and are passed separately. An engine that needs one key encodes both and joins them
with `:`, which the encoding never produces, so two different pairs never share a key.
"""

from __future__ import annotations

import zlib

from leasehold.errors import ConfigError

# The interpreter's own sha256, as in `random`: OpenSSL's gives the same result, but costs 2 us more per claim on a core
# shared with the engine, because it touches more memory.
try:
    from _sha2 import sha256  # type: ignore[import-not-found,unused-ignore]
except ImportError:
    try:
        from _sha256 import sha256  # type: ignore[import-not-found,unused-ignore]  # before 3.12
    except ImportError:
        from hashlib import sha256

FORMAT = "lh1"  # every engine key begins with it, so that versions can coexist during a roll-out
MAX_NAME_BYTES = 255
BUCKETS = 1024

_HEX = frozenset("0123456789abcdef")
_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_CODES = [chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in range(256)]


def check_name(name: str) -> str:
    """Return the name, or raise a ConfigError that says what is wrong with it."""
    if _check_text(name, "lock name") == 0:
        raise ConfigError("a lock name needs at least one character")
    return name


def check_namespace(namespace: str) -> str:
    _check_text(namespace, "namespace")
    return namespace


def check_prefix(prefix: str) -> str:
    """Return the prefix of a name, which may be empty, or raise ConfigError."""
    _check_text(prefix, "name prefix")
    return prefix


def _check_text(text: str, what: str) -> int:
    if not isinstance(text, str):
        raise ConfigError(f"a {what} must be text, not {type(text).__name__}: {text!r}")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise ConfigError(f"a {what} must be encodable as UTF-8: {text!r} has a lone surrogate") from None
    if size > MAX_NAME_BYTES:
        raise ConfigError(
            f"a {what} must have at most {MAX_NAME_BYTES} bytes of UTF-8, this one has {size}: {text[:40]!r}..."
        )
    if "\0" in text:
        raise ConfigError(f"a {what} must not contain a NUL character: {text!r}")
    return size


def encode(text: str) -> str:
    """Encode text one-to-one as letters, digits, `_`, `-` and `%XX`; `.`, `/`, `{` and `:` are all encoded."""
    return "".join([_CODES[byte] for byte in text.encode()])


def decode(key: str) -> str:
    """The inverse of `encode`."""
    head, *parts = key.split("%")
    raw = head.encode() + b"".join(bytes([int(part[:2], 16)]) + part[2:].encode() for part in parts)
    return raw.decode()


def engine_key(namespace: str, name: str) -> str:
    return f"{encode(namespace)}:{encode(name)}"


def bucket(name: str) -> int:
    """The bucket of a name: the names of a bucket share a token counter, and on SQL servers a row lock. The number of
    buckets is fixed, so a name that is gone leaves no counter behind."""
    return zlib.crc32(name.encode()) & (BUCKETS - 1)


def make_claim_id(owner: str, secret: str) -> tuple[str, str]:
    """A new claim's id and id hash. `owner` (eight hex digits, public) is a thread or task; `secret` is per claim."""
    new_id = f"{owner}.{secret}"
    # The same as `hash_id`, without the check whether the id has an owner.
    return new_id, sha256(new_id.encode()).hexdigest()[:24] + owner


def hash_id(claim_id: str) -> str:
    """What engines store and compare instead of the secret id, so that they cannot leak it. It ends with the owner, if
    the id has one, so that the claims of one thread or task can be recognised."""
    has_owner = claim_id[8:9] == "." and _HEX.issuperset(claim_id[:8])
    digest: str = sha256(claim_id.encode()).hexdigest()
    return digest[:24] + claim_id[:8] if has_owner else digest[:32]


def owner_of(id_hash: str) -> str:
    """The owner, a thread or task, of the claim with this id hash. Needs only the end of the hash."""
    return id_hash[-8:]
