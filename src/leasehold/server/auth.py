"""Who calls, and what that caller may do: API keys, client certificates, or neither.

A right is a set of verbs for the names of one namespace that begin with one prefix. No verb implies another: a key that
may `break` a name can neither acquire nor list it.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from leasehold.server import keys
from leasehold.server.keys import Key, Right
from leasehold.server.settings import Settings
from leasehold.server.watched_files import WatchedFiles

Verb: TypeAlias = Literal["read", "lock", "break"]
# Why a request was refused, for metrics: without a key or certificate, with one that is not known or is over, in a
# namespace without a right, or with none for this verb and name.
Failure: TypeAlias = Literal["missing", "unknown", "expired", "namespace", "scope"]

CERTIFICATE_NAMES: Final = "leasehold.certificate_names"  # in the extensions of an ASGI scope
_MAX_AUTHORIZATION: Final = 512  # bytes; a longer header is no key of ours
_NO_HASH: Final = bytes(32)

logger = logging.getLogger("leasehold.server.auth")


@dataclass(frozen=True, slots=True)
class Caller:
    """One caller of the server. `limited`: the limits per key apply to it. `sha256`: of its key; another key of the
    same name is another caller."""

    who: str
    rights: tuple[Right, ...]
    limited: bool = True
    sha256: bytes | None = field(default=None, repr=False)

    def may(self, verb: Verb, namespace: str, name: str) -> bool:
        """Whether a right covers this verb for this name."""
        return any(right.covers(verb, namespace, name) for right in self.rights)

    def failure(self, namespace: str) -> Failure:
        """Why this caller was refused something in this namespace."""
        known = any(right.namespace in (namespace, keys.ANY_NAMESPACE) for right in self.rights)
        return "scope" if known else "namespace"

    def may_list(self, namespace: str, prefix: str) -> bool:
        """Whether one right covers reading every name of the namespace that begins with this prefix."""
        return self.may("read", namespace, prefix)


_EVERYTHING: Final = (Right(frozenset(keys.VERBS), keys.ANY_NAMESPACE, ""),)

# The caller of a server without authentication. All callers are this one, so it has no limits per key.
ANYONE: Final = Caller("anyone", _EVERYTHING, limited=False)


class Authenticator:
    """Finds the caller of a request.

    A caller is known by its API key or, without one, by a name in its client certificate. Rights come from the key file
    in both cases. Without a key file, every certificate of the authority may do everything.
    """

    def __init__(self, key_file: Path | None, *, certificates: bool = False, now: Callable[[], float] = time.time):
        self._watched = None if key_file is None else WatchedFiles("the key file", [key_file], self._read)
        self._certificates, self._now = certificates, now
        self.failures: dict[Failure, int] = {}  # reason -> refused requests
        self._keys: Mapping[str, Key] = {}
        self._callers: Mapping[str, Caller] = {}
        if self._watched is not None:
            self._watched.load()

    @classmethod
    def open(cls, settings: Settings) -> Authenticator:
        """Raises ConfigError if the key file cannot be read."""
        certificates = settings.tls is not None and settings.tls.client_ca is not None
        return cls(settings.keys, certificates=certificates)

    def identify(self, authorization: bytes, certificate_names: Sequence[str]) -> Caller | None:
        """The caller, or None: it must not be told why. An API key counts more than a certificate."""
        found = self._find(authorization, certificate_names)
        if isinstance(found, Caller):
            return found
        self.count_failure(found)
        return None

    def find(self, authorization: bytes, certificate_names: Sequence[str]) -> Caller | None:
        """The same for a request that is not complete yet: a failure is not counted."""
        found = self._find(authorization, certificate_names)
        return found if isinstance(found, Caller) else None

    def _find(self, authorization: bytes, certificate_names: Sequence[str]) -> Caller | Failure:
        if self._watched is None and not self._certificates:
            return ANYONE
        if authorization:
            return self._by_key(authorization)
        return self._by_certificate(certificate_names) if self._certificates else "missing"

    def count_failure(self, reason: Failure) -> None:
        self.failures[reason] = self.failures.get(reason, 0) + 1

    def still(self, caller: Caller) -> bool:
        """Whether this caller, identified earlier, would have the same rights now, with the same key. For responses
        that take long."""
        if self._watched is None:
            return True
        key = self._keys.get(caller.who)
        return key is not None and self._callers.get(caller.who) == caller and not key.expired(self._now())

    def refresh(self, *, force: bool = False) -> None:
        """Read the key file again if it has changed; `force`: in any case. If that fails, nothing changes."""
        if self._watched is not None:
            self._watched.refresh(force=force)

    def _read(self, paths: Sequence[Path]) -> Callable[[], None]:
        found = keys.read(paths[0])
        callers = {who: Caller(who, key.allow, sha256=key.sha256) for who, key in found.items()}

        def apply() -> None:
            self._keys, self._callers = found, callers

        return apply

    def _by_key(self, authorization: bytes) -> Caller | Failure:
        scheme, _, secret = authorization[: _MAX_AUTHORIZATION + 1].partition(b" ")
        secret = secret.strip(b" ")
        who = keys.who_of(secret)
        if scheme.lower() != b"bearer" or who is None or len(authorization) > _MAX_AUTHORIZATION:
            return "unknown"
        # The same work for a caller that is not known: the answer's time says nothing about the file.
        key = self._keys.get(who)
        expected = key.sha256 if key is not None and key.sha256 is not None else _NO_HASH
        fits = hmac.compare_digest(hashlib.sha256(secret).digest(), expected)
        if not fits or key is None:
            return "unknown"
        return "expired" if key.expired(self._now()) else self._callers[who]

    def _by_certificate(self, names: Sequence[str]) -> Caller | Failure:
        if not names:
            return "missing"
        if self._watched is None:
            return Caller(names[0], _EVERYTHING)
        failure: Failure = "unknown"
        for name in names:
            key = self._keys.get(name)
            if key is not None and not key.expired(self._now()):
                return self._callers[name]
            failure = failure if key is None else "expired"
        return failure


def certificate_names(scope: Mapping[str, Any]) -> Sequence[str]:
    """The names in the client certificate of an ASGI request, DNS and URI. TLS has verified the certificate."""
    names: Sequence[str] = scope.get("extensions", {}).get(CERTIFICATE_NAMES, ())
    return names
