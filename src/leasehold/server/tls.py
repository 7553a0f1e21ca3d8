"""The server's TLS: certificates that are replaced without a restart, and the names in client certificates."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from leasehold import files
from leasehold.errors import ConfigError
from leasehold.server.settings import TLSFiles
from leasehold.server.watched_files import WatchedFiles

_NAMES: Final = ("DNS", "URI")


class Certificates:
    """Every handshake uses the files that were read last, if it uses `context` as it is then.

    A certificate and its key are read into a new context, which replaces the one before only if both are good. So a
    bad pair never reaches a handshake, and an authority that is no longer in the file is no longer trusted: a context
    also keeps the sessions that callers may resume, whose certificates are not verified again."""

    context: ssl.SSLContext

    def __init__(self, tls: TLSFiles) -> None:
        self._tls = tls
        paths = [tls.cert, tls.key, *([tls.client_ca] if tls.client_ca else [])]
        self._watched = WatchedFiles("the TLS certificate", paths, self._read)
        self._watched.load()

    def refresh(self, *, force: bool = False) -> None:
        """Read the files again if one has changed; `force`: in any case. If that fails, nothing changes."""
        self._watched.refresh(force=force)

    def _read(self, _paths: Sequence[Path]) -> Callable[[], None]:
        context = self._new_context()

        def apply() -> None:
            self.context = context

        return apply

    def _new_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
        try:
            with _checked(self._tls.cert) as cert, _checked(self._tls.key) as key:
                context.load_cert_chain(cert, key, password=_no_password)
        except ssl.SSLError as error:
            raise ConfigError(
                f"the certificate {self._tls.cert} cannot be used with the key {self._tls.key}: {_reason(error)}"
            ) from None
        if self._tls.client_ca is not None:
            # Optional, so that health checks and callers with an API key need none. Calls of the lock API do.
            context.verify_mode = ssl.CERT_OPTIONAL
            # The certificate of a resumed session is not verified again.
            context.options |= ssl.OP_NO_TICKET
            context.num_tickets = 0
            try:
                with _checked(self._tls.client_ca) as authorities:
                    context.load_verify_locations(authorities)
            except ssl.SSLError as error:
                raise ConfigError(
                    f"{self._tls.client_ca} has no authority for client certificates: {_reason(error)}"
                ) from None
        return context


def names_in(certificate: Mapping[str, Any] | None) -> tuple[str, ...]:
    """The names of a verified certificate, as `getpeercert()` returns it: DNS and URI of its subjectAltName."""
    return tuple(value for kind, value in (certificate or {}).get("subjectAltName", ()) if kind in _NAMES)


@contextmanager
def _checked(path: Path) -> Iterator[str]:
    """A path at which OpenSSL finds the file that was checked, even if another user swaps it meanwhile."""
    with files.opened(str(path)) as fd:
        yield f"/dev/fd/{fd}"


def _no_password() -> str:
    raise ConfigError("the private key of the certificate is encrypted: store it without a passphrase, mode 0600")


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or "it is not valid PEM").lower().replace("_", " ")
