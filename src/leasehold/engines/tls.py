"""TLS for URLs whose options name certificate files: `ca=`, `cert=` and the certificate's private key."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping

from leasehold.errors import ConfigError


def check_readable(path: str) -> str:
    """For options of URLs."""
    if not os.access(path, os.R_OK):
        raise ValueError("this file cannot be read")
    return path


def client_context(
    scheme: str, tls_scheme: str, options: Mapping[str, str], key_option: str = "key"
) -> ssl.SSLContext | None:
    """A context that checks the server's certificate and host name; None: the scheme has no TLS. `options` are the
    certificate options that the URL has."""
    if scheme != tls_scheme:
        if options:
            names = ", ".join(sorted(options))
            raise ConfigError(f"the URL options {names} need TLS: use {tls_scheme}:// instead of {scheme}://")
        return None
    if key_option in options and "cert" not in options:
        raise ConfigError(
            f"{key_option}= is the private key of a client certificate: pass the certificate, too, with cert="
        )
    try:
        context = ssl.create_default_context(cafile=options.get("ca"))
        if "cert" in options:
            context.load_cert_chain(options["cert"], options.get(key_option), refuse_passphrase)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the certificates of this {scheme}:// URL cannot be used: {error}") from error
    return context


def refuse_passphrase() -> str:
    """Without this, OpenSSL would prompt on the terminal and wait for ever."""
    raise ValueError("the private key is encrypted")
